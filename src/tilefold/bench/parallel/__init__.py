"""Context parallelism on the ranks that there are: checked, timed, traced."""
