"""KV caches: attention over them, new keys into them, rotary embedding, merging of results."""
