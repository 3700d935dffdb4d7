"""regraft: convert pretrained Gated DeltaNet models to Bayesian Layers, distil, compare, report.

Importing it registers the model with transformers' Auto classes.
"""

import os

__version__ = "0.1.0"

if "_REGRAFT_COMPLETE" not in os.environ:  # a shell asks for words to complete: seconds sooner without models
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        from regraft.layers import RegraftConfig, RegraftForCausalLM
    except (ImportError, RuntimeError) as error:  # transformers makes either of what its neighbours raise
        from regraft.doctor.known import why

        raise ImportError(why(error)) from error
    AutoConfig.register(RegraftConfig.model_type, RegraftConfig)
    AutoModelForCausalLM.register(RegraftConfig, RegraftForCausalLM)
