"""The mixers and the decoder that hosts them."""

from regraft.layers.cache import MixerState, RegraftCache
from regraft.layers.config import RegraftConfig
from regraft.layers.mixer import Mixer
from regraft.layers.mixers import (
    GLA,
    KDA,
    MIXERS,
    BayesianLayer,
    CovarianceReset,
    DeltaNet,
    GatedDeltaNet,
    KalmanDeltaNet,
    LinearAttention,
    Mamba2SSD,
    RetNet,
)
from regraft.layers.model import RegraftForCausalLM, RegraftModel

__all__ = [
    "GLA",
    "KDA",
    "MIXERS",
    "BayesianLayer",
    "CovarianceReset",
    "DeltaNet",
    "GatedDeltaNet",
    "KalmanDeltaNet",
    "LinearAttention",
    "Mamba2SSD",
    "Mixer",
    "MixerState",
    "RegraftCache",
    "RegraftConfig",
    "RegraftForCausalLM",
    "RegraftModel",
    "RetNet",
]
