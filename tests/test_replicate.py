"""The replication: its plans hold, its results survive packing, and its tables say what was put in."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import write_teacher

from regraft.assets import austen, teacher_dir
from regraft.assets.haystack import Haystack
from regraft.assets.needles import TASKS
from regraft.convert import load_model, load_tokenizer, make_student
from regraft.convert.convert import write_student
from regraft.errors import UserError
from regraft.report.niah import prompt_hash
from regraft.report.tasks import make_documents

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.replicate import choices, quiet  # noqa: E402
from scripts.replicate.analysis import Analysis, overall  # noqa: E402
from scripts.replicate.figures import BEGIN, END, draw, put  # noqa: E402
from scripts.replicate.plan import Work, load_plan, model_name  # noqa: E402
from scripts.replicate.results import Results, pack, unpack  # noqa: E402
from scripts.replicate.run import Job, Runner, jobs  # noqa: E402
from scripts.replicate.tables import sections  # noqa: E402
from scripts.teacher.corpus import encoded  # noqa: E402
from scripts.teacher.levels import SHORT, replication_levels, short_levels  # noqa: E402
from scripts.teacher.model import new_model  # noqa: E402
from scripts.teacher.rows import Material  # noqa: E402
from scripts.teacher.speed import choose  # noqa: E402
from scripts.teacher.step import choose_kernels  # noqa: E402
from scripts.teacher.train import Trainer, arguments  # noqa: E402

HAYSTACK = Haystack.from_text("The rain went on all day. Nobody came. " * 50)
HEADER = {"tokenizer": "t", "bos": "", "generator": 1}


@pytest.mark.parametrize("name", ["h200", "embedded", "tiny"])
def test_every_recipe_of_a_plan_is_valid_and_differs_from_the_main_one(name, tmp_path):
    work = Work(name, tmp_path)
    recipes = {variant.name: work.recipe(variant) for variant in work.plan.variants if not variant.quiet}
    assert all(a != recipes["main"] for name, a in recipes.items() if name != "main")
    known = {model_name(*model) for model in work.plan.models()}
    assert all(variant.against in known for variant in work.plan.variants)
    trained = {
        sum(phase.tokens for phase in recipe.phases)
        for name, recipe in recipes.items() if not work.variant(name).after
    }  # fmt: skip
    assert len(trained) == 1, "variants are compared at one budget"
    assert work.plan.data_tokens >= trained.pop()
    assert all(recipe.data.seed == recipe.seed for recipe in recipes.values())


def test_a_plan_with_a_wrong_key_is_refused_with_its_place(tmp_path):
    plan = load_plan("tiny")[0].model_dump(mode="json")
    plan["evaluation"]["sample"] = 3
    (tmp_path / "p.yaml").write_text(json.dumps(plan))
    with pytest.raises(UserError, match=r"evaluation\.sample"):
        load_plan(str(tmp_path / "p.yaml"))


def records(model: str, hit: float, samples: int = 40, tasks=("niah_single_2", "niah_multiquery")) -> list:
    """Made-up answers: a share `hit` of the needles is found, the same documents for every model."""
    found = []
    for task in tasks:
        for length in (1024, 2048):
            rng = np.random.default_rng(length)
            for index in range(samples):
                needles = [
                    {"depth": (index % 10 + 0.5) / 10, "decile": index % 10, "start_token": 9, "asked": asked,
                     **({"hit": bool(rng.random() < hit)} if asked else {})}
                    for asked in (True, False)[: TASKS[task].n_keys]
                ]  # fmt: skip
                score = float(needles[0]["hit"])
                found.append(
                    {"model": model, "task": task, "length": length, "index": index, "seed": 0,
                     "score": score,
                     "needles": needles, "completion": f"{index}", "prompt_sha256": f"{task}{index}",
                     "n_tokens": 1000, "new_tokens": 32, **HEADER}
                )  # fmt: skip
    return found


def nll(model: str, factor: float) -> list:
    """Made-up log-likelihoods of three books."""
    return [
        {"model": model, "set": "heldout.jsonl", "length": length, "document": book, "stretch": 0,
         "bytes": 4096,
         "tokens": 2048, "nll": factor * (6000 + book), "buckets": [[0, 1024, 2048, factor * (6000 + book)]],
         "text_sha256": str(book), "before": "x", **HEADER}
        for length in (1024, 2048) for book in range(3)
    ]  # fmt: skip


def results(**hits: float) -> Results:
    """A replication of two seeds and an ablation with given shares of needles found."""
    plan = load_plan("tiny")[0].model_dump(mode="json")
    models = [name.replace("__", "/").replace("_", "-") for name in hits]
    found = Results(plan=plan, models={name: {"name": name} for name in models})
    for name, hit in zip(models, hits.values(), strict=True):
        found.records += records(name, hit)
        found.perplexity += nll(name, 1.002 if name.endswith("student") else 1.0)
    return found


def test_seeds_are_pooled_and_differences_are_paired():
    a = Analysis(
        results(
            teacher=0.5, main__student=1.0, main__control=0.0, main_1__student=0.0, main_1__control=0.0,
            isotropic__student=1.0,
        )
    )  # fmt: skip
    assert a.seeds == ["main", "main-1"] and a.complete
    gain = overall(a.gains, student="student", baseline="control", task="mean")[2048]
    assert gain["difference"] == 0.5 and gain["low"] == gain["high"] == 0.5  # each document: (1 + 0) / 2 - 0
    ratio = overall(a.ratios, student="student")[2048]
    assert ratio["ratio"] == pytest.approx(np.exp(0.002 * 6001 / 2048))
    (isotropic,) = a.ablations  # against the mean of both seeds, the better of which it equals
    assert overall(isotropic.gains, task="mean")[1024]["difference"] == 0.5
    assert overall(isotropic.ratios)[2048]["ratio"] == 1.0
    assert isotropic.spread[1024] == (-0.5, 0.5) and not isotropic.beyond(1024)
    assert "| -50.0 to +50.0 |" in sections(a, {}) and "**+50.0" not in sections(a, {})


def test_what_no_seed_does_stands_out():
    a = Analysis(
        results(
            teacher=0.5, main__student=0.0, main__control=0.0, main_1__student=0.0, main_1__control=0.0,
            isotropic__student=1.0,
        )
    )  # fmt: skip
    assert a.ablations[0].beyond(1024)
    assert "| **+100.0 [+100.0, +100.0]** |" in sections(a, {})


def test_a_seed_without_its_control_is_left_out():
    a = Analysis(results(teacher=0.5, main__student=1.0, main__control=0.0, main_1__student=0.0))
    assert a.seeds == ["main"]
    assert overall(a.gains, student="student", baseline="control", task="mean")[1024]["difference"] == 1.0


@pytest.mark.parametrize("plan", ["h200", "embedded"])
def test_every_variant_of_a_plan_is_in_a_comparison_with_its_control_or_an_ablation(plan):
    plan = load_plan(plan)[0]
    names = [model_name(*model) for model in plan.models()]
    found = Results(plan=plan.model_dump(mode="json"), models={name: {"name": name} for name in names})
    found.records = [r for name in names for r in records(name, 0.5, 10, ("niah_single_2",))]
    found.perplexity = [r for name in names for r in nll(name, 1.0)]
    a = Analysis(found)
    seeds = {own.base: own.seeds for own in (a, *a.others)}
    assert seeds == {
        "main": ["main", "main-1", "main-2"], "memory": ["memory", "memory-1", "memory-2"],
        "noise": ["noise"], "quiet": ["quiet"], "long": ["long"], "last-long": ["last-long"],
    }  # fmt: skip
    own = {v.name for v in plan.variants if v.control is True}
    assert {v.name for v in plan.variants} - own == {x.name for x in a.ablations}


def test_a_control_may_be_shared():
    found = results(
        teacher=0.5, main__student=1.0, main__control=0.0, main_1__student=0.0, main_1__control=0.0,
        quiet__student=1.0, quiet_1__student=1.0,
    )  # fmt: skip
    like = found.plan["variants"][0]
    for seed in ("", "-1"):
        shared = {"name": f"quiet{seed}", "control": f"main{seed}", "against": f"main{seed}/student"}
        found.plan["variants"].append(like | shared)
    a = Analysis(found)
    (quiet,) = a.others
    assert quiet.controls == {"quiet": "main/control", "quiet-1": "main-1/control"}
    gain = overall(quiet.gains, student="student", baseline="control", task="mean")[1024]
    assert gain["difference"] == gain["low"] == 1.0
    assert {x.name: overall(x.gains, task="mean")[1024]["difference"] for x in a.ablations} == {
        "quiet": 0.5, "quiet-1": 1.0,
    }  # fmt: skip
    assert [*a.profiles] == ["teacher", "main student", "main control", "quiet student"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"control": "other"}, "other has no control"),
        ({"quiet": {"of": "x", "heads": "0:0"}}, "no variant x"),
    ],
)
def test_a_plan_names_variants_that_there_are(tmp_path, change, reason):
    plan = load_plan("tiny")[0].model_dump(mode="json")
    plan["variants"][-1] |= change
    (tmp_path / "p.yaml").write_text(json.dumps(plan))
    with pytest.raises(UserError, match=reason):
        load_plan(str(tmp_path / "p.yaml"))


def test_other_comparisons_are_against_their_own_control_and_seeds():
    found = results(
        teacher=0.5, main__student=1.0, main__control=0.0, even__student=1.0, even__control=1.0,
        even_1__student=0.0, even_1__control=0.0, isotropic__student=0.0,
    )  # fmt: skip
    like = found.plan["variants"][0]
    found.plan["variants"] += [like | {"name": name} for name in ("even", "even-1")]
    found.models["even/student"]["layers"] = [1, 3]
    a = Analysis(found)
    (even,) = a.others
    assert (even.base, even.seeds, even.layers) == ("even", ["even", "even-1"], "1, 3")
    assert overall(even.scores, model="student", task="mean")[1024]["mean"] == 0.5
    assert overall(even.gains, student="student", baseline="control", task="mean")[1024]["high"] == 0.0
    text = sections(a, {})
    assert "| main | student | 100.0 | 100.0 |" in text and "| even | student | 50.0 | 50.0 |" in text
    assert "| layers 1, 3 | control | 50.0 | 50.0 |  |" in text and "| 2 seeds | student - control |" in text
    assert "| even-1 | +0.0 [+0.0, +0.0] |" in text and "| main-1 |" not in text
    tenths = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.count(" | ") == 10}
    assert tenths["main student"].count("100.0") == tenths["even control"].count("50.0") == 10
    assert tenths["isotropic"].count(" 0.0 ") == 10


@pytest.mark.parametrize("left_out", range(12))
def test_whatever_is_finished_has_tables(left_out):
    """Every model missing in turn, then all from the first one missing on."""
    names = [
        "teacher",
        "main/student",
        "main/control",
        "main-1/student",
        "main-1/control",
        "isotropic/student",
    ]
    kept = names[:left_out] + names[left_out + 1 :] if left_out < 6 else names[: left_out - 6]
    a = Analysis(results(**{name.replace("/", "__").replace("-", "_"): 0.5 for name in kept}))
    text = sections(a, {})
    pairs = [seed for seed in ("main", "main-1") if {f"{seed}/student", f"{seed}/control"} <= {*kept}]
    assert a.seeds == pairs and ("### Goals" in text) == a.complete == ("teacher" in kept and bool(pairs))
    assert ("### Ablations" in text) == ({"main/student", "isotropic/student"} <= {*kept})
    assert ("### The teacher" in text) == ("teacher" in kept)


def test_choices_tell_which_needle_was_named(capsys, tmp_path, monkeypatch):
    tokenizer = load_tokenizer("embedded")
    made = make_documents([choices.TASK], [384], 4, seed=0, tokenizer=tokenizer)[choices.TASK, 384]
    found = []
    for document, place in zip(made, (0, 3, None, 1), strict=True):
        needles = sorted(document.needles, key=lambda needle: needle.start_token)
        asked = next(needle for needle in needles if needle.asked)
        named = asked if place == 0 else needles[place] if place is not None else None
        found.append(
            {"model": "m", "task": choices.TASK, "length": 384, "seed": 0, "index": document.index,
             "completion": f" {named.value}." if named else " none", "prompt_sha256": prompt_hash(document)}
        )  # fmt: skip
    own = choices.choices(found, dict(enumerate(made)))["m"]
    right = 1 + sum(
        sorted(made[i].needles, key=lambda needle: needle.start_token)[place].asked
        for i, place in ((1, 3), (3, 1))
    )
    assert (own.documents, own.right.total(), own.wrong.total(), own.none) == (4, right, 3 - right, 1)
    assert set(own.wrong) <= {1, 3}
    monkeypatch.setattr(choices, "unpack", lambda path: Results(records=found))
    choices.main(["x"])
    said = capsys.readouterr().out
    assert said.startswith("384 tokens") and f"| m | {25 * right} | {75 - 25 * right} | 25 |" in said
    with pytest.raises(UserError, match="document 0 is another"):
        choices.choices([found[0] | {"prompt_sha256": ""}], dict(enumerate(made)))
    with pytest.raises(SystemExit, match="no niah_multikey_1 of 7 tokens"):
        choices.main(["x", "--lengths", "7"])


def test_tables_hold_what_there_is_and_nothing_else(tmp_path):
    partial = Analysis(results(teacher=0.5))
    text = sections(partial, {})
    assert "teacher, ours" in text and "control, ours" not in text and "### Goals" not in text
    whole = Analysis(results(teacher=0.0, main__student=1.0, main__control=0.0, isotropic__student=0.0))
    pictures = draw(whole, tmp_path / "images")
    text = sections(whole, pictures)
    assert "| student - control, ours | +100.0 [+100.0, +100.0] | +100.0 [+100.0, +100.0] |" in text
    assert "| isotropic |" in text and "-100.0 [-100.0, -100.0]" in text
    assert "at 2x (2,048), interval above 0 | +100.0 [+100.0, +100.0] | yes |" in text
    assert "perplexity cost at most 0.5 %" in text and "| no |" in text  # 0.6 % is more
    assert {"length", "depth", "maps", "perplexity", "ablations"} <= set(pictures)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put(page, text)
    put(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n{END}\nafter\n"


def test_results_survive_packing(tmp_path):
    work = Work("tiny", tmp_path)
    (tmp_path / "records").mkdir()
    made = {"teacher": records("teacher", 0.5), "isotropic/student": records("isotropic/student", 0.7)}
    for name, answers in made.items():
        found = {"sha256": "s", "dtype": "float32", "answers": answers, "perplexity": nll(name, 1.0)}
        (tmp_path / "records" / f"{name.replace('/', '.')}.json").write_text(json.dumps(found))
    run = tmp_path / "runs" / "isotropic"
    run.mkdir(parents=True)
    finished = {"tokens": 9, "flops": 2.0, "seconds": 1.5, "device": "cpu", "data_sha256": "d"}
    manifest = {"layers": [1], "versions": {}, "finished": finished}
    (run / "manifest.json").write_text(json.dumps(manifest))
    lines = [{"step": i, "stage": "match", "tokens": i, "loss": 1.0, "lr": 0.1} for i in range(200)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    back = unpack(pack(work))
    assert back.records == [record for answers in made.values() for record in answers]
    assert back.perplexity == [record for name in made for record in nll(name, 1.0)]
    assert back.models["isotropic/student"]["tokens"] == 9
    curve = back.models["isotropic/student"]["curve"]
    assert curve[0][0] == 0 and curve[-1][0] == 199 and len(curve) <= 70


def test_results_of_an_earlier_run_are_joined_and_others_refused(tmp_path):
    def results_of(folder: Path, hits: dict[str, float], samples: int) -> Path:
        (folder / "records").mkdir(parents=True)
        for name, hit in hits.items():
            found = {"sha256": "s", "dtype": "d", "answers": records(name, hit, samples), "perplexity": []}
            (folder / "records" / f"{name}.json").write_text(json.dumps(found))
        return pack(Work("tiny", folder))

    first = results_of(tmp_path / "first", {"teacher": 0.5}, 10)
    work = Work("tiny", tmp_path / "second")
    work.folder.mkdir()
    joined = unpack(pack(work, old=first))
    assert joined.records == records("teacher", 0.5, 10)
    results_of(tmp_path / "third", {"teacher": 0.0}, 20)
    with pytest.raises(UserError, match="documents are others"):
        pack(Work("tiny", tmp_path / "third"), old=first)


@pytest.mark.parametrize(("kernels", "programs"), [("torch", 1), ("triton", 4)])
def test_one_compiled_program_serves_all_layers(kernels, programs):
    """The filter in torch compiles whole; around kernels a block breaks, but for every layer alike."""
    shape = ["--layers", "5", "--hidden", "32", "--heads", "1", "--head-dim", "32"]
    args = arguments(["--out", "x", "--device", "cpu", *shape])
    model = new_model(args, 300)
    choose_kernels(model, kernels)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids = torch.arange(140)[None]
    plain = model(ids).logits
    for block in model.model.layers:
        block.compile(dynamic=False, backend="eager")
    assert torch.allclose(model(ids).logits, plain, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= programs
    torch._dynamo.reset()


def test_a_stopped_teacher_goes_on_where_it_was(tokenizer, tmp_path, capsys):
    """Weights, moments and counts of the last checkpoint; rows that were not seen."""
    shape = ["--layers", "1", "--hidden", "32", "--heads", "1", "--head-dim", "32", "--rows", "2"]
    args = arguments(
        ["--out", str(tmp_path), "--device", "cpu", "--workers", "0", "--save-seconds", "0", *shape]
    )
    books = np.arange(3000, dtype=np.uint16)
    train, held_out = (Material.make(tokenizer, HAYSTACK, books, split) for split in ("train", "eval"))
    first = Trainer(new_model(args, len(tokenizer)), train, held_out, args)
    args.minutes = 0.02
    first.run(io.StringIO())
    assert first.at.step > 2 and first.at.tokens == first.at.step * 2 * SHORT[0]
    second = Trainer(new_model(args, len(tokenizer)), train, held_out, args)
    args.minutes = 0.0  # nothing is left to do
    second.run(io.StringIO())
    assert second.at.step == first.at.step and second.at.level == 0
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    moments = [list(t.take_step.optimizer.state.values()) for t in (first, second)]
    assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in zip(*moments, strict=True))
    assert f"goes on after step {first.at.step}" in capsys.readouterr().out
    assert not torch.equal(next(first.batches)[0], next(second.batches)[0])


def test_levels_add_up_and_reach_the_full_length():
    levels = replication_levels(1024, 96, 64)
    assert all(sum(level.mixture.values()) == pytest.approx(1) for level in levels)
    assert [level.length for level in levels] == [96, 160, 192, 192, 192, 256, 1024, 1024]
    assert not any(level.whole for level in short_levels(96)) and levels[-1].most is None
    assert levels[-1].mixture["book"] >= 0.85


def test_the_fastest_way_is_chosen_among_those_that_agree():
    torch_way = {"loss": 1.0, "gradient": 2.0, "ms": 9.0}
    assert choose({"torch": torch_way, "triton": {"loss": 1.0, "gradient": 2.01, "ms": 3.0}}) == "triton"
    assert choose({"torch": torch_way, "triton": {"loss": 1.0, "gradient": 2.5, "ms": 3.0}}) == "torch"
    assert choose({"torch": torch_way, "triton": {"failed": True}}) == "torch"
    assert (
        choose({"torch": {"failed": True}, "triton": {"loss": 1.0, "gradient": 2.0, "ms": 3.0}}) == "triton"
    )


@pytest.mark.slow
def test_books_are_tokenised_alike_by_one_process_and_by_two(tokenizer):
    texts = ["One book.", "Another, with a number: 1234567.", ""]
    alone = [ids.tolist() for ids in encoded(texts, teacher_dir(), 1)]
    assert alone == [ids.tolist() for ids in encoded(texts, teacher_dir(), 2)]
    assert alone == [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


def test_jobs_wait_for_each_other_and_what_is_done_is_left_alone(tmp_path, capsys):
    def job(name: str, code: str, needs: tuple[str, ...] = ()) -> Job:
        script = tmp_path / f"{name}_job.py"
        script.write_text(code)
        return Job(name, lambda: [script.stem], needs, (tmp_path / name).is_file)

    def touch(name: str) -> str:
        return f"open({str(tmp_path / name)!r}, 'x').close()"

    args = argparse.Namespace(
        plan="tiny", text=[], valid=[], test=[], workers=1, speed=False, rehearse=False, only=[], jobs=2,
        gpus=1, site=str(tmp_path), minutes=5,
    )  # fmt: skip
    todo = [
        job("second", f"open({str(tmp_path / 'first')!r}).close(); {touch('second')}", ("first",)),
        job("first", touch("first")),
        job("broken", "raise SystemExit(3)"),
        job("behind", touch("behind"), ("broken",)),
        job("spare", "raise SystemExit(3)"),
        job("after", touch("after"), ("spare",)),
    ]
    todo[4].optional = True
    runner = Runner(Work("tiny", tmp_path), args)
    runner.todo = list(todo)
    assert not runner.run()
    assert (runner.done, runner.failed) == ({"first", "second", "spare", "after"}, {"broken", "spare"})
    assert "left out: behind" in capsys.readouterr().out
    runner = Runner(Work("tiny", tmp_path), args)
    runner.todo = todo[:2]
    assert runner.run() and "begins" not in capsys.readouterr().out
    late = Runner(Work("tiny", tmp_path), argparse.Namespace(**{**vars(args), "minutes": 0}))
    late.todo = [job("late", touch("late"))]
    assert not late.run() and not (tmp_path / "late").exists()


def test_a_plan_like_another_has_its_variants_with_names_of_its_own(tmp_path):
    found, like = (Work(name, tmp_path) for name in ("embedded", "h200"))
    assert found.plan.variants == like.plan.variants and found.plan.teacher != like.plan.teacher
    for work, layers, lengths in ((found, "scan:1", [512, 2048]), (like, (0, 2), [1024, 4096])):
        assert work.recipe(work.variant("long")).convert.layers == layers
        assert work.row_lengths() == lengths


@pytest.mark.parametrize("other", ["p", "missing"])
def test_a_plan_like_itself_or_like_none_is_refused(tmp_path, other):
    (tmp_path / "p.yaml").write_text(f"like: {other}\n")
    with pytest.raises(UserError, match="like: there is no other plan"):
        load_plan(str(tmp_path / "p.yaml"))


def test_jobs_are_spread_over_gpus_and_the_rehearsal_leaves_the_teacher_alone(tmp_path):
    args = argparse.Namespace(jobs=3, gpus=2, site=None, minutes=1)
    runner = Runner.__new__(Runner)
    runner.work, runner.args, runner.slots = Work("tiny", tmp_path), args, list(range(args.jobs))

    def gpu(**settings):
        job = Job("a", list, (), lambda: False, **settings)
        return runner._environment(job, runner._place(job))["CUDA_VISIBLE_DEVICES"]

    assert [gpu(), gpu(), gpu()] == ["0", "1", "0"]
    assert gpu(beside=True) == "0" and gpu(beside=True, last=True) == "1"


def test_every_job_is_its_own_command(tmp_path):
    args = argparse.Namespace(
        plan="h200",
        text=[Path("a")],
        valid=[],
        test=[],
        workers=1,
        speed=True,
        rehearse=True,
        only=["main", "long"],
    )
    found = {job.name: job.command() for job in jobs(Work("h200", tmp_path), args)}
    assert {name: command[0].removeprefix("scripts.") for name, command in found.items()} == {
        "corpus": "replicate.data", "data": "replicate.data", "speed": "teacher.speed", "teacher": "teacher",
        "rehearsal": "replicate.rehearsal", "teacher-reads": "replicate.job", "main": "replicate.job",
        "main-control": "replicate.job", "long": "replicate.job", "long-control": "replicate.job",
    }  # fmt: skip
    assert (found["corpus"][-1], found["data"][-1]) == ("corpus", "data")
    assert [found[name][1] for name in ("teacher-reads", "main", "long")] == ["teacher", "main", "long"]
    assert (
        "--out" not in found["speed"] and "--graph" in found["speed"] and "--kernels" not in found["teacher"]
    )
    (tmp_path / "speed.json").write_text('{"chosen": "triton"}')
    found = {job.name: job.command() for job in jobs(Work("h200", tmp_path), args)}
    assert found["teacher"][-2:] == ["--kernels", "triton"]


@pytest.mark.slow
def test_the_whole_chain(tmp_path, monkeypatch):
    """A teacher of a few steps, a student with its control, all figures; jobs one by one in this process."""
    books, valid = (tmp_path / f"{name}.jsonl.xz" for name in ("books", "valid"))
    for path, size in ((books, 150_000), (valid, 12_000)):
        with lzma.open(path, "wt", encoding="utf-8") as file:
            for start in range(0, 4 * size, size):
                file.write(json.dumps({"text": austen()[start : start + size], "author": "J. A."}) + "\n")
    plan = load_plan("tiny")[0].model_dump(mode="json")
    plan["teacher"]["train"] = [{"0.4": "0.01"}.get(x, x) for x in plan["teacher"]["train"]]
    plan["evaluation"] = {"lengths": [384], "samples": 2, "batch_size": 16, "books": 2}
    plan["recipe"] = str(ROOT / "scripts/replicate/plans/tiny-recipe.yaml")
    quiet = {"name": "quiet", "question": "?", "quiet": {"of": "main", "heads": "1:0"}, "control": "main"}
    plan["variants"] = [plan["variants"][0], quiet]
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    work = Work(str(tmp_path / "plan.yaml"), tmp_path / "work")
    args = argparse.Namespace(
        plan=work.name, text=[books], valid=[valid], test=[], workers=1, speed=False, rehearse=False, only=[]
    )
    monkeypatch.setenv("REGRAFT_CACHE", str(work.folder / "cache"))
    for job in jobs(work, args):
        assert not job.done() and job.ready()
        module, *words = job.command()
        monkeypatch.setattr(sys, "argv", [module, *words])
        main = f"{module}.train" if module == "scripts.teacher" else module
        importlib.import_module(main).main()
        assert job.done(), job.name
    a = Analysis(unpack(pack(work)))
    assert a.complete and len(a.records) == 3 * len(TASKS) * 2
    assert a.results.models["quiet/student"]["layers"] == a.results.models["main/student"]["layers"]
    assert [own.base for own in a.others] == ["quiet"] and a.others[0].complete
    assert {"length", "depth", "maps", "perplexity", "curves"} <= set(draw(a, tmp_path / "images"))


def test_a_control_begins_with_its_run_and_not_before(tmp_path):
    work = Work("tiny", tmp_path)
    args = argparse.Namespace(
        plan="tiny", only=["main"], speed=False, rehearse=False, workers=1, text=[], valid=[], test=[]
    )
    (own,) = (job for job in jobs(work, args) if job.name == "main-control")
    assert not own.ready()
    run = work.run(work.variant("main"))
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    assert own.ready() and own.command()[-1] == "--control"


def test_a_later_phase_waits_for_the_run_and_the_control_before(tmp_path):
    work = Work("h200", tmp_path)
    args = argparse.Namespace(
        plan="h200", only=["last-long"], speed=False, rehearse=False, workers=1, text=[], valid=[], test=[]
    )
    student, control = [job for job in jobs(work, args) if job.name.startswith("last-long")]

    def write(run, text):
        run.mkdir(parents=True, exist_ok=True)
        (run / "manifest.json").write_text(text)

    before, own = work.run(work.variant("memory")), work.run(work.variant("last-long"))
    write(before, "{}")
    assert not student.ready()
    write(before, '{"finished": {}}')
    write(own, "{}")
    assert student.ready() and not control.ready()
    write(before / "control", '{"finished": {}}')
    assert control.ready()
    phases = work.recipe(work.variant("last-long")).phases
    assert [p.name for p in phases] == ["match", "joint", "long"]
    assert phases[:2] == work.recipe(work.variant("memory")).phases


def test_quiet_heads_have_no_process_noise_and_the_rest_stays(tmp_path):
    teacher = write_teacher(tmp_path / "t", tokenizer=True, tie_word_embeddings=True)
    done = make_student(str(teacher), [1])
    done.student.model.layers[1].attn.evidence.data.fill_(1.0)
    write_student(done, tmp_path / "s")
    quiet.main([str(tmp_path / "s"), str(tmp_path / "q"), "--heads", "1:0"])
    before, after = (load_model(str(tmp_path / name)) for name in ("s", "q"))
    x = torch.randn(1, 9, before.config.hidden_size)
    noise = []
    for model in (before, after):
        mixer = model.model.layers[1].attn
        keys = torch.nn.functional.normalize(torch.randn(1, 9, mixer.num_v_heads, mixer.head_dim), dim=-1)
        noise.append(mixer.design(x, keys).process_var[0])
    assert noise[0].min() > 1e-7 and noise[1][:, 0].max() < 1e-12
    assert torch.equal(noise[0][:, 1:], noise[1][:, 1:])
    changed = {
        n for (n, a), b in zip(before.named_parameters(), after.parameters(), strict=True) if not a.equal(b)
    }
    assert changed == {f"model.layers.1.attn.{name}" for name in ("process_log_scale", "refresh")}
    for wrong in ("0:0", "9:0", "1:9", "1:-1"):
        with pytest.raises(SystemExit, match="no such head"):
            quiet.main([str(tmp_path / "s"), str(tmp_path / "r"), "--heads", wrong])
    assert not (tmp_path / "r").exists()
    quiet.quieten(before, [(1, [0]), (1, [1])])  # a layer named twice
    assert before.model.layers[1].attn.refresh[:2].max() == quiet.SILENT
