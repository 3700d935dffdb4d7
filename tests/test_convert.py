"""Conversion: the plan, the exact start, the certificate, and every mistake told without writing anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from folders import edit_config, edit_tensors, mixer_shapes, shard, write_index, write_teacher
from safetensors import safe_open
from safetensors.torch import load_file

from regraft.assets import teacher_dir
from regraft.convert import Checkpoint, load_model, make_student, open_checkpoint
from regraft.convert.verify import tolerance_for
from regraft.files import hash_directory
from regraft.layers import BayesianLayer, DeltaNet, RegraftForCausalLM

torch.set_num_threads(1)

FINE = BayesianLayer.float32_parameters


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model", tokenizer=True)


def tokens(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


def dtypes(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as f:
        return {name: f.get_slice(name).get_dtype() for name in f.keys()}  # noqa: SIM118


def test_a_dry_run_reads_no_weights_and_prints_every_tensor(regraft, tmp_path, monkeypatch) -> None:
    folder = write_teacher(tmp_path / "t")
    monkeypatch.setattr(Checkpoint, "read", None)  # whoever calls it fails
    code, out, err = regraft("convert", folder, "--layers", "1,3", "--noise-groups", 2, "--dry-run")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["target", "source", "initialisation", "shape", "type", "bytes"]
    by_target = {line[0]: line for line in lines if line}
    for name in open_checkpoint(str(folder)).tensors:
        assert by_target[name][1:4] == ["same", "name", "copied"], name
    for layer in (1, 3):
        for name in mixer_shapes(json.loads((folder / "config.json").read_text())):
            assert f"model.layers.{layer}.attn.{name}" in by_target
    new = {line[0]: line for line in lines if len(line) > 1 and line[1] == "-"}
    assert set(new) == {
        f"model.layers.{i}.attn.{name}{'.weight' if name.endswith('proj') else ''}"
        for i in (1, 3)
        for name in BayesianLayer.new_parameters
    }
    assert new["model.layers.1.attn.obs_proj.weight"][2:] == ["new:", "zeros", "4x32", "float32", "512"]


def test_a_dry_run_of_the_embedded_teacher(regraft) -> None:
    if not (teacher_dir() / "model.safetensors").is_file():
        pytest.skip("the embedded teacher has no weights in this tree")
    code, out, _ = regraft("convert", "embedded", "--layers", "last:2", "--dry-run")
    assert code == 0 and "evidence" in out and "new" in out.splitlines()[-1]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_v_heads": 4, "expand_v": 2},
        {"use_gate": False, "num_heads": 1, "tie_word_embeddings": True},
        {"expand_v": 0.5},
    ],
    ids=lambda shape: ",".join(shape) or "plain",
)
def test_a_student_starts_as_the_copy_of_its_teacher(shape: dict[str, Any], regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t", **shape)
    code, _, err = regraft("convert", folder, "--layers", "1,3", "--out", tmp_path / "s")
    assert code == 0, err
    teacher, student = load_model(str(folder)), load_model(str(tmp_path / "s"))
    ids = tokens(97, 2, 150)
    torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=0, atol=1e-4)
    assert student.config.layers_of("bayesian") == (1, 3)
    for name, x in teacher.state_dict().items():
        assert torch.equal(x, student.state_dict()[name]), name
    report = json.loads((tmp_path / "s" / "verify.json").read_text())
    assert report["passed"] and report["worst"] <= 1e-4
    assert report["teacher_sha256"] == hash_directory(folder)
    assert report["student_sha256"] == hash_directory(tmp_path / "s")
    assert report["teacher_logits"] > 1  # the comparison saw a model that says something


def test_a_difference_above_the_tolerance_exits_with_3_and_writes_nothing(
    regraft, tmp_path, monkeypatch
) -> None:
    folder = write_teacher(tmp_path / "t")
    code, _, err = regraft(
        "convert", folder, "--layers", 1, "--out", tmp_path / "s", "--tolerance", 0, "--process-match", 1
    )
    assert code == 3 and "tolerance" in err and "nothing was written" in err
    right = DeltaNet.log_precision
    monkeypatch.setattr(BayesianLayer, "log_precision", lambda self, x: right(self, x) + 0.1)
    code, _, err = regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")
    assert code == 3
    assert os.listdir(tmp_path) == ["t"]


def test_a_nan_never_passes(regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t")
    edit_tensors(folder, lambda t: t["model.norm.weight"].fill_(torch.nan))
    assert regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")[0] == 3
    assert os.listdir(tmp_path) == ["t"]


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _outside(folder: Path) -> None:
    index = shard(folder)
    os.rename(folder / "model-00002-of-00002.safetensors", folder.parent / "stolen.safetensors")
    for name, file in index["weight_map"].items():
        if "00002" in file:
            index["weight_map"][name] = "../stolen.safetensors"
    write_index(folder, index)


def _index_without_a_tensor(folder: Path) -> None:
    index = shard(folder)
    del index["weight_map"]["model.norm.weight"]
    write_index(folder, index)


def _index_with_a_lie(folder: Path) -> None:
    index = shard(folder)
    for name, file in index["weight_map"].items():
        index["weight_map"][name] = file.replace("00002-of", "0000X-of").replace("00001-of", "00002-of")
    for name in index["weight_map"]:
        index["weight_map"][name] = index["weight_map"][name].replace("0000X", "00001")
    write_index(folder, index)


Q = "model.layers.2.attn.q_proj.weight"


def _wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.2.attn.q_proj.weight": torch.zeros(8, 32)}))


def _unexpected(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.2.attn.f_proj.weight": torch.zeros(8, 32)}))


MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "cut file": (_cut, "model.safetensors: is not a whole safetensors file"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "is not a whole safetensors file"),
    "missing shard": (_missing_shard, "model-00002-of-00002.safetensors: is missing"),
    "outside": (_outside, "names '../stolen.safetensors', outside the folder"),
    "index without a tensor": (_index_without_a_tensor, "model.norm.weight"),
    "index that lies": (_index_with_a_lie, "model-0000"),
    "wrong shape": (_wrong_shape, "model.layers.2.attn.q_proj.weight has shape [8, 32], not [16, 32]"),
    "unexpected key": (_unexpected, "model.layers.2.attn.f_proj.weight is unexpected"),
    "quantised": (
        lambda f: edit_tensors(f, lambda t: t.update({Q: torch.zeros(16, 32, dtype=torch.int8)})),
        "model.layers.2.attn.q_proj.weight holds I8, not floats",
    ),
    "missing tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.layers.0.attn.A_log")),
        "model.layers.0.attn.A_log is missing",
    ),
    "other model type": (lambda f: edit_config(f, model_type="llama"), "describes a 'llama' model"),
    "no model type": (lambda f: edit_config(f, model_type=None), "config.json: describes a None model"),
    "vocabulary": (
        lambda f: edit_config(f, vocab_size=96),
        "model.embeddings.weight has shape [97, 32], not [96, 32]",
    ),
    "no short convolution": (lambda f: edit_config(f, use_short_conv=False), "use_short_conv"),
    "another MLP": (lambda f: edit_config(f, hidden_act="relu"), "hidden_act='relu'"),
    "another gate": (
        lambda f: edit_config(f, output_gate_activation="sigmoid"),
        "output_gate_activation='sigmoid'",
    ),
    "attention over residuals": (lambda f: edit_config(f, attnres_block_size=2), "attnres_block_size=2"),
    "attention nowhere": (
        lambda f: edit_config(f, attn={"layers": [7], "num_heads": 2}),
        "attn: layer 7 is named twice or is not one of 4",
    ),
    "attention of another kind": (
        lambda f: edit_config(f, attn={"layers": [2], "num_heads": 2, "qk_norm": True}),
        "attn: qk_norm unknown",
    ),
    "attention without its tensors": (
        lambda f: edit_config(f, attn={"layers": [2], "num_heads": 2}),
        "model.layers.2.attn.q_proj.weight has shape [16, 32], not [32, 32]",
    ),
    "heads": (lambda f: edit_config(f, num_v_heads=3), "num_v_heads"),
    "negative eigenvalues": (lambda f: edit_config(f, allow_neg_eigval=True), "layer 1: has write strengths"),
    "layer too many": (lambda f: edit_config(f, num_hidden_layers=5), "model.layers.4.attn.A_log is missing"),
    "a count that is text": (lambda f: edit_config(f, num_heads="two"), "num_heads"),
    "a negative width": (lambda f: edit_config(f, hidden_size=-32), "hidden_size"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_folders_exit_with_2_and_write_nothing(case: str, regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t")
    spoil, message = MALFORMED[case]
    spoil(folder)
    before = sorted(os.listdir(tmp_path))
    for extra in (["--dry-run"], []):
        code, out, err = regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s", *extra)
        assert (code, out) == (2, ""), err
        assert message in err and "Traceback" not in err and err.count("error ") == 1
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "99"], "layer 99 does not exist"),
        (["--layers", "-1"], "layer -1 does not exist"),
        (["--layers", "4"], "choose from 0 to 3"),
        (["--layers", "1,1"], "layer 1 is given twice"),
        (["--layers", ""], "selects no layer"),
        (["--layers", "two"], "'two' is not a layer"),
        (["--layers", "last:5"], "layer -1 does not exist"),
        (["--layers", "1", "--noise-groups", "3"], "3 groups do not divide the value width 8"),
    ],
)
def test_wrong_arguments_exit_with_2_and_write_nothing(regraft, tmp_path, arguments, message) -> None:
    folder = write_teacher(tmp_path / "t")
    code, out, err = regraft("convert", folder, *arguments, "--out", tmp_path / "s")
    assert (code, out) == (2, "") and message in err
    assert os.listdir(tmp_path) == ["t"]


def test_no_folder_and_no_hub_id(regraft, tmp_path) -> None:
    for model in (tmp_path / "nothing", "./nothing", "nothing"):
        code, _, err = regraft("convert", model, "--layers", 1, "--out", tmp_path / "s")
        assert code == 2 and "is not a folder" in err
    assert not os.listdir(tmp_path)


def test_a_filled_output_folder_is_left_alone(regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t")
    out = tmp_path / "s"
    out.mkdir()
    (out / "mine").write_text("mine")
    code, _, err = regraft("convert", folder, "--layers", 1, "--out", out)
    assert code == 2 and "exists and is not empty" in err and os.listdir(out) == ["mine"]
    code, _, _ = regraft("convert", folder, "--layers", 99, "--out", out, "--overwrite")
    assert code == 2 and os.listdir(out) == ["mine"]
    assert regraft("convert", folder, "--layers", 1, "--out", out, "--overwrite")[0] == 0
    assert "mine" not in os.listdir(out) and "config.json" in os.listdir(out)
    assert regraft("convert", folder, "--layers", 1, "--out", folder / "config.json")[0] == 2


def _with_D(t: dict[str, torch.Tensor]) -> None:
    t.update({f"model.layers.{i}.attn.D": torch.zeros(2) for i in range(4)})


def _fuse_gate(t: dict[str, torch.Tensor]) -> None:
    for i in range(4):
        mlp = f"model.layers.{i}.mlp."
        t[mlp + "gate_proj.weight"] = torch.cat([t[mlp + "gate_proj.weight"], t.pop(mlp + "up_proj.weight")])


@pytest.mark.parametrize("change", [_with_D, _fuse_gate])
def test_legacy_forms_are_the_same_model(change: Callable[..., None], regraft, tmp_path) -> None:
    folder, legacy = write_teacher(tmp_path / "t"), write_teacher(tmp_path / "old")
    edit_tensors(legacy, change)
    ids = tokens(97, 1, 40)
    assert torch.equal(load_model(str(folder))(ids).logits, load_model(str(legacy))(ids).logits)
    code, out, _ = regraft("convert", legacy, "--layers", 1, "--dry-run")
    assert code == 0
    expected = "legacy, zero and never read" if change is _with_D else "part of fused gate_proj"
    assert out.count(expected) == (4 if change is _with_D else 8)
    assert regraft("convert", legacy, "--layers", 1, "--out", tmp_path / "s")[0] == 0
    stored = load_file(tmp_path / "s" / "model.safetensors")
    assert not any(name.endswith(".D") for name in stored)
    assert stored["model.layers.0.mlp.up_proj.weight"].shape == (48, 32)


def test_the_file_decides_whether_embeddings_are_tied(regraft, tmp_path, monkeypatch) -> None:
    """The flag says tied: a stored head that differs wins; one that is equal is dropped."""
    for equal in (False, True):
        folder = write_teacher(tmp_path / f"t{equal}")
        edit_config(folder, tie_word_embeddings=True)
        if equal:
            edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embeddings.weight"]}))
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "read", None)
            code, out, _ = regraft("convert", folder, "--layers", 1, "--dry-run")
            assert code == 0 and "lm_head.weight" in out
        out_dir = tmp_path / f"s{equal}"
        assert regraft("convert", folder, "--layers", 1, "--out", out_dir)[0] == 0
        assert ("lm_head.weight" in load_file(out_dir / "model.safetensors")) != equal
        assert json.loads((out_dir / "config.json").read_text())["tie_word_embeddings"] == equal


def test_shards_and_one_file_are_the_same_model(tmp_path) -> None:
    folder, sharded = write_teacher(tmp_path / "t"), write_teacher(tmp_path / "shards")
    shard(sharded)
    ids = tokens(97, 1, 40)
    assert torch.equal(load_model(str(folder))(ids).logits, load_model(str(sharded))(ids).logits)


def test_a_student_is_a_teacher_for_the_next_conversion(regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t")
    assert regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")[0] == 0
    assert regraft("convert", tmp_path / "s", "--layers", 3, "--out", tmp_path / "s2")[0] == 0
    assert load_model(str(tmp_path / "s2")).config.layers_of("bayesian") == (1, 3)


def test_bfloat16_keeps_noise_parameters_in_float32(regraft, teacher, tmp_path) -> None:
    out = tmp_path / "s"
    code, _, err = regraft("convert", teacher, "--layers", "1,3", "--out", out, "--dtype", "bfloat16")
    assert code == 0, err
    for name, kind in dtypes(out / "model.safetensors").items():
        assert kind == ("F32" if set(name.split(".")) & set(FINE) else "BF16"), name
    for loaded in (
        load_model(str(out), dtype="bfloat16"),
        RegraftForCausalLM.from_pretrained(out, dtype="auto"),
        RegraftForCausalLM.from_pretrained(out, dtype=torch.bfloat16),
    ):
        for name, p in loaded.named_parameters():
            fine = bool(set(name.split(".")) & set(FINE))
            assert p.dtype == (torch.float32 if fine else torch.bfloat16), name


def test_a_layer_goes_back_to_its_teacher(regraft, tmp_path) -> None:
    folder, student, out = write_teacher(tmp_path / "t"), tmp_path / "s", tmp_path / "r"
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert regraft("convert", folder, "--layers", "1,3", "--out", student)[0] == 0
    edit_tensors(student, lambda t: [x.mul_(1.5) for n, x in t.items() if ".attn." in n and "proj" in n])
    arguments = ("--teacher", folder, "--out", out)
    code, printed, err = regraft("convert", student, "--revert", 3, *arguments, "--dry-run")
    assert code == 0 and not out.exists(), err
    assert "evidence" in printed and "model.layers.3.attn.evidence" not in printed
    code, printed, err = regraft("convert", student, "--revert", 3, *arguments)
    assert code == 0 and "still converted: 1" in printed, err
    card = (out / "README.md").read_text()
    assert (
        yaml.safe_load(card.split("---")[1])["license"] == "mit" and "Licence\n\nThe teacher's: mit" in card
    )
    assert "layers 3 taken from its teacher `t` again" in card and "Still converted: 1." in card
    model, before, teacher = load_model(str(out)), load_model(str(student)), load_model(str(folder))
    assert model.config.layers_of("bayesian") == (1,)
    for name, x in model.state_dict().items():
        assert torch.equal(x, (teacher if ".3.attn." in name else before).state_dict()[name]), name
    code, _, err = regraft("convert", out, "--revert", 3, "--teacher", folder, "--out", tmp_path / "r2")
    assert code == 2 and "is the teacher's own already" in err
    assert regraft("convert", out, "--revert", 1, "--teacher", folder, "--out", tmp_path / "r2")[0] == 0
    assert regraft("convert", student, "--revert", 3, "--out", tmp_path / "r3")[0] == 2
    assert regraft("convert", student, "--revert", 3, "--layers", 1, *arguments)[0] == 2


def test_the_model_card_tells_the_licence_the_recipe_and_the_numbers(regraft, teacher, tmp_path) -> None:
    (folder := tmp_path / "t").mkdir()
    for file in teacher.iterdir():
        os.link(file, folder / file.name)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Theirs\n")
    assert (
        regraft("convert", folder, "--layers", "1", "--to", "kdn-diagonal", "--out", tmp_path / "s")[0] == 0
    )
    card = (tmp_path / "s" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "apache-2.0" and front["library_name"] == "transformers"
    assert "base_model" not in front  # a local folder is no Hub id
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["convert"]["layers"] == [1] and recipe["convert"]["to"] == "kdn-diagonal"
    worst = json.loads((tmp_path / "s" / "verify.json").read_text())["worst"]
    assert f"{worst:.2g}" in card and "| 1 | bayesian | covariance diagonal, noise_groups 1 |" in card
    assert regraft("convert", teacher, "--layers", 1, "--out", tmp_path / "s2")[0] == 0
    card = (tmp_path / "s2" / "README.md").read_text()
    assert "names none" in card and "license" not in yaml.safe_load(card.split("---")[1])


def test_an_upload_happens_only_when_asked_for(regraft, tmp_path, monkeypatch) -> None:
    import huggingface_hub

    folder, calls = write_teacher(tmp_path / "t"), []

    class Api:
        def create_repo(self, name: str, **settings: Any) -> str:
            calls.append((name, settings["private"]))
            return f"https://huggingface.co/{name}"

        def upload_folder(self, **settings: Any) -> None:
            calls.append((settings["repo_id"], sorted(os.listdir(settings["folder_path"]))))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")[0] == 0 and not calls
    arguments = ("--out", tmp_path / "s2", "--push-to-hub", "me/mine")
    code, out, _ = regraft("convert", folder, "--layers", 1, *arguments)
    assert code == 0 and "https://huggingface.co/me/mine" in out
    assert calls[0] == ("me/mine", True) and "model.safetensors" in calls[1][1]


def test_what_travels_along(regraft, teacher, tmp_path) -> None:
    (folder := tmp_path / "t").mkdir()
    for file in teacher.iterdir():
        os.link(file, folder / file.name)
    (folder / "generation_config.json").write_text('{"max_length": 77, "pad_token_id": 3}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("theirs")
    (folder / "tokenizer_code.py").write_text("raise SystemExit")
    assert regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")[0] == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "s" / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((tmp_path / "s" / "generation_config.json").read_text())["max_length"] == 77
    assert not (tmp_path / "s" / "tokenizer_code.py").exists()


def test_pickled_weights_only_when_asked_for(regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t")
    expected = load_model(str(folder))(tokens(97, 1, 9)).logits
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    code, _, err = regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")
    assert code == 2 and "--allow-pickle" in err
    arguments = ("convert", folder, "--layers", 1, "--out", tmp_path / "s", "--allow-pickle")
    assert regraft(*arguments, "--dry-run")[0] == regraft(*arguments)[0] == 0
    torch.testing.assert_close(load_model(str(tmp_path / "s"))(tokens(97, 1, 9)).logits, expected)
    torch.save({"model": print, "weights": tensors}, folder / "pytorch_model.bin")  # needs code to load
    code, _, err = regraft(*arguments, "--overwrite")
    assert code == 2 and "pytorch_model.bin: cannot be read as plain weights" in err


def test_a_hub_id_goes_through_huggingface_hub(regraft, tmp_path, monkeypatch) -> None:
    import huggingface_hub

    folder, asked = write_teacher(tmp_path / "t"), []

    def download(model: str, **settings: Any) -> str:
        asked.append((model, settings["revision"], settings["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    code, out, _ = regraft("convert", "some/model", "--revision", "v1", "--layers", 1, "--dry-run")
    assert code == 0 and "evidence" in out
    assert asked[0][:2] == ("some/model", "v1")
    assert not any("bin" in pattern or ".py" in pattern for pattern in asked[0][2])
    code, _, err = regraft("convert", folder, "--revision", "v1", "--layers", 1, "--dry-run")
    assert code == 2 and "is a folder and has none" in err


def test_without_a_network_a_hub_id_is_one_message(regraft, monkeypatch) -> None:
    import huggingface_hub

    def download(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    code, _, err = regraft("convert", "some/model", "--layers", 1, "--dry-run")
    assert code == 2 and "HF_HUB_OFFLINE" in err and "Traceback" not in err


def test_offline_a_hub_id_is_read_from_the_cache(regraft, tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "models--some--model"
    write_teacher(cache / "snapshots" / "abc123")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc123")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    code, out, err = regraft("convert", "some/model", "--layers", 1, "--dry-run")
    assert code == 0 and str(cache / "snapshots" / "abc123") in out, err
    for model, revision in (("some/model", "v9"), ("some/other", "main")):
        code, _, err = regraft("convert", model, "--revision", revision, "--layers", 1, "--dry-run")
        assert code == 2 and "could not be fetched from the Hub" in err and "HF_HUB_OFFLINE" in err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_as_a_verb(dtype: str, regraft, tmp_path) -> None:
    folder = write_teacher(tmp_path / "t")
    assert regraft("convert", folder, "--layers", "1,3", "--out", tmp_path / "s")[0] == 0
    arguments = ("--teacher", folder, "--dtype", dtype, "--length", 300, "--out", tmp_path / "v.json")
    code, out, err = regraft("verify", tmp_path / "s", *arguments)
    assert code == 0, err
    certificate = json.loads((tmp_path / "v.json").read_text())
    names = {
        "length_1",
        "length_63",
        "length_64",
        "length_65",
        "length_300",
        "chunked_prefill",
        "step_by_step",
    }
    assert set(certificate["checks"]) >= names | {"left_padded", "right_padded", "packed", "greedy"}
    assert certificate["dtype"] == dtype and certificate["passed"]
    logits = certificate["teacher_logits"]
    assert certificate["tolerance"] == (1e-4 if dtype == "float32" else logits / 16) and logits > 1
    assert certificate["tolerance_rule"].startswith(dtype)
    assert {i: row["exact"] for i, row in certificate["layers"].items()} == {"1": True, "3": True}
    assert out.count("exact copy") == 2
    assert certificate["student_sha256"] == hash_directory(tmp_path / "s")
    edit_tensors(tmp_path / "s", lambda t: t["model.layers.3.attn.obs_log_scale"].fill_(-3))
    code, out, err = regraft("verify", tmp_path / "s", *arguments)
    assert code == 3 and "too large" in out and "tolerance" in err and out.count("not a copy") == 1
    certificate = json.loads((tmp_path / "v.json").read_text())
    assert not certificate["passed"] and not certificate["layers"]["3"]["exact"]


def test_verify_refuses_what_it_cannot_compare(regraft, tmp_path) -> None:
    folder, other = write_teacher(tmp_path / "t"), write_teacher(tmp_path / "o", vocab_size=96)
    assert regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")[0] == 0
    assert "tokens and layers" in regraft("verify", tmp_path / "s", "--teacher", other)[2]
    assert regraft("verify", tmp_path / "s", "--teacher", folder, "--length", 5)[0] == 2
    if not torch.cuda.is_available():
        code, _, err = regraft("verify", tmp_path / "s", "--teacher", folder, "--device", "cuda")
        assert code == 2 and "no GPU" in err


def test_verify_runs_the_kernels_that_are_asked_for(regraft, tmp_path, monkeypatch) -> None:
    from regraft.layers import fla_kernels

    folder = write_teacher(tmp_path / "t")
    assert regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s")[0] == 0
    asked = []
    monkeypatch.setattr(fla_kernels, "problem_with", lambda *what: asked.append(what) or "they are not here")
    arguments = ("verify", tmp_path / "s", "--teacher", folder, "--kernels")
    assert regraft(*arguments, "regraft")[0] == regraft(*arguments, "auto")[0] == 0 and not asked
    code, _, err = regraft(*arguments, "fla")
    assert code == 2 and "they are not here" in err and len(asked) == 1


def test_tolerances_grow_with_the_logits() -> None:
    assert tolerance_for("float32", 5.0)[0] == 1e-4 and tolerance_for("float32", 50.0)[0] == 5e-4
    assert tolerance_for("bfloat16", 8.0) == (0.5, "bfloat16: 0.0625 of the largest logit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "1", "--teacher", "embedded"], "--teacher: belongs to --revert"),
        (["--revert", "1", "--teacher", "embedded", "--noise-groups", "2"], "--revert: converts nothing"),
        (["--revert", "1", "--teacher", "embedded", "--tolerance", "1"], "--revert: converts nothing"),
        (["--layers", "1", "--revert", "1"], "--layers: is missing, or given with --revert"),
        (["--revert", "1"], "--teacher: is missing"),
    ],
)
def test_options_that_say_nothing_are_refused(regraft, tmp_path, arguments, message) -> None:
    code, _, err = regraft("convert", tmp_path, *arguments, "--out", tmp_path / "s")
    assert code == 2 and message in err and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "3=bayesian"], "layer 3 is not among the converted layers 1"),
        (["--target", "1=hopfield"], "'hopfield' is unknown"),
        (["--to", "hopfield"], "is not one of 'bayesian'"),
        (["--target", "bayesian"], "is not LAYER=TARGET"),
        (["--target", "1=bayesian", "--target", "1=bayesian"], "names layer 1 again"),
    ],
)
def test_wrong_targets(regraft, tmp_path, arguments, message) -> None:
    folder = write_teacher(tmp_path / "t")
    code, _, err = regraft("convert", folder, "--layers", 1, "--out", tmp_path / "s", *arguments)
    assert code == 2 and message in err


def test_every_target_starts_as_a_copy(regraft, tmp_path) -> None:
    folder, out = write_teacher(tmp_path / "t", expand_v=2), tmp_path / "s"
    targets = ["1=kdn-diagonal", "2=kdn-isotropic", "3=covariance-reset"]
    words = [word for target in targets for word in ("--target", target)]
    code, printed, err = regraft(
        "convert", folder, "--layers", "0,1,2,3", *words, "--noise-groups", 2, "--out", out
    )
    assert code == 0, err
    assert "0 bayesian, 1 kdn-diagonal, 2 kdn-isotropic, 3 covariance-reset" in " ".join(printed.split())
    certificate = json.loads((out / "verify.json").read_text())
    rows = certificate["layers"]
    assert [rows[i]["mixer"].get("covariance") for i in "0123"] == [None, "diagonal", "isotropic", None]
    assert rows["3"]["mixer"]["kind"] == "covariance_reset" and all(r["exact"] for r in rows.values())
    model = load_model(str(out))
    with torch.no_grad():
        for layer in (0, 1, 2):
            model.model.layers[layer].attn.evidence.fill_(1.0)
    ids = tokens(97, 1, 100)
    moved = (model(ids).logits - load_model(str(folder))(ids).logits).abs().max()
    assert moved > 1e-2  # at evidence 1 they are filters of their own


def test_a_teacher_with_doubled_write_strength_is_hosted(tmp_path) -> None:
    """`allow_neg_eigval`: `beta = 2 sigmoid(b)`, against the plain recurrence of the layer."""
    folder = write_teacher(tmp_path / "t", allow_neg_eigval=True, use_gate=False)
    mixer = load_model(str(folder)).model.layers[0].attn
    x = torch.randn(1, 70, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q, k, v = (
            conv(proj(x), None, None)[0].unflatten(-1, (2, 8))
            for conv, proj in (
                (mixer.q_conv1d, mixer.q_proj),
                (mixer.k_conv1d, mixer.k_proj),
                (mixer.v_conv1d, mixer.v_proj),
            )
        )
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        beta = 2 * mixer.b_proj(x).sigmoid()
        g = -mixer.A_log.exp() * torch.nn.functional.softplus(mixer.a_proj(x) + mixer.dt_bias)
        S, outputs = torch.zeros(1, 2, 8, 8), []
        for t in range(70):
            S = S * g[:, t].exp()[..., None, None]
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * 8**-0.5)
        o = torch.stack(outputs, dim=1)
        expected = mixer.o_proj(mixer.o_norm(o).flatten(2))
        torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-4, atol=1e-5)


HYBRID = {"layers": [0, 2], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 50}


def test_a_hybrid_keeps_its_attention(regraft, tmp_path) -> None:
    """Its delta layers are converted; generation, reload and revert work; attention layers are refused."""
    folder, out = write_teacher(tmp_path / "t", attn=HYBRID), tmp_path / "s"
    code, _, err = regraft("convert", folder, "--layers", 3, "--out", out)
    assert code == 0, err
    teacher, student = load_model(str(folder)), load_model(str(out))
    assert [m["kind"] for m in student.config.mixers] == [
        "attention",
        "gated_deltanet",
        "attention",
        "bayesian",
    ]
    ids = tokens(97, 2, 150)
    with torch.no_grad():
        torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=0, atol=1e-4)
        reloaded = RegraftForCausalLM.from_pretrained(out).eval()
        assert torch.equal(reloaded(ids).logits, student(ids).logits)
    settings: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :60] = 0
    with_cache = student.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(with_cache, student.generate(ids, attention_mask=mask, use_cache=False, **settings))
    certificate = json.loads((out / "verify.json").read_text())
    assert certificate["passed"] and list(certificate["layers"]) == ["3"]
    for layers, names in (("2,3", "layer 2"), ("last:3", "layer 2"), ("0,2", "layers 0, 2")):
        code, _, err = regraft("convert", folder, "--layers", layers, "--out", tmp_path / "s2")
        assert code == 2 and f"{names}: softmax attention (`attn` in config.json)" in err
        assert "choose among 1, 3" in err and not (tmp_path / "s2").exists()
    arguments = ("--revert", 3, "--teacher", folder, "--out", tmp_path / "r")
    assert regraft("convert", out, *arguments)[0] == 0
    assert torch.equal(load_model(str(tmp_path / "r"))(ids).logits, teacher(ids).logits)


def test_conversion_in_memory(teacher) -> None:
    done = make_student(str(teacher), "last:2", noise_groups=2, process_match=1.0)
    assert done.layers == (2, 3)
    layer = done.student.model.layers[3].attn
    assert isinstance(layer, BayesianLayer) and layer.noise_groups == 2
    torch.testing.assert_close(torch.nn.functional.softplus(layer.refresh), torch.ones(2))
    plain = make_student(str(teacher), [3]).student.model.layers[3].attn
    assert torch.nn.functional.softplus(plain.refresh).max() < 1e-4  # noise that would add up over a document
