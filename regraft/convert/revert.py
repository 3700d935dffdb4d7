"""`regraft convert --revert`: put a teacher's own mixers back into a student, for ablations."""

from __future__ import annotations

import torch
from rich.console import Console

from regraft.convert.card import reverted_card
from regraft.convert.checkpoint import open_checkpoint
from regraft.convert.convert import Output
from regraft.convert.export import export_model, push
from regraft.convert.load import DTYPES, fill
from regraft.convert.plan import make_plan, model_config
from regraft.convert.targets import with_mixers
from regraft.errors import UserError
from regraft.files import atomic_directory, refuse_existing, write_text
from regraft.layers import RegraftForCausalLM
from regraft.recipes.selector import resolve_layers


def revert(
    student: str,
    output: Output,
    *,
    layers: str,
    teacher: str,
    revision: str | None = None,
    allow_pickle: bool = False,
) -> None:
    """Write the student with the mixers of these layers taken from its teacher; all else stays the student's.

    Args:
        student: folder of a converted model.
        output: where the result goes, and how.
        layers: indices, `every:N` or `last:N`.
        teacher: the model it was made from.
        revision: of the teacher.
        allow_pickle: read a teacher's `.bin` weights.

    Raises:
        UserError: layers that are the teacher's already, or two models that do not belong together.
    """
    ours, theirs = open_checkpoint(student), open_checkpoint(teacher, revision, allow_pickle=allow_pickle)
    config = model_config(ours, headers_only=output.dry_run)
    original = model_config(theirs, headers_only=True)
    if config.num_hidden_layers != original.num_hidden_layers:
        reason = f"has {original.num_hidden_layers} layers, {student} has {config.num_hidden_layers}."
        raise UserError(teacher, reason, "name the teacher that the student was made from.")
    chosen = resolve_layers(layers, config.num_hidden_layers)
    for layer in chosen:
        if config.mixers[layer] == original.mixers[layer]:
            converted = [i for i, m in enumerate(config.mixers) if m != original.mixers[i]]
            reason = "is the teacher's own already."
            raise UserError(f"layer {layer}", reason, f"choose among {', '.join(map(str, converted))}.")
    mixed = ours.with_tensors_of(theirs, tuple(f"model.layers.{i}.attn." for i in chosen))
    mixers = {i: original.mixers[i] for i in chosen}
    plan = make_plan(mixed, with_mixers(config, mixers), DTYPES[output.dtype])
    console = Console()
    if output.dry_run or output.out is None:
        plan.print(Console(width=max(console.width, 160)), mixed)
        return
    out = output.out
    refuse_existing(out, output.overwrite)
    model = fill(mixed, plan)
    left = [i for i, m in enumerate(model.config.mixers) if m != original.mixers[i]]
    names, still = ", ".join(map(str, chosen)), ", ".join(map(str, left)) or "none"
    card = reverted_card(student=student, student_folder=ours.path, teacher=teacher, layers=names, left=still)
    with atomic_directory(out, output.overwrite) as folder:
        export_model(model, folder, companions_from=ours.path)
        write_text(folder / "README.md", card)
    note = "" if left else _distance(model, fill(theirs, make_plan(theirs, original, DTYPES[output.dtype])))
    console.print(
        f"layers {names} of {student} are the teacher's again; still converted: {still}{note}\n"
        f"student: {out}",
        soft_wrap=True,
    )
    if output.push_to is not None:
        console.print(f"uploaded: {push(out, output.push_to)}", soft_wrap=True)


def _distance(model: RegraftForCausalLM, teacher: RegraftForCausalLM) -> str:
    """What still differs once every layer is the teacher's: norms or other layers that were trained too."""
    state = teacher.state_dict()
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, state[name])]
    return f"; {len(changed)} tensors differ from the teacher's" if changed else ", so this is the teacher"
