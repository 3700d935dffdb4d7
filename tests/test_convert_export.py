"""An export in a process of its own, without network: loads, gives the same logits, generates."""

from __future__ import annotations

import os
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
