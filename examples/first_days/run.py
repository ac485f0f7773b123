"""Play the first days of five roles with the graphopt of a checkout, and print a row of guides/first_days.md for each.

Run it: python examples/first_days/run.py [--checkout FOLDER] [ROLE ...]
It needs the extras cpu, sklearn and images, torch, make, a C compiler, node and npm.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path

from desk import Desk

ROLES = ("edge", "data_scientist", "back_end", "writer", "operations")
HEAD = "| role | commands | lines of programs | refusals | tracebacks | seconds | result |\n" + "|---" * 7 + "|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roles", nargs="*", default=ROLES, metavar="ROLE", help=", ".join(ROLES))
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--show", action="store_true", help="print what was refused")
    said = parser.parse_args()
    print(HEAD)
    for role in said.roles:
        with tempfile.TemporaryDirectory() as folder:
            desk = Desk(said.checkout.resolve(), Path(folder))
            print(desk.row(role.replace("_", " "), importlib.import_module(role).play(desk)), flush=True)
            if said.show:
                print(*(f"    {refusal}" for refusal in desk.refusals), sep="\n")


if __name__ == "__main__":
    main()
