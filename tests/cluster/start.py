"""`python -m tests.cluster.start`: `largetrain launch` with stand-ins (`tests.cluster.stand_in`) as ranks."""

import sys

from largetrain.cli import launch, main

launch.PROGRAM = ("-m", "tests.cluster.stand_in")

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
