"""One optimiser step: weighted losses, gradients of present tokens only, on a GPU recorded and replayed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.layers import GatedDeltaNet, RegraftForCausalLM
from regraft.layers.cache import MixerState
from regraft.layers.mixer import Design
from regraft.ops.chunk import chunk_filter
from regraft.ops.inputs import State, prepare

CHUNK = 64  # tokens of the filter at once


def loss_of(
    model: Callable[..., Any], ids: Tensor, weights: Tensor, is_book: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted cross-entropy; needle rows and book rows are normalised apart and count the same."""
    logits = model(ids).logits[:, :-1].float()
    ce = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)
    w = weights[:, 1:]
    book = is_book[:, None].float()
    parts = {}
    for name, mask in (("needle", 1 - book), ("book", book)):
        total = (w * mask).sum()
        parts[name] = (ce * w * mask).sum() / total.clamp(min=1)
    return parts["needle"] + parts["book"], {k: v.detach() for k, v in parts.items()}


def keep_absent_tokens(embeddings: torch.nn.Embedding, ids: Tensor) -> None:
    """No gradient for tokens that a batch does not hold.

    The softmax pushes them all in one direction, and Adam makes full steps of it: rare words, those of the
    evaluation too, would end up with one and the same embedding and could not be told apart as keys.
    """
    assert embeddings.weight.grad is not None
    present = torch.zeros(len(embeddings.weight), 1, device=ids.device)
    embeddings.weight.grad.mul_(present.index_fill_(0, ids.flatten(), 1.0))


def make_optimizer(model: RegraftForCausalLM, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; only matrices decay, embeddings do not. Groups know the names of their parameters."""
    named = list(model.named_parameters())
    embeddings = model.model.embeddings.weight
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        own = [(n, p) for n, p in named if (p.dim() == 2 and p is not embeddings) == decays]
        names, parameters = zip(*own, strict=True)
        groups.append({"params": parameters, "names": names, "weight_decay": 0.1 if decays else 0.0})
    cuda = args.device == "cuda"
    lr = torch.tensor(args.lr, device=args.device) if cuda else args.lr  # a tensor, to change it in a graph
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=cuda, capturable=cuda)


class Traceable(GatedDeltaNet):
    """A Gated DeltaNet in training whose filter is made of operations that the compiler knows.

    The op itself chooses kernels and sets the precision of products, neither of which can be traced; here the
    caller's precision holds.
    """

    def filter(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        design: Design,
        state: MixerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        """`Mixer.filter` on whole rows, without a state."""
        g, obs_var, process_var, *_ = design
        nothing: Any = None
        x = prepare(
            q, k, v, g, obs_var, process_var, self.covariance, evidence=0.0, prior_var=1.0, rotation=None,
            scale=None, initial_state=nothing, cu_seqlens=nothing, obs_var_floor=0.0,
        )  # fmt: skip
        with torch.autocast(q.device.type, enabled=False):
            o, _, _ = chunk_filter(x, CHUNK)
        return o.flatten(3).to(v.dtype), None


class Untraced(GatedDeltaNet):
    """A Gated DeltaNet whose filter the compiler leaves alone, kernels and all."""

    kernels = "regraft"
    filter = torch.compiler.disable(GatedDeltaNet.filter)


def choose_kernels(model: RegraftForCausalLM, kernels: str) -> None:
    """Which form of the filter runs: `torch` operations, which compile with the rest, or `triton` kernels.

    Kernels of our own are no operations that the compiler knows, so that compiled blocks break around them.
    One class for all layers, so that one program serves them.
    """
    for mixer in (m for m in model.modules() if isinstance(m, GatedDeltaNet)):
        mixer.__class__ = Traceable if kernels == "torch" else Untraced


class Step:
    """One optimizer step; with `graph` the fourth of each batch shape is recorded, later ones are replayed.

    A step of a small model is thousands of short kernels, and launching them takes longer than they do.
    """

    def __init__(self, model: RegraftForCausalLM, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.optimizer = make_optimizer(model, args)
        self.shape: tuple[int, ...] = ()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.parts: dict[str, Tensor] = {}

    def __call__(self, batch: Sequence[Tensor], lr: float) -> dict[str, Tensor]:
        """Losses of the parts of the batch."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if not self.args.graph:
            return self._run([x.to(self.args.device, non_blocking=True) for x in batch])
        if batch[0].shape != self.shape:
            self.shape, self.calls, self.graph = tuple(batch[0].shape), 0, None
            self.inputs = [x.to(self.args.device) for x in batch]
        for to, x in zip(self.inputs, batch, strict=True):
            to.copy_(x, non_blocking=True)
        self.calls += 1
        if self.calls <= 3:  # warm up outside the main stream, as recording demands
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.parts = self._run(self.inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return self.parts
        if self.graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.parts = self._run(self.inputs)
        self.graph.replay()
        return self.parts

    def compile(self) -> None:
        """Compile the blocks, one program for all of them; to be called where a new batch shape begins."""
        for block in self.model.model.layers:
            block.compile(dynamic=False)
        self.shape = ()

    def _run(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        ids, weights, is_book = batch
        with torch.autocast(self.args.device, dtype=torch.bfloat16, enabled=self.args.device == "cuda"):
            loss, parts = loss_of(self.model, ids, weights, is_book)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        keep_absent_tokens(self.model.model.embeddings, ids)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return parts
