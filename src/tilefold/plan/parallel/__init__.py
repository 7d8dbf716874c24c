"""Plans of attention over several GPUs."""
