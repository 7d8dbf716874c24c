"""`python -m gpu_run`."""

import signal
import sys

from .cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes end with it
    sys.exit(main())
