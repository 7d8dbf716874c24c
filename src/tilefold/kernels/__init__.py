"""@triton.jit entry points: prologue, fold, epilogue; one thin kernel per data layout.  Kernels never import kernels."""
