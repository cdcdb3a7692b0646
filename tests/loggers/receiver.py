"""A service on loopback that keeps every request it gets.

In:   HTTP requests of a logger
Out:  their paths, headers and bodies; a status and a JSON object as the answer to each
"""

import gzip
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """Listens until it is closed; `status` says how a request is answered."""

    def __init__(
        self,
        status: Callable[[Received], int] = lambda request: 200,
        answer: Callable[[Received], dict[str, Any]] = lambda request: {"message": "Accepted"},
    ) -> None:
        self.requests: list[Received] = []
        self.status = status
        self.answer = answer
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Received(self.path, headers, body)
                status = receiver.status(request)
                if status == 200:
                    receiver.requests.append(request)
                answer = json.dumps(receiver.answer(request)).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def at(self, path: str) -> list[Received]:
        return [one for one in self.requests if one.path == path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
