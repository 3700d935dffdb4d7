"""The report as a reader meets it: the page in a browser, figures, the verb, interrupted and resumed."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regraft.assets import austen, teacher_dir
from regraft.assets.haystack import Haystack
from regraft.convert import export_model
from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.recipes import dump_recipe, load_recipe
from regraft.report.inspection import Trace, _spy, calibration, inspect_student, traces
from regraft.report.niah import Entrant, _Run, evaluate
from regraft.report.perplexity import buckets
from regraft.report.report import write_report
from regraft.report.run import report_run
from regraft.report.tasks import make_documents

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000",
    "--enable-logging=stderr",
]  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes, and the text of headings and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        elif self.open and self.open[-1] == "td":
            self.cells[-1] += data


def made_up_perplexity(models: list[str]) -> list[dict]:
    records = []
    for shift, model in enumerate(models):
        for length in (256, 1024):
            for document in range(12):
                parts = [
                    [a, b, b - a, (b - a) * (4 + 0.01 * shift + 0.001 * document)] for a, b in buckets(length)
                ]
                records.append(
                    {
                        "model": model, "set": "some.txt", "length": length, "document": document,
                        "tokens": length, "nll": sum(part[3] for part in parts), "bytes": 4 * length,
                        "buckets": parts, "text_sha256": str(document), "stretch": 0, "tokenizer": "t",
                        "before": "<b>",
                    }
                )  # fmt: skip
    return records


@pytest.fixture(scope="module")
def report(tmp_path_factory, tokenizer) -> dict[str, Path]:
    from lm_eval.api.model import LM

    class Recent(LM):
        def __init__(self, characters: int) -> None:
            super().__init__()
            self.characters = characters

        def generate_until(self, requests):
            return [
                " ".join(re.findall(r"is: (\d+)\.", r.args[0][-self.characters :])) + "." for r in requests
            ]

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    names = {"<teacher> & co": 600, "student": 1500, "control": 900}
    records = evaluate(
        {name: (Recent(n), tokenizer) for name, n in names.items()},
        tasks=["niah_single_2", "niah_multiquery"], lengths=[400, 800], samples=10,
        haystack=Haystack.from_text(austen()[:100_000]),
    )  # fmt: skip
    return write_report(
        records, tmp_path_factory.mktemp("report") / "r", student="student", baseline="control",
        perplexity=made_up_perplexity(list(names)), resamples=200,
    )  # fmt: skip


def test_the_page_is_whole_and_says_what_the_markdown_says(report):
    text = report["html"].read_text()
    page = Page(text)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 6 and all(
        image["alt"] for image in images
    )  # mean, depth, by task, two tasks, perplexity
    for image in images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object")]
    links = [a.get("href") or a.get("src") for _, a in page.tags if "href" in a or "src" in a]
    assert all(link.startswith(("#s", "data:")) for link in links)
    markdown = report["markdown"].read_text()
    assert page.headings == re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    rows = [line for line in markdown.splitlines() if line.startswith("| ") and "| ---" not in line]
    cells = [cell for row in rows for cell in row[2:-2].split(" | ")]
    assert [cell for cell in cells if cell in set(page.cells)] and set(page.cells) <= set(cells)
    assert "&lt;teacher&gt; &amp; co" in text and "<teacher>" not in text
    for name in re.findall(r"\]\((\w+)\.png\)", markdown):
        assert (report["html"].parent / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (report["html"].parent / f"{name}.svg").read_text().startswith("<?xml")


def test_tables_and_figures_have_their_numbers_behind_them(report):
    plain = json.loads(report["json"].read_text())
    for name, key in (("scores", "scores"), ("differences", "differences")):
        rows = list(csv.DictReader(report[name].open()))
        assert len(rows) == len(plain[key])
        assert [float(row["low"]) for row in rows] == [row["low"] for row in plain[key]]
    rows = list(csv.DictReader(report["perplexity"].open()))
    assert len(rows) == len(plain["perplexity"]) + len(plain["perplexity_ratios"])
    pairs = {(row["student"], row["baseline"]) for row in plain["differences"]}
    assert pairs == {("student", "control"), ("<teacher> & co", "control"), ("student", "<teacher> & co")}
    card = report["model card"].read_text()
    assert "## Evaluation" in card and "student - control" in card and "bpb" in card and "![" not in card


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium; the structure is tested without it")
def test_the_page_in_a_browser(report, tmp_path):
    count = "[...document.images].filter(i => i.complete && i.naturalWidth > 300).length"
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    script = f"<script>onload = () => document.title = 'images ' + {count} + ' wide ' + ({wide})</script>"
    copy = tmp_path / "page.html"
    copy.write_text(report["html"].read_text().replace("</head>", f"{script}</head>"))

    def chromium(*arguments: str) -> subprocess.CompletedProcess:
        command = [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *arguments, copy.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    for size in ("1280,900", "500,900"):  # a screen, a narrow window
        shown = chromium("--dump-dom", f"--window-size={size}")
        assert "<title>images 6 wide false</title>" in shown.stdout
        assert "CONSOLE" not in shown.stderr
    chromium(f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"


@pytest.fixture
def run(tmp_path, tiny, tokenizer, monkeypatch) -> Path:
    """A finished run whose teacher, student and control are one small model."""
    monkeypatch.setenv("REGRAFT_CACHE", str(tmp_path / "cache"))
    for place in ("run/export", "run/control/export"):
        (tmp_path / place).mkdir(parents=True)
        export_model(tiny, tmp_path / place, companions_from=teacher_dir())
    recipe = load_recipe(
        "demo",
        [
            f"teacher.model={tmp_path / 'run' / 'export'}", "report.niah.samples=12",
            "report.niah.tasks=[niah_single_2, niah_multikey_1]", "report.niah.lengths=[240, 320]",
            "report.perplexity={lengths: [64, 128], sets: [austen], samples: 3}", "report.niah.batch_size=10",
        ],
    )  # fmt: skip
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe))
    return tmp_path / "run"


@pytest.mark.slow
def test_an_interrupted_report_goes_on_where_it_was(run, monkeypatch, capsys):
    calls: list[tuple] = []
    answered = _Run._answered

    def stop_at_the_third(self, made):
        ((cell, documents),) = made.items()
        calls.append((*cell, len(documents)))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answered(self, made)

    monkeypatch.setattr(_Run, "_answered", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        report_run(run, limit=10)
    assert not (run / "report").exists()
    paths = report_run(run, limit=10)
    assert calls[3:] == [("niah_multikey_1", 240, 10), ("niah_multikey_1", 320, 10)]  # all are one model
    out = capsys.readouterr().out
    assert "documents/s" in out and "20 were finished before" in out.replace("documents ", "")
    assert str(paths["html"]) in out and max(map(len, out.splitlines())) >= 100
    scores = json.loads(paths["json"].read_text())["scores"]
    counts = [row["n"] for row in scores if row["task"] == "niah_single_2" and row["depth"] is not None]
    assert len(counts) == 3 * 2 * 10 and set(counts) == {1}  # three models, two lengths, ten tenths
    first = {path.name: path.read_bytes() for path in (run / "report").iterdir()}
    del calls[:]
    report_run(run, limit=10, overwrite=True)
    assert not calls and {path.name: path.read_bytes() for path in (run / "report").iterdir()} == first


def test_any_number_of_models_and_one_baseline(run, tmp_path):
    fewer = ["report.niah.tasks=[niah_single_2]", "report.niah.lengths=[240]", "report.perplexity=null"]
    export = str(run / "export")
    paths = report_run(
        None, models=[f"a={export}", f"b={export}"], baseline="b", limit=2, overrides=fewer,
        inspect=True, out=tmp_path / "two",
    )  # fmt: skip
    rows = json.loads(paths["json"].read_text())["differences"]
    assert {(row["student"], row["baseline"]) for row in rows} == {("a", "b")}
    assert "The filter at work" in paths["markdown"].read_text()
    one = report_run(None, models=[f"a={export}"], limit=2, overrides=fewer, out=tmp_path / "one")
    assert not json.loads(one["json"].read_text())["differences"]
    for mistake, message in (
        ({"models": ["a"]}, "NAME=MODEL"),
        ({"models": [f"a={export}", f"a={export}"]}, "is taken"),
        ({"models": [f"a={export}"], "baseline": "c"}, "is no model"),
        ({"models": []}, "RUN: is missing"),
    ):
        with pytest.raises(UserError, match=message):
            report_run(None, out=tmp_path / "x", overrides=fewer, **mistake)
    with pytest.raises(UserError, match="--out"):
        report_run(None, models=[f"a={export}"])


@pytest.mark.slow
def test_any_causal_lm_of_transformers_is_a_model(run, tmp_path, tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    place = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    settings = [
        "report.niah.tasks=[niah_single_2]", "report.niah.lengths=[240]",
        "report.perplexity={lengths: [64, 128], sets: [austen], samples: 2}",
    ]  # fmt: skip
    models = [f"llama={place}", f"ours={run / 'export'}"]
    paths = report_run(None, models=models, limit=2, overrides=settings, out=tmp_path / "out")
    plain = json.loads(paths["json"].read_text())
    assert (
        {row["model"] for row in plain["scores"]}
        == {"llama", "ours"}
        == {row["model"] for row in plain["perplexity"]}
    )
    longer = [*settings, "report.niah.lengths=[320]"]
    with pytest.raises(UserError, match="never truncated"):
        report_run(None, models=models, limit=1, overrides=longer, out=tmp_path / "longer")
    with pytest.raises(UserError, match="reads 256 tokens"):
        shorter = [*settings, "report.perplexity.lengths=[512]"]
        report_run(None, models=models, limit=2, overrides=shorter, out=tmp_path / "longer")
    (place / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(UserError, match="does not load"):
        report_run(None, models=models, limit=1, overrides=settings, out=tmp_path / "broken")
    assert not (tmp_path / "longer").exists() and not (tmp_path / "broken").exists()


def test_the_filter_is_watched_as_it_runs(tiny, tokenizer, tmp_path):
    model = RegraftForCausalLM(tiny.config).eval()
    model.load_state_dict(tiny.state_dict())
    document = make_documents(["niah_single_2"], [300], 1, seed=0, tokenizer=tokenizer)["niah_single_2", 300][
        0
    ]
    for evidence in (0.0, 1.0):
        torch.nn.init.constant_(model.model.layers[1].attn.evidence, evidence)
        ((layer, trace),) = traces(model, tokenizer, document).items()
        assert layer == 1 and trace.gain.shape == (document.n_tokens, 2)
        assert trace.gain.min() > 0 and trace.gain.max() < 1
        assert np.isnan(trace.needle_variance[: trace.end - 1]).all()
        assert np.isfinite(trace.needle_variance[trace.end - 1 :]).all()
        written = trace.needle_variance[trace.end - 1].mean()
        assert written == pytest.approx(1, abs=1e-3) if evidence == 0 else written < 0.9
        assert trace.needle_error[trace.end - 1].mean() < 1
    ids = tokenizer(document.model_input, return_tensors="pt")["input_ids"]
    with _spy() as calls, torch.no_grad():
        mean = model(ids, use_cache=True).cache.states[1].mean[0]  # [H,D,V]
    keys, values = (
        calls[1].k[0, trace.start : trace.end, :, 0],
        calls[1].v[0, trace.start : trace.end].flatten(2),
    )
    wrong = (torch.einsum("nhd,hdv->nhv", keys, mean) - values).square().sum((0, 2)) / values.square().sum(
        (0, 2)
    )
    np.testing.assert_allclose(trace.needle_error[-1], wrong.numpy(), rtol=1e-3)
    with pytest.raises(UserError, match="not one of ours"):
        inspect_student(Entrant(torch.nn.Linear(1, 1), tokenizer), 0, tmp_path)


def test_calibration_of_a_right_and_of_a_random_prediction():
    rng = np.random.default_rng(0)
    predicted = rng.uniform(0.1, 2.0, size=(400, 3))
    empty = np.zeros((400, 3))
    for error, low, high in (
        (predicted * rng.chisquare(32, size=predicted.shape) / 32 * 7, 0.85, 1.0),
        (rng.uniform(1, 2, size=predicted.shape), -0.1, 0.1),
    ):
        trace = Trace(0, 1, empty, predicted, empty, error, empty, empty, empty, empty)
        x, y, correlation = calibration(trace)
        assert low <= correlation <= high
        if low > 0:
            np.testing.assert_allclose(x, y, rtol=0.15)
