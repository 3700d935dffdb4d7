"""Evaluation and report: golden fake models, the scorer, intervals, comparability, determinism."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import regraft
from regraft.assets import austen, teacher_dir
from regraft.assets.haystack import Haystack
from regraft.assets.needles import ALL_TASKS, GENERATOR_VERSION, TASKS, answer_text
from regraft.errors import UserError
from regraft.report.generate import PREFILL_TOKENS, Prompt, _shared, answer
from regraft.report.lm import AnswersComplete, NeedleLM
from regraft.report.niah import Entrant, evaluate
from regraft.report.report import terminal_table, write_report
from regraft.report.shelf import Shelf
from regraft.report.statistics import MEAN, bootstrap, differences, table, wilson
from regraft.report.tasks import TASK_DIR, complete, dataset, describe, found, make_documents

LENGTHS = [512, 1024]
HAYSTACK = Haystack.from_text(austen()[:200_000])


class FakeLM(LM):
    """Answers with a function of the text it is given."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests):
        return [self.answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def recent(characters: int) -> Callable[[str], str]:
    """Every value within the last `characters` of the input: a model that forgets all else."""
    return lambda text: " " + ", ".join(re.findall(r"is: ([0-9a-f-]+)\.", text[-characters:])) + "."


@pytest.fixture(scope="module")
def records(tokenizer):
    models = {
        "perfect": (FakeLM(recent(10**9)), tokenizer),
        "empty": (FakeLM(lambda _: ""), tokenizer),
        "recent": (FakeLM(recent(1200)), tokenizer),
    }
    return evaluate(models, lengths=LENGTHS, samples=10, seed=0, haystack=HAYSTACK)


def of(records, model):
    return [record for record in records if record["model"] == model]


def cells(records, model):
    return [row for row in table(records) if row["model"] == model]


def test_perfect_model_has_one_everywhere_and_empty_zero(records):
    assert len(of(records, "perfect")) == len(TASKS) * len(LENGTHS) * 10
    assert {row["mean"] for row in cells(records, "perfect")} == {1.0}
    assert {row["mean"] for row in cells(records, "empty")} == {0.0}


def test_recency_gives_a_step_exactly_where_arithmetic_says(records, tokenizer):
    documents = make_documents(list(TASKS), LENGTHS, 10, seed=0, tokenizer=tokenizer, haystack=HAYSTACK)
    seen = 0
    for record in of(records, "recent"):
        document = documents[record["task"], record["length"]][record["index"]]
        text = document.model_input
        for needle in record["needles"]:
            if needle["asked"]:
                assert needle["hit"] == (text.index(f"is: {needle['value']}.") >= len(text) - 1200)
                seen += needle["hit"]
        hits = [needle["hit"] for needle in record["needles"] if needle["asked"]]
        assert hits == sorted(hits)  # needles come in the order of the document: misses, then hits
    assert 0 < seen < sum(len(record["needles"]) for record in of(records, "recent"))


def test_recency_step_shows_in_the_table(records):
    for task in (MEAN, "niah_single_2"):
        rows = {row["depth"]: row for row in cells(records, "recent")
                if row["task"] == task and row["length"] == 1024}  # fmt: skip
        assert [rows[depth]["mean"] for depth in range(6)] == [0.0] * 6
        assert [rows[depth]["mean"] for depth in (8, 9)] == [1.0] * 2


def test_the_model_reads_the_prompt_a_space_and_the_prefix(tokenizer):
    seen: list[str] = []
    fake = FakeLM(lambda text: seen.append(text) or "")
    evaluate({"m": (fake, tokenizer)}, tasks=["niah_multivalue"], lengths=[512], samples=2, haystack=HAYSTACK)
    documents = make_documents(["niah_multivalue"], [512], 2, seed=0, tokenizer=tokenizer, haystack=HAYSTACK)
    assert seen == [f"{d.prompt} {d.answer_prefix}" for d in documents["niah_multivalue", 512]]


def test_records_do_not_depend_on_the_order_of_tasks_lengths_or_models(records, tokenizer):
    again = evaluate(
        {"recent": (FakeLM(recent(1200)), tokenizer)},
        tasks=list(reversed(TASKS)), lengths=LENGTHS[::-1], samples=7, haystack=HAYSTACK,
    )  # fmt: skip

    def key(record):
        return record["task"], record["length"], record["index"]

    before = [record for record in of(records, "recent") if record["index"] < 7]
    assert sorted(again, key=key) == sorted(before, key=key)


def test_evaluation_leaves_global_state_alone(tokenizer):
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    level = logging.getLogger("lm_eval").level
    model = {"m": (FakeLM(lambda _: ""), tokenizer)}
    evaluate(model, tasks=["niah_single_1"], lengths=[512], samples=1, haystack=HAYSTACK)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert logging.getLogger("lm_eval").level == level


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("6161", "it is 16161", False),
        ("6161", "it is 61610.", False),
        ("6161", "abc6161", False),
        ("6161", "6161", True),
        ("6161", "(6161)", True),
        (
            "6161",
            "The special magic number for it mentioned in the text, I think, is\n\n**6161**, as asked",
            True,
        ),
        ("6161", "The special magic number mentioned in the provided text is 6162.", False),
        ("6161", "16161, no: 6161", True),
        ("ab12-cd34", "AB12-CD34.", True),
        ("ab12-cd34", "ab12-cd345", False),
        ("ab12-cd34", "ff-ab12-cd34", False),
        ("ab12-cd34", "ab12-cd34-ff", False),
        ("ab12-cd34", "- ab12-cd34", True),
        ("ab12-cd34", "", False),
    ],
)
def test_scorer(value, text, expected):
    assert found(value, text) is expected


def test_a_value_is_complete_only_once_the_text_goes_on():
    assert not complete("6161", " 6161")
    assert complete("6161", " 6161.")
    assert not complete("6161", " 61610 ")
    assert complete("6161", " 6161 6161")


def test_a_transformers_model_gives_the_same_records_at_any_batch_size(tiny, tokenizer):
    ticks: list[tuple[str, int, int]] = []
    runs = [
        evaluate(
            {"tiny": (tiny, tokenizer)}, tasks=["niah_single_2"], lengths=[200, 240],
            samples=2, batch_size=batch_size, haystack=HAYSTACK, progress=lambda *tick: ticks.append(tick),
        )
        for batch_size in (1, 4)
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert len(runs[0]) == 4 and all(record["completion"] for record in runs[0])
    assert ("documents", 2, 2) in ticks
    assert ticks[-1][0] == "tiny: niah_single_2 at 200 and on" and ticks[-1][1] == ticks[-1][2]


def test_batches_shared_beginnings_and_lm_evals_own_loop_give_the_same_answers(tiny, tokenizer, monkeypatch):
    """The filler task shares long beginnings; wanted values come from what is written, so rows end early."""
    cells = make_documents(["niah_single_1", "niah_multikey_1"], [400, 600], 4, seed=0, tokenizer=tokenizer)
    flat = [document for cell in cells.values() for document in cell]
    plain = HFLM(tiny, tokenizer=tokenizer, max_length=4096, batch_size=3)
    args = {"until": [], "max_gen_toks": 24, "do_sample": False}
    requests = [Instance("generate_until", {}, (d.model_input, args), i) for i, d in enumerate(flat)]
    expected = plain.generate_until(requests, disable_tqdm=True)
    wanted = [text.split()[2:3] if i % 2 else ["none"] for i, text in enumerate(expected)]
    prompts = [
        Prompt(tuple(tokenizer(d.model_input)["input_ids"]), tuple(values), 24)
        for d, values in zip(flat, wanted, strict=True)
    ]
    assert _shared(sorted(prompts[:4], key=lambda p: p.ids)) >= 64
    runs = [answer(tiny, tokenizer, prompts, batch_size=size) for size in (1, 3, 8)]
    assert runs[0] == runs[1] == runs[2]
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 200)  # prompts are read in pieces
    assert answer(tiny, tokenizer, prompts, batch_size=8) == runs[0]
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 4096)
    monkeypatch.setattr("regraft.report.generate.SHARING", set())  # all of like length together, as on a GPU
    assert answer(tiny, tokenizer, prompts, batch_size=8) == runs[0]
    ended = 0
    for text, full, values in zip(runs[0], expected, wanted, strict=True):
        assert full.startswith(text) and all(found(v, text) == found(v, full) for v in values)
        ended += len(text) < len(full)
    assert ended


def test_finished_cells_are_not_run_again(tokenizer, tmp_path):
    calls: list[int] = []

    class Counting(FakeLM):
        def generate_until(self, requests):
            calls.append(len(requests))
            return super().generate_until(requests)

    def run(samples: int, lengths: list[int], identity: str = "a") -> list[dict]:
        entrant = Entrant(lambda: Counting(recent(900)), tokenizer, identity)
        return evaluate(
            {"m": entrant}, tasks=["niah_single_2"], lengths=lengths, samples=samples, haystack=HAYSTACK,
            documents=Shelf(tmp_path / "documents"), finished=Shelf(tmp_path / "cells"),
        )  # fmt: skip

    first = run(3, [512])
    assert calls == [3]
    assert run(2, [512]) == first[:2] and calls == [3]  # the first of a longer set
    more = run(5, [512, 600])
    assert more[:3] == first and calls == [3, 2 + 5]
    assert run(5, [512, 600]) == more and calls == [3, 7]
    assert run(5, [512, 600], "b") == more and calls[2:] == [10]  # other weights
    run(1, [512], "")
    assert calls[3:] == [1]  # nothing of a nameless model is kept
    for file in (tmp_path / "cells").iterdir():
        file.write_bytes(file.read_bytes()[:60])  # a damaged file counts as absent
    assert run(5, [512, 600]) == more and calls[4:] == [10]


def test_a_prompt_without_room_is_refused_not_truncated(tiny, tokenizer):
    lm = NeedleLM(tiny, tokenizer, max_length=64, answers={}, batch_size=1)
    with pytest.raises(UserError, match="never truncated"):
        lm.tok_batch_encode(["word " * 60], left_truncate_len=32)


def test_a_row_ends_once_its_answers_stand_complete(tokenizer):
    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    width = max(len(ids(" 1234567.")), len(ids(" 12345678")))
    rows = [(ids(text) + ids(" x" * width))[:width] for text in (" 1234567.", " 12345678")]
    criterion = AnswersComplete(tokenizer, [["1234567"], ["1234567"]], start=0)
    assert criterion(torch.tensor(rows), None).tolist() == [True, False]


def test_wilson_against_known_values():
    assert wilson(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert wilson(0.5, 100) == pytest.approx((0.4038315, 0.5961685), abs=1e-6)
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_bootstrap_against_the_normal_interval():
    rng = np.random.default_rng(0)
    gain = rng.choice([-1.0, 0.0, 1.0], size=800, p=[0.2, 0.5, 0.3])
    cloud = bootstrap(gain, np.ones(800), resamples=10_000, seed=0)
    error = gain.std() / math.sqrt(800)
    assert cloud.shape == (10_000,)
    expected = gain.mean() - 1.96 * error, gain.mean() + 1.96 * error
    assert np.quantile(cloud, [0.025, 0.975]) == pytest.approx(expected, abs=0.06 * error + 1 / 800)
    assert set(bootstrap(np.full(5, 0.5), np.ones(5), resamples=10, seed=0)) == {0.5}


def test_differences_are_paired_and_weigh_tasks_equally(records):
    rows = differences(records, "perfect", "empty", resamples=100)
    assert all((row["difference"], row["low"], row["high"]) == (1.0, 1.0, 1.0) for row in rows)
    rows = differences(records, "recent", "empty", resamples=100)
    scores = {(r["task"], r["length"], r["depth"]): r for r in cells(records, "recent")}
    assert len(rows) == len(scores)
    for row in rows:
        score = scores[row["task"], row["length"], row["depth"]]
        assert row["difference"] == pytest.approx(score["mean"]) and row["n"] == score["n"]
        assert row["low"] <= row["difference"] <= row["high"]
    for length in LENGTHS:
        parts = [scores[task, length, None]["mean"] for task in TASKS]
        assert scores[MEAN, length, None]["mean"] == pytest.approx(sum(parts) / len(parts))
        assert scores[MEAN, length, None]["n"] == 60


def test_an_interval_does_not_depend_on_the_other_cells(records):
    some = [record for record in records if record["task"] == "niah_multiquery"]
    alone = [r for r in differences(some, "recent", "empty", resamples=200) if r["task"] != MEAN]
    among = differences(records, "recent", "empty", resamples=200)
    assert alone == [row for row in among if row["task"] == "niah_multiquery"]


@pytest.mark.parametrize("field", ["prompt_sha256", "tokenizer", "generator", "bos"])
def test_records_of_other_documents_are_no_pair(records, field):
    other = [record | {"model": "other", field: "else"} for record in of(records, "recent")]
    with pytest.raises(UserError, match=f"differ in {field}"):
        differences([*records, *other], "other", "perfect")


def test_incomplete_or_doubled_records_are_refused(records, tmp_path):
    fewer = [r | {"model": "fewer"} for r in of(records, "recent") if r["index"] < 9]
    with pytest.raises(UserError, match="only one of"):
        write_report([*records, *fewer], tmp_path / "r")
    with pytest.raises(UserError, match="twice"):
        table([*records, dict(records[0])])
    with pytest.raises(UserError, match="no records of 'nobody'"):
        write_report(records, tmp_path / "r", student="nobody", baseline="empty")
    with pytest.raises(UserError, match="there are none"):
        write_report([], tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_evaluate_refuses_mistakes(tokenizer, tiny):
    fake = FakeLM(lambda _: "")
    with pytest.raises(UserError, match="niah_x"):
        evaluate({"m": (fake, tokenizer)}, tasks=["niah_x"], lengths=[512], samples=1)
    with pytest.raises(UserError, match="twice"):
        evaluate({"m": (fake, tokenizer)}, lengths=[512, 512], samples=1)
    with pytest.raises(UserError, match="at least 1"):
        evaluate({"m": (fake, tokenizer)}, lengths=[512], samples=0)
    other = AutoTokenizer.from_pretrained(teacher_dir())
    same = evaluate({"a": (fake, tokenizer), "b": (fake, other)}, tasks=["niah_single_1"], lengths=[512],
                    samples=1)  # fmt: skip
    assert len(same) == 2
    other.add_tokens(["Emma"])
    with pytest.raises(UserError, match="tokenizer is another"):
        evaluate({"a": (fake, tokenizer), "b": (fake, other)}, lengths=[512], samples=1)


def test_a_tokenizer_that_ends_prompts_is_refused(tokenizer):
    from tokenizers.processors import TemplateProcessing

    ending = AutoTokenizer.from_pretrained(teacher_dir())
    eos = (ending.eos_token, ending.eos_token_id)
    ending.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    with pytest.raises(UserError, match="appends"):
        describe(ending)
    ending.backend_tokenizer.post_processor = TemplateProcessing(single=f"{eos[0]} $A", special_tokens=[eos])
    assert describe(ending)["bos"] == eos[0]
    assert describe(tokenizer)["bos"] == ""


def test_the_answer_text_of_a_document_scores_one(tokenizer):
    for cell in make_documents(
        list(TASKS), [512], 2, seed=1, tokenizer=tokenizer, haystack=HAYSTACK
    ).values():
        for document in cell:
            assert all(found(value, answer_text(document)) for value in document.answers)


def test_report_files_are_the_same_bytes_again(records, tmp_path):
    few = [record for record in records if record["task"] == "niah_multivalue"]
    outputs: list[dict[str, bytes]] = []
    for name in ("a", "b"):
        paths = write_report(
            json.loads(json.dumps(few)), tmp_path / name, student="recent", baseline="empty", resamples=200
        )
        outputs.append({key: path.read_bytes() for key, path in paths.items()})
    assert outputs[0] == outputs[1]
    assert set(paths) == {
        "html", "markdown", "json", "records", "model card", "heatmap", "scores", "differences",
    }  # fmt: skip
    lines = Path(paths["records"]).read_text().splitlines()
    assert [json.loads(line) for line in lines] == few
    text = paths["markdown"].read_text()
    assert "recent - empty" in text and "recent - perfect" in text and "(niah_mean.png)" in text
    assert "perfect - empty" in text
    with pytest.raises(UserError, match="not empty"):
        write_report(few, tmp_path / "a")


def test_terminal_table_fits_a_hundred_columns(records):
    names = {"perfect": "teacher", "recent": "student", "empty": "control"}
    renamed = [record | {"model": names[record["model"]]} for record in records]
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(terminal_table(renamed, student="student", baseline="control", resamples=100))
    text = console.export_text()
    assert "…" not in text and "student - control" in text and "80-100%" in text
    assert len([line for line in text.splitlines() if line.startswith("│")]) == 5 * len(LENGTHS)


@pytest.mark.slow
def test_shipped_tasks_run_from_lm_evals_own_command_line_without_network(tokenizer, tmp_path):
    """A Llama of the smallest size, so that nothing but lm-eval and transformers is at work."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "def blocked(*_, **__):\n    raise OSError('no network in this test')\n"
        "socket.socket.connect = socket.getaddrinfo = blocked\n"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(regraft.__file__).parents[1]}",
        "REGRAFT_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"),
    }  # fmt: skip

    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf",
        "--model_args", f"pretrained={tmp_path / 'model'},dtype=float32", "--device", "cpu",
        "--include_path", str(TASK_DIR), "--tasks", "regraft_niah_single_1", "--log_samples",
        "--metadata", json.dumps({"length": 400, "samples": 2}), "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("samples_regraft_niah_single_1*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    made = make_documents(["niah_single_1"], [400], 2, seed=0, tokenizer=tokenizer)["niah_single_1", 400]
    assert [s["arguments"]["gen_args_0"]["arg_0"] for s in samples] == [d.model_input for d in made]
    assert [s["doc"]["needles"][0]["depth"] for s in samples] == [d.needles[0].depth for d in made]
    assert len(list((tmp_path / "cache" / "needles").iterdir())) == 1
    with pytest.raises(UserError, match="prompts of 4096 tokens would be cut to 1024"):
        dataset(task="niah_single_1", length=4096, pretrained=str(tmp_path / "model"))


@pytest.mark.slow
def test_the_page_on_evaluation_runs(capsys):
    """Its Python; its commands are those of the tests of `report` and of lm-eval's command line."""
    page = Path(regraft.__file__).parents[1] / "docs" / "evaluation.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    rows = eval(capsys.readouterr().out)
    assert {row[0] for row in rows} == {256, 512} and all(low <= mean <= high for _, mean, low, high in rows)


def test_shipped_tasks_have_the_generators_budgets():
    for name, task in ALL_TASKS.items():
        config = yaml.load((TASK_DIR / f"{name}.yaml").read_text(), yaml.BaseLoader)
        assert config["task"] == f"regraft_{name}" and config["metadata"]["task"] == name
        assert config["metadata"]["version"] == str(GENERATOR_VERSION)
        assert config["generation_kwargs"]["max_gen_toks"] == str(task.new_tokens)
