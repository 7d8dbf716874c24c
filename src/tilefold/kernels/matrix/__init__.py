"""Matrix kernels: products, sums, transposes, convolutions, weights of few bits."""
