"""``python -m entropy_monitor`` is the console script ``entropy-monitor``."""

import sys

from entropy_monitor.cli import main

if __name__ == "__main__":
    sys.exit(main())
