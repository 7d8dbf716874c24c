"""How matrix kernels are cut: tiles, orders, splits, and what is left to the vendor's library.  Pure."""
