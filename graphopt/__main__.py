"""Run the `graphopt` command by `python -m graphopt`."""

import sys

from graphopt.cli import main

sys.exit(main())
