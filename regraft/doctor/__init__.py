"""`regraft doctor`: what is installed here, whether it fits together, whether kernels compute right."""
