"""`regraft scan`: where a teacher's long memory lives, layer by layer.

Each layer in turn has its memory cut to a window: its log-decay is lowered to at most `-1 / window`, all else
stays. What the answers to needle documents lose by that is what this layer remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from regraft.assets.needles import answer_text, make_document
from regraft.convert.checkpoint import Checkpoint, open_checkpoint
from regraft.convert.load import DTYPES, fill, load_tokenizer
from regraft.convert.plan import make_plan, model_config
from regraft.errors import UserError
from regraft.files import hash_directory, write_json
from regraft.layers import DeltaNet, Mixer, RegraftForCausalLM
from regraft.layers.attention import Attention

TASK = "niah_single_2"
WINDOW = 32  # tokens; a needle and its question are further apart
SAMPLES = 8
LONGEST = 512  # documents of a scan, unless the teacher was trained on shorter rows


@dataclass(frozen=True)
class LayerScan:
    """One layer: means over tokens for each head, and what retrieval is without its long memory."""

    layer: int
    mixer: str
    decay: tuple[float, ...]  # exp(g): what a step keeps
    half_life: tuple[float, ...]  # tokens after which half is left, at the mean log-decay
    gain: tuple[float, ...]  # write strength along a key; empty for mixers without one
    answer_loss: float  # nats a token of the answer, teacher-forced, with this layer's memory cut
    retrieved: float  # share of documents whose whole answer is the most likely one, token by token
    loss_rise: float  # answer_loss less that of the model as it is


@dataclass(frozen=True)
class Scan:
    """All layers of a model, and the model as it is."""

    answer_loss: float
    retrieved: float
    length: int
    samples: int
    layers: tuple[LayerScan, ...]

    def best(self, n: int) -> list[int]:
        """The n layers whose memory retrieval needs most, in order of depth."""
        ranked = sorted(self.layers, key=lambda row: (-row.loss_rise, -row.layer))
        return sorted(row.layer for row in ranked[:n])

    def print(self, console: Console) -> None:
        """A row a layer, the most needed one marked."""
        console.print(
            f"{TASK}, {self.samples} documents of {self.length} tokens: answer loss {self.answer_loss:.3f}, "
            f"retrieved {self.retrieved:.0%}. With the memory of one layer cut to {WINDOW} tokens:"
        )
        table = Table("layer", "mixer", "answer loss", "rise", "retrieved", box=None)
        for name in ("decay", "half-life", "gain"):
            table.add_column(f"{name} by head")
        most = self.best(1)
        for row in self.layers:
            heads = (
                " ".join(f"{x:.3f}" for x in row.decay),
                " ".join(f"{x:.0f}" for x in row.half_life),
                " ".join(f"{x:.2f}" for x in row.gain) or "-",
            )
            losses = (f"{row.answer_loss:.3f}", f"{row.loss_rise:+.3f}", f"{row.retrieved:.0%}")
            style = "bold" if row.layer in most else ""
            table.add_row(str(row.layer), row.mixer, *losses, *heads, style=style)
        console.print(table)


@dataclass(frozen=True)
class _Document:
    ids: Tensor  # [1,T]
    answer: int  # tokens of the answer, at the end


def scan_model(model: RegraftForCausalLM, documents: Sequence[_Document], progress: bool = False) -> Scan:
    """Measure every layer of a model that has a memory to cut, on the same documents."""
    loss, retrieved = _answers(model, documents)
    rows = []
    layers = [i for i, m in enumerate(model.config.mixers) if m["kind"] != Attention.kind]
    statistics = iter(_statistics(model, documents, layers))
    for layer in track(layers, "scan", transient=True, disable=not progress):
        with forgetting(_mixer(model, layer)):
            cut_loss, cut_retrieved = _answers(model, documents)
        kind = model.config.mixers[layer]["kind"]
        rows.append(LayerScan(layer, kind, *next(statistics), cut_loss, cut_retrieved, cut_loss - loss))
    return Scan(loss, retrieved, max(d.ids.shape[1] for d in documents), len(documents), tuple(rows))


def scan(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    samples: int = SAMPLES,
    length: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    allow_pickle: bool = False,
) -> Scan:
    """`regraft scan`: load a model, measure it, print the table, and write it as JSON where asked.

    Raises:
        UserError: the model does not load, has no tokenizer, or its documents are too short for the task.
    """
    checkpoint = open_checkpoint(model, revision, allow_pickle=allow_pickle)
    result = scan_checkpoint(checkpoint, dtype=dtype, samples=samples, length=length, seed=seed)
    console = Console()
    result.print(Console(width=max(console.width, 120)))
    if out is not None:
        write_json(out, {**asdict(result), "model_sha256": hash_directory(checkpoint.path)})
        console.print(f"table: {out}", soft_wrap=True)
    return result


def scan_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: str = "float32",
    samples: int = SAMPLES,
    length: int | None = None,
    seed: int = 0,
) -> Scan:
    """Measure the model of an opened folder; see `scan`."""
    if samples < 1:
        raise UserError("samples", f"{samples} is too few.", "give at least 1.")
    plan = make_plan(checkpoint, model_config(checkpoint), DTYPES[dtype])
    length = length or min(LONGEST, plan.config.max_position_embeddings)
    documents = _documents(checkpoint, length, samples, seed, plan.config.vocab_size)
    model = fill(checkpoint, plan)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = [_Document(d.ids.to(device), d.answer) for d in documents]
    return scan_model(model.to(device), on_device, progress=True)


@contextmanager
def forgetting(mixer: Mixer, window: int = WINDOW) -> Iterator[None]:
    """Inside, this mixer forgets: a step keeps at most `exp(-1 / window)` of its memory."""
    own = mixer.log_decay

    def faster(x: Tensor) -> Tensor:
        return own(x).clamp(max=-1 / window)

    mixer.log_decay = faster  # type: ignore[method-assign]
    try:
        yield
    finally:
        del mixer.log_decay


def _documents(
    checkpoint: Checkpoint, length: int, samples: int, seed: int, vocab_size: int
) -> list[_Document]:
    tokenizer = load_tokenizer(checkpoint.path)
    documents = []
    for index in range(samples):
        document = make_document(TASK, length, index, seed=seed, tokenizer=tokenizer)
        prompt = tokenizer(document.model_input)["input_ids"]
        answer = tokenizer(answer_text(document), add_special_tokens=False)["input_ids"]
        if max(*prompt, *answer) >= vocab_size:
            reason = f"its tokenizer has ids beyond the vocabulary of {vocab_size}."
            raise UserError(checkpoint.path, reason, "use the tokenizer that belongs to these weights.")
        documents.append(_Document(torch.tensor([[*prompt, *answer]]), len(answer)))
    return documents


@torch.no_grad()
def _answers(model: RegraftForCausalLM, documents: Sequence[_Document]) -> tuple[float, float]:
    """Mean loss a token of the answers, and the share of documents with every token right."""
    losses, right = [], 0
    for document in documents:
        n = document.answer
        logits = model(document.ids, logits_to_keep=n + 1).logits[0, :-1].float()
        answer = document.ids[0, -n:]
        losses.append(torch.nn.functional.cross_entropy(logits, answer))
        right += int(torch.equal(logits.argmax(-1), answer))
    return float(torch.stack(losses).mean()), right / len(documents)


@torch.no_grad()
def _statistics(
    model: RegraftForCausalLM, documents: Sequence[_Document], layers: Sequence[int]
) -> list[tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]]:
    """For each of these layers: decay, half-life and gain of its heads, means over all tokens."""
    mixers = [_mixer(model, layer) for layer in layers]
    sums: list[dict[str, Tensor]] = [{} for _ in mixers]
    pairs = zip(mixers, sums, strict=True)
    hooks = [mixer.register_forward_pre_hook(_recorder(mixer, row)) for mixer, row in pairs]
    try:
        for document in documents:
            model(document.ids, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    tokens = sum(d.ids.shape[1] for d in documents)
    means = [{name: (total / tokens).tolist() for name, total in row.items()} for row in sums]
    return [
        (
            tuple(row["decay"]),
            tuple(min(log(2) / max(-g, 1e-12), 1e9) for g in row["log_decay"]),
            tuple(row.get("gain", ())),
        )
        for row in means
    ]


def _recorder(mixer: Mixer, sums: dict[str, Tensor]) -> Any:
    """A hook that adds a mixer's decay and gain, summed over tokens and channels, to `sums`."""

    def record(_module: Any, arguments: tuple[Tensor, ...]) -> None:
        g = mixer.log_decay(arguments[0])
        g = g.mean(-1) if g.dim() == 4 else g
        values = {"log_decay": g, "decay": g.exp()}
        if isinstance(mixer, DeltaNet):
            values["gain"] = mixer.log_precision(arguments[0]).sigmoid() * (1 + getattr(mixer, "doubled", 0))
        for name, value in values.items():
            total = value[0].sum(0)
            sums[name] = sums[name] + total if name in sums else total

    return record


def _mixer(model: RegraftForCausalLM, layer: int) -> Mixer:
    mixer = model.get_submodule(f"model.layers.{layer}.attn")
    assert isinstance(mixer, Mixer)
    return mixer
