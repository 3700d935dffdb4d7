"""What a model can do: answers under teacher forcing, and the perplexity of held-out books."""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, DataLoader

from regraft.assets.needles import TASKS
from regraft.layers import RegraftForCausalLM
from scripts.teacher.rows import Checks, Material, Row, collate

TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65_536}


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # one shape after the other: not worth compiling
def accuracy(model: torch.nn.Module, rows: list[Row], length: int, device: str) -> tuple[float, float]:
    """Teacher-forced accuracy of the answers: share of tokens right, share of rows with every token right."""
    right = total = exact = 0
    batch = max(1, TOKENS_AT_ONCE[device] // length)
    for i in range(0, len(rows), batch):
        ids, weights, _ = collate([(r, False) for r in rows[i : i + batch]], length)
        ids, answer = ids.to(device), (weights[:, 1:] == 1.0).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            hit = (model(ids).logits[:, :-1].argmax(-1) == ids[:, 1:]) | ~answer
        right += int((hit & answer).sum())
        total += int(answer.sum())
        exact += int(hit.all(-1).sum())
    return right / max(1, total), exact / len(rows)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def perplexity(model: RegraftForCausalLM, ids: np.ndarray, length: int, device: str) -> float:
    """Of held-out books, in rows of `length` tokens."""
    rows = torch.from_numpy(ids[: len(ids) // length * length].astype(np.int64)).view(-1, length)
    total = 0.0
    for batch in rows.split(max(1, TOKENS_AT_ONCE[device] // 2 // length)):
        batch = batch.to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (len(rows) * (length - 1)))


def retrieval(
    model: RegraftForCausalLM, m: Material, args: argparse.Namespace
) -> dict[str, dict[int, float]]:
    """Share of documents whose every answer token is right, by task and length, 1 to 8 times its own."""
    cells = [(task, times * args.length) for task in TASKS for times in (1, 2, 4, 8)]
    checks = [Checks(m, task, length, args.documents) for task, length in cells]
    rows = list(DataLoader(ConcatDataset(checks), batch_size=None, collate_fn=list, num_workers=args.workers))
    table: dict[str, dict[int, float]] = {task: {} for task in TASKS}
    for i, (task, length) in enumerate(cells):
        cell = rows[i * args.documents : (i + 1) * args.documents]
        table[task][length] = round(accuracy(model, cell, length, args.device)[1], 3)
    return table
