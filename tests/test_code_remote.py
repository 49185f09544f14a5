"""Sandboxes that are not ours: the protocol, and SandboxFusion over HTTP, by a fake that follows its interface."""

import ast
import json
import pickle

import pytest

from dash_trl import CodeReward
from dash_trl.sandbox import SandboxError, SandboxFusion, UnfitTests, Verdict
from tests.fake_fusion import FakeFusion
from tests.launching import ends
from tests.tiny import refused

RIGHT = "def f(x): return x + 1"
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.fixture(scope="module")
def running():
    with FakeFusion() as one:
        yield one
        one.shutdown()


@pytest.fixture
def server(running, monkeypatch):
    running.waits = []
    monkeypatch.setattr(SandboxFusion._ask.retry, "sleep", running.waits.append)
    running.requests.clear()
    running.headers.clear()
    yield running
    running.answers.clear()


@pytest.fixture
def sandbox(server):
    return SandboxFusion(server.url, seconds=600)


# ---------------------------------------------------------------------------------------------------------- protocol


def test_any_object_with_run_is_a_sandbox():
    asked = []

    class Own:
        def run(self, program, tests, entry_point=None):
            asked.append((program, list(tests), entry_point))
            return Verdict(1, 1, "why")

    class Counted(Own):
        count = 3

    reward = CodeReward(Own())
    assert reward.max_concurrency is None
    score, notes = reward(f"```python\n{RIGHT}\n```", ["assert f(1)"], "f", inputs=["1"], outputs=["2"])
    assert (score, notes) == (0.0, {"passed": 0.5, "explanation": "why"})
    assert CodeReward(Counted()).max_concurrency == 3
    assert asked == [(RIGHT, ["assert f(1)", ("1", "2")], "f")]


# ----------------------------------------------------------------------------------------------------- SandboxFusion


def test_verdicts_of_a_server(sandbox):
    for program, tests, passed, failed, reason in [
        (RIGHT, TESTS, 2, 0, None),
        ("def f(x): return 2", TESTS, 1, 1, "AssertionError: "),
        ("def f(x) return 2", TESTS, 0, 2, "SyntaxError: expected ':' (solution.py, line 1)"),
        ("print(int(input()) + 1)", [("1\n", "2\n"), ("5", "6.0"), ("1", "3")], 2, 1, ""),
    ]:
        verdict = sandbox.run(program, tests, "f")
        assert (verdict.passed, verdict.failed) == (passed, failed), program
        assert verdict.reason == reason or reason == "" and verdict.reason.startswith("AssertionError"), program


FORGED = {
    "the end of its process": "import os\ndef f(x): os._exit(0)",
    "a line": "print('passed', flush=True)\nimport os; os._exit(0)",
    "a line in the tests' output": (
        "import json, os, sys\n"
        "with open(f'/proc/{os.getppid()}/fd/1', 'w') as file:\n"
        "    verdict = {'passed': 9, 'failed': 0, 'reason': None, 'unfit': None, 'ended': None}\n"
        "    print('0' * 32, json.dumps(verdict), file=file)\n"
        "os.kill(os.getppid(), 9)"
    ),
    "two megabytes in the tests' output": (
        "import os\nwith open(f'/proc/{os.getppid()}/fd/1', 'w') as file: file.write('x' * (2 << 20))"
    ),
    "the end of its tests": "import os\nos.kill(os.getppid(), 9)",
    "the tests in its memory": (
        "import gc\ndef f(x):\n"
        "    return next((2 for one in gc.get_objects() if 'assert f(1)' in str(one) and 'gc.' not in str(one)), None)"
    ),
    "a module that its tests import": (
        "with open('numpy.py', 'w') as file:\n"
        "    file.write('class array:\\n  size = 1\\n  __init__ = lambda *a: None\\n  __eq__ = lambda *a: True')\n"
        "class Number:\n    __module__ = 'numpy'\n    tolist = lambda self: [1]\n"
        "def f(x): return Number()"
    ),
    "the tests in its input": "import sys\nTESTS = sys.stdin.read()\ndef f(x): return 2 if TESTS else None",
}


def test_a_verdict_is_hard_to_forge_and_nothing_is_unscored(sandbox):
    for name, program in FORGED.items():
        assert not sandbox.run(program, ["assert f(1) == 2"]).right, name


def test_a_programs_time_out_is_wrong_and_its_process_ends(server, tmp_path):
    """On a busy machine it gets more time to begin."""
    number = tmp_path / "number"
    seconds = 0.5
    program = f"import os\nopen({str(number)!r}, 'w').write(str(os.getpid()))\ndef f(x):\n    while True: pass"
    while not (number.exists() and number.read_text()):
        seconds *= 2
        verdict = SandboxFusion(server.url, seconds=seconds).run(program, TESTS)
        assert not verdict.right and verdict.reason == f"more than {seconds:g} s"
    assert ends(int(number.read_text())), "it goes on"


def test_what_is_sent(server):
    one = SandboxFusion(
        f"{server.url}/run_code/", seconds=777, options={"memory_limit_MB": 512}, headers={"X-Key": "k"}
    )
    assert pickle.loads(pickle.dumps(one)).run(RIGHT, TESTS).right
    ((path, request),) = server.requests
    assert path == "/run_code" and server.headers[0]["X-Key"] == "k"
    assert request == request | {"language": "python", "run_timeout": 777, "memory_limit_MB": 512}
    ast.parse(request["code"], feature_version=(3, 10))  # that of SandboxFusion's older images
    assert RIGHT not in request["code"] and TESTS[0] not in request["code"]  # a file there, which a program can read


ERROR = json.dumps({"status": "SandboxError", "message": "no pod", "run_result": None}).encode()


def test_a_servers_failure_is_asked_again(server, sandbox):
    for answers, waits in [
        ([(500, {}, b"no")], [1.0]),
        ([(503, {}, b"no"), (429, {}, b""), (200, {}, ERROR)], [1.0, 2.0, 4.0]),
        ([(200, {"Content-Length": "9"}, b"{")], [1.0]),
    ]:
        server.answers = list(answers)
        server.waits[:] = []
        assert sandbox.run(RIGHT, TESTS).right
        assert server.waits == waits, answers


def finished(**result) -> bytes:
    done = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "no fork", **result}
    return json.dumps({"status": "Failed", "message": "", "run_result": done}).encode()


def test_a_servers_failure_is_no_verdict(server, sandbox):
    for answer, count, message in [
        ((200, {}, ERROR), 4, "ValueError: .*SandboxError.*no pod"),
        ((500, {}, b"out of order"), 4, "HTTP Error 500"),
        ((307, {"Location": "http://127.0.0.1:9/run_code"}, b""), 4, "HTTP Error 307"),
        ((200, {}, bytes(17 << 20)), 4, "JSONDecodeError"),
        ((200, {}, finished()), 1, "did not run the tests: .*no fork"),
        ((200, {}, finished(status="Error")), 1, "did not run the tests"),
    ]:
        server.answers = [answer] * count
        server.requests.clear()
        refused(message, sandbox.run, RIGHT, TESTS, error=SandboxError)
        assert len(server.requests) == count, message


def test_tests_that_score_no_program_are_an_error_of_theirs(sandbox):
    for tests, message in [
        (["assert f(1) =="], "SyntaxError"),
        ([("x" * (7 << 20), "")] * 5, "a request of .* bytes, and the limit is 33,554,432"),
    ]:
        refused(message, sandbox.run, RIGHT, tests, error=UnfitTests)


def test_an_address_that_cannot_be():
    for url in ["127.0.0.1:8080", "http://", "http://user:secret@127.0.0.1:8080", "ftp://a/run_code"]:
        with pytest.raises(ValueError, match="The URL of a SandboxFusion server must be") as error:
            SandboxFusion(url)
        assert "secret" not in str(error.value)
