"""A random sweep of every public operation, written from the documents, against fp64 formulas of its own.

    python -m sweep --seconds 240 --jobs 14 --out DIR      # a run; `make sweep SECONDS=240` is the same
    python -m sweep --reproduce '{"op": ...}'              # one problem again

A *problem* is plain data (JSON): an operation, its options and dims (which decide what is compiled), its sizes and a seed.
Nothing here imports `tilefold.reference`, a kernel or a plan.
"""
