"""Block-sparse attention, and what chooses its blocks."""
