"""Trainable sets, adapters, and phases that run alone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from folders import write_teacher
from loops import make_recipe
from rich.console import Console
from transformers import AutoModelForCausalLM

from regraft.convert import load_model, load_tokenizer, make_student
from regraft.distill import control, distill
from regraft.distill.adapters import add_adapters, merge_adapters
from regraft.distill.compare import check_same_rows, side_by_side
from regraft.distill.data import RowStream
from regraft.distill.stage import control_stages, phase_stages
from regraft.distill.trainable import new_names, parameter_groups, trainable_names, trainable_table
from regraft.errors import UserError
from regraft.recipes.schema import LoRA

LORA = "phases.1.train={kind: lora, rank: 2, alpha: 8}"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("phases") / "t", tokenizer=True, tie_word_embeddings=True)


@pytest.fixture
def student(teacher):
    return make_student(str(teacher), [1, 2]).student


def finished(run):
    return json.loads((run / "manifest.json").read_text())["finished"]


# trainable sets


def test_sets_by_name(student):
    every = {n for n, _ in student.named_parameters() if not n.endswith(".evidence")}
    assert set(trainable_names(student, "all", (1, 2))) == every
    converted = set(trainable_names(student, "converted", (1, 2)))
    assert converted == {n for n in every if n.startswith(("model.layers.1.attn.", "model.layers.2.attn."))}
    norms = set(trainable_names(student, "converted+norms", (1, 2)))
    assert norms - converted == {
        n for n in every - converted if n.endswith("norm.weight") and "conv" not in n
    }


def test_sets_by_pattern(student):
    names = trainable_names(student, ("model.layers.*.mlp.*", "model.norm.weight"), (1, 2))
    assert len(names) == 4 * 3 + 1 and all(".mlp." in n for n in names[:-1])
    with pytest.raises(UserError, match=r"'model.norms' fits no parameter.*did you mean `model.norm.weight`"):
        trainable_names(student, ("model.norms",), (1, 2))
    with pytest.raises(UserError, match="selects no parameter"):
        trainable_names(student, "converted", ())


def test_sets_without_what_stays(student, teacher):
    converted = trainable_names(student, "converted", (1, 2))
    noise = ("!*.process_*", "!*.refresh")
    moving = trainable_names(student, noise, (1, 2))
    assert set(converted) - set(moving) == {
        f"model.layers.{i}.attn.{name}"
        for i in (1, 2)
        for name in ("process_log_scale", "process_proj.weight", "refresh")
    }
    mlps = trainable_names(student, ("model.layers.*.mlp.*", "!*.down_proj.*"), (1, 2))
    assert len(mlps) == 4 * 2 and not any("down_proj" in name for name in mlps)
    with pytest.raises(UserError, match=r"'\*.proces_\*' fits no parameter"):
        trainable_names(student, ("!*.proces_*",), (1, 2))
    theirs = load_model(str(teacher))  # a control, whose layers have no such noise
    assert trainable_names(theirs, noise, (1, 2)) == trainable_names(theirs, "converted", (1, 2))


def test_adapters_start_without_effect_and_merge_exactly(student):
    ids = torch.randint(100, (2, 30), generator=torch.Generator().manual_seed(0))
    names = {n for n, _ in student.named_parameters()}
    before = student(ids).logits
    add_adapters(student, LoRA(rank=2, alpha=8), (1, 2))
    assert torch.equal(student(ids).logits, before)
    trained = trainable_names(student, LoRA(), (1, 2))
    assert sum(".lora_" in n for n in trained) == 4 * 4 * 2
    assert set(trained) >= {n for n in new_names(student) if not n.endswith("evidence")}
    assert not any(".lora_" in n for n in trainable_names(student, "all", (1, 2)))
    for name, p in student.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(1))
    adapted = student(ids).logits
    assert float((adapted - before).detach().abs().max()) > 1e-2
    merge_adapters(student)
    torch.testing.assert_close(student(ids).logits, adapted, rtol=1e-3, atol=1e-3)
    assert {n for n, _ in student.named_parameters()} == names


def test_adapters_on_converted_layers_and_wrong_targets(student):
    with pytest.raises(UserError, match=r"'q_prj' fits no linear map.*did you mean `q_proj`"):
        add_adapters(student, LoRA(targets=("q_prj",)), (1, 2))
    add_adapters(student, LoRA(targets=("up_proj", "v_proj"), layers="converted"), (1, 2))
    adapted = {n.split(".lora_")[0] for n, _ in student.named_parameters() if ".lora_" in n}
    assert adapted == {f"model.layers.{i}.{m}" for i in (1, 2) for m in ("mlp.up_proj", "attn.v_proj")}


def test_weight_decay_spares_everything_but_matrices_in_every_set(student):
    add_adapters(student, LoRA(), (1, 2))
    for train in ("converted+norms", "all", LoRA()):
        decay, exempt = parameter_groups(student, trainable_names(student, train, (1, 2)), 0.1)
        assert decay["weight_decay"] == 0.1 and exempt["weight_decay"] == 0.0
        assert all(p.dim() == 2 for p in decay["params"])
        spared = ("norm", "conv1d", "A_log", "dt_bias", "obs_", "process_", "refresh")
        assert all(any(word in name for word in spared) for name in exempt["names"])
        assert not any(word in name for word in spared for name in decay["names"])


def test_the_table_names_every_tensor_and_counts_the_trained_ones(teacher, student):
    recipe = make_recipe(teacher, LORA)
    add_adapters(student, recipe.lora, (1, 2))
    stages = phase_stages(recipe)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(trainable_table(student, stages, (1, 2)))
    lines = captured.get().splitlines()
    (new,) = (line for line in lines if "obs_proj" in line)
    assert "new" in new and new.split()[-2:] == ["trained", "trained"] and " 1-2 " in new
    (adapters,) = (line for line in lines if "lora" in line)
    assert "adapter" in adapters and adapters.split()[-2:] == ["frozen", "trained"] and " 0-3 " in adapters
    (evidence,) = (line for line in lines if line.strip().startswith("evidence"))
    assert evidence.split()[-2:] == ["schedule", "schedule"]
    sizes = dict(student.named_parameters())
    counts = [f"{sum(sizes[n].numel() for n in trainable_names(student, s.train, (1, 2))):,}" for s in stages]
    assert lines[-1].split()[-2:] == counts


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases.1.train=convertd", "phases.1.train: should be 'converted', 'converted+norms' or 'all'"),
        ("phases.1.train=[]", "phases.1.train: should name at least one"),
        ("phases.1.train={kind: lora, rnk: 3}", "phases.1.train.rnk: unknown key; did you mean `rank`?"),
        ("phases.1.train={kind: lora, rank: 0}", "phases.1.train.rank: should be greater"),
        ("phases.1.losses=[{kind: jsd, beta: 1}]", "phases.1.losses.0.beta: should be less than 1"),
        ("phases.1.losses=[{kind: jsd}, {kind: jsd}]", "phases.1.losses: two losses are of kind 'jsd'"),
    ],
)
def test_wrong_sets_and_losses_are_named(teacher, override, message):
    with pytest.raises(UserError) as caught:
        make_recipe(teacher, override)
    assert f"\n  {message}" in str(caught.value)


def test_phases_with_different_adapters_are_refused(teacher):
    with pytest.raises(UserError, match="phases with lora share their adapters"):
        make_recipe(teacher, LORA, "phases.0.train={kind: lora, rank: 3}")


def test_a_run_with_adapters_exports_a_plain_model_and_resumes(tmp_path, teacher, monkeypatch):
    recipe = make_recipe(teacher, LORA)
    distill(recipe, tmp_path / "run")
    export = tmp_path / "run" / "export"
    assert b"lora" not in (export / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(export)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "start")
    moved = {
        n
        for (n, a), (_, b) in zip(model.named_parameters(), start.named_parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert "model.layers.0.attn.q_proj.weight" in moved and "model.layers.0.mlp.up_proj.weight" not in moved
    whole = finished(tmp_path / "run")
    for step in (8, 7):  # the newest checkpoints are gone: go on from the one of step 6, in the second phase
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step}", ignore_errors=True)
    distill(recipe, tmp_path / "run", resume=True)
    assert finished(tmp_path / "run")["export_sha256"] == whole["export_sha256"]
    control(tmp_path / "run")
    assert finished(tmp_path / "run" / "control")["data_sha256"] == whole["data_sha256"]


# phases that run alone


def test_phases_one_by_one_equal_all_at_once(tmp_path, teacher):
    recipe = make_recipe(teacher)
    distill(recipe, tmp_path / "whole")
    distill(recipe, tmp_path / "one", phase="match")
    distill(recipe, tmp_path / "two", phase="joint", start=tmp_path / "one")
    whole, two = finished(tmp_path / "whole"), finished(tmp_path / "two")
    for key in ("export_sha256", "data_sha256", "data"):
        assert two[key] == whole[key]
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert manifest["parent"]["phases"] == ["match"] and manifest["phases"] == ["joint"]
    assert manifest["parent"]["export_sha256"] == finished(tmp_path / "one")["export_sha256"]
    control(tmp_path / "whole")
    control(tmp_path / "two")
    assert (
        finished(tmp_path / "two" / "control")["export_sha256"]
        == finished(tmp_path / "whole" / "control")["export_sha256"]
    )


def test_a_phase_refuses_a_parent_that_is_not_what_its_manifest_says(tmp_path, teacher):
    recipe = make_recipe(teacher)
    one = tmp_path / "one"
    distill(recipe, one, phase="match")

    def refused(message, recipe=recipe, **arguments):
        with pytest.raises(UserError, match=message):
            distill(recipe, tmp_path / "two", **arguments)
        assert not (tmp_path / "two").exists()

    refused("--phase joint: follows on 'match'", phase="joint")
    refused("--phase match: is the first phase", phase="match", start=one)
    refused("did you mean `joint`", phase="joit", start=one)
    refused("--from: goes with --phase", start=one)
    refused("is no run directory", phase="joint", start=tmp_path)
    refused("had another `data` section", make_recipe(teacher, "data.seed=1"), phase="joint", start=one)
    distill(recipe, tmp_path / "resumed", phase="joint", start=one)
    with pytest.raises(UserError, match="the run does joint"):
        distill(recipe, tmp_path / "resumed", phase="match", resume=True)
    with pytest.raises(UserError, match="did the phases match, joint; 'joint' follows on match"):
        distill(recipe, tmp_path / "two", phase="joint", start=tmp_path / "resumed")
    config = one / "export" / "config.json"
    config.write_text(config.read_text() + " ")
    refused("export: has the hash", phase="joint", start=one)
    config = tmp_path / "resumed" / "start" / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(UserError, match="start: has the hash"):
        distill(recipe, tmp_path / "resumed", phase="joint", resume=True)


def test_a_phase_may_read_other_data_and_its_control_goes_on_from_the_one_before(tmp_path, teacher):
    kl = "losses: [{kind: forward_kl}], tokens: 256, batch_tokens: 128, lr: 1e-3"
    phases = f"phases=[{{name: match, losses: [{{kind: layer_nmse}}], {kl[kl.index('tokens') :]}}},"
    phases += f" {{name: long, {kl}}}, {{name: longer, {kl}}}]"
    longer = make_recipe(teacher, "data.seq_len=64", phases, "checkpoint.every=1")
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    distill(make_recipe(teacher), one, phase="match")
    with pytest.raises(UserError, match="pass --other-data to read this one's from their beginning"):
        distill(longer, two, phase="long", start=one)
    with pytest.raises(UserError, match="--other-data: goes with --from"):
        distill(longer, two, phase="match", other_data=True)
    distill(longer, two, phase="long", start=one, other_data=True)
    with pytest.raises(UserError, match=f"regraft control {one}"):
        control(two)
    assert not (two / "control").exists()
    control(one)
    with pytest.raises(UserError, match="reads other data than the one before it"):
        control(two, match="flops")
    control(two)

    def check(run, before, tokens):
        manifest = json.loads((run / "control" / "manifest.json").read_text())
        assert manifest["phases"] == json.loads((run / "manifest.json").read_text())["phases"]
        assert manifest["start_sha256"] == finished(before / "control")["export_sha256"]
        both = manifest["side_by_side"]
        assert both["distill"]["tokens"] == both["control"]["tokens"] == tokens
        assert finished(run)["data"] == finished(run / "control")["data"]
        assert finished(run)["data_sha256"] == finished(run / "control")["data_sha256"]

    check(two, one, 512)
    stream, left = RowStream(longer.data, load_tokenizer(str(teacher))), 256
    while left:  # from the beginning of the data
        left -= stream.take(2, left).tokens
    assert finished(two)["data"] == stream.state()
    for folder, again in ((two, lambda: distill(longer, two, resume=True)),
                          (two / "control", lambda: control(two, resume=True))):  # fmt: skip
        whole = finished(folder)
        shutil.rmtree(folder / "checkpoints" / "step-2")
        again()
        assert finished(folder)["export_sha256"] == whole["export_sha256"]

    distill(longer, three, phase="longer", start=two)  # the same data, so from where that one was
    control(three)
    check(three, two, 768)
    assert finished(three)["data"] != finished(two)["data"]


# what the control is matched by


def test_a_control_of_equal_flops_goes_on_after_the_same_rows(tmp_path, teacher, capsys):
    recipe = make_recipe(teacher, "phases.0.tokens=64", "phases.1.tokens=448")
    run = tmp_path / "run"
    distill(recipe, run)
    control(run, match="flops")
    both = side_by_side(run)
    assert both["control"]["flops"] == pytest.approx(both["distill"]["flops"], rel=0.1)
    assert both["control"]["tokens"] > both["distill"]["tokens"] == 512
    assert both["distill"]["flops_of_teacher"] > 0 == both["control"]["flops_of_teacher"]
    assert json.loads((run / "control" / "manifest.json").read_text())["side_by_side"] == both
    assert "control / distill" in capsys.readouterr().out
    mine, theirs = (
        [json.loads(line)["rows"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, run / "control")
    )
    assert len(theirs) > len(mine) == 8 and theirs[:8] == mine
    with pytest.raises(UserError, match="was begun with --match flops"):
        control(run, match="tokens", resume=True)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[3] = lines[3].replace(mine[3], "0" * 16)
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="the control saw other rows"):
        check_same_rows(run)


def test_a_control_of_equal_tokens_runs_beside_its_run(tmp_path, teacher, capsys):
    recipe, run = make_recipe(teacher), tmp_path / "run"
    distill(recipe, run)
    manifest = json.loads((run / "manifest.json").read_text())
    under_way = {key: value for key, value in manifest.items() if key != "finished"}
    (run / "manifest.json").write_text(json.dumps(under_way))
    with pytest.raises(UserError, match="is not finished, so its FLOPs are not known"):
        control(run, match="flops")
    capsys.readouterr()
    control(run)
    assert "side_by_side" not in json.loads((run / "control" / "manifest.json").read_text())
    assert "control / distill" not in capsys.readouterr().out
    distill(recipe, run, resume=True)  # which ends last, and compares
    assert "control / distill" in capsys.readouterr().out
    assert json.loads((run / "control" / "manifest.json").read_text())["side_by_side"] == side_by_side(run)
    mine = json.loads((run / "metrics.jsonl").read_text().splitlines()[3])["rows"]
    changed = (run / "metrics.jsonl").read_text().replace(mine, "0" * 16)
    (run / "metrics.jsonl").write_text(changed)
    with pytest.raises(UserError, match="the control saw other rows"):
        control(run, resume=True)


def test_segments_of_a_control_are_cut_or_go_on(teacher):
    recipe = make_recipe(teacher, "phases.1.batch_tokens=128")
    assert control_stages(recipe)[0].segments == ((256, 2), (256, 4))
    assert control_stages(recipe, tokens=700)[0].segments == ((256, 2), (256, 4), (188, 4))
    assert control_stages(recipe, tokens=300)[0].segments == ((256, 2), (44, 4))
    assert control_stages(recipe, tokens=512)[0].segments == ((256, 2), (256, 4))
    assert control_stages(recipe, ["match"])[0].segments == ((256, 2),)
