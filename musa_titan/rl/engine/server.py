"""HTTP/1.1 for the rehearsal engine, in a process of its own that ends with its parent."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from musa_titan.rl.engine.routes import Engine, routes_of


def serve(host: str, port: int, model_path: str, seed: int, server_args: dict[str, Any], parent: int) -> None:
    """Load the model and serve until the process `parent` is gone."""
    import torch

    torch.set_num_threads(1)  # a rehearsal shares its few cores with trainers
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    engine = Engine(model_path, seed, server_args)
    _Server((host, port), _handler(engine)).serve_forever()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def _handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    routes = routes_of(engine)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            self._answer(json.loads(body) if body else {})

        def _answer(self, request: dict[str, Any]) -> None:
            handler = routes.get(self.path.partition("?")[0])
            if handler is None:
                self._send(404, {"error": f"the rehearsal engine has no {self.path}"})
                return
            try:
                self._send(200, handler(request))
            except Exception as error:
                traceback.print_exc()
                self._send(400, {"success": False, "message": str(error), "error": str(error)})

        def _send(self, status: int, reply: dict[str, Any]) -> None:
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing for each request."""

    return Handler
