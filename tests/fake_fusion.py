"""A server with the interface of SandboxFusion's `POST /run_code`, which runs Python without any protection.

And a sandbox that runs nothing.
"""

import json
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dash_trl import CodeReward
from dash_trl.sandbox import Verdict


class FakeFusion(ThreadingHTTPServer):
    """The server, which runs until `shutdown`.

    Attributes:
        answers: (status, headers, body) for the next requests, which then run no program.
        requests: the requests so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.requests: list[tuple[str, Any]] = []
        self.headers = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

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
            status = 200
            headers = {"Content-Type": "application/json"}
            body = json.dumps(answer(request)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """As documented: the status is that of the command, and Failed for a time-out or an exit code that is not 0."""
    assert request["language"] == "python" and isinstance(request["code"], str)
    result = {"status": "Finished", "execution_time": 0.1, "stderr": ""}
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


class Given:
    """A sandbox that keeps the programs that it is given."""

    def __init__(self):
        self.programs = []

    def run(self, program, tests, entry_point=None):
        self.programs.append(program)
        return Verdict(1, 0, None)


def found(completion: str, *columns: object, tests: str | None = "assert f(1)", **more: object) -> str | None:
    """The program of a completion that the reward runs."""
    sandbox = Given()
    CodeReward(sandbox)(completion, tests, *columns, **more)
    return sandbox.programs[0] if sandbox.programs else None
