"""README and docs keep their word: commands and Python run, links and names resolve, the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_commands import NOT_RUN, smaller, why_not, with_stand_ins
from doc_pages import (
    LANGUAGES,
    PAGES,
    ROOT,
    Block,
    all_blocks,
    all_commands,
    anchors,
    blocks,
    inline_code,
    links,
    name_of,
)
from folders import edit_tensors, write_teacher
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from regraft import cli
from regraft.layers import MIXERS
from regraft.probes.load import load as load_probe
from regraft.recipes import load_recipe, shipped
from regraft.recipes.load import tree_of, validated
from regraft.recipes.schema import Recipe

PROGRAMS = (
    "regraft",
    "python",
    "make",
    "pip",
    "torchrun",
    "accelerate",
    "lm_eval",
    "scripts/replicate/offline.sh",
)
# Pages whose commands need what those of another page have made.
AFTER = {"docs/howto/evaluate-any-model.md": "README.md", "docs/evaluation.md": "README.md"}
RECIPE_KEY = re.compile(rf"({'|'.join(Recipe.model_fields)})(\.(\w+))+")
GENERATED = (
    "reference/cli.md",
    "reference/recipe.md",
    "reference/versions.md",
    "contributing.md",
    "changelog.md",
)
by_name = pytest.mark.parametrize("page", PAGES, ids=name_of)


# What the blocks are


@by_name
def test_every_block_of_code_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: a block of code needs one of {LANGUAGES}"
        first = block.text.split(maxsplit=1)[0]
        assert block.language == "sh" or first not in PROGRAMS, f"{block.place}: a command has to be `sh`"


def test_every_command_is_of_a_program_that_is_looked_at() -> None:
    commands = all_commands()
    assert len(commands) > 60
    for block, words in commands:
        assert words[0] in PROGRAMS, block.place


def test_nothing_is_excused_that_the_pages_do_not_have() -> None:
    texts = [" ".join(words) for _, words in all_commands()]
    unused = [start for start in NOT_RUN if not any(text.startswith(start) for text in texts)]
    assert not unused


# Commands against what there is


def test_options_of_every_regraft_command_exist_and_its_recipe_is_valid() -> None:
    for block, words in all_commands():
        arguments = regraft_arguments(words)
        if arguments is not None:
            check_regraft(with_stand_ins(arguments), block.place)


def regraft_arguments(words: list[str]) -> list[str] | None:
    """What follows `regraft` in a command, also behind a launcher."""
    if "-m" in words and words[words.index("-m") + 1] == "regraft":
        return words[words.index("-m") + 2 :]
    return words[1:] if words[0] == "regraft" else None


def check_regraft(arguments: list[str], place: str, *, whole: bool = True) -> None:
    """Parse as the command line would; `whole` asks for what is required, too."""
    command: Any = typer.main.get_command(cli.app)
    rest = list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{place}: no verb {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    if hasattr(command, "commands"):
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        assert {word for word in rest if word.startswith("-")} <= known, place
        return
    try:
        command.make_context(command.name, rest, resilient_parsing=not whole)
    except Exception as error:  # of Typer's own click
        raise AssertionError(f"{place}: regraft {' '.join(arguments)}: {error}") from error
    sets = [value for word, value in pairwise(arguments) if word == "--set"]
    if whole and arguments[0] == "distill":
        load_recipe(arguments[1] if arguments[1] in shipped() else "demo", sets)
    if whole and arguments[0] == "probe":
        default = {"collision": "paper", "belief": "analytic"}.get(arguments[1], "small")
        named = [word for word in arguments[2:3] if not word.startswith("-")]
        load_probe(arguments[1], *(named or [default]), sets)


def test_scripts_exist_and_have_the_options_that_pages_give_them() -> None:
    for block, words in all_commands():
        if words[0] != "python":
            continue
        folder = ROOT / (words[2].replace(".", "/") if words[1] == "-m" else words[1])
        files = [folder, *([folder.parent / "shapes.py"])] if folder.suffix == ".py" else sources_of(folder)
        source = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        assert source, f"{block.place}: no {folder}"
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source, f"{block.place}: {option}"


def sources_of(module: Path) -> list[Path]:
    """The files of a package, or the one of a module."""
    return sorted(module.glob("*.py")) if module.is_dir() else [module.with_suffix(".py")]


def test_targets_of_make_and_extras_of_pip_exist() -> None:
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for block, words in all_commands():
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), block.place
        if words[0] == "pip":
            for extra in re.findall(r"\[(.*?)\]", " ".join(words)):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"{block.place}: {extra}"


def test_every_piece_of_a_recipe_is_valid() -> None:
    for block in all_blocks("yaml"):
        tree = tree_of(block.text, block.place)
        whole = tree if "version" in tree else {**tree_of((shipped()["demo"]).read_text(), "demo"), **tree}
        validated(Recipe, whole, block.place, "")


# Names in the text


@by_name
def test_links_and_anchors_resolve(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if name_of(target).removeprefix("docs/") in GENERATED:
            continue  # mkdocs looks at these
        assert target.exists(), f"{name_of(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: {link}"


@by_name
def test_files_commands_and_recipe_keys_in_the_text_exist(page: Path) -> None:
    for code in inline_code(page):
        place = f"{name_of(page)}: `{code}`"
        if re.fullmatch(r"(regraft|scripts|tests|docs|\.ci)/[\w./-]+", code):
            assert (ROOT / code).exists(), place
        elif code.startswith("regraft ") and code.split()[1].islower():
            check_regraft([word for word in code.split()[1:] if word != "…"], place, whole=False)
        elif re.fullmatch(r"--[a-z-]+", code):
            assert code in known_options(), place
        elif RECIPE_KEY.fullmatch(code) and not code.endswith((".html", ".json")):
            assert has_key(Recipe.model_json_schema(), code.split(".")), place


def known_options() -> set[str]:
    """Options of any verb, and of the scripts."""
    scripts = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "scripts").rglob("*.py"))
    found = set(re.findall(r'"(--[a-z-]+)"', scripts))

    def walk(command: Any) -> None:
        for parameter in command.params:
            found.update(parameter.opts)
        for child in getattr(command, "commands", {}).values():
            walk(child)

    walk(typer.main.get_command(cli.app))
    return found | {"--help"}


def has_key(schema: dict[str, Any], path: list[str]) -> bool:
    """Whether a recipe may have this key; `N` and numbers are places in a list."""

    def below(node: dict[str, Any], steps: list[str]) -> bool:
        if "$ref" in node:
            return below(schema["$defs"][node["$ref"].rpartition("/")[2]], steps)
        if not steps:
            return True
        for union in ("anyOf", "oneOf", "allOf"):
            if any(below(item, steps) for item in node.get(union, ())):
                return True
        if "items" in node and (steps[0] == "N" or steps[0].isdecimal()):
            return below(node["items"], steps[1:])
        if "items" in node:  # `data.source.parts.weight`: any of them
            return below(node["items"], steps)
        return steps[0] in node.get("properties", {}) and below(node["properties"][steps[0]], steps[1:])

    return below(schema, path)


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "regraft").rglob("*.py"))
    page = ROOT / "docs" / "troubleshooting.md"
    messages = [code for code in inline_code(page) if code.startswith("“")]
    assert len(messages) >= 25
    for message in messages:
        for part in message.strip("“”").split("…"):
            assert part.strip() in source, message


# Running it


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
    write_teacher(folder / "teacher", tokenizer=True, num_hidden_layers=24)
    edit_tensors(folder / "teacher", calm)
    for file in (folder / "teacher").glob("tokenizer*"):
        (folder / "llama" / file.name).write_bytes(file.read_bytes())
    return folder


def calm(tensors: dict[str, Tensor]) -> None:
    """Blocks that add little, so that 24 of random weights do not blow rounding up."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.1)


_PLACES: dict[Path, Workplace] = {}


@pytest.mark.slow
@by_name
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


# The site


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="the docs extra is not installed")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        html = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//([^\"]*)", html)
        assert not fetched, f"{page.name} loads {fetched}"
        assert "arithmatex" not in html, f"{page.name}: a formula was left as it is"
    assert (tmp_path / "filter.html").read_text(encoding="utf-8").count("<math") > 40
    assert "--noise-groups" in (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
