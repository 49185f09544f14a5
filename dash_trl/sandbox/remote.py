"""`SandboxFusion` runs programs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion), over HTTP.

::

    run(program, tests) ──► POST /run_code: the source of `checker.py`; program and tests are its standard input
                        ◄── the checker's output

Only the server confines the two processes, which have the same user. To forge a verdict, the program would have to find
the job's nonce in the memory of the tests' process.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from tenacity import retry, retry_if_not_exception_type, stop_after_attempt, wait_exponential

from dash_trl.sampling import BASE_URL
from dash_trl.sandbox import checker
from dash_trl.sandbox.checker import Test
from dash_trl.sandbox.protocol import SandboxError, UnfitTests, Verdict, job_of, read_verdict

MOST_SENT = 32 << 20  # limit of a request, in bytes
MOST_READ = 16 << 20  # limit of an answer, in bytes; the server cuts output at 1 MiB, but JSON may make it 6 MiB
PATIENCE = 60.0  # seconds to wait for the server in addition to the program's time limit
TRIES = 4  # number of tries; the pauses are 1, 2 and 4 s

CODE = inspect.getsource(checker)


class SandboxFusion:
    """Runs programs against tests on a server of ByteDance's SandboxFusion, which verl uses, too.

    The server's `python` has to be Python 3.10 or newer, and the server has to allow `fork`. All limits but `seconds`
    are the server's own.

    Example::

        CodeReward(SandboxFusion("http://10.0.0.5:8080"))

    Args:
        url: address of the server, with or without the path `/run_code`.
        seconds: limit of wall time on the server for a program with all its tests.
        count: largest number of requests at once.
        options: more fields of each request's JSON body, such as `{"memory_limit_MB": 2048}`.
        headers: HTTP headers for each request, such as `{"Authorization": "Bearer …"}`.

    Raises:
        ValueError: if `url` is no address, or has a user, a password or a query.
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
        if not BASE_URL.fullmatch(url):
            raise ValueError(
                "The URL of a SandboxFusion server must be http://HOST:PORT or https://HOST:PORT, without a user, a "
                "password or a query, which would appear in logs. Pass a key by headers={'Authorization': ...}."
            )
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.seconds = seconds
        self.count = count
        self.options = dict(options or {})
        self.headers = dict(headers or {})

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Run a program against tests, see `ProgramSandbox.run`. A program that takes too long has failed."""
        nonce, job = job_of(program, tests, entry_point)
        request = {"code": CODE, "language": "python", "run_timeout": self.seconds, **self.options}
        body = json.dumps({**request, "stdin": job}).encode()
        if len(body) > MOST_SENT:
            raise UnfitTests(f"the tests make a request of {len(body):,} bytes, and the limit is {MOST_SENT:,}")
        try:
            result = self._ask(body)
        except Exception as error:
            raise SandboxError(f"{self.url} gave no result: {type(error).__name__}: {error}") from error
        if result["status"] == "TimeLimitExceeded":
            return Verdict(0, len(tests), f"more than {self.seconds:g} s")
        verdict = read_verdict(result["stdout"], nonce, len(tests))
        if result["status"] != "Finished" or verdict is None:
            raise SandboxError(f"{self.url} did not run the tests: {json.dumps(result):.1000}")
        return verdict

    # After a time-out, another try would take as long.
    @retry(
        retry=retry_if_not_exception_type(TimeoutError),
        stop=stop_after_attempt(TRIES),
        wait=wait_exponential(),
        reraise=True,
    )
    def _ask(self, body: bytes) -> dict[str, Any]:
        request = Request(self.url, body, {"Content-Type": "application/json"})
        for name, value in self.headers.items():
            request.add_unredirected_header(name, value)  # it may be a key, and another server must not get it
        with build_opener(ProxyHandler({})).open(request, timeout=self.seconds + PATIENCE) as response:
            answer = json.loads(response.read(MOST_READ))
        if answer["status"] not in ("Success", "Failed"):
            raise ValueError(f"{answer!r:.500}")
        return dict(answer["run_result"])
