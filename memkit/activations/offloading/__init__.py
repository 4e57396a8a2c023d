"""Let saved tensors leave for host memory, and have them back: the moving stage."""
