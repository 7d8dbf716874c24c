"""Host side of the matrix kernels: products, sums, transposes, convolutions, weights of few bits."""
