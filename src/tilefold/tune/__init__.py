"""Measured plans: which problems, which candidates, how each is checked and timed; the table is `tilefold.plan.table`'s."""
