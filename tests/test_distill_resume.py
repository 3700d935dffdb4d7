"""A run that was stopped, killed or refused by a disk goes on bit for bit from its last whole checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from loops import make_loop, outcome, same, write_models
from safetensors.torch import load_file

from regraft.distill import checkpoint
from regraft.distill.loop import _Run
from regraft.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module", params=["distill", "control"])
def straight(request, models, tmp_path_factory):
    """Kind and outcome of a run that nothing happened to."""
    loop = make_loop(models, tmp_path_factory.mktemp("straight") / request.param, kind=request.param)
    loop.run()
    return request.param, outcome(loop)


def at_step(monkeypatch, step, act):
    """Do something within a step, counted from 1, once its gradients are there."""
    original = _Run._backward

    def backward(self, rows):
        values = original(self, rows)
        return (act(values) or values) if self.at.step + 1 == step else values

    monkeypatch.setattr(_Run, "_backward", backward)


def in_child(work):
    """Run something in a forked process and return how it ended, as `waitpid` says."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


# the same as straight


@pytest.mark.parametrize("step", [5, 10])
def test_killed_and_resumed_equals_straight(models, straight, tmp_path, monkeypatch, step):
    kind, expected = straight
    assert len(expected[1]) > 11
    with monkeypatch.context() as patch:
        at_step(patch, step, kill)
        assert in_child(make_loop(models, tmp_path, kind=kind).run) == signal.SIGKILL
    loop = make_loop(models, tmp_path, kind=kind)
    assert loop.resume() and loop.at.step == 4 * (step // 5)
    loop.run()
    assert same(outcome(loop), expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_the_run_goes_on(models, straight, tmp_path, monkeypatch, number):
    kind, expected = straight
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda _: os.kill(os.getpid(), number))
        with pytest.raises(KeyboardInterrupt):
            make_loop(models, tmp_path, kind=kind).run()
    loop = make_loop(models, tmp_path, kind=kind)
    assert loop.resume() and loop.at.step == 7
    loop.run()
    assert same(outcome(loop), expected)


def test_the_command_line_says_how_to_resume(regraft, models, tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
version: 1
teacher: {{model: {models / "teacher"}}}
convert: {{layers: [1, 2]}}
data: {{source: {{kind: jsonl, path: {models / "docs.jsonl"}}}, seq_len: 24}}
phases: [{{name: match, losses: [{{kind: layer_nmse}}], tokens: 300, batch_tokens: 48, lr: 1e-3}}]
""")
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        code, _, error = regraft("distill", recipe, "--out", run)
    assert code == 130 and f"regraft distill {recipe} --out {run} --resume" in error
    code, printed, _ = regraft("distill", recipe, "--out", run, "--resume")
    assert code == 0 and "resuming after step 3" in printed
    finished = json.loads((run / "manifest.json").read_text())["finished"]
    ledger = finished["ledger"]
    assert finished["tokens"] == ledger["trained"] == 300
    assert ledger["read"] == 300 + sum(ledger["dropped"].values())
    assert [x["step"] for x in map(json.loads, (run / "metrics.jsonl").open())] == list(
        range(1, finished["steps"] + 1)
    )


# what can go wrong


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(models, tmp_path, monkeypatch):
    original = checkpoint.save_file

    def full(tensors, path):
        if "step-6" in str(path):
            original({n: t[:1] for n, t in tensors.items()}, path)  # some of it arrived
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(UserError, match=r"No space left.*resume goes on from step-4"):
            make_loop(models, tmp_path).run()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-4"]
    loop = make_loop(models, tmp_path)
    assert loop.resume() and loop.at.step == 4


def test_a_loss_that_is_no_number_ends_the_run_at_the_state_before_it(models, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda values: values | {"loss": float("nan")})
        with pytest.raises(UserError, match=r"step 4 of stage match: loss is no number.*from step-3"):
            make_loop(models, tmp_path / "nan").run()
    short = make_loop(models, tmp_path / "short")
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            short.run()
    for name in ("parameters.safetensors", "optimizer.safetensors"):
        found, expected = (
            load_file(tmp_path / run / "checkpoints/step-3" / name) for run in ("nan", "short")
        )
        assert found.keys() == expected.keys()
        # evidence stands where its schedule had put it for step 4, and does so again at a resume
        assert all(torch.equal(found[n], expected[n]) for n in found if not n.endswith("attn.evidence"))


def save(folder, step, **settings):
    """A checkpoint that holds its step."""
    tensor = torch.full((8,), float(step))
    return checkpoint.save(
        folder, step, parameters={"p": tensor}, moments={"m": tensor},
        state={"loss": float(step), "stage": "one", "ends_stage": False} | settings.pop("state", {}),
        **{"keep": 2, **settings},
    )  # fmt: skip


def kill_at_call(count, patch):
    """From here on the `count`-th call that changes a file kills this process."""
    left = [count]

    def wrap(owner, name):
        original = getattr(owner, name)

        def called(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                kill()
            return original(*args, **kwargs)

        patch.setattr(owner, name, called)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        wrap(os, name)
    wrap(checkpoint, "save_file")


def test_a_kill_at_any_point_of_a_save_leaves_the_newest_whole_checkpoint(tmp_path, monkeypatch):
    for count in range(60):
        folder = tmp_path / f"{count}"
        save(folder, 900), save(folder, 1000)
        with monkeypatch.context() as patch:
            kill_at_call(count, patch)
            ended = in_child(lambda folder=folder: save(folder, 1100))
        assert ended in (0, signal.SIGKILL)
        checkpoint.sweep(folder)
        found = [path.name for path in checkpoint.existing(folder)]
        assert found in (
            ["step-900", "step-1000"],
            ["step-900", "step-1000", "step-1100"],
            ["step-1000", "step-1100"],
        )
        assert sorted(p.name for p in folder.iterdir()) == sorted(found)
        for path in checkpoint.existing(folder):
            read = checkpoint._read(path / "parameters.safetensors")["p"]
            assert read.tolist() == [float(path.name.removeprefix("step-"))] * 8
        if ended == 0:
            assert count > 8 and found == ["step-1000", "step-1100"]
            return
    pytest.fail("the save never came to its end")


def test_checkpoints_rotate_by_number_and_keep_the_best_and_the_last_of_a_stage(tmp_path):
    for step in (900, 1000, 1100):
        save(tmp_path, step)
    assert [p.name for p in checkpoint.existing(tmp_path)] == ["step-1000", "step-1100"]
    shutil.rmtree(tmp_path)
    save(tmp_path, 1, state={"ends_stage": True, "stage": "zero"})
    for step in (8, 9, 10, 11):
        save(tmp_path, step, best=True, state={"loss": abs(step - 9.1)}, keep=1)
    assert [p.name for p in checkpoint.existing(tmp_path)] == ["step-1", "step-9", "step-11"]


def test_damaged_checkpoints_are_named(models, tmp_path):
    loop = make_loop(models, tmp_path)
    folder = save(loop.checkpoints, 3)
    (folder / "state.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        loop.resume()
    shutil.rmtree(folder)
    save(loop.checkpoints, 4)
    file = loop.checkpoints / "step-4" / "parameters.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match="damaged"):
        checkpoint.restore_parameters(Path(file).parent, loop.student)
