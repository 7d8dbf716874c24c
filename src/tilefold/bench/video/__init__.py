"""The video pipeline by stages and in sweeps, and what its selection keeps of rendered video."""
