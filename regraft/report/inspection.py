"""Inside a converted layer on a needle document: gains, what the filter is sure of, whether it is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from regraft.assets.needles import NeedleDocument, make_document
from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM, mixer
from regraft.ops.inputs import FilterInputs, prepare
from regraft.ops.reference import _gain
from regraft.report.figures import save
from regraft.report.niah import Entrant

LENGTH, TASK, TENTH = 512, "niah_single_2", 3  # a needle with room before and after it
BINS = 12
_COLOURS = {"needle": "#D55E00", "rest": "#0072B2", "gain": "#666666"}


@dataclass(frozen=True)
class Trace:
    """What one layer did on a document of T tokens with a needle at tokens [start, end).

    Per token and head, `[T,H]`: `gain` along the token's own key (0 to 1), `predicted` variance of the
    read-out there before the write (the prior's is 1), `noise` the observation's variance, `error` the
    squared innovation per value column. `[T,H]` after each token: `needle_variance` and `needle_error`,
    along the needle's keys (nan before they are written), `rest_variance` and `rest_error` along those of
    as many tokens just before it. Errors of read-outs are relative: 0 is kept, 1 is as if nothing were there.
    """

    start: int
    end: int
    gain: NDArray[np.float64]
    predicted: NDArray[np.float64]
    noise: NDArray[np.float64]
    error: NDArray[np.float64]
    needle_variance: NDArray[np.float64]
    needle_error: NDArray[np.float64]
    rest_variance: NDArray[np.float64]
    rest_error: NDArray[np.float64]


def inspect_student(entrant: Entrant, seed: int, folder: Path) -> list[tuple[str, str]]:
    """Draw a figure a converted layer into `folder`, the needle's trace, and one of all layers' calibration.

    Args:
        entrant: a model of ours with at least one layer that keeps a covariance.
        seed: of the needle document, `niah_single_2` at 512 tokens.
        folder: an existing directory.

    Returns:
        (file name without suffix, caption) per figure.

    Raises:
        UserError: the model is not ours, or no layer keeps a covariance.
    """
    model = entrant.load()
    if not isinstance(model, RegraftForCausalLM):
        raise UserError("--inspect", "the model is not one of ours.", "inspect a converted student.")
    found = traces(model, entrant.tokenizer, inspection_document(entrant.tokenizer, seed))
    figures = []
    for layer, trace in found.items():
        name = f"inspect_layer_{layer}"
        save(trace_figure(trace, layer), folder / name)
        caption = f"Layer {layer}: gain, variance along the needle's keys, error of its read-out"
        figures.append((name, caption))
    save(_calibration_figure(found), folder / "calibration")
    figures.append(("calibration", "Predicted variance of what comes in, against its real error"))
    return figures


def inspection_document(tokenizer: PreTrainedTokenizerFast, seed: int) -> NeedleDocument:
    """The first document whose needle lies where there is room around it."""
    made = (make_document(TASK, LENGTH, index, seed=seed, tokenizer=tokenizer) for index in range(30))
    return next(document for document in made if document.needles[0].decile == TENTH)


def traces(model: RegraftForCausalLM, tokenizer: Any, document: NeedleDocument) -> dict[int, Trace]:
    """Traces of every layer that keeps a covariance, by layer index.

    Raises:
        UserError: no layer does.
    """
    needle = document.needles[0]
    text = f" One of the special magic numbers for {needle.key} is: {needle.value}."
    encoded = tokenizer(document.model_input, return_tensors="pt")
    end = needle.start_token + len(tokenizer(text, add_special_tokens=False)["input_ids"])
    value = len(tokenizer(f" {needle.value}", add_special_tokens=False)["input_ids"]) + 1  # and its full stop
    with _spy() as calls, torch.no_grad():
        model(encoded["input_ids"].to(model.device), logits_to_keep=1)
    found = {
        layer: _trace(inputs, end - value, end)
        for layer, inputs in enumerate(calls)
        if inputs.cov is not None
    }
    if not found:
        raise UserError("--inspect", "no layer keeps a covariance.", "inspect a converted student.")
    return found


@contextmanager
def _spy() -> Iterator[list[FilterInputs]]:
    """The arguments of every call of the op, layer by layer, as a backend gets them."""
    calls: list[FilterInputs] = []
    op = mixer.kalman_delta_rule

    def spy(q: Tensor, k: Tensor, v: Tensor, g: Tensor, obs_var: Tensor, w: Tensor, **settings: Any) -> Any:
        given = {"evidence": 1.0, "prior_var": 1.0, "scale": None, "obs_var_floor": 0.0} | settings
        names = ("covariance", "evidence", "prior_var", "rotation", "scale", "initial_state", "cu_seqlens")
        own = {name: given.get(name) for name in (*names, "obs_var_floor")}
        calls.append(prepare(q, k, v, g, obs_var, w, **own))  # type: ignore[arg-type]
        return op(q, k, v, g, obs_var, w, **settings)

    mixer.kalman_delta_rule = spy  # type: ignore[assignment]
    try:
        yield calls
    finally:
        mixer.kalman_delta_rule = op


@torch.no_grad()
def _trace(x: FilterInputs, start: int, end: int) -> Trace:
    """Walk the tokens of one row with the reference's own step."""
    M, P = x.mean, x.cov
    if x.rotation is not None:
        raise UserError("--inspect", "layers that rotate are not shown.", "inspect another student.")
    width = end - start
    stretches = {"needle": slice(start, end), "rest": slice(max(0, start - 2 * width), max(1, start - width))}
    out: dict[str, list[Tensor]] = {
        name: [] for name in Trace.__dataclass_fields__ if name not in ("start", "end")
    }
    for t in range(x.k.shape[1]):
        k, a = x.k[:, t, ..., None], x.g[:, t, ..., None].exp()
        kappa, P = _gain(x, t, P, k, a)
        innovation = x.v[:, t, :, :, None] - k.mT @ (a * M)
        M = a * M + kappa * innovation
        gain = (k.mT @ kappa)[0, :, :, 0, 0].mean(-1)
        noise = x.obs_var[0, t, :, :, 0].mean(-1)
        out["gain"].append(gain)
        out["noise"].append(noise)
        out["predicted"].append(noise * gain / (1 - gain).clamp(min=1e-6))
        out["error"].append(innovation.square().mean((0, 2, 3, 4)))
        for name, part in stretches.items():
            seen = t >= part.stop - 1
            keys, values = x.k[0, part], x.v[0, part]  # [n,H,1,D], [n,H,G,Vg]
            missing = keys.new_full((keys.shape[1],), float("nan"))
            out[f"{name}_variance"].append(_variance(P[0], keys) if seen and P is not None else missing)
            out[f"{name}_error"].append(_relative_error(M[0], keys, values) if seen else missing)
    return Trace(start, end, **{name: torch.stack(rows).double().cpu().numpy() for name, rows in out.items()})


def _variance(P: Tensor, keys: Tensor) -> Tensor:
    """`[H]`: mean of `k' P k` over the keys `[n,H,1,D]`, P a matrix, a diagonal or one number per head."""
    if P.dim() == 4:  # [H,G,D,D]
        return torch.einsum("nhxd,hgde,nhxe->h", keys, P, keys) / (len(keys) * P.shape[1])
    return (keys.square() * P).sum(-1).mean((0, 2))


def _relative_error(M: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`[H]`: squared error of reading the values `[n,H,G,Vg]` back at their keys, over their own size."""
    read = torch.einsum("nhxd,hgdv->nhgv", keys, M)
    return (read - values).square().sum((0, 2, 3)) / values.square().sum((0, 2, 3)).clamp(min=1e-12)


def trace_figure(trace: Trace, layer: int) -> Figure:
    """Three panels over the tokens of the document."""
    figure = Figure(figsize=(8.6, 6.6), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    title = f"Layer {layer}: a needle in the filter (mean over heads; thin lines: each head)"
    figure.suptitle(title, fontsize=11)
    axes[0].plot(
        trace.predicted.mean(1), color="#222222", linewidth=1, label="predicted variance before the write"
    )
    axes[0].plot(trace.gain.mean(1), color="#009E73", linewidth=1, label="gain of the write")
    axes[0].set_ylabel("at each token's own key\n(prior variance 1)", fontsize=9)
    for axis, kind in ((axes[1], "variance"), (axes[2], "error")):
        for name, label in (("needle", "the needle's value"), ("rest", "as many tokens just before")):
            values = getattr(trace, f"{name}_{kind}")
            axis.plot(values, color=_COLOURS[name], linewidth=0.6, alpha=0.35)
            line = "-" if name == "needle" else "--"
            axis.plot(values.mean(1), line, color=_COLOURS[name], linewidth=2, label=label)
    axes[1].set_ylabel("variance along old keys\n(evidence: its inverse)", fontsize=9)
    axes[2].set_ylabel("error of reading back\n(1: nothing kept)", fontsize=9)
    axes[2].set_ylim(0, max(1.1, float(np.nanquantile(trace.needle_error, 0.98))))
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.axvspan(trace.start, trace.end, color=_COLOURS["needle"], alpha=0.15, linewidth=0)
        _plain(axis)
    for axis in axes[:2]:  # above the panel, where no line runs
        axis.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=2)
    axes[2].set_xlabel("token of the document (shaded: the needle's value)", fontsize=9)
    axes[2].set_xlim(0, len(trace.gain))
    return figure


def calibration(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Predicted variances of what comes in, the real squared errors beside them, and their rank correlation.

    Values have no unit that the filter knows, so each head's errors are divided by their mean ratio to the
    prediction; `[BINS]` means over tokens of like prediction, and Spearman's correlation over all tokens.
    """
    predicted = trace.predicted + trace.noise
    scale = trace.error.sum(0, keepdims=True) / predicted.sum(0, keepdims=True)
    x, y = predicted.ravel(), (trace.error / np.maximum(scale, 1e-12)).ravel()
    order = np.argsort(x, kind="stable")
    bins = [part for part in np.array_split(order, BINS) if len(part)]
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (x, y)]
    correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    means = [np.array([values[part].mean() for part in bins]) for values in (x, y)]
    return means[0], means[1], correlation


def _calibration_figure(found: dict[int, Trace]) -> Figure:
    """A panel per layer, three in a row."""
    rows = -(-len(found) // 3)
    figure = Figure(figsize=(8.6, 2.9 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    for axis, (layer, trace) in zip(axes.flat, found.items(), strict=False):
        x, y, correlation = calibration(trace)
        axis.plot(x, y, "o", color=_COLOURS["rest"], markersize=5, label="tokens of like prediction")
        ends = [min(x.min(), y.min()) * 0.8, max(x.max(), y.max()) * 1.25]
        axis.plot(ends, ends, "--", color=_COLOURS["gain"], label="as predicted")
        if ends[1] > 20 * ends[0]:
            axis.set_xscale("log")
            axis.set_yscale("log")
        axis.set_title(f"Layer {layer}: rank correlation {correlation:.2f}", fontsize=9.5, loc="left")
        _plain(axis)
    figure.supxlabel("predicted variance, read-out and noise", fontsize=9)
    axes[0, 0].set_ylabel("squared innovation, scaled per head", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    return figure


def _plain(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8.5)
