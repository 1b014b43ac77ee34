"""`python -m largetrain [command] ...`; no command means train."""

import sys

from largetrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
