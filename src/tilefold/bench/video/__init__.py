"""The video pipeline by stages and in sweeps."""
