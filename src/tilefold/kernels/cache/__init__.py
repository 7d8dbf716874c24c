"""Attention over a KV cache, and what writes one."""
