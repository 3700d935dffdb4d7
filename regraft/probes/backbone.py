"""The model around the mixers of a probe: pre-norm residual blocks, as small as the papers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from regraft.layers.config import RegraftConfig
from regraft.layers.mixer import RMSNorm, ShortConvolution
from regraft.layers.model import MLP, RegraftPreTrainedModel
from regraft.probes.mixers import build, mixed, prepare
from regraft.probes.schema import MixerSpec

Wrapper = Callable[[nn.Module], nn.Module]  # puts a mixer into a host of its own


class GatedConvolution(nn.Module):
    """Local mixing that is the same for every mixer: a short causal convolution, gated by the input."""

    def __init__(self, width: int, taps: int = 3) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * width, bias=False)
        self.conv = ShortConvolution(width, taps)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B,T,d] -> [B,T,d]`."""
        y, gate = self.in_proj(x).chunk(2, dim=-1)
        return self.out_proj(self.conv(y, None, None)[0] * gate)


class _Block(nn.Module):
    def __init__(self, config: RegraftConfig, mixer: nn.Module | None, mlp: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = mixer
        if mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = MLP(config)

    def forward(self, h: Tensor, *context: Tensor) -> Tensor:
        assert self.mixer is not None
        x = self.norm(h)
        h = h + (self.mixer(x, *context) if context else mixed(self.mixer, x))
        return h + self.mlp(self.mlp_norm(h)) if hasattr(self, "mlp") else h


class Backbone(RegraftPreTrainedModel):
    """Embedding, blocks, norm, read-out.

    Args:
        config: its width, and `intermediate_size`, the width of the MLPs.
        embed: from the probe's tokens to `[B,T,d]`.
        readout: from `[...,d]` to the predictions.
        layers: `mixer` or `conv` for each block.
        spec: the mixer under test.
        mlp: whether blocks have an MLP.
        chunk_size: tokens that a filter takes at once.
        wrap: host of every mixer, which then also gets the context of `forward`.

    Raises:
        UserError: the mixer cannot be built.
    """

    def __init__(
        self,
        config: RegraftConfig,
        embed: nn.Module,
        readout: nn.Module,
        layers: Sequence[str],
        spec: MixerSpec,
        *,
        mlp: bool,
        chunk_size: int = 64,
        wrap: Wrapper | None = None,
    ) -> None:
        super().__init__(config)
        self.embed, self.readout = embed, readout
        made = [build(spec, config) if kind == "mixer" else None for kind in layers]
        # Foreign classes initialise themselves, so they are put in after `post_init`.
        self.blocks = nn.ModuleList(
            _Block(config, GatedConvolution(config.hidden_size) if m is None else m[0] if m[1] else None, mlp)
            for m in made
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()
        for block, m in zip(self.blocks, made, strict=True):
            if m is not None:
                prepare(m[0], spec, chunk_size)
                block.mixer = m[0] if wrap is None else wrap(m[0])

    def forward(self, x: Tensor, *context: Tensor, at: Tensor | None = None) -> Tensor:
        """Predictions of the tokens `x [B,T,...]`, or of those at positions `at [B,Q]` only."""
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, *context)
        if at is not None:
            h = h.gather(1, at[..., None].expand(-1, -1, h.shape[-1]))
        return self.readout(self.norm(h))


def decayed(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters that weight decay touches, matrices, and those it leaves alone."""
    kept = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        for name in getattr(module, "float32_parameters", ())
    }
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.dim() > 1 and not any(n.startswith(k) for k in kept)]
    rest = [p for n, p in trained if p.dim() <= 1 or any(n.startswith(k) for k in kept)]
    return matrices, rest


def parameters(model: nn.Module) -> int:
    """Trained numbers."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
