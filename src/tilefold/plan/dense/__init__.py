"""Plans of dense attention."""
