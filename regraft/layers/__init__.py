"""The mixers and the decoder that hosts them."""

from regraft.layers.cache import MixerState, RegraftCache
from regraft.layers.config import RegraftConfig
from regraft.layers.mixers import MIXERS, BayesianLayer, GatedDeltaNet, Mixer
from regraft.layers.model import RegraftForCausalLM, RegraftModel

__all__ = [
    "MIXERS",
    "BayesianLayer",
    "GatedDeltaNet",
    "Mixer",
    "MixerState",
    "RegraftCache",
    "RegraftConfig",
    "RegraftForCausalLM",
    "RegraftModel",
]
