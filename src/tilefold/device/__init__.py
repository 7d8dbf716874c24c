"""Triton helpers that kernels are built from; they import nothing but Triton.

    state    the fold's algebra: init, step, merge, finish
    ranges   which KV tiles a band mask can touch, cut in edge, interior and edge
    source   where tile i lies (locate) and how it is brought (fetch)
    tile     loads and stores of whole tiles, and the casts between storage and arithmetic
    mods     score and mask modifications: softcap, ALiBi, bias, boolean mask, causal, window, and the user's own
    approximate functions of one instruction, less exact, for a user's mod
    grid     which rows a program makes
    fold     the loop over KV tiles, where the five meet
    cache    a KV cache's sources, page numbers asked a tile ahead, bytes into numbers; fold_cache: the loop over it
    work     which tiles of a cache a program owns; partials: results over parts of the keys, put together
    gradient the same loops backward: gradients of a tile of queries, of keys, of scores

Names: `i_` is an index of a tile or a head, `o_` are offsets [N], `m_` masks, `p_` pointers; capitals are constexpr.
A comment above a tile gives its shape.
"""
