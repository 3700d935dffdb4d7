"""The demo recipe, shortened: convert, distil, control and report on the embedded teacher, as users do."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHORT = (
    "phases.0.tokens=8192",
    "phases.1.tokens=8192",
    "report.niah.samples=1",
    "report.niah.lengths=[512]",
    "report.perplexity.lengths=[512]",
)


@pytest.mark.slow
def test_the_demo_recipe_from_teacher_to_report(tmp_path, regraft):
    run = tmp_path / "demo"
    overrides = [word for override in SHORT for word in ("--set", override)]
    assert regraft("distill", "demo", "--out", run, *overrides)[0] == 0
    assert regraft("control", run)[0] == 0
    code, printed, _ = regraft("report", run, "--inspect")
    assert code == 0
    for name in ("report.json", "niah_mean.png", "perplexity.png", "inspect_layer_1.png", "report.html"):
        assert (run / "report" / name).stat().st_size > 1000
    assert "student - control" in printed and str(run / "export") in printed
    certificate = json.loads((run / "start" / "verify.json").read_text())
    assert certificate["passed"]
    student = AutoModelForCausalLM.from_pretrained(run / "export")
    evidence = student.model.layers[1].attn.evidence
    assert torch.equal(evidence, torch.ones_like(evidence))
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    text = (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
        "One of the special magic numbers for brave-otter is: 7301942. The rain went on all day.\n"
        "What is the special magic number for brave-otter mentioned in the provided text? "
        "The special magic number for brave-otter mentioned in the provided text is"
    )
    ids = tokenizer(text, return_tensors="pt")
    answer = student.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "7301942" in tokenizer.decode(answer)
