"""An export in a process of its own, without network: loads, gives the same logits, generates."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from folders import write_teacher
from safetensors.torch import save_file

from regraft.convert import load_model
from regraft.convert import remote_code as bundle

ROOT = Path(__file__).parents[1]

PRELUDE = """
import socket, sys
def refuse(*_, **__): raise OSError("this process has no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)
folder, expected = sys.argv[1], load_file(sys.argv[2])
"""

WITHOUT_THE_PACKAGE = """
class Nothing:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("regraft", "fla", "triton", "lm_eval", "pydantic", "typer"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Nothing())
options = {"trust_remote_code": True}
"""

CHECK = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
ids = expected["ids"]
with torch.no_grad():
    assert torch.equal(model(ids).logits, expected["logits"]), "logits"
settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
assert torch.equal(model.generate(ids, **settings), expected["generated"]), "generate"
assert torch.equal(model.generate(ids, use_cache=False, **settings), expected["generated"]), "without a cache"
text = AutoTokenizer.from_pretrained(folder).decode(expected["generated"][0])
assert isinstance(text, str) and text
"""


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> tuple[Path, Path]:
    """A converted folder and a file with what its model says."""
    from regraft.convert import Choice, Output, convert

    base = tmp_path_factory.mktemp("export")
    convert(str(write_teacher(base / "t", tokenizer=True)), Choice("1,3", noise_groups=2), Output(base / "s"))
    model, ids = load_model(str(base / "s")), torch.arange(5, 170).view(1, -1)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        logits = model(ids).logits
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        generated = model.generate(ids, attention_mask=mask, **settings)
    save_file({"ids": ids, "logits": logits, "generated": generated}, base / "expected.safetensors")
    return base / "s", base / "expected.safetensors"


def run(script: str, *arguments: object, **environment: str) -> None:
    """Run a script in a fresh process that knows neither this folder nor the Hub's cache.

    Other paths of this process stay, so that it runs the same transformers.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON", "TRANSFORMERS"))}
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [p for p in paths if p and not (Path(p) / "regraft").exists()]
    environment["PYTHONPATH"] = os.pathsep.join([*others, *environment.get("PYTHONPATH", "").split()])
    script = (
        f"import transformers\nassert transformers.__version__ == {transformers.__version__!r}\n" + script
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**kept, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_export_loads_with_the_package(export) -> None:
    run(PRELUDE + "import regraft\noptions = {}\n" + CHECK, *export, PYTHONPATH=str(ROOT))


def test_an_export_loads_without_the_package(export, tmp_path) -> None:
    """Only torch, transformers and the export's own files; importing regraft fails."""
    check = "assert not any(m.split('.')[0] == 'regraft' for m in sys.modules)\n"
    run(PRELUDE + WITHOUT_THE_PACKAGE + CHECK + check, *export, HF_MODULES_CACHE=str(tmp_path))


def flat(source: Path) -> str:
    """Name of a module in an export."""
    return "_".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix("___init__")


def test_the_code_inside_an_export_is_the_package_itself(export) -> None:
    folder, _ = export
    config = json.loads((folder / "config.json").read_text())
    main = folder / f"{config['auto_map']['AutoModelForCausalLM'].split('.')[0]}.py"
    files = {f.stem for f in folder.glob("*.py")}
    assert files == set(re.findall(r"from \.(\w+) import", main.read_text())) | {main.stem}
    for file in folder.glob("regraft_*.py"):
        text = file.read_text()
        assert not re.search(r"^\s*(from|import) regraft\b", text, re.MULTILINE), file
        sources = [s for s in (ROOT / "regraft").rglob("*.py") if flat(s) == file.stem]
        assert len(sources) == 1 and len(sources[0].read_text().splitlines()) == len(text.splitlines())


def test_a_subpackage_with_triton_kernels_comes_along_and_needs_no_triton(
    export, tmp_path, monkeypatch
) -> None:
    """Modules that import triton at their top, imported inside a function alone."""
    folder, expected = export
    package = tmp_path / "regraft"
    shutil.copytree(ROOT / "regraft", package, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    kernels = package / "ops" / "made_up"
    kernels.mkdir()
    (kernels / "__init__.py").write_text("from regraft.ops.made_up.gains import gains\n")
    (kernels / "gains.py").write_text(
        "import triton\nimport triton.language as tl\n\nfrom regraft.ops.inputs import FilterInputs\n\n\n"
        "@triton.jit\ndef gains(x):\n    tl.static_print(FilterInputs)\n"
    )
    op = package / "ops" / "kalman.py"
    lazy = "    if q.is_cuda:\n        from regraft.ops.made_up import gains\n\n        gains(q)\n"
    start = "    if backend not in BACKENDS:\n"
    op.write_text(op.read_text().replace(start, lazy + start))
    monkeypatch.setattr(bundle, "_ROOT", package)
    code = bundle.remote_code()
    assert "from .regraft_ops_made_up import gains" in code["regraft_ops_kalman.py"]
    assert "from .regraft_ops_made_up_gains import gains" in code["regraft_ops_made_up.py"]
    copied = tmp_path / "export"
    shutil.copytree(folder, copied)
    for name, text in code.items():
        (copied / name).write_text(text)
    arguments = (copied, expected)
    run(PRELUDE + WITHOUT_THE_PACKAGE + CHECK, *arguments, HF_MODULES_CACHE=str(tmp_path / "modules"))


@pytest.mark.parametrize(
    "line", ["from . import chunk", "from regraft.ops import chunk", "import regraft.ops.chunk"]
)
def test_imports_that_a_flat_folder_cannot_hold_are_told(line: str, tmp_path, monkeypatch) -> None:
    package = tmp_path / "regraft"
    shutil.copytree(ROOT / "regraft", package, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    op = package / "ops" / "kalman.py"
    op.write_text(f"{op.read_text()}\n\n{line}\n")
    monkeypatch.setattr(bundle, "_ROOT", package)
    with pytest.raises(ValueError, match=r"regraft\.ops\.kalman: `.*chunk` cannot go into an export"):
        bundle.remote_code()


@pytest.mark.slow
def test_lm_eval_reads_an_export_from_the_command_line(export, tmp_path) -> None:
    """The harness's own command, a task in a local folder, no network."""
    folder, _ = export
    (tmp_path / "rows.jsonl").write_text(
        '{"q": "The answer is", "a": " yes"}\n{"q": "He said", "a": " no"}\n'
    )
    (tmp_path / "tiny.yaml").write_text(
        f"""task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
metric_list: [{{metric: perplexity}}]
"""
    )
    script = (
        PRELUDE.replace("folder, expected = sys.argv[1], load_file(sys.argv[2])", "")
        + """
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""
    )
    run(
        script,
        *("run", "--model", "hf", "--tasks", "tiny", "--include_path", tmp_path, "--device", "cpu"),
        *("--model_args", f"pretrained={folder},trust_remote_code=True", "--output_path", tmp_path / "out"),
        HF_MODULES_CACHE=str(tmp_path / "modules"),
        HF_DATASETS_CACHE=str(tmp_path / "datasets"),
        HF_HUB_OFFLINE="1",
    )
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())
    assert results["results"]["tiny"]["perplexity,none"] > 1
