"""Serve a page that trains any model file in a browser on this machine, and compile for it.

The page is a stranger until it proves to be ours: requests name this server as their host, those to compile also come
from its origin and have its token, which only its address tells. Nothing that a request says becomes a path.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from graphopt.errors import GraphoptError, escaped, line
from graphopt.files import json_of
from graphopt.hosts.for_page import Choice, compile_for_page
from graphopt.runtime.checkpoint import state_bytes

MOST_BYTES, MOST_CHOICE = 2**29, 2**12  # of a model, and of what a visitor chose
SECONDS = 60  # that a request may be silent
ADDRESS = "127.0.0.1"
COMPILE = "/compile"
CHOICE = "graphopt-choice"  # a header, in JSON
RUNTIME = ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
_HERE = Path(__file__).parent
_TYPES = {
    ".css": "text/css",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".wasm": "application/wasm",
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self' blob:; script-src 'self' blob: 'wasm-unsafe-eval'; "
    "img-src 'self' blob: data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Embedder-Policy": "require-corp",  # with this and the next, ONNX Runtime has threads
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_files(runtime: Path) -> dict[str, Path]:
    """Return the files of the page by their paths in addresses.

    Args:
        runtime: the folder `dist` of the package onnxruntime-web.

    Raises:
        GraphoptError: a file is missing.
    """
    files = {f"/{path.name}": path for folder in ("javascript", "web") for path in (_HERE / folder).glob("*.*")}
    files |= {f"/onnxruntime/{name}": runtime / name for name in RUNTIME}
    for path in files.values():
        if not path.is_file():
            raise GraphoptError(f"{path}: expected a file of the page, found none: npm install onnxruntime-web@1.30")
    return {path: file for path, file in files.items() if file.suffix in _TYPES} | {"/": _HERE / "web" / "index.html"}


class PageServer(ThreadingHTTPServer):
    """Serve the page on a free port of this machine's own address, until `shutdown`.

    Args:
        runtime: as `page_files` takes it.

    Raises:
        GraphoptError: a file of the page is missing.
    """

    daemon_threads = True

    def __init__(self, runtime: Path) -> None:
        self.files = page_files(runtime)
        self.token = secrets.token_urlsafe(24)
        self.one_at_a_time = threading.Lock()
        super().__init__((ADDRESS, 0), _Handler)

    @property
    def hosts(self) -> list[str]:
        """Return what the header Host of a request to this server is; another is a name that leads here."""
        return [f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")]

    @property
    def address(self) -> str:
        """Return the address of the page, with the token behind #, which browsers do not send."""
        return f"http://{self.hosts[0]}/#{self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = SECONDS

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        file = self.server.files.get(self.path.partition("?")[0])
        if file is None:
            self._answer(HTTPStatus.NOT_FOUND, b"expected a file of the page, found none\n")
        else:
            self._answer(HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix])

    def do_POST(self) -> None:
        self.close_connection = True  # what is not read of a body would be the next request
        if not self._is_ours():
            return
        said = {name: self.headers.get(name, "") for name in ("Origin", "Authorization", "Content-Length", CHOICE)}
        given = said["Authorization"].encode()
        if said["Origin"] not in [f"http://{host}" for host in self.server.hosts] or not hmac.compare_digest(
            given, f"Bearer {self.server.token}".encode()
        ):
            return self._answer(HTTPStatus.FORBIDDEN, b"expected the page that graphopt serve has opened\n")
        if self.path != COMPILE:
            return self._answer(HTTPStatus.NOT_FOUND, b"expected /compile\n")
        length = said["Content-Length"]
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 12 else 0
        if not 0 < size <= MOST_BYTES or len(said[CHOICE]) > MOST_CHOICE:
            text = f"expected a model of 1 to {MOST_BYTES:,} bytes, found {size:,}\n"
            return self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text.encode())
        model = self.rfile.read(size)
        try:
            choice = Choice.of(json_of(said[CHOICE], "choice"))
            with self.server.one_at_a_time:
                files = compile_for_page(model, choice)
        except GraphoptError as error:
            self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, escaped(str(error)).encode())
        except Exception as error:  # noqa: BLE001 - the page tells it, and the server goes on
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, escaped(f"{type(error).__name__}: {line(error)}").encode())
        else:
            content = state_bytes({name: np.frombuffer(data, np.uint8) for name, data in files.items()})
            self._answer(HTTPStatus.OK, content, "application/octet-stream")

    def _is_ours(self) -> bool:
        """Answer a request under another name, such as one of a page that rebinds its own name to this address."""
        if self.headers.get_all("Host", []) in [[host] for host in self.server.hosts]:
            return True
        self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"expected the address that graphopt serve has printed\n")
        return False

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Leave the terminal to errors."""
