"""Plans of block-sparse attention and of what chooses its blocks."""
