"""How the commands of README and docs run in a test: in small, and without a network or a GPU.

A command that nothing here mentions runs as it stands. What cannot run is named in `NOT_RUN` with its reason,
and is then only held against the options that there are.
"""

from __future__ import annotations

# Words of the docs, alone or after a `=`, and what stands in for them.
STAND_INS = {
    "m-a-p/340M-20B-GatedDeltaNet-pure-baseline": "teacher",  # of as many layers, made by the test
    "MODEL": "teacher",
    "ORG/NAME": "llama",  # a small model that is not ours
    "runs/replication/runs/noise/export": "teacher",
    "quiet": "teacher",
}

# Runs: a teacher of two layers, one of them converted, and a step a phase.
_TEACHER = (
    "teacher={model: shallow}",
    "convert={layers: last:1}",
    "data.source={kind: builtin}",
    "data.seq_len=128",
)
_DOCUMENTS = (
    "report.niah={lengths: [256], tasks: [niah_single_2], samples: 1}",
    "report.perplexity=null",
)
_STEPS = tuple(f"phases.{i}.{key}=256" for i in (0, 1) for key in ("tokens", "batch_tokens"))
_RUN = (*_TEACHER, *_STEPS, *_DOCUMENTS)
_TRAINED = ("width=16", "heads=2", "mlp=16")
_ONE_STEP = ("train.steps=1", "train.batch=4", "seeds=[0]")
_RECALL = (
    "collision={pairs: 2, boost: 1, floods: [1], test_floods: [2], test_overlaps: [[0.6, 0.8]], "
    "curve: [0.9], test: 4}",
    "random={raw: 8, labels: 4, queries: 2, writes: [3], test_writes: [3], test: 4}",
    "key_width=4",
)
_MQAR = (
    "tasks=[{name: base, train: [[16, 2]], test: [[16, 2]]}]",
    "vocabulary=16", "widths=[16]", "rates=[1e-2]", "sequences=4", "validation=4",
)  # fmt: skip
_KERNELS = ("length=8", "fit=64", "held_out=16", "regimes=[exponential]")
_BANDITS = ("tasks=[{kind: beta-bernoulli, arms: 3, length: 8, delay: 1, episodes: 8}]",)
_PROBES = {
    "collision": ("rotations=2",),
    "belief": _BANDITS,
    "belief small": (*_KERNELS, *_TRAINED, *_ONE_STEP),
    "recall": (*_RECALL, *_TRAINED, *_ONE_STEP),
    "mqar": (*_MQAR, *_ONE_STEP),
}
# Scripts and the options that make them small.
_SCRIPTS = {
    "scripts/bench/cpu_ops.py": "--tokens 64 --widths 16 --repeats 1 --families dense",
    "scripts/bench/evaluation.py": "--lengths 256 --samples 1 --repeats 1 --tasks niah_single_2",
}

_TWO_PROCESSES = "tests/test_distill_engine.py starts both launchers with two processes"
_GPU = "measures a GPU"
NOT_RUN = {
    "make demo": "its three commands run one by one; tests/test_wheel.py looks at what they give",
    "make test": "this is it",
    "make docs": "test_the_site_builds_without_a_warning",
    "make lint": "the second half of CI",
    ".ci/run": "runs this test",
    "regraft doctor": "what it finds is up to the machine; tests/test_doctor.py",
    "pip install": "changes the environment; its extras are looked up",
    "tar -xJf docs/probes/results.tar.xz": "tests/test_probe_archive.py unpacks it and sums up all of it",
    "torchrun": _TWO_PROCESSES,
    "accelerate launch": _TWO_PROCESSES,
    "lm_eval run": "tests/test_report.py runs lm-eval's own command on the shipped tasks",
    "python scripts/bench/gpu_ops.py": _GPU,
    "python scripts/bench/gpu_model.py": _GPU,
    "python scripts/bench/gpu_train.py": _GPU,
    "python scripts/bench/fla_agreement.py": _GPU,
    "python scripts/bench/evaluation.py --random": _GPU,
    "python scripts/bench/convert_340m.py": "20 minutes; in small: tests/test_convert_memory.py",
    "python -m scripts.replicate": "hours of a GPU, and books; tests/test_replicate.py",
    "python -m scripts.teacher": "needs books and a GPU; tests/test_replicate.py runs its steps",
    "scripts/replicate/offline.sh": "downloads packages",
}


def why_not(words: list[str]) -> str | None:
    """The reason for which a command is not run; None if it is."""
    text = " ".join(words)
    return next((NOT_RUN[start] for start in sorted(NOT_RUN, reverse=True) if text.startswith(start)), None)


def with_stand_ins(words: list[str]) -> list[str]:
    """A command with what can be had without a network."""
    out = []
    for word in words:
        name, equals, value = word.rpartition("=")
        out.append(name + equals + STAND_INS.get(value, value))
    return out


def smaller(words: list[str]) -> list[str]:
    """A command's words (the program first) with the options that make it small; later options win."""
    words = with_stand_ins(words)
    if words[0] == "python":
        return [*words, *_SCRIPTS.get(words[1], "").split()]
    verb, rest = words[1], words[2:]
    if verb in ("distill", "demo") or words[1:3] == ["recipes", "validate"]:
        return [*words, *_sets(*_RUN)]
    if verb == "report":
        return [*words, *_sets(*_DOCUMENTS)]
    if verb == "scan":
        return [*words, "--samples", "1", "--length", "128"]
    if verb == "verify":
        return [*words, "--length", "193", "--device", "cpu", "--kernels", "auto"]
    if verb == "probe":
        trained = len(rest) > 1 and not rest[1].startswith("-")
        sets = _PROBES["belief small" if rest[0] == "belief" and trained else rest[0]]
        return [*words, *_sets(*sets), "--device", "cpu", "--jobs", "1"]
    return words


def _sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]
