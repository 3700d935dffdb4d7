"""Recipes of the probes: strict like those of `regraft.recipes`, one schema a probe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from regraft.recipes.schema import (
    Count,
    Index,
    NonNegative,
    Positive,
    Section,
    Share,
    ShareBelowOne,
    Some,
    Text,
)

Overlap = Annotated[float, Field(gt=-1, lt=1)]


def _named(spec: object) -> object:
    return {"use": spec} if isinstance(spec, str) else spec


class MixerSpec(Section):
    """A mixer under test. `- gla` is short for `- {use: gla}`."""

    use: Text
    """A mixer of regraft by its kind, `attention`, or the import path of a class, `package.module:Class`."""
    name: Text | None = None
    """What tables and figures call it; the last part of `use` if not given."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class."""
    start: dict[str, float] = Field(default_factory=dict)
    """Parameters that start at a constant, by their name in the mixer."""
    frozen: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Parameters that are not trained."""

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return self.name or self.use.rpartition(":")[2]


Mixers = Some[Annotated[MixerSpec, BeforeValidator(_named)]]


def _distinct(mixers: tuple[MixerSpec, ...]) -> tuple[MixerSpec, ...]:
    labels = [m.label for m in mixers]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"two mixers are called {label!r}; give one of them a `name`")
    return mixers


class Training(Section):
    """How a model is trained: AdamW, cross-entropy or squared error."""

    steps: Count
    """Updates."""
    batch: Count
    """Sequences an update, all of them fresh."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    betas: Annotated[tuple[ShareBelowOne, ShareBelowOne], Field(strict=False)] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: NonNegative = 1e-4
    """Of matrices; biases, norms and what a mixer keeps in float32 are left alone."""
    clip: Positive = 1.0
    """Largest gradient norm."""
    warmup: ShareBelowOne = 0.0
    """Share of the steps in which the rate rises from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the rate does after that; cosine ends at 0."""


class Sweep(Section):
    """What the trained probes share."""

    mixers: Mixers
    """Mixers under test."""
    seeds: Some[Index] = (0, 1, 2)
    """One run each; equal seeds see equal data."""
    train: Training
    """The training of every run."""
    chunk_size: Count = 64
    """Tokens that the filter takes at once; narrow heads are faster with 16 on a CPU."""

    _names = field_validator("mixers")(_distinct)


class Collision(Section):
    """The deterministic two-key collision (paper 000, Appendix E.4)."""

    probe: Literal["collision"]
    rotations: Count = 32
    """Random bases of the rotated variant."""


class BanditTask(Section):
    """A delayed bandit."""

    kind: Literal["beta-bernoulli", "logistic"]
    arms: Count
    length: Count
    """Steps T of an episode."""
    delay: Count
    """Steps K after which a reward is seen; less than `length`."""
    episodes: Count
    """Episodes of the comparison."""

    @field_validator("delay")
    @classmethod
    def _arrives(cls, delay: int, info: Any) -> int:
        if delay >= info.data.get("length", delay + 1):
            raise ValueError("should be less than `length`, or no reward ever arrives")
        return delay


class Bandits(Section):
    """Update rules with one-hot keys in delayed bandits, without training (paper 004, Case 2.a)."""

    probe: Literal["bandits"]
    tasks: Some[BanditTask]
    gains: Some[Share] = (0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.25, 0.3)
    """Constant gains tried for the rules that have one; the best is reported."""
    seed: Index = 0
    """Of the episodes."""


class Kernel(Sweep):
    """Belief maintenance: a mixer learns a posterior mean, and its kernel is fitted (paper 004, Case 1)."""

    probe: Literal["kernel"]
    regimes: Some[Literal["uniform", "exponential"]] = ("uniform", "exponential")
    length: Count = 128
    """Observations an episode."""
    persistence: Annotated[float, Field(gt=0.9, le=1)] = 1.0
    """Of the hidden number in `exponential`, what of it is left after a step; 1 is a random walk."""
    width: Count = 32
    heads: Count = 4
    mlp: Index = 64
    """Width of the MLP; 0 for none."""
    conv: Count = 4
    """Taps of the mixers' short convolutions."""
    init: Positive | None = None
    """Deviation of the initial weights; (3 width)^-1/2, that of torch's own linear layers, if null."""
    fit: Count = 8192
    """Episodes that the kernel is fitted on."""
    held_out: Count = 8192
    """Episodes of the regret and of R²."""
    penalty: NonNegative = 1e-2
    """Of the ridge regression."""


class CollisionRecall(Section):
    """Sequences of E.5.1."""

    pairs: Count = 8
    """Target-distractor pairs K; keys have 2K channels."""
    boost: Index = 4
    """Writes of each target after the seed."""
    floods: Some[Index] = (1, 2, 4, 8)
    """Writes of each distractor in training; one of these a batch."""
    overlap: Annotated[tuple[Overlap, Overlap], Field(strict=False)] = (0.6, 0.8)
    """Range of the overlap in training."""
    basis: Literal["axes", "random"] = "axes"
    """Keys along coordinate axes, as the paper's, or in a random basis drawn for every sequence."""
    test_floods: Some[Index] = (8, 16, 32, 64)
    test_overlaps: Some[Annotated[tuple[Overlap, Overlap], Field(strict=False)]] = ((0.6, 0.8), (0.85, 0.95))
    """Ranges of the overlap, [low, high], that are tested with every flood."""
    curve: Annotated[tuple[Overlap, ...], Field(strict=False)] = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
    """Single overlaps that are tested with the longest flood."""
    test: Count = 1024
    """Sequences of each test."""


class RandomRecall(Section):
    """Sequences of E.5.4."""

    raw: Count = 64
    """Width of the raw addresses."""
    labels: Count = 64
    """Values."""
    queries: Count = 8
    writes: Some[Count] = (16, 32, 48, 64)
    """Keys written in training; one of these a batch."""
    test_writes: Some[Count] = (16, 32, 64, 96, 128, 192, 256)
    test: Count = 1024
    """Sequences of each test."""


class Recall(Sweep):
    """Learned recall under collisions and of random keys (paper 000, Appendix E.5)."""

    probe: Literal["recall"]
    collision: CollisionRecall | None = CollisionRecall()
    """null leaves it out."""
    random: RandomRecall | None = RandomRecall()
    """null leaves it out."""
    width: Count = 64
    layers: Count = 2
    heads: Count = 4
    key_width: Count = 16
    """Key and value width D of a head."""
    mlp: Count = 128


Size = Annotated[tuple[Count, Count], Field(strict=False)]


class MqarTask(Section):
    """One task of the MQAR family."""

    name: Text
    """What tables and figures call it."""
    train: Some[Size]
    """Sizes [tokens, pairs] of training, one of these a batch, in turn."""
    test: Some[Size]
    """Sizes [tokens, pairs] that are tested."""
    updated: Share = 0.0
    """Share of the keys that are written again with another value."""
    interleaved: bool = False
    """Second writes stand among the first ones instead of after them."""
    block: Count = 1
    """Keys in a row before their values follow."""

    @model_validator(mode="after")
    def _fits(self) -> MqarTask:
        for tokens, pairs in (*self.train, *self.test):
            needed = 4 * pairs + 2 * round(self.updated * pairs)
            if needed > tokens:
                raise ValueError(
                    f"{self.name}: {pairs} pairs and their queries need {needed} tokens, not {tokens}"
                )
        return self


class Mqar(Sweep):
    """Multi-query associative recall with one vocabulary, updates and blocks (paper 000, 4.2)."""

    probe: Literal["mqar"]
    tasks: Some[MqarTask]
    vocabulary: Count = 8192
    filler: Literal["zero", "random"] = "random"
    """What stands where nothing is asked: 0, or ids that are neither key nor value of the sequence."""
    widths: Some[Count] = (64, 128, 256, 512)
    rates: Some[Positive] = (1e-3, 3.16e-3, 1e-2)
    """Learning rates tried at every width, in place of `train.lr`; the best by validation is tested."""
    heads: Count = 2
    conv: Count = 4
    """Taps of the mixers' short convolutions; 1 for no local mixing."""
    layers: Some[Literal["conv", "mixer"]] = ("conv", "mixer")
    """`conv` is a gated short convolution, the same for every mixer."""
    stop_at: Share = 0.995
    """Training ends where the validation accuracy reaches this; looked at twenty times."""
    validation: Count = 256
    """Sequences of the validation."""
    sequences: Count = 1000
    """Sequences of each test."""

    @model_validator(mode="after")
    def _enough_ids(self) -> Mqar:
        for task in self.tasks:
            for _, pairs in (*task.train, *task.test):
                needed = 2 * pairs + round(task.updated * pairs) + 2  # 0, and one to fill with
                if needed > self.vocabulary:
                    raise ValueError(f"vocabulary: {task.name} with {pairs} pairs needs {needed} ids")
        return self


SCHEMAS: dict[str, type[Section]] = {
    "collision": Collision,
    "bandits": Bandits,
    "kernel": Kernel,
    "recall": Recall,
    "mqar": Mqar,
}
