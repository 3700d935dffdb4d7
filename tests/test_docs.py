"""README and docs name only what is there: commands, options, recipe keys, files, links, messages."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import typer
import yaml
from doc_commands import NOT_RUN, with_stand_ins
from doc_pages import (
    LANGUAGES,
    PAGES,
    ROOT,
    all_blocks,
    all_commands,
    anchors,
    blocks,
    inline_code,
    links,
    name_of,
)

import regraft.convert
import regraft.distill
import regraft.layers
import regraft.ops
import regraft.recipes
from regraft import cli
from regraft.errors import UserError
from regraft.probes.load import load as load_probe
from regraft.recipes import load_recipe, shipped
from regraft.recipes.load import tree_of, validated
from regraft.recipes.schema import Recipe
from regraft.report.tasks import TASK_DIR

PROGRAMS = {"regraft", "python", "make", "pip", "tar", "torchrun", "accelerate", "lm_eval"}
PROGRAMS |= {".ci/run", "scripts/replicate/offline.sh"}
RECIPE_KEY = re.compile(rf"({'|'.join(Recipe.model_fields)})(\.(\w+))+")
GENERATED = {f"reference/{name}.md" for name in ("cli", "recipe", "versions")}
GENERATED |= {"contributing.md", "changelog.md"}
by_name = pytest.mark.parametrize("page", PAGES, ids=name_of)


# What the blocks are


@by_name
def test_every_block_of_code_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: a block of code needs one of {LANGUAGES}"
        first = block.text.split(maxsplit=1)[0]
        assert block.language == "sh" or first not in PROGRAMS, f"{block.place}: a command has to be `sh`"


def test_every_command_is_of_a_program_that_is_looked_at() -> None:
    for block, words in all_commands():
        assert words[0] in PROGRAMS, block.place


def test_the_pages_are_found() -> None:
    assert len(PAGES) > 20 and len(all_commands()) > 60


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


def test_tasks_given_to_lm_eval_exist_and_its_settings_are_json() -> None:
    for block, words in all_commands():
        if words[0] == "lm_eval":
            tasks = words[words.index("--tasks") + 1].split(",")
            assert all((TASK_DIR / f"{task.removeprefix('regraft_')}.yaml").is_file() for task in tasks), (
                block
            )
            assert {"length", "samples", "seed"} >= set(json.loads(words[words.index("--metadata") + 1]))


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
        elif re.match(rf"--set \"?({'|'.join(Recipe.model_fields)})\.", code):
            load_recipe("demo", shlex.split(code)[1:])
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


@pytest.mark.parametrize(
    "command",
    [
        "convert nowhere --layers 1 --dry-run",
        "convert . --layers 1 --dry-run",
        "convert embedded --layers 6 --dry-run",
        "convert embedded --layers last:2 --noise-groups 7 --dry-run",
        "convert embedded --layers last:2 --out taken",
        "recipes validate demo --set sed=1",
        "recipes validate demo --set seed",
        "recipes validate demo --set phases.2.lr=1",
        "recipes validate demo --set 'data.source={kind: text, path: none.txt}'",
        "recipes validate demo --set 'data.source={kind: text, path: latin.txt}'",
        "recipes validate demo --set 'data.source={kind: jsonl, path: lines.jsonl}'",
        "recipes validate demo --set 'data.source={kind: text, path: empty.txt}'",
        "recipes validate demo --set 'phases.0.train=[\"no.such.*\"]'",
        "distill demo --out runs/new --phase joint --from taken",
        "control taken",
        "report --model one=embedded --out new --set 'report.perplexity={sets: [none], lengths: [64]}'",
        "probe mqar small --out new --set 'mixers=[\"nowhere:Layer\"]'",
        "verify taken --teacher embedded",
    ],
)
def test_a_mistake_is_in_troubleshooting(
    command: str, regraft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("here")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "lines.jsonl").write_text("[1]\n")
    (tmp_path / "empty.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGRAFT_CACHE", str(tmp_path / "cache"))
    code, _, error = regraft(*shlex.split(command))
    assert code == 2
    said = " ".join(error.split())
    messages = [code.strip("“”").split("…") for code in inline_code(ROOT / "docs" / "troubleshooting.md")]
    told = ["…".join(parts) for parts in messages if all(part.strip() in said for part in parts)]
    assert [message for message in told if len(message) > 8], said


def test_the_reference_of_python_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    told_elsewhere = {"MIXERS", "Recipe"}
    for package in (regraft.ops, regraft.layers, regraft.convert, regraft.recipes, regraft.distill):
        listed = set(re.findall(rf"^::: {package.__name__}\.(?:\w+\.)*(\w+)$", page, re.MULTILINE))
        assert listed >= set(package.__all__) - told_elsewhere, package.__name__


def test_pages_about_the_house_name_every_room_and_the_version_that_is_cited() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {folder.name for folder in (ROOT / "regraft").iterdir() if (folder / "__init__.py").is_file()}
    assert all(f"  {room}/" in design for room in rooms)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == regraft.__version__


WRONG_AND_RIGHT = [
    ("test_every_block_of_code_says", "    regraft scan embedded", "```sh\nregraft scan embedded\n```"),
    ("test_every_block_of_code_says", "```text\nregraft scan embedded\n```", "```text\nlayer 0\n```"),
    ("test_options_of_every", "$ regraft scan embedded --sample 1", "$ regraft scan embedded --samples 1"),
    ("test_options_of_every", "$ regraft verify student", "$ regraft verify student --teacher embedded"),
    ("test_options_of_every", "$ regraft distill demo --out x --set sed=1",
     "$ regraft distill demo --out x --set seed=1"),
    ("test_options_of_every", "$ torchrun -m regraft distil demo --out x",
     "$ torchrun -m regraft distill demo --out x"),
    ("test_options_of_every", "$ regraft probe mqar small --set wide=1",
     "$ regraft probe mqar small --set chunk_size=1"),
    ("test_scripts_exist", "$ python -m scripts.teacher --texts x", "$ python -m scripts.teacher --text x"),
    ("test_scripts_exist", "$ python -m scripts.teachers --out x", "$ python -m scripts.teacher --out x"),
    ("test_targets_of_make", "$ make domo", "$ make demo"),
    ("test_targets_of_make", "$ pip install 'regraft[loras]'", "$ pip install 'regraft[lora]'"),
    ("test_every_command_is_of_a_program", "$ curl example.org", "$ X=1 chrt -r 10 python x.py"),
    ("test_every_piece_of_a_recipe", "```yaml\nengine: {students: sharded}\n```",
     "```yaml\nengine: {student: sharded}\n```"),
    ("test_links_and_anchors", "[x](nowhere.md)", "[x](filter.md)"),
    ("test_links_and_anchors", "[x](filter.md#no-such-heading)", "[x](filter.md#the-filter)"),
    ("test_files_commands_and_recipe", "`scripts/none.py`", "`scripts/teacher/train.py`"),
    ("test_files_commands_and_recipe", "`regraft skan`", "`regraft scan`"),
    ("test_files_commands_and_recipe", "`--no-such-option`", "`--noise-groups`"),
    ("test_files_commands_and_recipe", "`--set phases.0.rate=1`", "`--set phases.0.lr=1`"),
    ("test_files_commands_and_recipe", "`phases.N.micro_batches`", "`phases.N.micro_batch`"),
]  # fmt: skip


@pytest.mark.parametrize(("test", "wrong", "right"), WRONG_AND_RIGHT)
def test_a_wrong_page_is_found(
    test: str, wrong: str, right: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "filter.md").write_text("# The filter\n")
    page = tmp_path / "page.md"
    for module in (doc_pages, sys.modules[__name__]):
        monkeypatch.setattr(module, "name_of", lambda path: path.name)
    monkeypatch.setattr(doc_pages, "PAGES", [page])
    (function,) = (f for name, f in globals().items() if name.startswith(test))
    arguments = [page] if "page" in function.__code__.co_varnames[: function.__code__.co_argcount] else []
    for text in (wrong, right):
        page.write_text(re.sub(r"^\$ (.*)", r"```sh\n\1\n```", text) + "\n")
        with pytest.raises((AssertionError, UserError)) if text is wrong else nullcontext():
            function(*arguments)
