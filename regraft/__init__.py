"""regraft: convert pretrained Gated DeltaNet models to Bayesian Layers, distil, compare, report.

Importing it registers the model with transformers' Auto classes.
"""

import os

__version__ = "0.1.0"

if "_REGRAFT_COMPLETE" not in os.environ:  # a shell asks for words to complete: seconds sooner without models
    from transformers import AutoConfig, AutoModelForCausalLM

    from regraft.layers import RegraftConfig, RegraftForCausalLM

    AutoConfig.register(RegraftConfig.model_type, RegraftConfig)
    AutoModelForCausalLM.register(RegraftConfig, RegraftForCausalLM)
