"""Host side of the kernels: check, plan, allocate, launch.  The only place that launches anything.

dense     attention forward          backward  its gradients
sparse    block-sparse attention and the stages of its pipeline
cache     KV caches: attention over them, new keys into them, rotary embedding, merging
here      what all of them use: the call and its checks, the device, launches, operators, records of calls
"""
