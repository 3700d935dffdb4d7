"""The tables of docs/replication.md as Markdown, from an analysis; what is not there yet is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from regraft.report.inspection import calibration
from regraft.report.statistics import Row
from scripts.replicate.analysis import CONTROL, MEAN, PAIRS, STUDENT, TEACHER, Analysis, overall

PAPER = {  # 340M Gated DeltaNet, four of 24 layers, 2k to 16k: Table 4 and section 4.3 of the paper
    TEACHER: (49.5, 31.1, 16.8, 7.9),
    STUDENT: (50.8, 34.0, 20.0, 8.8),
    CONTROL: (48.5, 31.6, 16.1, 8.4),
}
NAMES = {TEACHER: "teacher", STUDENT: "Bayesian student", CONTROL: "control"}


def sections(a: Analysis, pictures: dict[str, str]) -> str:
    """All sections that there are results for."""
    made = (
        goals, retrieval, by_task, by_depth, perplexity, others, seeds, ablations,
        inside, teacher, memory, cost,
    )  # fmt: skip
    texts = [text for make in made if (text := make(a, pictures))]
    return "\n\n".join(texts) + "\n" if texts else ""


def goals(a: Analysis, _: dict[str, str]) -> str:
    """What issue and paper ask for, met or not."""
    if not a.complete:
        return ""
    first, *longer = a.lengths
    mean = overall(a.gains, student=STUDENT, baseline=CONTROL, task=MEAN)
    rows = [
        [
            f"student above control at {_times(a, n)}, interval above 0",
            _gain(mean[n]),
            _yes(mean[n]["low"] > 0),
        ]
        for n in longer
    ]
    ratio = max((r for r in overall(a.ratios, student=STUDENT).values()), key=lambda r: r["ratio"])
    rows.append(
        ["perplexity cost at most 0.5 %, at the worst length", _cost(ratio), _yes(ratio["ratio"] <= 1.005)]
    )
    worst = min(
        (overall(a.gains, student=STUDENT, baseline=TEACHER, task=task)[first] for task in a.tasks),
        key=lambda r: r["difference"],
    )
    text = "no task at 1x more than one point below the teacher"
    rows.append([text, f"{worst['task']}: {_gain(worst)}", _yes(worst["difference"] >= -0.01)])
    return "### Goals\n\n" + _table(["goal", "measured", "met"], rows)


def retrieval(a: Analysis, pictures: dict[str, str]) -> str:
    """The paper's Table 4, mean of six tasks, beside ours."""
    if not a.models:
        return ""
    head = ["mean of six tasks, %", *(_times(a, n) for n in a.lengths)]
    rows: list[list[str]] = []
    for role in a.models:
        own = overall(a.scores, model=role, task=MEAN)
        rows.append([f"{NAMES[role]}, ours", *(_share(own[n]) for n in a.lengths)])
    for student, baseline in PAIRS if a.complete else ():
        own = overall(a.gains, student=student, baseline=baseline, task=MEAN)
        rows.append([f"{student} - {baseline}, ours", *(_gain(own[n]) for n in a.lengths)])
    if len(a.lengths) == len(PAPER[TEACHER]):
        rows += [[f"{NAMES[role]}, paper", *(f"{x:.1f}" for x in PAPER[role])] for role in NAMES]
        for other in (CONTROL, TEACHER):
            gaps = (x - y for x, y in zip(PAPER[STUDENT], PAPER[other], strict=True))
            rows.append([f"student - {other}, paper", *(f"{x:+.1f}" for x in gaps)])
    pooled = f"Layers {a.layers}, mean of {_seeds(a)}. " if a.complete else ""
    note = f"{pooled}Brackets are 95 % intervals over documents, differences paired."
    return "\n\n".join(["### Retrieval", _table(head, rows), note, *_figure(pictures, "length")])


def by_task(a: Analysis, _: dict[str, str]) -> str:
    """Every task: shares and paired differences."""
    if not a.complete:
        return ""
    head = ["task", "", *(_times(a, n) for n in a.lengths)]
    rows = []
    for task in a.tasks:
        for role in a.models:
            own = overall(a.scores, model=role, task=task)
            label = task.removeprefix("niah_") if role == TEACHER else ""
            rows.append([label, role, *(f"{100 * own[n]['mean']:.1f}" for n in a.lengths)])
        for baseline in (CONTROL, TEACHER):
            own = overall(a.gains, student=STUDENT, baseline=baseline, task=task)
            rows.append(["", f"student - {baseline}", *(_gain(own[n]) for n in a.lengths)])
    return "### By task\n\n" + _table(head, rows)


def by_depth(a: Analysis, pictures: dict[str, str]) -> str:
    """The paper's Figure 5 and its numbers."""
    if not a.complete:
        return ""
    head = ["student - control, points", *(_times(a, n) for n in a.lengths)]
    gains = (r for r in a.depth_gains if (r["baseline"], r["task"]) == (CONTROL, MEAN))
    cells = {(r["depth"], r["length"]): r for r in gains}
    rows = [
        [f"{tenth / 10:.1f}-{(tenth + 1) / 10:.1f}",
         *(_gain(cells[tenth, n]) if (tenth, n) in cells else "" for n in a.lengths)]
        for tenth in range(10)
    ]  # fmt: skip
    figures = [*_figure(pictures, "depth"), *_figure(pictures, "maps")]
    return "\n\n".join(["### By depth", *figures, _table(head, rows), _profiles(a)])


def _profiles(a: Analysis) -> str:
    """Every model at the longest length, where depth tells most."""
    tenths = range(10)
    head = [f"found at {_times(a, a.lengths[-1])}, %", *(f"{t / 10:.1f}-{(t + 1) / 10:.1f}" for t in tenths)]
    rows = [
        [name, *(f"{100 * own[t]['mean']:.1f}" if t in own else "" for t in tenths)]
        for name, own in a.profiles.items()
    ]
    half = max((row["high"] - row["low"]) / 2 for own in a.profiles.values() for row in own.values())
    note = (
        "Mean of six tasks, seeds of a comparison pooled, variants without a control one seed. A 95 %"
        f" interval of one such share by itself is at most {100 * half:.0f} points to either side."
    )
    return f"{_table(head, rows)}\n\n{note}"


def perplexity(a: Analysis, pictures: dict[str, str]) -> str:
    """The paper's Table 5: cost against the teacher by length."""
    if not a.models:
        return ""
    lengths = sorted({row["length"] for row in a.perplexities})
    rows = []
    for role in a.models:
        own = overall(a.perplexities, model=role)
        rows.append([NAMES[role], *(f"{own[n]['perplexity']:.2f}" for n in lengths)])
    for role in (STUDENT, CONTROL):
        own = overall(a.ratios, student=role)
        if own:
            rows.append([f"{role} against teacher", *(_cost(own[n]) for n in lengths)])
    books = max((row["documents"] for row in a.perplexities), default=0)
    note = (
        f"{books} held-out books, one stretch each; every length scores the same tokens. The paper: "
        "student +2.5 to +2.7 %, control within 0.3 %, on Wikitext-103, PG-19 and SlimPajama."
    )
    head = ["perplexity a token", *(f"{n:,}" for n in lengths)]
    return "\n\n".join(["### Perplexity", _table(head, rows), note, *_figure(pictures, "perplexity")])


def others(a: Analysis, pictures: dict[str, str]) -> str:
    """All students with a control side by side."""
    if not a.others:
        return ""
    head = ["comparison", "mean of six tasks, %", *(_times(a, n) for n in a.lengths), "perplexity"]
    rows = [line for own in (a, *a.others) if own.complete for line in _comparison(own)]
    note = (
        "Differences in points, perplexity where it differs most from the teacher's. Comparisons may share a"
        " control: the same layers of the teacher on the same tokens."
    )
    title = "### Students with a control, side by side"
    return "\n\n".join([title, _table(head, rows), note, *_figure(pictures, "students")])


def _comparison(a: Analysis) -> Iterator[list[str]]:
    names = iter([a.base, f"layers {a.layers}", _seeds(a)])
    for role in (STUDENT, CONTROL):
        own = overall(a.scores, model=role, task=MEAN)
        yield [next(names, ""), role, *(f"{100 * own[n]['mean']:.1f}" for n in a.lengths), ""]
    for student, baseline in PAIRS:
        own = overall(a.gains, student=student, baseline=baseline, task=MEAN)
        cost = _worst(overall(a.ratios, student=student)) if baseline == TEACHER else ""
        yield [next(names, ""), f"{student} - {baseline}", *(_gain(own[n]) for n in a.lengths), cost]


def _seeds(a: Analysis) -> str:
    return f"{len(a.seeds)} seed{'s' * (len(a.seeds) > 1)}"


def seeds(a: Analysis, _: dict[str, str]) -> str:
    """Each seed by itself, where a comparison has several."""
    head = ["student - control, mean of six tasks", *(_times(a, n) for n in a.lengths)]
    rows = [
        [seed, *(_gain(overall(gains, task=MEAN)[n]) for n in a.lengths)]
        for own in (a, *a.others) if len(own.seeds) > 1
        for seed, gains in own.seed_gains.items()
    ]  # fmt: skip
    return "### Seeds\n\n" + _table(head, rows) if rows else ""


def ablations(a: Analysis, pictures: dict[str, str]) -> str:
    """One line a variant."""
    if not a.ablations:
        return ""
    head = ["variant", "question", "against", *(_times(a, n) for n in a.lengths), "perplexity"]
    rows = []
    for against, own in {own.against: own for own in a.ablations}.items():
        spread = [f"{100 * low:+.1f} to {100 * high:+.1f}" for low, high in own.spread.values()]
        if any(low < high for low, high in own.spread.values()):
            rows.append(
                [f"{against}, its seeds", "How far is one from their mean?", "their mean", *spread, ""]
            )
    for own in a.ablations:
        gains, cost = overall(own.gains, task=MEAN), _worst(overall(own.ratios))
        cells = [f"**{_gain(gains[n])}**" if own.beyond(n) else _gain(gains[n]) for n in a.lengths]
        rows.append([own.name, own.question, own.against, *cells, cost])
    note = (
        "Points of the mean over six tasks: one seed of the variant against the mean of all seeds of what it"
        " is compared with; perplexity where it differs most. Bold is what lies outside the range of those"
        " seeds and has an interval without 0; inside it a difference may be the order of the data."
    )
    return "\n\n".join(["### Ablations", _table(head, rows), note, *_figure(pictures, "ablations")])


def inside(a: Analysis, pictures: dict[str, str]) -> str:
    """What the filters of the students did on one needle document."""
    head = [
        "variant", "layer", "gain, tokens 0-63", "gain, last 64", "variance along the needle's keys",
        "error of reading the needle", "of the tokens before it", "predicted against real error, rank",
    ]  # fmt: skip
    rows = [
        [name.removesuffix(f"/{STUDENT}"), layer, f"{t.gain[:64].mean():.3f}", f"{t.gain[-64:].mean():.3f}",
         f"{t.needle_variance[-1].mean():.3f}", f"{t.needle_error[-1].mean():.2f}",
         f"{t.rest_error[-1].mean():.2f}", f"{calibration(t)[2]:+.2f}"]
        for name, layers in a.traces.items() for layer, t in layers.items()
    ]  # fmt: skip
    if not rows:
        return ""
    note = (
        "`niah_single_2`, one document of 512 tokens, means over heads. A gain is the share of its own key's"
        " value that a token writes. Variance and errors are those after the last token; variances start at"
        " 1, and an error of 1 is nothing kept."
    )
    figures = [text for name in pictures if name.startswith("inside") for text in _figure(pictures, name)]
    return "\n\n".join(["### Inside the filters", _table(head, rows), note, *figures])


def memory(a: Analysis, _: dict[str, str]) -> str:
    """Where the teacher's memory lives."""
    found = a.results.models.get(TEACHER, {}).get("inside", {}).get("scan")
    if not found:
        return ""
    head = ["layer", "answer loss", "rise", "retrieved, %", "kept a token, by head", "gain, by head"]
    rows = [
        [str(x["layer"]), f"{x['answer_loss']:.3f}", f"{x['loss_rise']:+.3f}", f"{100 * x['retrieved']:.0f}",
         " ".join(f"{d:.3f}" for d in x["decay"]), " ".join(f"{g:.2f}" for g in x["gain"])]
        for x in found["layers"]
    ]  # fmt: skip
    note = (
        f"`niah_single_2`, {found['samples']} documents of {found['length']} tokens, each layer's memory in"
        f" turn cut to a few tokens; as it is: answer loss {found['answer_loss']:.3f},"
        f" {100 * found['retrieved']:.0f} % retrieved."
    )
    return "\n\n".join(["### Where the teacher's memory lives", _table(head, rows), note])


def teacher(a: Analysis, _: dict[str, str]) -> str:
    """What the teacher is, and what it finds."""
    parts = [_table(["", ""], _training(a.results.teacher))] if a.results.teacher else []
    if TEACHER in a.models:
        head = ["teacher, %", *(_times(a, n) for n in a.lengths)]
        shares = {task: overall(a.scores, model=TEACHER, task=task) for task in (*a.tasks, MEAN)}
        rows = [[task, *(f"{100 * own[n]['mean']:.1f}" for n in a.lengths)] for task, own in shares.items()]
        parts.append(_table(head, rows))
    return "\n\n".join(["### The teacher", *parts]) if parts else ""


def _training(found: dict[str, Any]) -> list[list[str]]:
    books = found.get("book_tokens", 0) / max(1, found.get("tokens", 0))
    init = found.get("args", {}).get("init", "None")
    return [
        ["parameters", f"{found['parameters']:,}"],
        ["began with", "random weights" if init == "None" else "the weights of an earlier run"],
        ["tokens of this run", f"{found.get('tokens', 0):,}, {100 * books:.0f} % of them books"],
        ["seconds of training", f"{found.get('seconds', 0):,.0f} on {found.get('card', 'a CPU')}"],
        ["steps of the levels", ", ".join(f"{k}: {v}" for k, v in found.get("passed", {}).items())],
        ["perplexity of held-out books, rows of its length", f"{found['perplexity']}"],
        ["model.safetensors, SHA-256", f"`{found['sha256'][:16]}`"],
        ["versions", f"torch {found['torch']}, transformers {found['transformers']}"],
    ]


def cost(a: Analysis, pictures: dict[str, str]) -> str:
    """Tokens, arithmetic, seconds and hashes of every run."""
    runs = {name: model for name, model in a.results.models.items() if "tokens" in model}
    if not runs:
        return ""
    head = ["run", "layers", "tokens", "FLOPs", "device-seconds", "data, SHA-256", "model, SHA-256"]
    rows = [
        [name, ", ".join(map(str, m["layers"])), f"{m['tokens']:,}", f"{m['flops']:.3g}",
         f"{m['seconds']:,.0f}", f"`{m['data_sha256'][:12]}`", f"`{m['sha256'][:12]}`"]
        for name, m in runs.items()
    ]  # fmt: skip
    note = "Device-seconds are those of a process; several ran at once on one card, so they do not add up."
    return "\n\n".join(["### Cost", _table(head, rows), note, *_figure(pictures, "curves")])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(pictures: dict[str, str], name: str) -> Iterator[str]:
    if name in pictures:
        yield f"![{name}]({pictures[name]})"


def _times(a: Analysis, length: int) -> str:
    times = length / a.lengths[0]
    return f"{times:g}x ({length:,})"


def _share(row: Row) -> str:
    return f"{100 * row['mean']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def _gain(row: Row) -> str:
    low, middle, high = (round(100 * row[key], 1) + 0.0 for key in ("low", "difference", "high"))
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def _cost(row: Row) -> str:
    low, middle, high = (100 * (row[key] - 1) for key in ("low", "ratio", "high"))
    return f"{middle:+.2f} % [{low:+.2f}, {high:+.2f}]"


def _worst(rows: dict[int, Row]) -> str:
    return _cost(max(rows.values(), key=lambda row: abs(row["ratio"] - 1)))


_yes: Callable[[bool], str] = {True: "yes", False: "no"}.__getitem__
