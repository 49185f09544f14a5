"""`SandboxFusion` runs programs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion), over HTTP.

Request and answer::

    run(program, tests) ──► POST /run_code: the source of `checker.py`; program and tests are its standard input
                        ◄── the checker's output: one line before the program runs, and one line with the verdict

On the server, `run_both` forks: the program runs in one process and the tests run in another, as in `Sandbox`. But both
processes have the same user, and this package does not confine them. The two lines of output begin with a random
number. To forge a verdict, the program would have to find this number in the memory of the tests' process.
"""

import http.client
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dash_trl.sandbox import checker
from dash_trl.sandbox.box import SandboxError, UnfitTests, Verdict
from dash_trl.sandbox.checker import Test

MOST_SENT = 32 << 20  # limit of a request, in bytes
MOST_READ = 16 << 20  # limit of an answer, in bytes; the server cuts output at 1 MiB, but JSON may make it 6 MiB
PATIENCE = 60.0  # seconds to wait for the server in addition to the program's time limit
TRIES = 4  # number of tries after which a temporary error is raised
PAUSE = 1.0  # seconds before the second try; doubled before each further try
LONGEST_PAUSE = 60.0  # upper limit of the server's Retry-After header, in seconds
AGAIN = (408, 429, 500, 502, 503, 504)  # HTTP status codes after which a request is repeated

CODE = Path(checker.__file__).read_text(encoding="utf-8") + "\nrun_both()\n"


class SandboxFusion:
    """Runs programs against tests on a server of ByteDance's SandboxFusion, which verl uses, too.

    The server's `python` has to be Python 3.10 or newer, and the server has to allow `fork`. This class limits only the
    time of a program (`seconds`). All other limits are the server's own.

    Example::

        CodeReward(SandboxFusion("http://10.0.0.5:8080"))

    Args:
        url: address of the server, with or without the path `/run_code`.
        seconds: limit of wall time on the server for a program with all its tests, in seconds.
        count: largest number of requests at once.
        options: more fields of each request's JSON body, such as `{"memory_limit_MB": 2048}`.
        headers: HTTP headers for each request, such as `{"Authorization": "Bearer …"}`.

    Raises:
        ValueError: if `url` is not the address of a server, or has a user, a password or a query.
    """

    def __init__(
        self,
        url: str,
        *,
        seconds: float = 10.0,
        count: int = 32,
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise ValueError(
                "The URL of a SandboxFusion server must be http://HOST:PORT or https://HOST:PORT, without a user, a "
                "password or a query, which would appear in logs. Pass a key by headers={'Authorization': ...}."
            )
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.seconds, self.count = seconds, count
        self.options, self.headers = dict(options or {}), dict(headers or {})

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Run a program against tests. A program that takes too long gets a verdict: it has failed.

        Args:
            program: see `ProgramSandbox.run`.
            tests: see `ProgramSandbox.run`.
            entry_point: see `ProgramSandbox.run`.

        Returns:
            The verdict.

        Raises:
            UnfitTests: if the tests are wrong, or too large to be sent.
            SandboxError: if the server cannot be reached, fails, or cannot run the checker.
        """
        nonce = secrets.token_hex(16)
        job = {"program": program, "tests": list(tests), "entry_point": entry_point, "nonce": nonce}
        request = {"code": CODE, "language": "python", "run_timeout": self.seconds, **self.options}
        body = json.dumps({**request, "stdin": json.dumps(job)}).encode()
        if len(body) > MOST_SENT:
            raise UnfitTests(f"the tests make a request of {len(body):,} bytes, and the limit is {MOST_SENT:,}")
        answer = self._ask(body)
        result = answer.get("run_result") or {}
        seconds = float(result.get("execution_time") or math.nan)
        if result.get("status") == "TimeLimitExceeded":
            return Verdict(0, 1, f"more than {self.seconds:g} s", seconds)
        lines = [line for line in (result.get("stdout") or "").split("\n") if line.startswith(nonce)]
        if result.get("status") != "Finished" or not lines:
            raise SandboxError(f"{self.url} did not run the tests: {json.dumps(answer):.1000}")
        verdict = None
        with suppress(ValueError):  # if there is only the first line, or the verdict was cut off
            verdict = json.loads(lines[-1][len(nonce) :])
        if verdict is None:
            return Verdict(0, 1, f"the tests' process ended with exit code {result.get('return_code')}", seconds)
        if verdict["unfit"] is not None:
            raise UnfitTests(f"these tests cannot score a program: {verdict['unfit']}")
        ended = verdict["ended"] and f"the program's process ended; {verdict['ended']}"
        return Verdict(verdict["passed"], verdict["failed"], ended or verdict["reason"], seconds)

    def _ask(self, body: bytes) -> dict[str, Any]:
        """Send a request and return the answer; repeat it a few times after temporary errors."""
        pause = PAUSE
        for left in reversed(range(TRIES)):
            asked_for = 0.0
            try:
                status, headers, text = self._post(body)
                if status == 200:
                    answer = json.loads(text)
                    if isinstance(answer, dict) and answer.get("status") in ("Success", "Failed"):
                        return answer
                failure = SandboxError(f"{self.url} answered with HTTP status {status}: {text[:500]!r}")
                if status not in (200, *AGAIN):
                    raise failure
                asked_for = _seconds(headers.get("retry-after"))
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = SandboxError(f"{self.url} gave no answer: {type(error).__name__}: {error}")
                if isinstance(error, TimeoutError):  # another try would take as long
                    raise failure from error
            if left:
                time.sleep(max(pause, asked_for))
                pause *= 2
        raise failure

    def _post(self, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send one request on a new connection. A redirect is not followed, because it would send the tests elsewhere.

        Returns:
            Status, headers and body of the answer.
        """
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=self.seconds + PATIENCE)
        try:
            connection.request("POST", parts.path, body, {"Content-Type": "application/json", **self.headers})
            response = connection.getresponse()
            text = response.read(MOST_READ + 1)
        finally:
            connection.close()
        if len(text) > MOST_READ:
            raise SandboxError(f"{self.url} answered with more than {MOST_READ:,} bytes")
        return response.status, response.headers, text


def _seconds(text: str | None) -> float:
    """Parse the header Retry-After as seconds, within limits; 0 if it is missing or a date."""
    return min(LONGEST_PAUSE, float(text)) if text and text.isdecimal() else 0.0
