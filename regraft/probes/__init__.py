"""Small experiments that show what an update rule does, without training."""
