"""Greedy answers of a recurrent decoder: like lengths together, shared beginnings read once, early ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from regraft.layers import RegraftCache, RegraftForCausalLM
from regraft.report.tasks import complete

# Tokens read at once: what fits the processor's cache, or fills the GPU. Longer prompts are read in pieces.
PREFILL_TOKENS = {"cpu": 4096, "cuda": 131_072}
# Shared beginnings and pieces end at whole chunks of the filter, which sums in the same order either way.
BLOCK = 64
SPREAD = 1.1  # prompts read together differ in length by this factor at most
# Devices that one prompt keeps busy: prompts are read together where they share a beginning, which is read
# once. Elsewhere whatever is of like length is read together: a GPU is idle on one row, and most documents
# share less than a block.
SHARING = {"cpu"}


@dataclass(frozen=True)
class Prompt:
    """Token ids the model reads, the values wanted of it, and how many tokens it may write."""

    ids: tuple[int, ...]
    answers: tuple[str, ...]
    new_tokens: int

    @property
    def size(self) -> int:
        """The same for prompts of like length."""
        return int(log(len(self.ids)) / log(SPREAD))

    @property
    def kind(self) -> tuple[int, tuple[int, ...]]:
        """The same for prompts of like length with the same first block."""
        return self.size, self.ids[:BLOCK]


@torch.no_grad()
def answer(
    model: RegraftForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Greedy completions in the order of the prompts; a row ends at end-of-text, its budget or its answers.

    Like prompts are read together, few at a time; writing costs the same for few rows as for many, so that
    rows of all lengths and budgets write together.

    Args:
        model: in eval mode.
        tokenizer: decodes what was written; its special tokens are left out of the text.
        prompts: any mixture of lengths and budgets.
        batch_size: rows that write together.
        progress: called with the number of prompt tokens just read.
    """
    texts = [""] * len(prompts)
    # longest first: an estimate of the time left errs on the safe side; then by ids, so that neighbours share
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].kind, prompts[i].ids), reverse=True)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = [prompts[i] for i in rows]
        for i, text in zip(
            rows, _write(model, tokenizer, batch, *_read(model, batch, progress)), strict=True
        ):
            texts[i] = text
    return texts


def _write(
    model: RegraftForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: list[Prompt],
    cache: RegraftCache,
    logits: Tensor,
) -> list[str]:
    """Completions of one batch from its state; finished rows leave it, so that later steps cost less."""
    stops = _stop_ids(model, tokenizer)
    written: list[list[int]] = [[] for _ in batch]
    texts = [""] * len(batch)
    rows = list(range(len(batch)))
    while rows:
        tokens = logits.argmax(-1)  # [B]
        keep = []
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if token in stops:
                continue
            written[row].append(token)
            texts[row] = tokenizer.decode(written[row], skip_special_tokens=True)
            done = all(complete(value, texts[row]) for value in batch[row].answers)
            if not done and len(written[row]) < batch[row].new_tokens:
                keep.append(place)
        if keep and len(keep) < len(rows):
            chosen = torch.tensor(keep, device=tokens.device)
            cache.select(chosen)
            tokens = tokens[chosen]
        rows = [rows[place] for place in keep]
        if rows:
            logits = model(tokens[:, None], cache=cache, logits_to_keep=1).logits[:, -1]
    return texts


def _read(
    model: RegraftForCausalLM, batch: list[Prompt], progress: Callable[[int], None] | None = None
) -> tuple[RegraftCache, Tensor]:
    """State after every prompt and the logits `[B,vocab]` of its first new token."""
    caches, logits = [], []
    sharing = model.device.type in SHARING
    for _, alike in groupby(batch, key=lambda prompt: prompt.kind if sharing else prompt.size):
        group = list(alike)
        shared = _shared(group) if len(group) > 1 else 0
        beginning: RegraftCache | None = None
        if shared:
            ids = torch.tensor([group[0].ids[:shared]], device=model.device)
            beginning = model.model(ids, use_cache=True).cache
        longest = max(len(prompt.ids) for prompt in group)
        at_once = max(1, PREFILL_TOKENS.get(model.device.type, 4096) // longest)
        for start in range(0, len(group), at_once):
            part = group[start : start + at_once]
            cache, last = _read_part(model, [prompt.ids[shared:] for prompt in part], beginning)
            caches.append(cache)
            logits.append(last)
            if progress:
                progress(sum(len(prompt.ids) for prompt in part))
    return RegraftCache.joined(caches), torch.cat(logits)


def _read_part(
    model: RegraftForCausalLM, part: list[tuple[int, ...]], beginning: RegraftCache | None
) -> tuple[RegraftCache, Tensor]:
    """State and last logits `[B,vocab]` of rows of ids, left-padded, that go on from one beginning."""
    width = max(map(len, part))
    ids = torch.tensor([(0,) * (width - len(row)) + row for row in part], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part], device=model.device)
    cache = _copies(beginning, len(part)) or RegraftCache(model.config.num_hidden_layers)
    step = max(BLOCK, PREFILL_TOKENS.get(model.device.type, 4096) // len(part) // BLOCK * BLOCK)
    for piece, piece_mask in zip(ids.split(step, dim=1), mask.split(step, dim=1), strict=True):
        out = model(piece, piece_mask, cache=cache, logits_to_keep=1)
    return cache, out.logits[:, -1]


def _shared(batch: list[Prompt]) -> int:
    """Tokens at the beginning of every prompt, in whole blocks, less than the shortest has."""
    first, last = min(prompt.ids for prompt in batch), max(prompt.ids for prompt in batch)
    shortest = min(len(prompt.ids) for prompt in batch) - 1
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), shortest)
    return min(same, shortest) // BLOCK * BLOCK


def _copies(cache: RegraftCache | None, rows: int) -> RegraftCache | None:
    """A one-row state as `rows` equal rows, the original left alone."""
    if cache is None:
        return None
    copy = RegraftCache(len(cache))
    copy.states, copy.seen = list(cache.states), cache.seen
    copy.batch_repeat_interleave(rows)
    return copy


def _stop_ids(model: RegraftForCausalLM, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """End-of-text tokens of the tokenizer and of the model's generation settings."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = own if isinstance(own, list) else [own]
    return {token for token in (tokenizer.eos_token_id, *ids) if token is not None}
