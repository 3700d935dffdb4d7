"""`regraft recipes validate`: everything about a recipe that can be found out without training or weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from regraft.convert import load_tokenizer, open_checkpoint
from regraft.convert.convert import Choice, plan_conversion
from regraft.convert.plan import model_config
from regraft.distill.adapters import add_adapters
from regraft.distill.cost import free_memory, memory_line, stage_costs
from regraft.distill.data import RowStream
from regraft.distill.divergence import HEAD_LOSSES
from regraft.distill.preflight import preflight
from regraft.distill.stage import control_stages, phase_stages
from regraft.errors import UserError
from regraft.layers import RegraftConfig, RegraftForCausalLM
from regraft.recipes.schema import Evidence, Recipe, Section

SAMPLE = 'One of the numbers is: 7301942.\n\nThe "naïve" café; 3 * 5 = 15,\tand so on…'


def validate(recipe: Recipe) -> Iterator[str]:
    """Check a recipe part by part; one line for each part that is right.

    Reads the teacher's headers and tokenizer and the first rows of the data; a teacher from the Hub is
    downloaded.

    Raises:
        UserError: the first thing that would stop a run, or train something else than it says.
    """
    checkpoint = open_checkpoint(recipe.teacher.model, recipe.teacher.revision)
    teacher = model_config(checkpoint, headers_only=True)
    choice, measured = _choice(recipe)
    plan, mixers = plan_conversion(checkpoint, choice, dtype=recipe.teacher.dtype, headers_only=True)
    layers = tuple(mixers)
    yield (
        f"key plan: {len(plan.entries)} tensors, {len(plan.new)} of them new, {len(plan.dropped)} dropped; "
        f"layers {', '.join(map(str, layers))} converted{measured}"
    )
    tokenizer = load_tokenizer(checkpoint.path)
    yield from _tokenizer(tokenizer, teacher.vocab_size)
    yield from _data(recipe, tokenizer)
    names = unread_keys(recipe, plan.config)
    if names:
        raise UserError(names[0][0], names[0][1], "leave it out." if len(names) == 1 else _others(names[1:]))
    yield "keys: every one is read"
    stages = [*phase_stages(recipe), *control_stages(recipe)]
    _on_a_narrow_twin(recipe, teacher, plan.config, layers)
    yield "losses: 0 where the student is its teacher, and felt by every parameter that is trained"
    phases, control = stages[:-1], stages[-1:]
    costs = stage_costs(phases, plan.config, teacher, layers, recipe)
    costs |= stage_costs(control, teacher, None, layers, recipe)
    yield memory_line(costs, free_memory())
    parts = [f"{phase.name} {costs[phase.name].flops * phase.tokens:.2e}" for phase in recipe.phases]
    tokens = sum(phase.tokens for phase in recipe.phases)
    yield f"FLOPs: {', '.join(parts)}, control {costs['control'].flops * tokens:.2e}"


def _choice(recipe: Recipe) -> tuple[Choice, str]:
    """What is converted; layers that a scan would have to find are stood in for by as many others."""
    settings, note = recipe.convert, ""
    layers: Any = settings.layers
    if isinstance(layers, str) and layers.strip().startswith("scan:"):
        note = f" in place of those that {layers} finds at the start of a run"
        layers = layers.strip().replace("scan", "last")
    targets = {t.layer: t.to for t in settings.targets}
    return Choice(layers, settings.to, targets, settings.noise_groups, settings.process_match), note


def _tokenizer(tokenizer: PreTrainedTokenizerFast, vocab: int) -> Iterator[str]:
    if len(tokenizer) > vocab:
        reason = f"has {len(tokenizer)} tokens, the model's embedding {vocab} rows."
        raise UserError("tokenizer", reason, "use the tokenizer that belongs to the model.")
    back = tokenizer.decode(
        tokenizer.encode(SAMPLE, add_special_tokens=False), clean_up_tokenization_spaces=False
    )
    if "".join(back.split()) != "".join(SAMPLE.split()):
        reason = f"does not give a text back: {SAMPLE!r} becomes {back!r}."
        raise UserError("tokenizer", reason, "use the tokenizer that belongs to the model.")
    spaces = "" if back == SAMPLE else ", but for spaces"
    unused = f", {vocab - len(tokenizer)} rows of the embedding unused" if len(tokenizer) < vocab else ""
    yield f"tokenizer: {len(tokenizer)} tokens{unused}; a text comes back as it was{spaces}"


def _data(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """The first rows, and one policy for what stands before a text in training and in evaluation."""
    rows = RowStream(recipe.data, tokenizer).take(2)
    plain = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.encode("a")[: -len(plain)]
    ids = rows.ids[0].tolist()
    found = ids[: len(before)]
    twice = bool(before) and ids[len(before) : 2 * len(before)] == before
    if found != before or twice:
        what = repr(tokenizer.decode(before))
        reason = f"training rows begin with {'it twice' if twice else repr(tokenizer.decode(ids[:1]))}."
        raise UserError(
            f"{what} before a text", reason, "take it out of the data, or let the tokenizer add it."
        )
    policy = repr(tokenizer.decode(before)) if before else "nothing"
    share = rows.tokens / rows.real.numel()
    yield f"data: first rows read, {share:.0%} of their places hold tokens; {policy} stands before a document"


def unread_keys(recipe: Recipe, student: RegraftConfig) -> list[tuple[str, str]]:
    """Keys that the recipe sets and nothing would read, with the reason."""
    found = []
    kinds = {m["kind"] for m in student.mixers}
    given = recipe.convert.model_fields_set
    if "process_match" in given and recipe.convert.process_match and "bayesian" not in kinds:
        found.append(("convert.process_match", "no converted layer has process noise."))
    own = {t.layer for t in recipe.convert.targets}
    converted = {i for i, m in enumerate(student.mixers) if m["kind"] in ("bayesian", "covariance_reset")}
    if "to" in given and own and own >= converted:
        found.append(("convert.to", "every layer has a target of its own."))
    for i, phase in enumerate(recipe.phases):
        where = f"phases.{i}"
        evidence = phase.evidence
        if evidence not in (None, Evidence()) and "bayesian" not in kinds:
            found.append((f"{where}.evidence", "no converted layer has an evidence."))
        if evidence is not None and not evidence.over:
            for name in sorted({"start", "shape"} & evidence.model_fields_set):
                if getattr(evidence, name) != type(evidence).model_fields[name].default:
                    found.append((f"{where}.evidence.{name}", "with `over: 0` there is no ramp."))
        for j, loss in enumerate(phase.losses):
            found += [
                (f"{where}.losses.{j}.{name}", "the loss has weight 0.")
                for name in sorted(_changed(loss) - {"weight"})
                if not loss.weight
            ]
        last = i + 1 == len(recipe.phases)  # the control takes over the last phase's
        heads = any(isinstance(loss, HEAD_LOSSES) for loss in phase.losses)
        if "logit_chunk" in _changed(phase) and not heads and not last:
            found.append((f"{where}.logit_chunk", "no loss of the phase looks at logits."))
    return found


def _changed(section: Section) -> set[str]:
    """Keys whose value is not the default."""
    fields = type(section).model_fields
    return {name for name, field in fields.items() if getattr(section, name) != field.default}


def _others(names: list[tuple[str, str]]) -> str:
    return (
        "leave it out, and likewise " + "; ".join(f"{name} ({reason[:-1]})" for name, reason in names) + "."
    )


def _on_a_narrow_twin(
    recipe: Recipe, teacher: RegraftConfig, student: RegraftConfig, layers: tuple[int, ...]
) -> None:
    """The preflight on models with the same parameters' names and few numbers in each, drawn at random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = RegraftForCausalLM(narrow(teacher, recipe.convert.noise_groups)).eval()
        mine = RegraftForCausalLM(narrow(student, recipe.convert.noise_groups)).eval()
        own = theirs.state_dict()
        mine.load_state_dict(own, strict=False)
        if recipe.lora is not None:
            add_adapters(mine, recipe.lora, layers)
            add_adapters(theirs, recipe.lora, layers)
        stages = phase_stages(recipe)
        preflight(mine, theirs, stages, layers)
        preflight(theirs, None, control_stages(recipe), layers)


def narrow(config: RegraftConfig, groups: int = 1) -> RegraftConfig:
    """The same layers with few numbers: one key head, widths just large enough for the noise groups."""
    fields = config.to_dict()
    heads = config.num_v_heads // config.num_heads
    width = next(k for k in range(8, 8 * groups + 8) if int(k * config.expand_v) % groups == 0)
    fields |= {
        "vocab_size": min(config.vocab_size, 256),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 1,
        "num_v_heads": heads,
        "head_dim": width,
    }
    return RegraftConfig(**fields)
