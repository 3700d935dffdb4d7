"""The model's source files inside an export, so that `trust_remote_code=True` needs no installed regraft.

They are the sources of `regraft.layers` and `regraft.ops` themselves, made flat: `regraft/ops/kalman.py`
becomes `regraft_ops_kalman.py`, and imports from it become `from .regraft_ops_kalman import ...`. Modules
that only a function imports come along and run only there, so that those with Triton kernels need no triton.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import regraft
from regraft.layers import RegraftConfig, RegraftForCausalLM

MAIN = "modeling_regraft"
AUTO_MAP = {
    "AutoConfig": f"{MAIN}.{RegraftConfig.__name__}",
    "AutoModelForCausalLM": f"{MAIN}.{RegraftForCausalLM.__name__}",
}
_IMPORT = re.compile(r"^(\s*)from (regraft(?:\.\w+)*) import ", re.MULTILINE)
_ROOT = Path(regraft.__file__).parent


def remote_code() -> dict[str, str]:
    """File names and contents: the main module and every module it needs, directly or not."""
    files: dict[str, str] = {}
    waiting = [RegraftForCausalLM.__module__, RegraftConfig.__module__]
    while waiting:
        module = waiting.pop()
        if _flat(module) in files:
            continue
        source = _source(module)
        _check_imports(module, source)
        waiting += [found for _, found in _IMPORT.findall(source)]
        files[_flat(module)] = _IMPORT.sub(lambda m: f"{m[1]}from .{_flat(m[2])} import ", source)
    files[MAIN] = _main(sorted(files))
    return {f"{name}.py": text for name, text in sorted(files.items())}


def _main(modules: list[str]) -> str:
    """The module that config.json names. It names every other: transformers copies the files it sees here."""
    lines = [
        f'"""Regraft {regraft.__version__} without its package. Made by `regraft convert`; do not edit."""',
        "",
        "from typing import TYPE_CHECKING",
        "",
        f"from .{_flat(RegraftConfig.__module__)} import {RegraftConfig.__name__}",
        f"from .{_flat(RegraftForCausalLM.__module__)} import {RegraftForCausalLM.__name__}",
        "",
        "if TYPE_CHECKING:  # named for transformers, not run: some are imported only where they are needed",
        *(f"    from .{name} import *  # noqa: F403" for name in modules),
    ]
    return "\n".join(lines) + "\n"


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _check_imports(module: str, source: str) -> None:
    """Refuse ways of importing this package's modules that do not survive flattening.

    Raises:
        ValueError: a relative import, `import regraft...`, or a module imported by its name from its package.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            wrong = node.level > 0 or any(_is_module(node.module or "", a.name) for a in node.names)
        else:
            wrong = isinstance(node, ast.Import) and any(a.name.startswith("regraft") for a in node.names)
        if wrong:
            line = ast.unparse(node)
            raise ValueError(
                f"{module}: `{line}` cannot go into an export; write `from regraft.X import NAME`"
            )


def _is_module(package: str, name: str) -> bool:
    """Whether `from package import name` gives a module of ours, not a name that the package binds."""
    if package.split(".")[0] != "regraft" or not _file(f"{package}.{name}").is_file():
        return False
    imports = [n for n in ast.parse(_source(package)).body if isinstance(n, ast.ImportFrom)]
    return not any(name in (a.asname or a.name for a in n.names) for n in imports)


def _source(module: str) -> str:
    """Source text of one of this package's modules."""
    return _file(module).read_text(encoding="utf-8")


def _file(module: str) -> Path:
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
