"""What a replication does: a teacher, variants of one recipe, and what they are measured on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic.types import Strict

from regraft.errors import UserError
from regraft.recipes import load_recipe
from regraft.recipes.schema import Count, Index, Recipe, Section, Share, Some, Text, Tokens
from regraft.recipes.yaml12 import parse_yaml

TEACHER, STUDENT, CONTROL = "teacher", "student", "control"
PLANS = Path(__file__).parent / "plans"
Strings = Annotated[tuple[str, ...], Strict(False)]


class TeacherPlan(Section):
    """Where the teacher comes from."""

    train: Strings = ()
    """Arguments of `python -m scripts.teacher`; empty for a model that is there."""
    model: Text | None = None
    """A folder or `embedded`, instead of training one."""


class Quiet(Section):
    """A student that is not trained: another one without the process noise of some heads."""

    of: Text
    """The variant that it is made from."""
    heads: Text
    """Layers and heads, `layer:head,head …`."""


class Variant(Section):
    """One student: the recipe with some keys set, and what it is to answer."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    """Name of its run."""
    question: Text
    """What its comparison with `main` answers."""
    set: Strings = ()
    """Overrides of the recipe, `a.b=value`."""
    seed: Index = 0
    """Order of the data, and everything else that is random."""
    control: bool | Text = False
    """Train its matched control too; or the variant whose control is this one's as well: the same layers of
    the teacher on the same tokens."""
    quiet: Quiet | None = None
    """Made from another student instead of trained."""
    after: Text | None = None
    """A variant whose finished run this one goes on from, on its own data and with its last phase alone."""
    against: Text = "main/student"
    """What it is compared with."""

    @property
    def source(self) -> str | None:
        """The variant whose run has to be finished first, if any."""
        return self.quiet.of if self.quiet else self.after


class Evaluation(Section):
    """Needle documents and held-out books that every model reads."""

    lengths: Some[Count]
    """Tokens of prompt and answer: 1, 2, 4 and 8 times the teacher's rows."""
    samples: Count = 200
    """Documents per task and length."""
    batch_size: Count = 1024
    """Documents answered at once."""
    books: Count = 80
    """Held-out books, of each one stretch of the longest length."""


class Plan(Section):
    """A whole replication."""

    like: Text | None = None
    """Another plan, whose values hold for all keys that this one leaves out."""
    set: Strings = ()
    """Overrides of the recipe for all variants, before their own."""
    names: dict[str, str] = Field(default_factory=dict)
    """What `{name}` in a variant's overrides and heads stands for."""
    teacher: TeacherPlan
    """The model to convert."""
    recipe: Text
    """Recipe file beside the plan; its teacher and data source are filled in."""
    needles: Share = 0.15
    """Share of needle documents among the tokens of distillation, the rest books."""
    data_tokens: Tokens
    """Tokens of books and needle documents made for distillation, per row length."""
    evaluation: Evaluation
    """What is measured."""
    variants: Some[Variant]
    """Students, the most important first."""

    @field_validator("variants")
    @classmethod
    def _distinct(cls, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        names = [variant.name for variant in variants]
        if len(set(names)) != len(names):
            raise ValueError("two variants have one name")
        trained = {variant.name for variant in variants if variant.control is True}
        for variant in variants:
            if isinstance(variant.control, str) and variant.control not in trained:
                raise ValueError(f"{variant.name}: {variant.control} has no control of its own")
            if variant.source and variant.source not in {v.name for v in variants if v.quiet is None}:
                raise ValueError(f"{variant.name}: no variant {variant.source} is trained")
        return variants

    def models(self) -> Iterator[tuple[Variant | None, str]]:
        """All models by variant and role, the teacher first."""
        yield None, TEACHER
        for variant in self.variants:
            yield variant, STUDENT
            if variant.control is True:
                yield variant, CONTROL


def load_plan(name: str) -> tuple[Plan, Path]:
    """A plan by file or by the name of one in `plans`, and its folder.

    Raises:
        UserError: no such file, nor what it is `like`, or something that is unknown, missing or out of range.
    """
    path = PLANS / f"{name}.yaml" if (PLANS / f"{name}.yaml").is_file() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PLANS.glob("*.yaml") if "recipe" not in p.stem))
        raise UserError(name, "no such plan.", f"use {known}, or a file.")
    try:
        return Plan.model_validate(_values(path)), path.parent
    except ValidationError as error:
        raise UserError(
            path, f"is no plan: {error}", "compare it with those in scripts/replicate/plans."
        ) from error


def _values(path: Path) -> Any:
    """What a plan's file says, with what it leaves to the plan that it is like."""
    own = parse_yaml(path.read_text(encoding="utf-8"), path)
    other = own.get("like") if isinstance(own, dict) else None
    if not isinstance(other, str):
        return own
    beside = path.with_name(f"{other}.yaml")
    if beside == path or not beside.is_file():
        raise UserError(path, f"like: there is no other plan {beside}.", "name one that lies beside it.")
    return {**_values(beside), **own}


class Work:
    """A plan and the folder in which it is carried out."""

    def __init__(self, plan: str, folder: Path) -> None:
        self.plan, self.beside = load_plan(plan)
        self.name, self.folder = plan, folder

    @property
    def teacher(self) -> str:
        """What the recipe's `teacher.model` is."""
        return self.plan.teacher.model or str(self.folder / "teacher" / "teacher")

    @property
    def heldout(self) -> Path:
        """Held-out books, one stretch each."""
        return self.folder / "data" / "heldout.jsonl"

    def tokens(self, kind: str, seq_len: int) -> Path:
        """Token file of `books` or `needles` for rows of a length."""
        return self.folder / "data" / f"{kind}-{seq_len}.bin"

    def run(self, variant: Variant) -> Path:
        """Run directory of a variant."""
        return self.folder / "runs" / variant.name

    def variant(self, name: str) -> Variant:
        """A variant by name."""
        return next(v for v in self.plan.variants if v.name == name)

    def recipe(self, variant: Variant, extra: tuple[str, ...] = ()) -> Recipe:
        """The variant's recipe, complete."""
        path = self.beside / self.plan.recipe
        own = [*map(self._named, (*self.plan.set, *variant.set)), *extra]
        seq_len = load_recipe(path, own).data.seq_len
        share = self.plan.needles
        # Documents are drawn by weight, and all of them are as long as a row.
        parts = [
            {"weight": weight, "source": {"kind": "tokens", "path": str(self.tokens(kind, seq_len))}}
            for kind, weight in (("books", 1 - share), ("needles", share))
            if weight > 0
        ]
        source: dict[str, Any] = {"kind": "mix", "parts": parts}
        filled = [
            f"teacher.model={self.teacher}",
            f"data.source={source}",
            f"data.seed={variant.seed}",
            f"seed={variant.seed}",
        ]
        return load_recipe(path, [*filled, *own])

    def source(self, variant: Variant) -> Path | None:
        """Run directory of the variant that a quiet one is made from, or a later phase goes on from."""
        return self.run(self.variant(variant.source)) if variant.source else None

    def heads(self, quiet: Quiet) -> list[str]:
        """Layers and heads without process noise, each as `layer:head,head`."""
        return self._named(quiet.heads).split()

    def _named(self, override: str) -> str:
        for name, value in self.plan.names.items():
            override = override.replace(f"{{{name}}}", value)
        return override

    def row_lengths(self) -> list[int]:
        """All lengths of rows that some variant distils on."""
        return sorted({self.recipe(variant).data.seq_len for variant in self.plan.variants})

    def place(self, variant: Variant | None, role: str) -> str:
        """Folder (or name) of a model."""
        if variant is None:
            return self.teacher
        run = self.run(variant)
        return str((run if role == STUDENT else run / CONTROL) / "export")


def model_name(variant: Variant | None, role: str) -> str:
    """`teacher`, `main/student`, `main/control`, …"""
    return role if variant is None else f"{variant.name}/{role}"
