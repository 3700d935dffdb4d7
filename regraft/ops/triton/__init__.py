"""The filter as Triton kernels. Imported only where Triton is: `regraft.ops.kalman` asks for it by name."""
