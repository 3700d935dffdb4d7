"""`regraft distill` and `regraft control`: a run directory from a recipe, the matched control beside it."""

from __future__ import annotations

import platform
import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import regraft
from regraft.convert import export_model, load_model, load_tokenizer, make_student, open_checkpoint
from regraft.convert.card import trained_card
from regraft.convert.convert import cast_model, write_student
from regraft.convert.load import DTYPES
from regraft.distill.adapters import add_adapters, merge_adapters
from regraft.distill.compare import check_same_rows, cost_table, side_by_side, tokens_of_equal_flops
from regraft.distill.cost import free_memory, memory_line, spent, stage_costs
from regraft.distill.data import RowStream
from regraft.distill.engine import Engine, release, unshard
from regraft.distill.loop import Loop, Progressed
from regraft.distill.metrics import check_wandb
from regraft.distill.parent import (
    CONTROL,
    EXPORT,
    MANIFEST,
    check_parent,
    check_start,
    chosen_phases,
    control_before,
    read_manifest,
)
from regraft.distill.preflight import preflight
from regraft.distill.stage import Stage, control_stages, phase_stages
from regraft.distill.trainable import trainable_table
from regraft.errors import UserError
from regraft.files import (
    atomic_directory,
    hash_directory,
    refuse_existing,
    sha256_file,
    write_json,
    write_text,
)
from regraft.layers import RegraftConfig, RegraftForCausalLM
from regraft.recipes import dump_recipe, load_recipe
from regraft.recipes.schema import Recipe

RECIPE, START = "recipe.yaml", "start"


def distill(
    recipe: Recipe,
    out: Path,
    *,
    phase: str | None = None,
    start: Path | None = None,
    other_data: bool = False,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert the recipe's teacher, verify, distil through all phases and export the student.

    Args:
        recipe: what to do.
        out: run directory; gets `recipe.yaml`, `manifest.json`, `start/`, `checkpoints/`, `metrics.jsonl` and
            `export/`.
        phase: do this phase alone; all of them by default.
        start: the finished run of the phase before it, whose student and place in the data it goes on from.
        other_data: the recipe has other `data` than that run, longer rows say; they are read from their
            beginning, and its control goes on from that run's control.
        resume: go on from the newest checkpoint of this directory.
        overwrite: start anew in a directory that holds something.

    Raises:
        UserError: a mistake in the recipe, its data or the directory.
        VerificationError: the converted student is not its teacher's copy; nothing is written.
    """
    engine = _engine(recipe)
    console = Console(quiet=not engine.main)
    out = Path(out)
    if not (resume and (out / MANIFEST).is_file()):
        engine.once(partial(_begin, recipe, out, overwrite, console, phase, start, other_data))
    _same_recipe(recipe, out)
    manifest = read_manifest(out)
    check_start(out / START, manifest, phase)
    stages = [stage for stage in phase_stages(recipe) if stage.name in manifest["phases"]]
    teacher = load_model(recipe.teacher.model, revision=recipe.teacher.revision)
    student = load_model(str(out / START))
    _train(recipe, out, student, teacher, tuple(manifest["layers"]), stages, resume, engine, console)
    _compare(out, engine, console)


def control(run: Path, *, match: str = "tokens", resume: bool = False, overwrite: bool = False) -> None:
    """Train the matched control of a run: the teacher's own layers, the run's rows in the run's order.

    Args:
        run: a run directory. Where tokens are matched it may still be under way, on another device say;
            whoever ends last compares the two.
        match: what is equal: `tokens`, or `flops`, the teacher's forward passes included.
        resume, overwrite: as in `distill`.

    Raises:
        UserError: `run` is no run, or not a finished one where FLOPs are to be matched, or its control
            exists, or the two saw other rows.
    """
    run = Path(run)
    parent = read_manifest(run)
    recipe = load_recipe(run / RECIPE)
    engine = _engine(recipe)
    console = Console(quiet=not engine.main)
    out = run / CONTROL
    layers = tuple(parent["layers"])
    model = load_model(recipe.teacher.model, revision=recipe.teacher.revision)
    if not (resume and (out / MANIFEST).is_file()):
        engine.once(partial(_begin_control, recipe, out, overwrite, parent, match, model.config))
    manifest = read_manifest(out)
    if manifest["match"] != match:
        fix = f"resume with --match {manifest['match']}, or begin anew with --overwrite."
        raise UserError(out, f"was begun with --match {manifest['match']}.", fix)
    if manifest.get("parent") is not None:
        check_start(out / START, manifest, None)
        model = load_model(str(out / START))
    stages = control_stages(recipe, manifest["phases"], manifest["tokens"])
    _train(recipe, out, model, None, layers, stages, resume, engine, console)
    _compare(run, engine, console)


def _compare(run: Path, engine: Engine, console: Console) -> None:
    """Where a run and its control are both finished: that they saw the same rows, and what they took."""
    both = side_by_side(run)
    if not both:
        return
    check_same_rows(run)
    out = run / CONTROL / MANIFEST
    engine.once(lambda: write_json(out, {**read_manifest(out.parent), "side_by_side": both}))
    console.print(cost_table(both))


def _begin(
    recipe: Recipe,
    out: Path,
    overwrite: bool,
    console: Console,
    phase: str | None,
    start: Path | None,
    other_data: bool,
) -> None:
    """Convert and verify, or take over a parent's student; then make the run directory in one piece."""
    _refuse_run(out, overwrite)
    # A mistake in the data shows before anything is written; the tokens made here are kept.
    RowStream(recipe.data, load_tokenizer(recipe.teacher.model, revision=recipe.teacher.revision))
    phases = chosen_phases(recipe, phase, start, other_data)
    origin = {**_origin(recipe), "kind": "distill", "phases": phases, "parent": None}
    if start is not None:
        parent = check_parent(Path(start), recipe, phases[0], origin["teacher_sha256"], other_data)
        with atomic_directory(out, overwrite) as folder:
            shutil.copytree(Path(start) / EXPORT, folder / START)
            manifest = {
                **origin,
                "layers": parent.layers,
                "start_sha256": parent.sha256,
                "parent": parent.record(),
            }
            write_json(folder / MANIFEST, manifest)
            write_text(folder / RECIPE, dump_recipe(recipe))
        return
    settings = recipe.convert
    done = make_student(
        recipe.teacher.model,
        settings.layers,
        to=settings.to,
        targets={t.layer: t.to for t in settings.targets},
        noise_groups=settings.noise_groups,
        process_match=settings.process_match,
        revision=recipe.teacher.revision,
    )
    with atomic_directory(out, overwrite) as folder:
        (folder / START).mkdir()
        digest = write_student(done, folder / START)
        manifest = {**origin, "layers": list(done.layers), "start_sha256": digest}
        write_json(folder / MANIFEST, manifest)
        write_text(folder / RECIPE, dump_recipe(recipe))
    console.print(
        f"layers {', '.join(map(str, done.layers))} converted; largest logit difference to the teacher "
        f"{done.certificate.worst:.2g}"
    )


def _begin_control(
    recipe: Recipe, out: Path, overwrite: bool, parent: dict[str, Any], match: str, config: RegraftConfig
) -> None:
    """Make the control's directory in one piece."""
    if match == "flops" and "finished" not in parent:
        fix = "bring it to its end with --resume, or match tokens."
        raise UserError(out.parent, "is not finished, so its FLOPs are not known.", fix)
    _refuse_run(out, overwrite)
    before = None
    if (parent["parent"] or {}).get("other_data"):
        if match == "flops":
            raise UserError(
                "--match flops", "the run reads other data than the one before it.", "match tokens."
            )
        before = control_before(parent["parent"])
    done = [] if before else (parent["parent"] or {}).get("phases", ())
    phases = [*done, *parent["phases"]]
    tokens = None
    if match == "flops":
        costs = stage_costs(control_stages(recipe, phases), config, None, tuple(parent["layers"]), recipe)
        tokens = tokens_of_equal_flops(parent, costs["control"])
    manifest = {
        **_origin(recipe),
        "kind": "control",
        "layers": parent["layers"],
        "phases": phases,
        "match": match,
        "tokens": tokens,
        "parent": before.record() if before else None,
    }
    with atomic_directory(out, overwrite) as folder:
        if before:
            shutil.copytree(Path(before.run) / EXPORT, folder / START)
            manifest["start_sha256"] = before.sha256
        write_json(folder / MANIFEST, manifest)
        write_text(folder / RECIPE, dump_recipe(recipe))


def _train(
    recipe: Recipe,
    out: Path,
    student: RegraftForCausalLM,
    teacher: RegraftForCausalLM | None,
    layers: tuple[int, ...],
    stages: list[Stage],
    resume: bool,
    engine: Engine,
    console: Console,
) -> Progressed:
    """Run the loop in `out` and export what comes out of it."""
    torch.manual_seed(recipe.seed)
    for model in (student, teacher):
        if model is not None:
            model.to(engine.device)
    if (lora := recipe.lora) is not None:
        add_adapters(student, lora, layers)
    console.print(trainable_table(student, stages, layers))
    preflight(student, teacher, stages, layers, autocast=DTYPES[recipe.teacher.dtype])
    costs = stage_costs(stages, student.config, teacher.config if teacher else None, layers, recipe)
    console.print(memory_line(costs, free_memory()), soft_wrap=True)
    tokenizer = load_tokenizer(recipe.teacher.model, revision=recipe.teacher.revision)
    engine.once(partial(RowStream, recipe.data, tokenizer))  # fills the cache that the others read
    stream = RowStream(recipe.data, tokenizer)
    loop = Loop(
        student=student,
        teacher=teacher,
        layers=layers,
        stages=stages,
        stream=stream,
        folder=out,
        every=recipe.checkpoint.every,
        keep=recipe.checkpoint.keep,
        best=recipe.checkpoint.best,
        autocast=DTYPES[recipe.teacher.dtype],
        seed=recipe.seed,
        engine=engine,
        wandb=recipe.engine.wandb,
    )
    if (parent := read_manifest(out).get("parent")) is not None:
        if parent["data"] is not None:
            stream.restore(parent["data"])
        loop.at.data_sha256 = parent["data_sha256"]
    if stream.tokens_per_pass is not None and stream.tokens_per_pass < loop.total:
        console.print(
            f"data: {stream.tokens_per_pass:,} tokens; {loop.total / stream.tokens_per_pass:.2f} passes"
        )
    if resume and loop.resume():
        console.print(f"resuming after step {loop.at.step}: {loop.at.tokens:,} of {loop.total:,} tokens")
    done = loop.run()
    unshard(student)
    release(student)
    engine.once(
        partial(
            _finish,
            recipe,
            out,
            student,
            done,
            stream,
            {"processes": engine.world} | spent(costs, done.places),
        )
    )
    console.print(_summary(done, stream.closed_ledger(), out), soft_wrap=True)
    return done


def _finish(
    recipe: Recipe,
    out: Path,
    student: RegraftForCausalLM,
    done: Progressed,
    stream: RowStream,
    cost: dict[str, Any],
) -> None:
    """Export, and note in the manifest what was done."""
    student.cpu()
    merge_adapters(student)
    cast_model(student, DTYPES[recipe.teacher.dtype])
    manifest = read_manifest(out)
    finished = {
        "data_sha256": done.data_sha256,
        "data": stream.state(),
        "tokens": done.tokens,
        "ledger": stream.closed_ledger(),
        "steps": done.step,
        "seconds": round(done.seconds, 2),
        "device": _device_name(),
        **cost,
    }
    source = open_checkpoint(recipe.teacher.model, recipe.teacher.revision).path
    with atomic_directory(out / EXPORT, overwrite=True) as folder:
        finished["export_sha256"] = export_model(student.eval(), folder, companions_from=source)
        card = trained_card(
            teacher=recipe.teacher.model,
            teacher_folder=source,
            recipe=dump_recipe(recipe),
            mixers={i: student.config.mixers[i] for i in manifest["layers"]},
            num_layers=student.config.num_hidden_layers,
            control=manifest["kind"] == "control",
            facts=manifest | finished,
            version=regraft.__version__,
        )
        write_text(folder / "README.md", card)
    write_json(out / MANIFEST, {**manifest, "finished": finished})


def _summary(done: Progressed, ledger: dict[str, Any], out: Path) -> str:
    speed = done.tokens / max(done.seconds, 1e-9)
    passes = [
        f"{name}: {of['passes']} passes begun\n" for name, of in ledger["sources"].items() if of["passes"] > 1
    ]
    dropped = ", ".join(f"{n:,} {cause.replace('_', ' ')}" for cause, n in ledger["dropped"].items() if n)
    return (
        "".join(passes)
        + f"{ledger['read']:,} tokens read = {ledger['trained']:,} trained"
        + (f" + dropped: {dropped}" if dropped else "")
        + f"\n{done.tokens:,} tokens in {done.seconds:.0f} s ({speed:,.0f} tokens/s); export: {out / EXPORT}"
    )


def _engine(recipe: Recipe) -> Engine:
    settings = recipe.engine
    check_wandb(settings.wandb)
    return Engine(
        student_sharded=settings.student == "sharded",
        teacher_sharded=settings.teacher == "sharded",
        recompute=settings.recompute,
    )


def _origin(recipe: Recipe) -> dict[str, Any]:
    """Where a run comes from: hashes of what it starts with, versions of what runs it."""
    teacher = open_checkpoint(recipe.teacher.model, recipe.teacher.revision)
    packages = ("torch", "transformers", "safetensors", "tokenizers")
    return {
        "teacher": recipe.teacher.model,
        "teacher_sha256": hash_directory(teacher.path),
        "tokenizer_sha256": sha256_file(teacher.path / "tokenizer.json"),
        "versions": {
            "regraft": regraft.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def _refuse_run(out: Path, overwrite: bool) -> None:
    """A run that is there is gone on with, or replaced, on request only."""
    if not overwrite and (out / MANIFEST).is_file():
        fix = "go on with --resume, begin anew with --overwrite, or choose another directory."
        raise UserError(out, "holds a run.", fix)
    refuse_existing(out, overwrite)


def _same_recipe(recipe: Recipe, out: Path) -> None:
    """A run resumes with the recipe it began with."""
    begun = load_recipe(out / RECIPE)
    if begun != recipe:
        there, given = (_leaves(each.model_dump(mode="json")) for each in (begun, recipe))
        keys = [key for key in there | given if there.get(key) != given.get(key)]
        first = f"{keys[0]} is {there.get(keys[0])} there and {given.get(keys[0])} here"
        more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
        fix = f"go on with {out / RECIPE}, or begin another run in another directory."
        raise UserError(out / RECIPE, f"differs from the recipe given: {first}{more}.", fix)


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Values of a tree of dicts and lists by the paths that `--set` takes."""
    if not isinstance(tree, dict | list) or not tree:
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    below = (_leaves(value, f"{path}.{key}" if path else str(key)) for key, value in items)
    return {key: value for leaves in below for key, value in leaves.items()}


def _device_name() -> str:
    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads"
    )
