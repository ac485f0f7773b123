"""`python -m graphopt` is the command `graphopt`."""

import sys

from graphopt.cli import main

sys.exit(main())
