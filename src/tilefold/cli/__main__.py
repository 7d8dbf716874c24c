"""`python -m tilefold.cli` is the `tilefold` command."""

from tilefold.cli import main

main()
