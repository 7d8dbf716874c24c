"""Benchmarks: cases, timers, other libraries as peers, and reports. Every figure follows a check of the output it times."""
