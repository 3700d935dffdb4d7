"""The recipe: one typed, frozen, strict description of convert, distill, control and report.

Every field is documented by the text under it, which `regraft recipes schema` prints too. Numbers are strict:
`true` is not 1 and `"5"` is not 5. Relative paths are taken from the working directory.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.types import Strict

from regraft.recipes.selector import SELECTOR_OR_LIST, resolve_layers

__all__ = ["Control", "Convert", "Data", "Evidence", "Phase", "Recipe", "Report", "Teacher", "resolve_layers"]

T = TypeVar("T")
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


def parse_tokens(value: object) -> object:
    """Token counts as people write them: `100M`, `256K`, `1.5B`, `1_000_000`, `1e6`; K is 1000, not 1024."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value  # a plain int passes, anything else is refused by the type
    number, unit = (value[:-1], _UNITS[value[-1]]) if value[-1:] in _UNITS else (value, 1)
    try:
        count = Decimal(number) * unit  # exact, where 1.001 * 1000 in floats is no whole number
        if count == int(count):
            return int(count)
    except ArithmeticError:
        pass  # not a number, or an infinite one
    raise ValueError("should be a whole number of tokens, such as 1000000, 256K, 100M or 1.5B")


def _listed(layers: object) -> str:
    return "selector" if isinstance(layers, str) else "list"


def _not_empty(items: tuple[T, ...]) -> tuple[T, ...]:
    if not items:
        raise ValueError("should name at least one")
    return items


def _some_weight(losses: tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = [loss.kind for loss in losses]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"two losses are of kind {kind!r}; give each once, with its weight")
    if not any(loss.weight for loss in losses):
        raise ValueError("every loss has weight 0: such a run would train nothing")
    return losses


Text = Annotated[str, StringConstraints(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
# tuples stay frozen; not strict, so that a YAML list fits
Some = Annotated[tuple[T, ...], Strict(False), AfterValidator(_not_empty)]
Tokens = Annotated[
    int,
    BeforeValidator(parse_tokens),
    Field(gt=0),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9._]+[KMB]?$"}]}),
]
Layers = Annotated[
    Annotated[Some[Index], Tag("list")]
    | Annotated[Annotated[str, StringConstraints(pattern=SELECTOR_OR_LIST)], Tag("selector")],
    Discriminator(_listed),
]
Shape = Literal["linear", "cosine"]
Target = Literal["bayesian", "kdn-diagonal", "kdn-isotropic", "covariance-reset"]
NeedleTask = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multiquery",
    "niah_multivalue",
    "niah_multikey_2",
    "niah_multikey_3",
]
SIX_TASKS: tuple[NeedleTask, ...] = get_args(NeedleTask)[:6]  # the last two are beyond small models


class Section(BaseModel):
    """What all parts of a recipe share: frozen, no unknown keys, strict and finite numbers."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Teacher(Section):
    """The pretrained model that is converted and imitated."""

    model: Text
    """`embedded` (the teacher in this package), a local folder, or a Hugging Face Hub id."""
    revision: Text | None = None
    """Hub branch, tag or commit; null takes the newest."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of teacher and student; noise parameters stay float32."""


class LayerTarget(Section):
    """A converted layer and its own mixer."""

    layer: Index
    """Index of the layer."""
    to: Target
    """The mixer put in."""


class Convert(Section):
    """Which layers are replaced, by what, and how the replacement starts."""

    layers: Layers
    """Indices such as [1, 3] (from 0), `every:6` (the last layer of each six), `last:4`, or `scan:4`, the
    four whose memory retrieval needs most, as `regraft scan` measures it."""
    to: Target = "bayesian"
    """The mixer put in: `bayesian`, the exact Kalman filter with a dense covariance; `kdn-diagonal` or
    `kdn-isotropic`, the filter with a covariance of that form; `covariance-reset`, the filter without one."""
    targets: Annotated[tuple[LayerTarget, ...], Strict(False)] = ()
    """Layers among these that get another mixer than `to`."""
    noise_groups: Count = 1
    """Groups of value columns with an observation noise and a covariance of their own."""
    transition: Literal["scalar"] = "scalar"
    """State transition: `scalar`, the teacher's one decay per head and token."""
    process_match: Share = 0.0
    """Initial share by which extra process noise restores the teacher's write gain along repeated keys at
    evidence 1; 0 is the stationary noise 1 - a^2 of the decay a alone, 1 restores the gain in full. In
    heads that never forget it adds up, and late writes overwrite early ones."""


class BuiltinSource(Section):
    """Text that ships with the package."""

    kind: Literal["builtin"] = "builtin"
    """Names this source."""
    name: Literal["austen"] = "austen"
    """`austen`: six novels, 4.0 M characters, public domain."""


class TextSource(Section):
    """Plain text files, shuffled in pieces of whole paragraphs, about 8000 characters each."""

    kind: Literal["text"] = "text"
    """Names this source."""
    path: Text
    """UTF-8 file, or several with `*`; .gz, .xz and .zst are unpacked."""


class JsonlSource(Section):
    """Files with one JSON object a line, each a document."""

    kind: Literal["jsonl"] = "jsonl"
    """Names this source."""
    path: Text
    """UTF-8 file, or several with `*`; .gz, .xz and .zst are unpacked."""
    field: Text = "text"
    """Key under which a line holds its text."""


class ParquetSource(Section):
    """Parquet files, each row a document."""

    kind: Literal["parquet"] = "parquet"
    """Names this source."""
    path: Text
    """File, or several with `*`."""
    field: Text = "text"
    """Column that holds the text."""


class TokenSource(Section):
    """Files of token ids made with the teacher's tokenizer; a document ends with its end-of-text token."""

    kind: Literal["tokens"] = "tokens"
    """Names this source."""
    path: Text
    """A `.npy` file with one axis of integers, or raw little-endian integers; several with `*`."""
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Number format of raw integers."""


class HubSource(Section):
    """A data set of the Hugging Face Hub, read through `datasets`."""

    kind: Literal["hub"] = "hub"
    """Names this source."""
    name: Text
    """Data set id."""
    split: Text
    """Split, such as `train`."""
    config: Text | None = None
    """Configuration of the data set, where it has several."""
    streaming: bool = True
    """Read while training rather than download first."""
    field: Text = "text"
    """Column that holds the text."""


class NeedleSource(Section):
    """Needle documents made on the fly, with words that the evaluation never uses."""

    kind: Literal["needles"] = "needles"
    """Names this source."""
    tasks: Some[NeedleTask] = SIX_TASKS
    """Forms of needle documents, drawn in equal parts."""


class MixPart(Section):
    """One source of a mixture and its share."""

    weight: Positive
    """Share of this source, relative to the other weights."""
    source: Source
    """Where its documents come from."""


class MixSource(Section):
    """Several sources drawn at random in the shares of their weights."""

    kind: Literal["mix"] = "mix"
    """Names this source."""
    parts: Some[MixPart]
    """The sources and their weights."""


Source = Annotated[
    BuiltinSource
    | TextSource
    | JsonlSource
    | ParquetSource
    | TokenSource
    | HubSource
    | NeedleSource
    | MixSource,
    Discriminator("kind"),
]
MixPart.model_rebuild()


class Data(Section):
    """The training documents and how they become rows of token ids; order depends on `seed` alone."""

    source: Source
    """Where documents come from."""
    seq_len: Annotated[int, Field(ge=2)]
    """Tokens in a row."""
    pack: bool = True
    """Fill rows with several documents; false gives each document rows of its own."""
    seed: Index = 0
    """Order of the documents."""


class LayerNMSE(Section):
    """Squared error of each converted layer on the teacher's own inputs, over the teacher's variance."""

    kind: Literal["layer_nmse"] = "layer_nmse"
    """Names this loss."""
    weight: NonNegative = 1.0
    """Factor in the sum of losses."""


class ForwardKL(Section):
    """KL(teacher || student) of the next-token distributions."""

    kind: Literal["forward_kl"] = "forward_kl"
    """Names this loss."""
    weight: NonNegative = 1.0
    """Factor in the sum of losses."""
    temperature: Positive = 1.0
    """Both sets of logits are divided by T; the loss is multiplied by T^2."""


class ReverseKL(Section):
    """KL(student || teacher) of the next-token distributions."""

    kind: Literal["reverse_kl"] = "reverse_kl"
    """Names this loss."""
    weight: NonNegative = 1.0
    """Factor in the sum of losses."""
    temperature: Positive = 1.0
    """Both sets of logits are divided by T; the loss is multiplied by T^2."""


class JSD(Section):
    """Generalised Jensen-Shannon divergence: beta KL(teacher || m) + (1 - beta) KL(student || m), where
    m = beta teacher + (1 - beta) student."""

    kind: Literal["jsd"] = "jsd"
    """Names this loss."""
    weight: NonNegative = 1.0
    """Factor in the sum of losses."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture: near 0 like the forward KL, near 1 like the reverse."""
    temperature: Positive = 1.0
    """Both sets of logits are divided by T; the loss is multiplied by T^2."""


class BoundaryMSE(Section):
    """Squared error of the hidden states after each converted layer, over the teacher's variance there."""

    kind: Literal["boundary_mse"] = "boundary_mse"
    """Names this loss."""
    weight: NonNegative = 1.0
    """Factor in the sum of losses."""


class CrossEntropy(Section):
    """Next-token cross-entropy on the text itself; needs no teacher."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    """Names this loss."""
    weight: NonNegative = 1.0
    """Factor in the sum of losses."""


Loss = Annotated[LayerNMSE | ForwardKL | ReverseKL | JSD | BoundaryMSE | CrossEntropy, Discriminator("kind")]


class LoRA(Section):
    """Low-rank adapters on linear maps, merged into them at export. Parameters that a conversion made
    new train in full, for they have no pretrained value to adapt."""

    kind: Literal["lora"] = "lora"
    """Names this set."""
    rank: Count = 16
    """Rank of an adapter."""
    alpha: Positive = 32.0
    """An adapter counts alpha / rank times."""
    targets: Some[Text] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear maps that get one, by the last part of their name."""
    layers: Literal["all", "converted"] = "all"
    """In which layers."""


def _train_form(train: object) -> str:
    return "name" if isinstance(train, str) else "patterns" if isinstance(train, list | tuple) else "lora"


Train = Annotated[
    Annotated[Literal["converted", "converted+norms", "all"], Tag("name")]
    | Annotated[Some[Text], Tag("patterns")]
    | Annotated[LoRA, Tag("lora")],
    Discriminator(_train_form),
]


class Evidence(Section):
    """How much each observation counts: 0 is the teacher's own layer, 1 the exact Kalman filter.

    At an exact start every distillation loss and its gradient are 0, so this schedule is what carries the
    student away from its teacher.
    """

    start: NonNegative = 0.0
    """Evidence at the first step."""
    end: NonNegative = 1.0
    """Evidence once the ramp is over."""
    over: Share = 0.5
    """Fraction of the phase that the ramp takes; 0 jumps to `end` at once."""
    shape: Shape = "linear"
    """Shape of the ramp."""
    learn: bool = False
    """Train the evidence of each head once the ramp is over."""


class Stretch(Section):
    """What a phase is called, what it trains, and on how many tokens."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
    """Name in metrics and checkpoints: letters, digits, - and _."""
    losses: Annotated[Some[Loss], AfterValidator(_some_weight)]
    """Losses, summed by their weights."""
    train: Train = "converted"
    """Which parameters move: `converted` layers, `converted+norms` (these and all norms), `all`; a list of
    patterns of parameter names such as `model.layers.*.mlp.*`, with ! before those that stay, such as
    `!*.process_*` (of `converted` if all have one); or adapters, {kind: lora, rank: 16}."""
    tokens: Tokens
    """Trained tokens of the phase, such as 100M: exactly so many, padding not counted."""
    batch_tokens: Tokens
    """Places for tokens in one optimiser step, padding counted: a multiple of `data.seq_len`."""
    micro_batch: Count | None = None
    """Rows computed at once (memory, not results, depends on it); null takes the whole step."""
    logit_chunk: Count = 512
    """Tokens whose logits exist at once (memory, not results, depends on it)."""
    lr: Positive
    """Peak learning rate."""


class Optimiser(Section):
    """AdamW and its schedule; weight decay touches matrices only."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up: held, or brought to 0 at the last step."""
    warmup: ShareBelowOne = 0.02
    """Fraction of the steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    betas: Annotated[tuple[ShareBelowOne, ShareBelowOne], Strict(False)] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    clip: Positive | None = 1.0
    """Largest gradient norm; null leaves gradients alone."""


class Phase(Optimiser, Stretch):  # this order of bases lists `name` first in a resolved recipe
    """One stretch of distillation; the next phase starts where it ended."""

    evidence: Evidence | None = None
    """Evidence schedule; null is a ramp from 0 to 1 over half of the first phase, and in later phases leaves
    the evidence where it is."""


class Control(Optimiser):
    """The matched control: the teacher's own layers trained on the same tokens in the same order.

    Tokens, batches and trainable layers are those of the phases.
    """

    losses: Annotated[Some[CrossEntropy], AfterValidator(_some_weight)] = (CrossEntropy(),)
    """Losses of the control: cross_entropy only."""
    lr: Positive = 1e-4
    """Peak learning rate."""


class Niah(Section):
    """Retrieval of needles by depth (the RULER tasks)."""

    tasks: Some[NeedleTask] = SIX_TASKS
    """Needle tasks."""
    lengths: Some[Annotated[int, Field(ge=128)]] = (1024, 2048, 4096)
    """Tokens of prompt and answer together."""
    samples: Count = 100
    """Documents per task and length."""
    seed: Index = 0
    """Seed of the documents."""
    batch_size: Count = 64
    """Documents answered at once: speed and memory depend on it, results do not."""


class Perplexity(Section):
    """Perplexity by context length and by position."""

    lengths: Some[Annotated[int, Field(ge=2)]]
    """Context lengths in tokens, each a divisor of the longest: all score the same tokens."""
    sets: Some[Text]
    """`austen` (also training text), `wikitext103`, `pg19`, `slimpajama`, or a .txt or .jsonl file."""
    samples: Count = 50
    """Stretches of the longest length, per set."""

    @field_validator("lengths")
    @classmethod
    def _divide(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        for length in lengths:
            if max(lengths) % length:
                raise ValueError(f"{length} should divide the longest, {max(lengths)}")
        return lengths


class Report(Section):
    """What teacher, student and control are compared on."""

    niah: Niah = Niah()
    """Needle retrieval."""
    perplexity: Perplexity | None = None
    """Perplexity by length."""
    colours: Literal["viridis", "red-yellow-green"] = "viridis"
    """Colours of the heatmaps; the first is told apart by colour-blind readers too."""


class Checkpoints(Section):
    """Checkpoints of a training run, which `--resume` goes on from."""

    every: Count = 100
    """Steps between checkpoints; the end of a phase always has one."""
    keep: Count = 2
    """How many of the newest are kept; the last of each phase is kept too."""
    best: bool = False
    """Keep the best of each phase too: the lowest mean loss over the steps since the one before."""


class Engine(Section):
    """How training is spread over processes, which `torchrun` or `accelerate launch` start, and over memory.

    None of it changes what is computed.
    """

    student: Literal["replicated", "sharded"] = "replicated"
    """With several processes: each has the student whole (DDP), or a share of its parameters, gradients and
    moments (FSDP2)."""
    teacher: Literal["replicated", "sharded"] = "replicated"
    """The same for the teacher's blocks."""
    recompute: bool = False
    """Compute activations inside mixers and MLPs again for the gradient: less memory, more time."""
    wandb: bool = False
    """Send metrics to Weights & Biases, which has to be installed."""


class Recipe(Section):
    """A whole experiment: convert a teacher, distil the student, train the control, report."""

    version: Literal[1]
    """Version of this format."""
    teacher: Teacher
    """The model to convert."""
    convert: Convert
    """The conversion."""
    data: Data
    """The training data."""
    phases: Some[Phase]
    """Distillation, phase by phase."""
    control: Control = Control()
    """The matched control."""
    report: Report = Report()
    """The comparison."""
    checkpoint: Checkpoints = Checkpoints()
    """When training saves its state."""
    engine: Engine = Engine()
    """Processes and memory."""
    seed: Index = 0
    """Seed of everything random but the order of the data, such as new parameters."""

    @field_validator("phases")
    @classmethod
    def _complete(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        names = [phase.name for phase in phases]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two phases are named {name!r}; give each a name of its own")
        adapters = [phase.train for phase in phases if isinstance(phase.train, LoRA)]
        if any(adapter != adapters[0] for adapter in adapters):
            raise ValueError("phases with lora share their adapters; give them the same settings")
        first = phases[0].model_copy(update={"evidence": phases[0].evidence or Evidence()})
        return (first, *phases[1:])

    @model_validator(mode="after")
    def _whole_rows(self) -> Recipe:
        rows = self.data.seq_len
        for i, phase in enumerate(self.phases):
            if phase.batch_tokens % rows:
                raise ValueError(
                    f"phases.{i}.batch_tokens: {phase.batch_tokens} is not a multiple of data.seq_len, {rows}"
                )
        return self

    @property
    def lora(self) -> LoRA | None:
        """The adapters that some phase trains; phases that do share them."""
        return next((phase.train for phase in self.phases if isinstance(phase.train, LoRA)), None)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors and for reading."""
    return Recipe.model_json_schema()
