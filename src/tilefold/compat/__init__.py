"""Other people's spelling of what tilefold does: no kernels, no planning."""
