"""Plans of attention over a KV cache."""
