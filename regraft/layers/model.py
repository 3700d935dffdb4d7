"""The decoder that hosts the mixers: fla's parameter names, plain PyTorch, transformers' generation."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from regraft.layers.attention import Attention
from regraft.layers.cache import RegraftCache
from regraft.layers.config import RegraftConfig
from regraft.layers.fla_kernels import choose
from regraft.layers.mixer import Mixer, RMSNorm, ShortConvolution, ZeroLinear
from regraft.layers.mixers import MIXERS, build_mixer

# transformers 5.24 renamed the keyword that carries the cache; decoding from an empty state goes unnoticed if
# the wrong one is read, so both are accepted everywhere and the running version's name is given back.
_GENERATION_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _GENERATION_ARGUMENTS else "past_key_values"


@dataclass
class RegraftOutput(ModelOutput):
    """Output of the decoder.

    loss: mean cross-entropy over labelled tokens. logits: `[B,T,vocab]`. cache: state after the last token.
    hidden_states: input of every block and the output of the last, `num_layers + 1` of `[B,T,d]`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: RegraftCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    last_hidden_state: Tensor | None = None

    @property
    def past_key_values(self) -> RegraftCache | None:
        """The cache under its older name."""
        return self.cache


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: RegraftConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=False)
        self.up_proj = nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,T,d] -> [B,T,d]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm residual block; the mixer is called `attn`, as in fla."""

    def __init__(self, config: RegraftConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn: Mixer | Attention = build_mixer(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        h: Tensor,
        cache: RegraftCache | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """`[B,T,d] -> [B,T,d]`; reads and writes its entry of the cache."""
        state = cache.states[self.layer] if cache is not None else None
        y, state = self.attn(self.attn_norm(h), state, lengths, cache is not None, cu_seqlens)
        if cache is not None:
            cache.states[self.layer] = state
        h = h + y
        return h + self.mlp(self.mlp_norm(h))


class RegraftPreTrainedModel(PreTrainedModel):
    """What the decoder and its language model share with transformers."""

    config_class = RegraftConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _no_split_modules = ["Block"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = sorted({n for m in MIXERS.values() for n in m.float32_parameters})

    def set_kernels(self, kernels: str | None) -> None:
        """Choose whose kernels compute the delta-rule layers: `auto`, `fla` or `regraft` (see `fla_kernels`).

        None goes back to what the environment variable `REGRAFT_KERNELS` says, else `auto`.
        """
        choose(kernels)
        for module in self.modules():
            if isinstance(module, Mixer):
                module.kernels = kernels

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what no file gave; `init.*` leaves tensors that were loaded alone."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.0 if isinstance(module, ZeroLinear) else std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ShortConvolution):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, Mixer):
            for name, value in module.initial_parameters().items():
                init.copy_(getattr(module, name), value)


class RegraftModel(RegraftPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: RegraftConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: RegraftCache | None = None,
        past_key_values: RegraftCache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> RegraftOutput:
        """Run the decoder.

        Args:
            input_ids: `[B,T]`, or `inputs_embeds [B,T,d]`.
            attention_mask: `[B,L]` with L >= T, 1 for real tokens; its last T columns count. Padding may
                stand anywhere and changes no state.
            cache, past_key_values: the state to continue from (two names of one thing).
            use_cache: return a cache; implied by passing one.
            cu_seqlens: boundaries `[N+1]`, from 0 to T, of documents packed into one row (B = 1) that shall
                not see each other; without mask and cache.
        """
        cache = cache if cache is not None else past_key_values
        if cache is None and use_cache:
            cache = RegraftCache(len(self.layers))
        if inputs_embeds is None and input_ids is None:
            raise ValueError("input_ids or inputs_embeds: one of them is needed")
        if cu_seqlens is not None and (cache is not None or attention_mask is not None):
            raise ValueError("cu_seqlens: packed documents go without attention_mask and cache")
        h = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        T = h.shape[1]
        packing = _Packing.of(attention_mask, T)
        h = packing.pack(h)
        hidden: list[Tensor] = []
        for block in self.layers:
            if output_hidden_states:
                hidden.append(packing.unpack(h))
            h = block(h, cache, packing.lengths, cu_seqlens)
        h = packing.unpack(h)
        if output_hidden_states:
            hidden.append(h)
        if cache is not None:
            cache.seen += T
        return RegraftOutput(
            last_hidden_state=self.norm(h), cache=cache, hidden_states=tuple(hidden) if hidden else None
        )


class RegraftForCausalLM(RegraftPreTrainedModel, GenerationMixin):
    """Language model: `RegraftModel` and a head."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: RegraftConfig) -> None:
        super().__init__(config)
        self.model = RegraftModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.model.embeddings

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = True,
        **kwargs: Any,
    ) -> RegraftOutput:
        """Logits, and the cross-entropy if `labels [B,T]` are given (-100 is ignored, shifted here).

        Args:
            input_ids, attention_mask, **kwargs: as in `RegraftModel.forward`.
            labels: `[B,T]`.
            logits_to_keep: logits of the last so many tokens only; 0 for all.
            return_dict: only True is supported.
        """
        out = self.model(input_ids, attention_mask, **kwargs)
        h = out.last_hidden_state
        out.logits = self.lm_head(h[:, -logits_to_keep:] if logits_to_keep else h)
        if labels is not None:
            logits = self.lm_head(h[:, :-1]).float()
            out.loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return out

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # generate() must not make a key-value cache: ours comes out of the first forward

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool = False,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Only the tokens that the cache has not seen yet."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        seen = cache.get_seq_length() if cache is not None else 0
        inputs: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": use_cache, CACHE_NAME: cache}
        if inputs_embeds is not None and seen == 0:
            return {**inputs, "inputs_embeds": inputs_embeds}
        # input_ids hold either everything so far or, at a restart from a cache, the new tokens only.
        total = attention_mask.shape[1] if attention_mask is not None else input_ids.shape[1]
        new = total - seen if total > seen else 1
        return {**inputs, "input_ids": input_ids[:, -new:], "logits_to_keep": kwargs.get("logits_to_keep", 0)}

    def _update_model_kwargs_for_generation(
        self, outputs: RegraftOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if outputs.cache is not None:
            model_kwargs[CACHE_NAME] = outputs.cache
        return model_kwargs


@dataclass(frozen=True)
class _Packing:
    """Moves the real tokens of each row to its front, so that padding of any side is padding at the end."""

    lengths: Tensor | None = None  # [B], None where every token is real
    order: Tensor | None = None  # [B,T]

    @classmethod
    def of(cls, mask: Tensor | None, T: int) -> _Packing:
        if mask is None:
            return cls()
        real = mask[:, -T:].bool()
        if bool(real.all()):
            return cls()
        return cls(real.sum(-1), torch.argsort(~real, dim=-1, stable=True))

    def pack(self, h: Tensor) -> Tensor:
        return h if self.order is None else h.gather(1, self.order[..., None].expand_as(h))

    def unpack(self, h: Tensor) -> Tensor:
        if self.order is None:
            return h
        return torch.empty_like(h).scatter(1, self.order[..., None].expand_as(h), h)
