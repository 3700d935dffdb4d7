"""What a run says: JSON lines, TensorBoard where it is, the live line."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from regraft.distill.metrics import FILE, Metrics, check_wandb, forget_after, numbers
from regraft.errors import UserError

LINE = {
    "step": 1, "stage": "match", "tokens": 10, "tokens_per_second": 1234.5, "memory_gb": 1.25, "rows": "ab",
    "lr": 0.1, "loss": 0.5, "layer_nmse": 0.5, "layer_nmse.3": 0.5, "grad_norm": 1.0, "evidence": 0.25,
}  # fmt: skip


@pytest.fixture
def board(monkeypatch):
    """Calls that TensorBoard's writer gets, as if it were installed."""
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("open", purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append(("close",))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return calls


def test_numbers_go_to_the_file_and_to_tensorboard(tmp_path, board):
    metrics = Metrics(tmp_path, 0)
    metrics.write(LINE)
    metrics.close()
    assert [json.loads(line) for line in (tmp_path / FILE).open()] == [LINE]
    assert ("loss", 0.5, 1) in board and ("layer_nmse.3", 0.5, 1) in board
    assert board[0] == ("open", 1) and board[-1] == ("close",)
    assert not any(call[0] in ("stage", "rows", "step") for call in board)


def test_without_tensorboard_there_is_the_file_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    metrics = Metrics(tmp_path, 0)
    metrics.write(LINE)
    metrics.close()
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


def test_lines_after_the_checkpoint_are_forgotten_and_torn_ones_too(tmp_path):
    lines = [json.dumps(LINE | {"step": step}) for step in (1, 2, 3)]
    (tmp_path / FILE).write_text("\n".join([*lines, lines[0][:20]]))
    forget_after(tmp_path, 2)
    assert [json.loads(line)["step"] for line in (tmp_path / FILE).open()] == [1, 2]
    forget_after(tmp_path / "none", 2)


def test_the_live_line_names_losses_speed_memory_and_evidence():
    assert numbers(LINE) == "loss 0.5  evidence 0.25  1,234 tokens/s  1.2 GB"
    both = numbers(LINE | {"forward_kl": 0.1, "boundary_mse": 0.4})
    assert "forward_kl 0.1" in both and "boundary_mse 0.4" in both


def test_wandb_has_to_be_installed_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_wandb(False)
    with pytest.raises(UserError, match="not installed"):
        check_wandb(True)
