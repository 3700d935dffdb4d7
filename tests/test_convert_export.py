"""An export in a process of its own, without network: loads, gives the same logits, generates."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import write_teacher
from safetensors.torch import save_file

from regraft.convert import load_model

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
    from regraft.convert import convert

    base = tmp_path_factory.mktemp("export")
    convert(str(write_teacher(base / "t", tokenizer=True)), layers="1,3", noise_groups=2, out=base / "s")
    model, ids = load_model(str(base / "s")), torch.arange(5, 170).view(1, -1)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        logits = model(ids).logits
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        generated = model.generate(ids, attention_mask=mask, **settings)
    save_file({"ids": ids, "logits": logits, "generated": generated}, base / "expected.safetensors")
    return base / "s", base / "expected.safetensors"


def run(script: str, *arguments: object, **environment: str) -> None:
    """Run a script in a fresh process that knows neither this folder nor the Hub's cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON", "TRANSFORMERS"))}
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
    block = """
import sys
class Nothing:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("regraft", "fla", "lm_eval", "pydantic", "typer"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Nothing())
options = {"trust_remote_code": True}
"""
    check = "assert not any(m.split('.')[0] == 'regraft' for m in sys.modules)\n"
    run(PRELUDE + block + CHECK + check, *export, HF_MODULES_CACHE=str(tmp_path))


def test_the_code_inside_an_export_is_the_package_itself(export) -> None:
    folder, _ = export
    config = json.loads((folder / "config.json").read_text())
    main = folder / f"{config['auto_map']['AutoModelForCausalLM'].split('.')[0]}.py"
    files = {f.stem for f in folder.glob("*.py")}
    assert files == set(re.findall(r"from \.(\w+) import", main.read_text())) | {main.stem}
    for file in folder.glob("regraft_*.py"):
        text = file.read_text()
        assert not re.search(r"^\s*(from|import) regraft\b", text, re.MULTILINE), file
        parts = file.stem.split("_")
        sources = [
            ROOT.joinpath(*parts[:2], "_".join(parts[2:]) + ".py"),
            ROOT.joinpath(*parts, "__init__.py"),
        ]
        source = next(s for s in sources if s.is_file()).read_text()
        assert len(source.splitlines()) == len(text.splitlines())


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
