"""Serve a page that trains any model file in a browser on this machine, and compile for it.

The server trusts no request. Each must name this server in Host. A request to compile must also have the page's Origin
and the token, which is part of the printed address only. Nothing in a request becomes a path.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from graphopt.confined import confined
from graphopt.errors import GraphoptError, escaped
from graphopt.files import json_of
from graphopt.hosts import for_page
from graphopt.hosts.for_page import REFUSED, Choice

MOST_BYTES, MOST_CHOICE = 2**29, 2**12  # of a model, and of what a visitor chose
SECONDS = 60  # that a request may be silent
MOST_CONNECTIONS = 64  # that have not shown the token
COMPILE_SECONDS = 300
MEGABYTES, MEGABYTES_PER_MEGABYTE = 4096, 16  # of memory for a compilation, and more by the size of the model
ADDRESS = "127.0.0.1"
COMPILE = "/compile"
CHOICE = "graphopt-choice"  # a header, in JSON
VERSION = (1, 30)  # of onnxruntime-web, or a later minor one
INSTALL = f"npm install onnxruntime-web@{VERSION[0]}.{VERSION[1]}"
_RUNTIME = ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
_HERE = Path(__file__).parent
_PART = 2**20  # bytes of a body that are read at once
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
        GraphoptError: a file is missing, or the package is another version.
    """
    wanted, described = ".".join(map(str, VERSION)), runtime.parent / "package.json"
    said = json_of(described.read_text(), str(described)) if described.is_file() else None
    found = said.get("version") if isinstance(said, Mapping) else None
    major, minor, *_ = [int(part) for part in re.findall(r"\d+", str(found))] + [0, 0]
    if major != VERSION[0] or minor < VERSION[1]:
        raise GraphoptError(
            f"{described}: expected onnxruntime-web {wanted} or a later {VERSION[0]}.x, "
            f"found {found or 'no version'}: {INSTALL}"
        )
    files = {f"/{path.name}": path for folder in ("javascript", "web") for path in (_HERE / folder).glob("*.*")}
    files |= {f"/onnxruntime/{name}": runtime / name for name in _RUNTIME}
    for path in files.values():
        if not path.is_file():
            raise GraphoptError(f"{path}: expected a file of the page, found none: {INSTALL}")
    return {path: file for path, file in files.items() if file.suffix in _TYPES} | {"/": _HERE / "web" / "index.html"}


class PageServer(ThreadingHTTPServer):
    """Serve the page on a free port of this machine's own address, until `shutdown`.

    Args:
        runtime: as `page_files` takes it.

    Raises:
        GraphoptError: as `page_files`.
    """

    daemon_threads = True

    def __init__(self, runtime: Path) -> None:
        self.files = page_files(runtime)
        self.token = secrets.token_urlsafe(24)
        self.strangers: dict[socket.socket, None] = {}  # connections that have not shown the token, the oldest first
        self.one_at_a_time = threading.Lock()
        self.compiling: subprocess.Popen[bytes] | None = None
        super().__init__((ADDRESS, 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and end the oldest of strangers that are too many: other users may open any number."""
        self.strangers[request] = None
        for oldest in [*self.strangers][:-MOST_CONNECTIONS]:
            self.strangers.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        if self.compiling is not None:
            self.compiling.kill()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, but nothing of visitors who leave."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def hosts(self) -> list[str]:
        """Return the headers Host of this server; a page that points its own name at this address has another."""
        return [f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")]

    @property
    def address(self) -> str:
        """Return the address of the page, with the token behind #, which browsers do not send."""
        return f"http://{self.hosts[0]}/#{self.token}"


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = SECONDS

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        file = self.server.files.get(self.path.partition("?")[0])
        if file is None:
            self._answer(
                HTTPStatus.NOT_FOUND, b"graphopt serve: expected a file of the page, found none of this name\n"
            )
        else:
            self._answer(HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix])

    def do_POST(self) -> None:
        self.close_connection = True  # what is not read of a body would be the next request
        if not self._is_ours():
            return
        try:
            size, choice = self._asked()
            self.server.strangers.pop(self.connection, None)
            with self.server.one_at_a_time, TemporaryFile() as model, TemporaryFile() as answer:
                self._take(size, model)
                self._compile(size, choice, model, answer)
        except _RefusedError as refused:
            self._answer(refused.status, f"{refused}\n".encode())
            self._drop()
        except GraphoptError as error:
            self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, escaped(str(error)).encode())
            self._drop()

    def _asked(self) -> tuple[int, Choice]:
        """Return the size of the model in a request and the choice, before anything of the body is read."""
        said = {name: self.headers.get(name, "") for name in ("Origin", "Authorization", "Content-Length", CHOICE)}
        given = said["Authorization"].encode()
        if said["Origin"] not in [f"http://{host}" for host in self.server.hosts] or not hmac.compare_digest(
            given, f"Bearer {self.server.token}".encode()
        ):
            raise _RefusedError(
                HTTPStatus.FORBIDDEN,
                "graphopt serve: expected the token of its address, found none or another: open the address that it "
                "printed last",
            )
        if self.path != COMPILE:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"graphopt serve: expected {COMPILE}, found another path")
        if len(said[CHOICE]) > MOST_CHOICE:
            text = f"choice: expected at most {MOST_CHOICE:,} characters, found {len(said[CHOICE]):,}"
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        length = said["Content-Length"]
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 12 else 0
        if not 0 < size <= MOST_BYTES:
            text = f"the model: expected 1 to {MOST_BYTES:,} bytes, found {size:,}: take a smaller one"
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        return size, Choice.of(json_of(said[CHOICE], "choice"))

    def _take(self, size: int, model: BinaryIO) -> None:
        while size > (found := model.tell()):
            if not (part := self.rfile.read(min(size - found, _PART))):
                text = f"the model: expected {size:,} bytes, found {found:,}: send it again"
                raise _RefusedError(HTTPStatus.BAD_REQUEST, text)
            model.write(part)
        model.seek(0)

    def _compile(self, size: int, choice: Choice, model: BinaryIO, answer: BinaryIO) -> None:
        """Compile in a process with limits, which ends when the page has gone: a small file may ask for any work."""
        arguments = ["-m", for_page.__name__, json.dumps(asdict(choice))]
        megabytes = MEGABYTES + MEGABYTES_PER_MEGABYTE * size // 2**20
        command = confined(arguments, megabytes=megabytes, seconds=COMPILE_SECONDS)
        end = time.monotonic() + COMPILE_SECONDS
        with subprocess.Popen(command, stdin=model, stdout=answer, cwd=_HERE.parents[1]) as process:
            self.server.compiling = process
            while process.poll() is None:
                has_gone = bool(select.select([self.connection], [], [], 0.05)[0])
                if has_gone or time.monotonic() > end:
                    process.kill()
                    if has_gone:
                        return
                    break
        answer.seek(0)
        if process.returncode == REFUSED:
            raise GraphoptError(answer.read().decode())
        if process.returncode:
            text = (
                f"the model: expected one that compiles within {COMPILE_SECONDS} s and {megabytes:,} MB, found one "
                "that needs more, or an error that graphopt serve prints"
            )
            raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        self._begin(HTTPStatus.OK, os.fstat(answer.fileno()).st_size, "application/octet-stream")
        shutil.copyfileobj(answer, self.wfile)

    def _drop(self) -> None:
        """Read what still comes of a body: a page does not see an answer whose connection is reset."""
        end = time.monotonic() + SECONDS
        with contextlib.suppress(OSError):  # of a visitor who has gone
            self.connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < end and self.rfile.read1(_PART):
                pass

    def _is_ours(self) -> bool:
        """Answer a request under another name, such as one of a page that rebinds its own name to this address."""
        if self.headers.get_all("Host", []) in [[host] for host in self.server.hosts]:
            return True
        self.close_connection = True
        text = b"graphopt serve: expected its own address, found another: open the address that it printed last\n"
        self._answer(HTTPStatus.MISDIRECTED_REQUEST, text)
        self._drop()
        return False

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self._begin(status, len(content), kind)
        self.wfile.write(content)

    def _begin(self, status: HTTPStatus, size: int, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Leave the terminal to errors."""
