"""Block-sparse attention and the stages of its pipeline: coarse, select, fine, fuse."""
