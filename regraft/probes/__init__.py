"""The papers' small experiments, on any mixer: what an update rule does, and what small models learn."""
