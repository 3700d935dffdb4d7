"""Perplexity by context length and position: every model on the same tokens, every length on the same text.

A document gives stretches of as many tokens as the longest length; each shorter length cuts the same
stretches into blocks. A block starts from an empty state with one token before it that is not scored: the
tokenizer's BOS, else its end-of-text token, as in lm-eval's rolling log-likelihood.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.report.niah import Entrant, Record
from regraft.report.shelf import Shelf
from regraft.report.tasks import Tick, describe
from regraft.report.texts import texts

TOKEN_CHARACTERS = 64  # no token is longer than that on average
SEGMENT = 2048  # tokens read at once; the state carries what came before
HEAD_TOKENS = 1024  # logits of so many tokens exist at once
AT_ONCE = {"cpu": 4096, "cuda": 65_536}  # tokens of a batch of segments
FIRST_BUCKET = 256  # positions 0-255, then 256-511, 512-1023 and so on


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one document, and the bytes of text they stand for."""

    document: int
    number: int
    ids: tuple[int, ...]
    n_bytes: int


@torch.no_grad()
def score_stream(
    model: nn.Module, pieces: Iterable[Tensor], before: int, *, segment: int = SEGMENT
) -> Iterator[Tensor]:
    """Negative log-likelihoods of a text that arrives in pieces, of any length and never held as a whole.

    Args:
        model: our decoder, whose state is carried; any other causal LM must be given one piece.
        pieces: token ids `[B,n]` each, the same rows continued.
        before: the token that the first one is conditioned on.
        segment: tokens read at once; the result does not depend on it.

    Yields:
        `[B,n]` float64 in nats, piece by piece.
    """
    cache, last = None, None
    for piece in pieces:
        for ids in piece.split(segment if isinstance(model, RegraftForCausalLM) else piece.shape[1], dim=1):
            first = torch.full_like(ids[:, :1], before) if last is None else last
            inputs = torch.cat([first, ids[:, :-1]], dim=1)
            last = ids[:, -1:]
            if isinstance(model, RegraftForCausalLM):
                out = model.model(inputs, cache=cache, use_cache=True)
                cache = out.cache
                yield _nll(model.lm_head, out.last_hidden_state, ids)
            else:
                yield _nll(nn.Identity(), model(inputs).logits, ids)


def _nll(head: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    """`[B,T]`: the softmax in float32, a part of the positions at a time."""
    rows, targets = hidden.flatten(0, 1).split(HEAD_TOKENS), ids.flatten().split(HEAD_TOKENS)
    parts = [
        F.cross_entropy(head(h).float(), target, reduction="none").double()
        for h, target in zip(rows, targets, strict=True)
    ]
    return torch.cat(parts).view(ids.shape)


def stretches(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerFast, length: int, count: int
) -> list[Stretch]:
    """The first `count` stretches of `length` tokens; a document's rest that fills none is left out."""
    found: list[Stretch] = []
    for number, text in enumerate(documents):
        encoded = tokenizer(
            text[: TOKEN_CHARACTERS * length * (count - len(found))],  # as far as it can be needed
            add_special_tokens=False, return_offsets_mapping=True, verbose=False,
        )  # fmt: skip
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        for part in range(len(ids) // length):
            begin, end = part * length, (part + 1) * length
            n_bytes = len(text[spans[begin][0] : spans[end - 1][1]].encode())
            found.append(Stretch(number, part, tuple(ids[begin:end]), n_bytes))
            if len(found) == count:
                return found
    return found


def buckets(length: int) -> list[tuple[int, int]]:
    """Position ranges `[start, end)` that double in width: 0-256, 256-512, 512-1024, ..."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(FIRST_BUCKET, 2 * edges[-1])))
    return list(pairwise(edges))


def measure(
    models: Mapping[str, Entrant],
    *,
    sets: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    progress: Tick | None = None,
    finished: Shelf | None = None,
) -> list[Record]:
    """Negative log-likelihood of every model on the same stretches of every set.

    Args:
        models: by name, of one tokenizer.
        sets: names as `regraft.report.texts.texts` takes them.
        lengths: context lengths in tokens; stretches have the longest.
        samples: stretches of a set, fewer if it has no more.
        progress: called as (what, done, total) in tokens.
        finished: where finished cells are kept; what is there is not run again.

    Returns:
        Records by model, set, length, stretch: model, set, length, document, stretch, tokens, nll (nats),
        bytes, buckets (start, end, tokens, nll), text_sha256, and what makes runs comparable.

    Raises:
        UserError: a set has no document as long as the longest length, or a model cannot read it.
    """
    tokenizer = next(iter(models.values())).tokenizer
    header = {**describe(tokenizer), "before": tokenizer.decode([_before(tokenizer)])}
    records: list[Record] = []
    needed = TOKEN_CHARACTERS * max(lengths) * samples
    made = {name: stretches(texts(name, needed), tokenizer, max(lengths), samples) for name in sets}
    for name, found in made.items():
        if not found:
            reason = f"no document of {name} has {max(lengths)} tokens."
            raise UserError("perplexity.lengths", reason, "take shorter lengths, or another set.")
    total = len(models) * sum(len(lengths) * max(lengths) * len(found) for found in made.values())
    done = 0
    for model, entrant in models.items():
        load = functools.lru_cache(maxsize=1)(entrant.load)
        for name, found in made.items():
            for length in lengths:
                if progress:
                    progress(f"perplexity: {model} on {name} at {length:,}", done, total)
                digest = hashlib.sha256(repr([stretch.ids for stretch in found]).encode()).hexdigest()
                key = {"model": entrant.identity, "perplexity": digest, "length": length, **header}
                own = finished.get(key) if finished and entrant.identity else []
                if not own:
                    own = _measured(load(), found, length, _before(tokenizer))
                    if finished and entrant.identity:
                        finished.put(key, own)
                done += len(found) * max(lengths)
                records += [{"model": model, "set": name, **record, **header} for record in own]
    if progress:
        progress("perplexity", total, total)
    return records


def _before(tokenizer: PreTrainedTokenizerFast) -> int:
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise UserError("tokenizer", "it has neither a BOS nor an end-of-text token", "add one")
    return token


def _measured(model: nn.Module, found: list[Stretch], length: int, before: int) -> list[Record]:
    """Records of one model, set and length, in the order of the stretches."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(model, RegraftForCausalLM) and limit is not None and limit < length:
        raise UserError("length", f"the model reads {limit} tokens, not {length}", "take shorter lengths")
    device = next(model.parameters()).device
    blocks = [
        (i, list(stretch.ids[start : start + length]))
        for i, stretch in enumerate(found)
        for start in range(0, len(stretch.ids) - length + 1, length)
    ]
    width = min(length, SEGMENT)
    at_once = max(1, AT_ONCE.get(device.type, 4096) // width)
    ranges = buckets(length)
    sums = torch.zeros(len(found), len(ranges), dtype=torch.float64)
    for start in range(0, len(blocks), at_once):
        batch = blocks[start : start + at_once]
        ids = torch.tensor([row for _, row in batch], device=device)
        nll = torch.cat(list(score_stream(model, [ids], before)), dim=1).cpu()
        for (i, _), row in zip(batch, nll, strict=True):
            sums[i] += torch.stack([row[a:b].sum() for a, b in ranges])
    return [_record(stretch, length, ranges, row.tolist()) for stretch, row in zip(found, sums, strict=True)]


def _record(stretch: Stretch, length: int, ranges: list[tuple[int, int]], sums: list[float]) -> Record:
    n_blocks = len(stretch.ids) // length
    return {
        "length": length,
        "document": stretch.document,
        "stretch": stretch.number,
        "bytes": stretch.n_bytes,
        "tokens": n_blocks * length,
        "nll": math.fsum(sums),
        "buckets": [[a, b, n_blocks * (b - a), nll] for (a, b), nll in zip(ranges, sums, strict=True)],
        "text_sha256": hashlib.sha256(repr(stretch.ids).encode()).hexdigest(),
    }
