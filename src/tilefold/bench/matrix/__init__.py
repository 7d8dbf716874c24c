"""The operator collection: products, convolutions, and products with weights of few bits."""
