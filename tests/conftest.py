"""What several test files share: the command line run in this process."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():  # Triton, once imported, interprets its kernels or does not
    os.environ["TRITON_INTERPRET"] = "1"

from regraft import cli


@pytest.fixture
def regraft(monkeypatch, capsys):
    """Run the command line in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["regraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    return run
