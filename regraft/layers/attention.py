"""Softmax attention, which hybrids of flash-linear-attention have in some layers; kept, never converted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.layers.cache import NO_TOKEN, KeyValues
from regraft.layers.config import RegraftConfig


class Attention(nn.Module):
    """Causal attention with rotary embeddings and grouped key heads; fla's parameter names.

    Settings (those of fla's `attn` entry):
        num_heads: query heads, of width `hidden_size / num_heads`; num_kv_heads: key heads, a divisor.
        qkv_bias: biases of the three projections.
        window_size: tokens that a token sees, itself counted; None for all before it.
        rope_theta: base of the rotary frequencies.
    """

    kind = "attention"
    float32_parameters: tuple[str, ...] = ()
    new_parameters: tuple[str, ...] = ()

    def __init__(
        self,
        config: RegraftConfig,
        num_heads: int,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        d, kv_heads = config.hidden_size, num_kv_heads or num_heads
        if d % (2 * num_heads) or num_heads % kv_heads:
            raise ValueError(
                f"attention: {num_heads} heads, {kv_heads} of them keys', do not divide width {d}"
            )
        self.head_dim, self.window_size, self.rope_theta = d // num_heads, window_size, rope_theta
        self.q_proj = nn.Linear(d, d, bias=qkv_bias)
        self.k_proj = nn.Linear(d, kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(d, kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(
        self,
        x: Tensor,
        state: KeyValues | None = None,
        lengths: Tensor | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, KeyValues | None]:
        """Attend over `x [B,T,d]` and the tokens in `state`; arguments as those of `Mixer.forward`."""
        B, T, _ = x.shape
        heads = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = heads
        column = torch.arange(T, device=x.device).expand(B, T)
        document = None
        if cu_seqlens is not None:
            document = torch.bucketize(column, cu_seqlens[1:-1], right=True)
            column = column - cu_seqlens[document]
        position = column if state is None else column + state.seen[:, None]
        q, k = self._rotated(q, position), self._rotated(k, position)
        told = position if lengths is None else position.where(column < lengths[:, None], NO_TOKEN)
        here = KeyValues(k, v, told, position[:, -1] + 1 if lengths is None else position[:, 0] + lengths)
        keys = here if state is None else state.followed_by(here)
        plain = state is None and lengths is None and document is None and self.window_size is None
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.k.transpose(1, 2),
            keys.v.transpose(1, 2),
            attn_mask=None if plain else self._visible(position, keys.position, document)[:, None],
            is_causal=plain,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        y = self.o_proj(o.transpose(1, 2).flatten(2))
        return y, keys.within(self.window_size) if use_cache else None

    def _rotated(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotary embedding of `x [B,T,H,D]` at `position [B,T]`: channels i and i + D/2 make a pair."""
        half = self.head_dim // 2
        exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angle = (position[..., None] * self.rope_theta**-exponent)[:, :, None]  # [B,T,1,D/2]
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def _visible(self, query: Tensor, key: Tensor, document: Tensor | None) -> Tensor:
        """Which keys `[B,S]` each query `[B,T]` sees, `[B,T,S]`."""
        distance = query[:, :, None] - key[:, None]
        visible = distance >= 0
        if self.window_size is not None:
            visible &= distance < self.window_size
        if document is not None:
            visible &= document[:, :, None] == document[:, None]
        # Its own column, which a real token sees anyway: a row without any key would be NaN.
        own = torch.eye(query.shape[1], dtype=torch.bool, device=query.device)
        return visible | F.pad(own, (key.shape[1] - query.shape[1], 0))


def mixers_of(attn: Any, num_layers: int) -> dict[int, dict[str, Any]]:
    """Entries of `RegraftConfig.mixers` for what fla's config calls `attn`: one mapping or a list of them.

    Raises:
        ValueError: not of that form, a field that this layer has not, or layers that are not there.
    """
    found: dict[int, dict[str, Any]] = {}
    fields = ("num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")
    for entry in attn if isinstance(attn, list) else [attn]:
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("layers"), list)
            or "num_heads" not in entry
        ):
            raise ValueError(f"attn: {entry!r} does not name layers and num_heads")
        unknown = sorted(set(entry) - {"layers", *fields})
        if unknown:
            raise ValueError(f"attn: {', '.join(unknown)} unknown")
        for layer in entry["layers"]:
            if layer in found or layer not in range(num_layers):
                raise ValueError(f"attn: layer {layer!r} is named twice or is not one of {num_layers}")
            found[layer] = {
                "kind": Attention.kind,
                **{n: entry[n] for n in fields if entry.get(n) is not None},
            }
    return found
