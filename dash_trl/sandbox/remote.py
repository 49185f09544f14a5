"""`SandboxFusion`: programs run by a server of that name (https://github.com/bytedance/SandboxFusion), over HTTP.

run(program, tests) ──► POST /run_code: the checker's own source, with program and tests as its standard input
                    ◄── what it printed: a line before the program runs, and a line with the verdict

There the checker forks (`run_both`): the program is a process of its own, which the tests call, as in `Sandbox`. But
both have the same user, and nothing of this package confines them. The lines begin with a random number that the
program would have to find in the other process to forge a verdict.
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

MOST_SENT = 32 << 20  # bytes of a request
MOST_READ = 16 << 20  # bytes of an answer; the server cuts output at 1 MiB, which JSON may write six times as long
PATIENCE = 60.0  # seconds that the server may take beside the program's
TRIES = 4
PAUSE = 1.0  # seconds before the second try, then twice as many each time
LONGEST_PAUSE = 60.0  # that a server may ask for by Retry-After
AGAIN = (408, 429, 500, 502, 503, 504)

CODE = Path(checker.__file__).read_text(encoding="utf-8") + "\nrun_both()\n"


class SandboxFusion:
    """A server of ByteDance's SandboxFusion runs the programs, as for verl.

        CodeReward(SandboxFusion("http://10.0.0.5:8080"))

    The server needs Python 3.10 or newer as its `python`, and to allow `fork`. It limits what programs do.

    Args:
        url: of the server, with or without its path `/run_code`.
        seconds: for a program with all its tests, by the server's clock.
        count: requests at once.
        options: more fields of each request, such as `{"memory_limit_MB": 2048}`.
        headers: of each request, such as `{"Authorization": "Bearer …"}`.
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
                "The URL of a SandboxFusion server is http://HOST:PORT or https://HOST:PORT, without a user, a "
                "password or a query, which logs would show; give headers={'Authorization': ...} for a key."
            )
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.seconds, self.count = seconds, count
        self.options, self.headers = dict(options or {}), dict(headers or {})

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """See `ProgramSandbox`. The program's time-out is a verdict.

        Raises:
            UnfitTests: the tests are at fault, or too large to be sent.
            SandboxError: the server cannot be reached, failed, or could not run the checker.
        """
        nonce = secrets.token_hex(16)
        job = {"program": program, "tests": list(tests), "entry_point": entry_point, "nonce": nonce}
        request = {"code": CODE, "language": "python", "run_timeout": self.seconds, **self.options}
        body = json.dumps({**request, "stdin": json.dumps(job)}).encode()
        if len(body) > MOST_SENT:
            raise UnfitTests(f"the tests make a request of {len(body):,} bytes, of {MOST_SENT:,} at most")
        answer = self._ask(body)
        result = answer.get("run_result") or {}
        seconds = float(result.get("execution_time") or math.nan)
        if result.get("status") == "TimeLimitExceeded":
            return Verdict(0, 1, f"more than {self.seconds:g} s", seconds)
        lines = [line for line in (result.get("stdout") or "").split("\n") if line.startswith(nonce)]
        if result.get("status") != "Finished" or not lines:
            raise SandboxError(f"{self.url} did not run the tests: {json.dumps(answer):.1000}")
        verdict = None
        with suppress(ValueError):  # it has only begun, or was cut off
            verdict = json.loads(lines[-1][len(nonce) :])
        if verdict is None:
            return Verdict(0, 1, f"the tests' process ended with exit code {result.get('return_code')}", seconds)
        if verdict["unfit"] is not None:
            raise UnfitTests(f"these tests score no program: {verdict['unfit']}")
        ended = verdict["ended"] and f"the program's process ended; {verdict['ended']}"
        return Verdict(verdict["passed"], verdict["failed"], ended or verdict["reason"], seconds)

    def _ask(self, body: bytes) -> dict[str, Any]:
        """The server's answer; asks again, a few times, after what may pass."""
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
                if isinstance(error, TimeoutError):  # it would take as long again
                    raise failure from error
            if left:
                time.sleep(max(pause, asked_for))
                pause *= 2
        raise failure

    def _post(self, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """One request on a connection of its own. No redirect is followed: it would take the tests elsewhere."""
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
    """Of Retry-After, within limits; 0 for none, or for a date."""
    return min(LONGEST_PAUSE, float(text)) if text and text.isdecimal() else 0.0
