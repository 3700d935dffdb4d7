"""Shape of a model: fla's names for everything a Gated DeltaNet has, plus one entry a layer for its mixer."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "num_v_heads",
    "head_dim",
    "conv_size",
)


class RegraftConfig(PretrainedConfig):
    """Configuration of `RegraftForCausalLM`.

    Field names are those of flash-linear-attention's Gated DeltaNet configuration, defaults those of the
    published 340M checkpoints.

    Args:
        mixers: one entry a layer, `{"kind": "gated_deltanet"}` or `{"kind": "bayesian", "noise_groups": G,
            "obs_var_floor": r_min}`. All Gated DeltaNet by default; `attention` is kept from hybrids.
        num_heads: key heads; `num_v_heads` value heads (the same by default, else a multiple).
        head_dim: key width K of a head; `int(head_dim * expand_v)` is its value width.
        intermediate_size: width of the SwiGLU; `256 * ceil(int(d * hidden_ratio * 2/3) / 256)` by default.

    Raises:
        ValueError: a width or count that is none, or widths and mixers that do not fit together.
    """

    model_type = "regraft"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012  (transformers' own form)

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 1024,
        num_hidden_layers: int = 24,
        num_heads: int = 4,
        num_v_heads: int | None = None,
        head_dim: int = 256,
        expand_v: float = 1.0,
        use_gate: bool = True,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        hidden_ratio: float = 4,
        intermediate_size: int | None = None,
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 2048,
        tie_word_embeddings: bool = False,
        mixers: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads if num_v_heads is not None else num_heads
        self.head_dim = head_dim
        self.expand_v = expand_v
        self.use_gate = use_gate
        self.conv_size = conv_size
        self.allow_neg_eigval = allow_neg_eigval
        self.hidden_ratio = hidden_ratio
        self._check(*COUNTS)
        if intermediate_size is None:
            intermediate_size = 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)
        self.intermediate_size = intermediate_size
        self._check("intermediate_size", "value_dim")
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        # What the teacher was trained at. A recurrent state has no such limit, so nothing enforces it.
        self.max_position_embeddings = max_position_embeddings
        self.mixers = mixers if mixers is not None else [{"kind": "gated_deltanet"}] * num_hidden_layers
        if len(self.mixers) != num_hidden_layers:
            raise ValueError(f"mixers: {len(self.mixers)} entries for {num_hidden_layers} layers")
        if self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads: {self.num_v_heads} is not a multiple of num_heads={num_heads}")
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def _check(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r} is not a positive whole number")

    @property
    def value_dim(self) -> int:
        """Value width V of one head."""
        return int(self.head_dim * self.expand_v)

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Indices of the layers whose mixer is of this kind."""
        return tuple(i for i, m in enumerate(self.mixers) if m["kind"] == kind)
