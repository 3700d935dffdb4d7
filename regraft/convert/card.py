"""The model card of an export: what it is made from, how, what was measured, under which licence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from regraft.convert.verify import Certificate

_LICENCE_KEYS = ("license", "license_name", "license_link")

_USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)  # or: import regraft
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

`trust_remote_code=True` runs the `.py` files of this folder and needs torch and transformers only. With
`import regraft` the installed package is used instead."""


def model_card(
    *,
    teacher: str,
    teacher_folder: Path,
    recipe: Mapping[str, Any],
    certificate: Certificate,
    num_layers: int,
    version: str,
) -> str:
    """README.md of a converted model.

    Args:
        teacher: the teacher as the user named it; `teacher_folder` is where it lies.
        recipe: arguments of the conversion, printed as YAML.
        certificate: what was measured on it.
        num_layers: layers of the model.
        version: of regraft.
    """
    measured = certificate.layers.items()
    layers = [(i, row["mixer"], f"{row['difference']:.2g}") for i, row in measured]
    return _page(
        f"{Path(teacher).name}, converted",
        teacher,
        _licence(teacher_folder),
        f"{_link(teacher)} with {len(layers)} of its {num_layers} layers replaced by regraft {version}.\n"
        "As converted, before any training, it computes what its teacher computes: the largest logit\n"
        f"difference was {certificate.worst:.2g} (tolerance {certificate.tolerance:.2g}, logits up to "
        f"{certificate.teacher_logits:.3g}).",
        _table(("layer", "mixer", "settings", "difference of its output, relative"), map(_layer, layers)),
        _made(yaml.safe_dump(dict(recipe), sort_keys=False)),
        "## What was measured",
        f"Largest differences of teacher and student, in logits, in {certificate.dtype}:",
        _table(
            ("way of running", "difference"),
            ((check, f"{x:.2g}") for check, x in certificate.checks.items()),
        ),
        "`verify.json` has the numbers in full and the hashes of both models.",
    )


def trained_card(
    *,
    teacher: str,
    teacher_folder: Path,
    recipe: str,
    mixers: Mapping[int, Mapping[str, Any]],
    num_layers: int,
    control: bool,
    facts: Mapping[str, Any],
    version: str,
) -> str:
    """README.md of a distilled student or of its matched control.

    Args:
        teacher: the teacher as the user named it; `teacher_folder` is where it lies.
        recipe: the run's recipe as YAML, every default written out.
        mixers: the trained layers; those of a student are what the teacher's were replaced by.
        num_layers: layers of the model.
        control: nothing was converted, the teacher's own layers were trained.
        facts: `tokens`, `steps`, `seconds`, `device` of the training, and the SHA-256 of what went in:
            `teacher_sha256`, `data_sha256`.
        version: of regraft.
    """
    names = ", ".join(map(str, mixers))
    what = (
        f"{_link(teacher)}, its own layers {names} trained further by regraft {version}:\nthe matched "
        "control of a distilled student, on the same rows in the same order. No layer was replaced."
        if control
        else f"{_link(teacher)} with {len(mixers)} of its {num_layers} layers replaced and distilled by "
        f"regraft {version}.\nIt started as an exact copy of its teacher, from which training moved it away."
    )
    return _page(
        f"{Path(teacher).name}, {'matched control' if control else 'distilled'}",
        teacher,
        _licence(teacher_folder),
        what,
        _table(("layer", "mixer", "settings"), (_layer((i, mixer)) for i, mixer in mixers.items())),
        f"Trained on {facts['tokens']:,} tokens in {facts['steps']:,} steps, {facts['seconds']:,.0f} s on "
        f"{facts['device']}.",
        _made(recipe),
        f"SHA-256 of the teacher: `{facts['teacher_sha256']}`;\n"
        f"of the rows, in order: `{facts['data_sha256']}`.",
        "## What was measured",
        "Nothing yet: `regraft report` on the run compares its models by needle depth, and the\n"
        "`report/model_card.md` that it writes belongs here.",
    )


def reverted_card(*, student: str, student_folder: Path, teacher: str, layers: str, left: str) -> str:
    """README.md of a student some of whose layers are its teacher's again.

    Args:
        student, teacher: as the user named them; `student_folder` is where the student lies.
        layers: those put back; `left`: those still converted.
    """
    name = Path(student).name
    return _page(
        f"{name}, layers {layers} put back",
        teacher,
        _licence(student_folder),
        f"`{name}` with the mixers of layers {layers} taken from its teacher {_link(teacher)} again, for an "
        f"ablation.\nStill converted: {left}. Everything else is the student's. Nothing was measured on this "
        "model.",
    )


def _page(title: str, teacher: str, licence: Mapping[str, str], *blocks: str) -> str:
    """A whole card: what the Hub reads, the title, the blocks, and what all cards end with."""
    parts = [f"# {title}", *blocks, _USE, f"## Licence\n\n{_licence_text(licence)}"]
    return _front(licence, teacher) + "\n" + "\n\n".join(parts) + "\n"


def _made(recipe: str) -> str:
    return f"## How it was made\n\n```yaml\n{recipe}```"


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [header := tuple(header), ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _layer(row: tuple[Any, ...]) -> tuple[object, ...]:
    """Index, kind and settings of a mixer, and what else is known of it."""
    index, mixer, *rest = row
    settings = ", ".join(f"{key} {value}" for key, value in mixer.items() if key != "kind")
    return index, mixer["kind"], settings or "-", *rest


def _link(model: str) -> str:
    return f"[{model}](https://huggingface.co/{model})" if _is_hub_id(model) else f"`{Path(model).name}`"


def _front(licence: Mapping[str, str], teacher: str) -> str:
    """The metadata that the Hub reads."""
    fields = {
        **licence,
        **({"base_model": teacher} if _is_hub_id(teacher) else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["regraft", "linear-attention", "gated-deltanet"],
    }
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def _is_hub_id(model: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", model)) and not Path(model).exists()


def _licence(folder: Path) -> dict[str, str]:
    """Licence fields of the teacher's own card."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        front = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError:
        front = {}
    fields = front if isinstance(front, dict) else {}
    return {key: str(fields[key]) for key in _LICENCE_KEYS if fields.get(key)}


def _licence_text(licence: Mapping[str, str]) -> str:
    if "license" in licence:
        return f"The teacher's: {licence.get('license_name', licence['license'])}."
    return "The teacher's folder names none; what its authors say about their weights holds for these."
