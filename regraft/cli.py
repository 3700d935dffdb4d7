"""The command line: one thin function a verb; what a verb does lives in the package of its name.

Heavy imports happen inside the verbs. Exit codes: 0 done, 1 unexpected, 2 a mistake the user can mend,
3 a verification that failed, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.text import Text

from regraft import __version__
from regraft.cli_groups import probe, recipes
from regraft.cli_options import (
    CHECKS,
    EVALUATION,
    FILES,
    MODEL,
    RECIPE,
    RUNNING,
    STUDENT,
    AllowPickle,
    AsJson,
    Device,
    Format,
    ModelName,
    Overrides,
    Overwrite,
    RecipeName,
    Resumable,
    Resume,
    Revision,
    RunDir,
    Tolerance,
    complete_layer_target,
    complete_model,
)
from regraft.errors import UserError, VerificationError
from regraft.recipes.schema import Target

app = typer.Typer(
    help="Convert pretrained Gated DeltaNet models to Bayesian Layers, distil, compare, report.",
    epilog="Start with: regraft demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
JOB, LOOK, AROUND = "The job", "Look closer", "Around it"

RESUMABLE = ("distill", "control")  # by --resume
GO_ON = ("demo", "report", "probe")  # by themselves
# Where nothing can be written, and what to do.
NO_PLACE = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a place that you may write to."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, or choose another disk."),
}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"regraft {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every verb; `main` reads `--debug` itself, for it must know when parsing fails too."""
    from transformers.utils import logging

    if not debug:  # its warnings about foreign model types and its bars are not about the user's job
        logging.set_verbosity_error()
        logging.disable_progress_bar()


@app.command(epilog="Example: regraft convert embedded --layers last:2 --out student", rich_help_panel=JOB)
def convert(
    model: ModelName,
    layers: Annotated[
        str | None,
        typer.Option(
            help="1,3 or every:6 or last:4, counted from 0; scan:4 measures which.", rich_help_panel=STUDENT
        ),
    ] = None,
    to: Annotated[
        Target,
        typer.Option(
            metavar="TARGET",
            help=f"The mixer put in: {', '.join(get_args(Target))}.",
            rich_help_panel=STUDENT,
        ),
    ] = "bayesian",
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER=TARGET",
            help="Another mixer for one of the layers, such as 5=kdn-diagonal; repeatable.",
            autocompletion=complete_layer_target,
            rich_help_panel=STUDENT,
        ),
    ] = None,
    noise_groups: Annotated[
        int,
        typer.Option(
            min=1, help="Groups of value columns with a noise of their own.", rich_help_panel=STUDENT
        ),
    ] = 1,
    process_match: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share by which extra process noise restores the teacher's write gain along repeated keys "
            "at evidence 1; 0 is stationary noise. In heads that never forget it adds up over a document.",
            rich_help_panel=STUDENT,
        ),
    ] = 0.0,
    revert: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Instead of converting: put these layers of --teacher back into MODEL, a student.",
            rich_help_panel=STUDENT,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Where --revert takes layers from.", rich_help_panel=STUDENT),
    ] = None,
    dtype: Format = "float32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    tolerance: Tolerance = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, read no weights.", rich_help_panel=CHECKS)
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the student goes.", rich_help_panel=FILES)
    ] = None,
    overwrite: Overwrite = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPOSITORY", help="Upload the student; a new one is private.", rich_help_panel=FILES
        ),
    ] = None,
) -> None:
    """Replace layers of a teacher by Bayesian Layers that start as exact copies, and verify it."""
    from regraft.convert import Choice, Output
    from regraft.convert.command import convert_or_revert
    from regraft.convert.targets import parse_targets

    convert_or_revert(
        model,
        Choice(
            () if layers is None else layers, to, parse_targets(target or []), noise_groups, process_match
        ),
        Output(out, dtype, dry_run, overwrite, push_to_hub),
        revert=revert,
        teacher=teacher,
        tolerance=tolerance,
        revision=revision,
        allow_pickle=allow_pickle,
    )


@app.command(epilog="Example: regraft scan embedded --samples 2", rich_help_panel=LOOK)
def scan(
    model: ModelName,
    samples: Annotated[int, typer.Option(min=1, help="Needle documents.", rich_help_panel=EVALUATION)] = 8,
    length: Annotated[
        int | None,
        typer.Option(
            min=128,
            help="Their tokens; if not given, the training length, at most 512.",
            rich_help_panel=EVALUATION,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the documents.", rich_help_panel=EVALUATION)] = 0,
    dtype: Format = "float32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table here, as JSON.", rich_help_panel=FILES),
    ] = None,
) -> None:
    """Find the layers that hold a teacher's long memory, by cutting the memory of one at a time."""
    from regraft.convert.scan import scan as run

    run(
        model,
        revision=revision,
        dtype=dtype,
        samples=samples,
        length=length,
        seed=seed,
        out=out,
        allow_pickle=allow_pickle,
    )


@app.command(epilog="Example: regraft verify student --teacher embedded", rich_help_panel=LOOK)
def verify(
    student: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a converted model.")],
    teacher: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="`embedded`, a local folder or a Hub id.",
            autocompletion=complete_model,
            rich_help_panel=MODEL,
        ),
    ],
    revision: Revision = None,
    dtype: Format = "float32",
    allow_pickle: AllowPickle = False,
    tolerance: Tolerance = None,
    length: Annotated[
        int, typer.Option(help="Tokens of the longest sequence, at least 193.", rich_help_panel=CHECKS)
    ] = 1025,
    device: Device = "cpu",
    kernels: Annotated[
        Literal["auto", "fla", "regraft"] | None,
        typer.Option(
            help="Whose kernels run the delta-rule layers; auto if not given.", rich_help_panel=RUNNING
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the certificate here, as JSON.", rich_help_panel=FILES),
    ] = None,
) -> None:
    """Compare a student with its teacher in every way of running them; exit 3 where they differ."""
    from regraft.convert import verify as run

    run(
        student,
        teacher=teacher,
        revision=revision,
        dtype=dtype,
        tolerance=tolerance,
        length=length,
        device=device,
        kernels=kernels,
        out=out,
        allow_pickle=allow_pickle,
    )


@app.command(
    cls=Resumable,
    epilog="Example: regraft distill demo --out runs/demo --set phases.0.tokens=100K",
    rich_help_panel=JOB,
)
def distill(
    recipe: RecipeName,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run directory.", rich_help_panel=FILES)],
    set_: Overrides = None,
    phase: Annotated[
        str | None, typer.Option(metavar="NAME", help="Do this phase alone.", rich_help_panel=RECIPE)
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="With --phase: the run that did the phase before.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    other_data: Annotated[
        bool,
        typer.Option(
            "--other-data",
            help="With --from: other data than before, longer rows say, read from their beginning.",
            rich_help_panel=RECIPE,
        ),
    ] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Convert the recipe's teacher and distil the student, phase by phase."""
    from regraft.recipes import load_recipe

    loaded = load_recipe(recipe, set_ or ())  # before the engine's slow import: mistakes show at once
    from regraft.distill import distill as run

    run(
        loaded, out, phase=phase, start=start, other_data=other_data, resume=resume, overwrite=overwrite
    )  # fmt: skip


@app.command(cls=Resumable, epilog="Example: regraft control runs/demo", rich_help_panel=JOB)
def control(
    run: RunDir,
    match: Annotated[
        Literal["tokens", "flops"],
        typer.Option(
            help="What is equal: tokens, for which the run may still be under way, or FLOPs, the teacher's "
            "of the distillation included.",
            rich_help_panel=RUNNING,
        ),
    ] = "tokens",
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Train the matched control: the teacher's own layers on the run's tokens, in the run's order."""
    from regraft.distill import control as train

    train(run, match=match, resume=resume, overwrite=overwrite)


@app.command(epilog="Example: regraft report runs/demo --set report.niah.samples=5", rich_help_panel=JOB)
def report(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run directory; none to compare only --model.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL",
            help="A further model: `embedded`, a local folder or a Hub id; repeatable.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the others are compared with; if not given, the control, else the first.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    set_: Overrides = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Documents per task and length; keeps all lengths, depths balanced.",
            rich_help_panel=EVALUATION,
        ),
    ] = None,
    inspect: Annotated[
        bool,
        typer.Option(
            "--inspect",
            help="Show gain, variance and a needle's trace in converted layers.",
            rich_help_panel=EVALUATION,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it goes; RUN/report if not given.", rich_help_panel=FILES),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare models on the same documents, those of a run first: tables, heatmaps, JSON, one HTML page.

    What was evaluated before is not run again, so an interrupted report goes on where it was.
    """
    from regraft.report.run import report_run

    report_run(
        run,
        models=model or (),
        baseline=baseline,
        overrides=set_ or (),
        limit=limit,
        inspect=inspect,
        out=out,
        overwrite=overwrite,
    )


@app.command(epilog="Example: regraft demo --out runs/demo", rich_help_panel=JOB)
def demo(
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run directory.", rich_help_panel=FILES)] = Path(
        "runs/demo"
    ),
    set_: Overrides = None,
) -> None:
    """Distil, control and report with recipe `demo` on the embedded teacher: minutes on 2 CPU cores.

    Finished parts are not done again, so the same command goes on where it was stopped.
    """
    from regraft.recipes import load_recipe

    recipe = load_recipe("demo", set_ or ())
    from regraft.distill import control, distill
    from regraft.report.run import report_run

    distill(recipe, out, resume=True)
    control(out, resume=True)
    report_run(out, inspect=True, overwrite=True)


@app.command(epilog="Example: regraft doctor --no-kernels", rich_help_panel=AROUND)
def doctor(
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels/--no-kernels",
            help="Compute a small problem in every way there is; a GPU compiles kernels for it.",
            rich_help_panel=CHECKS,
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Look at versions, GPU, kernels and disks, and say what does not go together; exit 2 if something."""
    from regraft.doctor.command import doctor as examine

    if not examine(kernels=kernels, as_json=as_json):
        raise typer.Exit(UserError.exit_code)


app.add_typer(recipes, name="recipes", rich_help_panel=AROUND)
app.add_typer(probe, name="probe", rich_help_panel=LOOK)


def main() -> None:
    """Run the command line and turn whatever stops it into one message and an exit code."""
    arguments = sys.argv[1:]
    try:
        app(prog_name="regraft")
    except UserError as error:
        _stop(error, [error.reason, f"fix: {error.fix}" if error.fix else ""], error.exit_code, error.where)
    except VerificationError as error:
        _stop(error, [str(error)], error.exit_code, "verification failed")
    except SystemExit as stop:
        if stop.code == 130:  # what Typer makes of Ctrl-C
            _err(Text(_after_interrupt(arguments)))
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_PLACE:
            place = Path(error.filename or ".").parent  # the file itself has a temporary name
            _stop(error, [f"{error.strerror}.", f"fix: {NO_PLACE[error.errno]}"], 2, str(place))
        lines = [str(error), "" if "--debug" in arguments else "with --debug: where it happened"]
        _stop(error, lines, 1, type(error).__name__)


def _stop(error: Exception, lines: list[str], code: int, where: str) -> None:
    """Print one error and exit with its code."""
    if "--debug" in sys.argv:
        Console(stderr=True).print_exception()
    message = "\n".join(line for line in lines if line)
    _err(Text.assemble(("error ", "bold red"), (where, "bold"), ": ", message))
    raise SystemExit(code) from error


def _err(text: Text) -> None:
    if os.environ.get("RANK", "0") != "0":  # of several processes one speaks
        return
    Console(stderr=True).print(text, soft_wrap=True)  # never breaks a path at the edge of the screen


def _after_interrupt(arguments: list[str]) -> str:
    verb = next((word for word in arguments if not word.startswith("-")), "")
    if verb in GO_ON:
        return f"Interrupted. To go on: regraft {shlex.join(arguments)}"
    if verb not in RESUMABLE:
        return "Interrupted; nothing half-written is left."
    words = [word for word in arguments if word not in ("--resume", "--overwrite")]
    return f"Interrupted. To go on: regraft {shlex.join([*words, '--resume'])}"
