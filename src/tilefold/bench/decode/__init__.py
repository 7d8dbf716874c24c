"""One step of generation over KV caches: cases, inputs, other libraries; and what a cache takes."""
