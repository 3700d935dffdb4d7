"""A student without the process noise of some heads, as a folder to evaluate: what does that noise do?

    python -m scripts.replicate.quiet runs/replication/runs/main/export quiet --heads 0:0,2
    regraft report --model noisy=runs/replication/runs/main/export --model quiet=quiet --baseline noisy \
        --set report.niah.lengths=[1024,8192] --limit 20 --out report

Nothing else changes. Meant for heads that never forget, whose noise adds up over a document; a head that does
forget would lose the noise that its decay stands for, and with it all strength.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from regraft.convert import export_model, load_model
from regraft.errors import UserError
from regraft.files import atomic_directory
from regraft.layers import BayesianLayer, RegraftForCausalLM

SILENT = -30.0  # as a logarithm: no noise in float32


@torch.no_grad()
def quieten(model: RegraftForCausalLM, heads: Iterable[tuple[int, Sequence[int]]]) -> None:
    """Take the process noise of these heads, layer by layer, to 0.

    Raises:
        UserError: a layer has no Bayesian Layer, or not so many heads.
    """
    mixers = dict(enumerate(block.attn for block in model.model.layers))
    for layer, chosen in heads:
        mixer = mixers.get(layer)
        if not isinstance(mixer, BayesianLayer) or not {*chosen} <= {*range(mixer.num_v_heads)}:
            raise UserError(
                f"--heads {layer}:{','.join(map(str, chosen))}",
                "there is no such head of a Bayesian Layer.",
                "name layers that were converted, and heads from 0 on.",
            )
        mixer.process_log_scale[list(chosen)] = SILENT
        mixer.refresh[list(chosen)] = SILENT


def write(student: str, out: Path, heads: Iterable[tuple[int, Sequence[int]]]) -> None:
    """Write a student without the process noise of these heads as a new folder.

    Raises:
        UserError: there is no such student or head, or something lies at `out`.
    """
    model = load_model(student)
    quieten(model, heads)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out) as folder:
        export_model(model.eval(), folder, companions_from=Path(student))


def parsed(text: str) -> tuple[int, list[int]]:
    """`0:0,2` is heads 0 and 2 of layer 0."""
    layer, _, heads = text.partition(":")
    return int(layer), [int(head) for head in heads.split(",")]


def main(given: list[str] | None = None) -> None:
    ap = argparse.ArgumentParser(
        prog="python -m scripts.replicate.quiet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ap.add_argument("student", help="exported folder of a student")
    ap.add_argument("out", type=Path, help="new folder")
    ap.add_argument("--heads", nargs="+", type=parsed, required=True, help="layer:head,head ...")
    args = ap.parse_args(given)
    try:
        write(args.student, args.out, args.heads)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
