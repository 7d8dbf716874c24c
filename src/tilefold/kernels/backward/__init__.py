"""The backward pass of dense attention."""
