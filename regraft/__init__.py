"""regraft: convert pretrained Gated DeltaNet models to Bayesian Layers, distil, compare, report.

Importing it registers the model with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from regraft.layers import RegraftConfig, RegraftForCausalLM

__version__ = "0.1.0"

AutoConfig.register(RegraftConfig.model_type, RegraftConfig)
AutoModelForCausalLM.register(RegraftConfig, RegraftForCausalLM)
