"""All commands and all Python of README and docs run, in small where they have to, and the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doc_commands import smaller, why_not
from doc_pages import PAGES, ROOT, Block, blocks, name_of
from folders import edit_tensors, write_teacher
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from regraft.layers import MIXERS

# Pages whose commands need what those of another page have made.
AFTER = {"docs/howto/evaluate-any-model.md": "README.md", "docs/evaluation.md": "README.md"}


class Workplace:
    """One folder in which the commands and Python of all pages run; what has run once is not run again."""

    def __init__(self, folder: Path, regraft: Callable[..., tuple[int, str, str]]) -> None:
        self.folder, self.regraft = folder, regraft
        self.done: set[str] = set()
        self.pages: set[str] = set()

    def read(self, page: Path) -> None:
        """Do what a page says, from top to bottom, after the page that it builds on."""
        name = name_of(page)
        if name in self.pages:
            return
        if name in AFTER:
            self.read(ROOT / AFTER[name])
        self.pages.add(name)
        names: dict[str, Any] = {"__name__": name}
        for block in blocks(page):
            if block.language == "sh":
                for words in block.commands():
                    self.run(words, block)
            elif block.language == "python":
                exec(compile("\n" * block.line + block.text, name, "exec"), names)

    def run(self, words: list[str], block: Block) -> None:
        """Run a command in small, once."""
        if why_not(words) is not None:
            return
        words = smaller(words)
        if " ".join(words) in self.done:
            return
        self.done.add(" ".join(words))
        if words[0] == "python":
            self.script(words[1:], block)
            return
        if self.taken(words):  # by another page
            words.append("--overwrite")
        code, _, error = self.regraft(*words[1:])
        assert code == 0, f"{block.place}: {' '.join(words)}\n{error}"

    def taken(self, words: list[str]) -> bool:
        """Whether a command would stop at what another one has written."""
        if words[1] == "demo" or {"--overwrite", "--resume"} & set(words):
            return False
        if words[1:3] == ["recipes", "copy"]:
            return (self.folder / words[-1]).is_file()
        return "--out" in words and (self.folder / words[words.index("--out") + 1]).is_dir()

    def script(self, words: list[str], block: Block) -> None:
        """Run a script in this process."""
        before = sys.argv
        sys.argv = words
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as stop:
            assert not stop.code, f"{block.place}: {' '.join(words)}"
        finally:
            sys.argv = before


@pytest.fixture(scope="session")
def workplace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: some text, a layer of one's own, a model that is not ours."""
    folder = tmp_path_factory.mktemp("docs")
    text = "The rain went on all day.\n\n" * 400
    (folder / "book.txt").write_text(text)
    (folder / "mine.py").write_text(
        "from regraft.layers import GatedDeltaNet\n\n\nclass Layer(GatedDeltaNet):\n"
        "    def add_design(self, config, taps=4):\n        super().add_design(config)\n"
    )
    config = LlamaConfig(
        vocab_size=8192, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    for name, layers in (("teacher", 24), ("shallow", 2)):
        write_teacher(folder / name, tokenizer=True, num_hidden_layers=layers)
        edit_tensors(folder / name, calm)
    for file in (folder / "teacher").glob("tokenizer*"):
        (folder / "llama" / file.name).write_bytes(file.read_bytes())
    return folder


def calm(tensors: dict[str, Tensor]) -> None:
    """Blocks that add little, so that 24 do not blow rounding up, in numbers that bfloat16 has."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.1)
        tensor.copy_(tensor.bfloat16())


_PLACES: dict[Path, Workplace] = {}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_all_python_of_a_page_runs(
    page: Path, workplace_folder: Path, regraft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace_folder)
    monkeypatch.syspath_prepend(str(workplace_folder))
    monkeypatch.setenv("REGRAFT_CACHE", str(workplace_folder / "cache"))
    place = _PLACES.setdefault(workplace_folder, Workplace(workplace_folder, regraft))
    place.regraft = regraft
    kinds = dict(MIXERS)
    try:
        place.read(page)
    finally:
        MIXERS.clear()  # a page adds a mixer of its own
        MIXERS.update(kinds)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="the docs extra is not installed")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        html = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//([^\"]*)", html)
        assert not fetched, f"{page.name} loads {fetched}"
        assert "arithmatex" not in html, f"{page.name}: a formula was left as it is"
    assert (tmp_path / "filter.html").read_text(encoding="utf-8").count("<math") > 40
    assert "--noise-groups" in (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
