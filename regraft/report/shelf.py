"""Finished work on disk: lists of JSON items under a key, so that nothing is made or run twice."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Item = dict[str, Any]


class Shelf:
    """A folder of files `<sha256 of the key>.jsonl.gz`: the key, then items 0, 1, 2 and so on, one a line.

    A file holds the first items of an endless sequence that its key decides, so a longer one serves every
    shorter request and is only ever extended. Files appear whole; a damaged one counts as absent.

    Args:
        folder: made when something is first put there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def get(self, key: Mapping[str, Any]) -> list[Item]:
        """Items under a key, none if there is nothing that can be read."""
        try:
            with gzip.open(self._path(key), "rt", encoding="utf-8") as file:
                first, *rest = (json.loads(line) for line in file)
        except (OSError, EOFError, ValueError):
            return []
        return rest if first == json.loads(json.dumps(key)) else []

    def put(self, key: Mapping[str, Any], items: Sequence[Item]) -> None:
        """Store items under a key; a disk that refuses is no reason to stop."""
        lines = (json.dumps(line, ensure_ascii=False, allow_nan=False) for line in (dict(key), *items))
        data = gzip.compress("".join(f"{line}\n" for line in lines).encode(), compresslevel=3, mtime=0)
        path = self._path(key)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)

    def _path(self, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.jsonl.gz"
