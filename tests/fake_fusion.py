"""A server with the interface of SandboxFusion's `POST /run_code`, which runs Python without any protection."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeFusion(ThreadingHTTPServer):
    """The server.

    Attributes:
        answers: (status, headers, body) for the next requests, which then run no program.
        requests: the requests so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeFusion

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, request))
        self.server.headers.append(self.headers)
        if self.server.answers:
            status, headers, body = self.server.answers.pop(0)
        else:
            status, headers, body = 200, {"Content-Type": "application/json"}, json.dumps(answer(request)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """As documented: the status is that of the command, and Failed for a time-out or an exit code that is not 0."""
    assert request["language"] == "python" and isinstance(request["code"], str)
    result: dict[str, Any] = {"status": "Finished", "execution_time": 0.1, "stderr": ""}
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", request["code"]],
                input=request.get("stdin") or "",
                capture_output=True,
                text=True,
                timeout=request.get("run_timeout", 10),
                cwd=folder,
            )
        result |= {"return_code": done.returncode, "stdout": done.stdout[: 1 << 20], "stderr": done.stderr[: 1 << 20]}
    except subprocess.TimeoutExpired:
        result |= {"status": "TimeLimitExceeded", "return_code": None, "stdout": ""}
    status = "Success" if result["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


@contextmanager
def fake_fusion() -> Iterator[FakeFusion]:
    with FakeFusion() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
