"""`python -m tilefold` is the `tilefold` command."""

from tilefold.cli import main

main()
