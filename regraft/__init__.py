"""regraft: convert pretrained Gated DeltaNet models to Bayesian Layers, distil, compare, report."""

__version__ = "0.1.0"
