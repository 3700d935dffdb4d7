"""The model card of an export: what it is made from, how, what was measured, under which licence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from regraft.convert.verify import Certificate

_LICENCE_KEYS = ("license", "license_name", "license_link")

_BODY = """
# {title}

[{teacher}](https://huggingface.co/{teacher}) with {n} of its {total} layers replaced by regraft {version}.
As converted, before any training, it computes what its teacher computes: the largest logit difference was
{worst:.2g} (tolerance {tolerance:.2g}, logits up to {logits:.3g}).

| layer | mixer | settings | difference of its output, relative |
|---:|---|---|---:|
{layers}

## How it was made

```yaml
{recipe}```

## What was measured

Largest differences of teacher and student, in logits, in {dtype}:

| way of running | difference |
|---|---:|
{checks}

`verify.json` has the numbers in full and the hashes of both models.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)  # or: import regraft
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

`trust_remote_code=True` runs the `.py` files of this folder and needs torch and transformers only. With
`import regraft` the installed package is used instead.

## Licence

{licence}
"""

_REVERTED = """
# {student}, layers {layers} put back

`{student}` with the mixers of layers {layers} taken from its teacher `{teacher}` again, for an ablation.
Still converted: {left}. Everything else is the student's. Nothing was measured on this model.

{use}## Licence

{licence}
"""


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
    licence = _licence(teacher_folder)
    is_hub_id = _is_hub_id(teacher)
    name = Path(teacher).name
    layers = [
        f"| {i} | {row['mixer']['kind']} | {_settings(row['mixer'])} | {row['difference']:.2g} |"
        for i, row in certificate.layers.items()
    ]
    body = _BODY.format(
        title=f"{name}, converted",
        teacher=teacher,
        n=len(certificate.layers),
        total=num_layers,
        version=version,
        worst=certificate.worst,
        tolerance=certificate.tolerance,
        logits=certificate.teacher_logits,
        dtype=certificate.dtype,
        layers="\n".join(layers),
        recipe=yaml.safe_dump(dict(recipe), sort_keys=False),
        checks="\n".join(f"| {check} | {x:.2g} |" for check, x in certificate.checks.items()),
        licence=_licence_text(licence),
    )
    if not is_hub_id:
        body = body.replace(f"[{teacher}](https://huggingface.co/{teacher})", f"`{name}`")
    return _front(licence, teacher) + body


def reverted_card(*, student: str, student_folder: Path, teacher: str, layers: str, left: str) -> str:
    """README.md of a student some of whose layers are its teacher's again.

    Args:
        student, teacher: as the user named them; `student_folder` is where the student lies.
        layers: those put back; `left`: those still converted.
    """
    licence = _licence(student_folder)
    return _front(licence, teacher) + _REVERTED.format(
        student=Path(student).name,
        teacher=teacher if _is_hub_id(teacher) else Path(teacher).name,
        layers=layers,
        left=left,
        use=_BODY[_BODY.index("## Use") : _BODY.index("## Licence")],
        licence=_licence_text(licence),
    )


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


def _settings(mixer: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in mixer.items() if key != "kind") or "-"
