"""Plans of the backward pass of dense attention."""
