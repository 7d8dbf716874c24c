"""`python -m tilefold.cli`: the same as the command `tilefold`."""

from tilefold.cli import main

if __name__ == "__main__":
    main()
