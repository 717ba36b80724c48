"""GPU kernels behind the backends."""
