"""``python -m steelyard.cli``: the same as ``steelyard``."""

import sys

from steelyard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
