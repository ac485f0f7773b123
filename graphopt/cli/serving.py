"""Run `graphopt serve`: a page that trains any model file in a browser on this machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from graphopt.cli.messages import say
from graphopt.errors import GraphoptError
from graphopt.hosts.server import INSTALL, PageServer

SERVE = "serve"
PACKAGE = Path("node_modules", "onnxruntime-web", "dist")


def serve(console: Console) -> None:
    """Print the address of the page, and serve it until Ctrl-C.

    Raises:
        GraphoptError: ONNX Runtime for browsers is neither here nor in a folder above.
    """
    here = Path.cwd()
    runtime = next((folder / PACKAGE for folder in (here, *here.parents) if (folder / PACKAGE).is_dir()), None)
    if runtime is None:
        raise GraphoptError(
            f"{SERVE}: expected ONNX Runtime for browsers in node_modules here or in a folder above, found none: "
            + INSTALL
        )
    with PageServer(runtime) as server:
        say(console, "runtime", str(runtime))
        say(console, "page", f"{server.address} on this machine alone; Ctrl-C ends it")
        server.serve_forever()
