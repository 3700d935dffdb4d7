"""What test files share: the command line run in this process, the embedded tokenizer, a small model."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():  # Triton, once imported, interprets its kernels or does not
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regraft import cli
from regraft.assets import teacher_dir
from regraft.layers import RegraftConfig, RegraftForCausalLM


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The embedded teacher's tokenizer."""
    return AutoTokenizer.from_pretrained(teacher_dir())


@pytest.fixture(scope="module")
def tiny(tokenizer) -> RegraftForCausalLM:
    """A random model of two layers, one of them Bayesian, that reads the embedded tokenizer's tokens."""
    torch.manual_seed(0)
    config = RegraftConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_heads=2, head_dim=16,
        mixers=[{"kind": "gated_deltanet"}, {"kind": "bayesian", "noise_groups": 2}],
    )  # fmt: skip
    model = RegraftForCausalLM(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


@pytest.fixture
def regraft(monkeypatch, capsys):
    """Run the command line in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["regraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    return run
