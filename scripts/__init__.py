"""How the embedded teacher was made, the benchmarks, and the replication of the paper's experiment."""
