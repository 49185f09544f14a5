"""The backends of rewards: whatever a call does, it gets exactly one outcome, its own, and harms no other call."""

import asyncio
import ctypes
import importlib.util
import math
import os
import queue
import random
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from dash_trl.workers import (
    AsyncCalls,
    Backend,
    Call,
    GivenUp,
    Overdue,
    ProcessCalls,
    RayCalls,
    RetriedCalls,
    ThreadCalls,
    WorkerDied,
    ray_calls,
)
from dash_trl.workers.processes import FUNCTIONS_KEPT
from tests.test_workers import ends

ROOT = Path(__file__).parents[1]
MINUTES = 300.0  # for what takes no time, on a machine however busy
SOON = 0.5  # after which a call that hangs is given up


class Asked(Exception):
    """Raised as asked."""


class Unsendable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Unreadable(Exception):
    """Its pickle calls it with one argument."""

    def __init__(self, code: int, text: str):
        super().__init__(f"{text} {code}")


def hang() -> None:
    while True:
        time.sleep(1)


def hang_deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    hang()


def raise_(error: BaseException) -> None:
    raise error


def fork() -> None:
    """The child comes back from the call, too."""
    os.fork()


# What a call does, and its outcome: a value, or the type of its error and what that says.
ANYWHERE = {
    "a value": (lambda: "mine", "mine"),
    "None": (lambda: None, None),
    "NaN": (lambda: math.nan, math.nan),
    "inf": (lambda: -math.inf, -math.inf),
    "raise": (lambda: raise_(Asked("as asked")), (Asked, "as asked")),
    "hang": (hang, (TimeoutError, "took more than 0.5 s")),
}
IN_A_PROCESS = {
    "hang in C": (lambda: sum(range(10**15)), (TimeoutError, "took more than 0.5 s")),
    "hang, deaf to signals": (hang_deaf, (TimeoutError, "took more than 0.5 s")),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), (WorkerDied, "killed by SIGKILL")),
    "segmentation fault": (lambda: ctypes.string_at(0), (WorkerDied, "killed by SIGSEGV")),
    "os._exit": (lambda: os._exit(0), (WorkerDied, "exit code 0")),
    "sys.exit": (lambda: sys.exit(3), (RuntimeError, "SystemExit: 3")),
    "out of memory": (lambda: len(bytearray(64 << 30)), (MemoryError, "")),
    "value that cannot be sent": (threading.Lock, (TypeError, "returned a lock, which cannot be sent back")),
    "error that cannot be sent": (lambda: raise_(Unsendable()), (RuntimeError, "Unsendable: holds a lock")),
    "error that cannot be read": (lambda: raise_(Unreadable(7, "code")), (RuntimeError, "Unreadable: code 7")),
    "fork": (fork, None),
}
FAULTS = {**ANYWHERE, **IN_A_PROCESS}


def act(what: str, i: int, log: str) -> object:
    """It writes that it was called."""
    with open(log, "a") as file:
        file.write(f"{i}\n")
    return i if what == "own number" else FAULTS[what][0]()


BACKENDS: dict[str, Callable[[], Backend]] = {"process": lambda: ProcessCalls(2), "ray": lambda: RayCalls(in_flight=64)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[str]:
    """The address of the Ray that `RayCalls` starts where there is none. It leaves nothing in the home folder."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    folder = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have 107 characters at most
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", *ray_calls.LOCAL_RAY):
            patch.delenv(name, raising=False)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(ray_calls, "default_workers", lambda: 2)
        import ray  # as TRL does where vLLM is installed, before the variables are set

        RayCalls().close()
        assert not ray_calls.LOCAL_RAY.keys() & os.environ.keys()
        for name, value in ray_calls.LOCAL_RAY.items():
            patch.setenv(name, value)  # for processes of the tests that share it
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=BACKENDS)
def backend_name(request) -> str:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return request.param


@pytest.fixture(scope="module")
def backend(backend_name) -> Iterator[Backend]:
    backend = BACKENDS[backend_name]()
    yield backend
    backend.close()


class Sheet:
    """A list of calls that records which of them are finished."""

    def __init__(self, function: Callable, arguments: Sequence[dict], timeout: float | Sequence[float] = MINUTES):
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.stops = [threading.Event() for _ in arguments]
        timeouts = [timeout] * len(arguments) if isinstance(timeout, float) else timeout
        self.calls = [
            Call(function, one, timeout=seconds, done=lambda _, i=i: self._done.put(i), stop=self.stops[i])
            for i, (one, seconds) in enumerate(zip(arguments, timeouts, strict=True))
        ]

    def wait(self, count: int | None = None) -> list[int]:
        """Waits until `count` calls (None = all) are finished; returns their numbers in the order of their ends."""
        return [self._done.get(timeout=MINUTES) for _ in self.calls[:count]]

    def run(self, backend: Backend) -> list[Call]:
        backend.submit(self.calls)
        assert sorted(self.wait()) == list(range(len(self.calls)))
        return self.calls


def check(call: Call, expected: object) -> None:
    if isinstance(expected, tuple):
        kind, text = expected
        assert type(call.error) is kind and text in str(call.error) and call.value is None, repr(call.error)
    else:
        assert call.error is None, repr(call.error)
        assert call.value == expected or call.value != call.value and expected != expected


def test_a_call_ends_once_with_its_own_outcome_and_takes_no_other_along(backend, tmp_path):
    """All faults at once, among calls without any; each is called once, whatever becomes of its neighbours."""
    whats = [*FAULTS, *["own number"] * len(FAULTS) * 4]
    random.Random(0).shuffle(whats)
    arguments = [{"what": what, "i": i, "log": str(tmp_path / "log")} for i, what in enumerate(whats)]
    calls = Sheet(act, arguments, [SOON if "hang" in what else MINUTES for what in whats]).run(backend)
    for i, (what, call) in enumerate(zip(whats, calls, strict=True)):
        check(call, FAULTS[what][1] if what in FAULTS else i)
    raised = calls[whats.index("raise")].error
    assert "in raise_\n    raise error" in "".join(raised.__notes__), "it does not tell where in the worker"
    assert Counter(map(int, (tmp_path / "log").read_text().split())) == Counter(range(len(whats)))


def meet(folder: str, i: int, wait_for: int | None) -> int:
    """Returns after another one has."""
    while wait_for is not None and not Path(folder, str(wait_for)).exists():
        time.sleep(0.01)
    Path(folder, str(i)).touch()
    return i


def test_what_is_too_large_for_a_socket_at_once(backend):
    """Both ways at the same time, while neither side reads."""
    arguments = [{"text": str(i % 10) * (1 << 20)} for i in range(24)]
    calls = Sheet(lambda text: text[::-1], arguments).run(backend)
    assert all(call.value == one["text"] for call, one in zip(calls, arguments, strict=True))


def test_functions_that_are_made_anew_for_each_call_beside_one_that_stays(backend):
    """A worker keeps some of them, and is sent the others again."""
    for i in range(FUNCTIONS_KEPT + 3):
        (new,), (old,) = Sheet(lambda x, i=i: x * i, [{"x": 3}]).run(backend), Sheet(repr_of, [{"x": i}]).run(backend)
        assert (new.value, old.value) == (3 * i, str(i)), (new.error, old.error)


@dataclass
class Stateful:
    """It compares by value, so that it has no hash."""

    base: int = 40

    def __call__(self, x: int) -> int:
        return self.base + x


def test_methods_and_callable_objects(backend):
    for function in (Stateful(), Stateful().__call__):
        assert [call.value for call in Sheet(function, [{"x": 2}] * 3).run(backend)] == [42] * 3


def test_a_function_that_cannot_be_sent_is_refused_at_once(backend):
    lock = threading.Lock()

    def guarded() -> None:
        lock.acquire()

    with pytest.raises(
        ValueError, match=r"'.*guarded' cannot be sent to another process \(TypeError: .*Create this object within"
    ):
        backend.submit(Sheet(guarded, [{}]).calls)


def test_arguments_that_cannot_be_sent_are_their_call_s_error(backend):
    good, bad = Sheet(repr_of, [{"x": 1}, {"x": threading.Lock()}]).run(backend)
    check(good, "1")
    check(bad, (ValueError, "its arguments cannot be sent to another process: TypeError: cannot pickle"))


def repr_of(x: object) -> str:
    return repr(x)


def test_cancelled_calls_are_left_out(backend, tmp_path):
    sheet = Sheet(meet, [{"folder": str(tmp_path), "i": i, "wait_for": None} for i in range(4)])
    sheet.stops[1].set()
    sheet.stops[2].set()
    backend.submit(sheet.calls)
    assert sorted(sheet.wait(2)) == [0, 3]
    check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")
    assert sheet._done.empty() and not (tmp_path / "1").exists()


def test_a_call_may_be_submitted_when_another_is_done(backend):
    sheet = Sheet(repr_of, [{"x": 2}])
    first = Call(repr_of, {"x": 1}, timeout=MINUTES, done=lambda _: backend.submit(sheet.calls))
    backend.submit([first])
    sheet.wait()
    check(sheet.calls[0], "2")


def test_close_ends_what_hangs_and_a_later_call_starts_again(backend_name, tmp_path):
    """Twice, since Ray loses some cancellations of what has just begun. They leave their CPUs."""
    for name in ("once", "again"):
        folder = tmp_path / name
        folder.mkdir()
        backend = BACKENDS[backend_name]()
        Sheet(repr_of, [{"x": 1}] * 8).run(backend)  # its workers have started
        sheet = Sheet(meet, [{"folder": str(folder), "i": i, "wait_for": 9 if i else None} for i in range(3)])
        backend.submit(sheet.calls)
        sheet.wait(1)
        backend.close()
        backend.close()
        for number in sheet.wait(2):
            check(sheet.calls[number], (WorkerDied, "were"))
        check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")
        backend.close()
    if backend_name == "ray":
        import ray

        assert ray.get(ray.remote(num_cpus=2)(repr_of).remote(1), timeout=MINUTES / 3) == "1"


def test_a_function_of_a_file_that_no_import_finds(backend, tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(
        "class Mine(Exception):\n    pass\n\n\ndef half(x):\n    return x / 2\n\n\n"
        "def reward(x):\n    if x < 0:\n        raise Mine(x)\n    return half(x)\n"
    )
    spec = importlib.util.spec_from_file_location("my_reward", tmp_path / "my_reward.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_reward", module)
    spec.loader.exec_module(module)
    good, bad = Sheet(module.reward, [{"x": 3.0}, {"x": -1.0}]).run(backend)
    check(good, 1.5)
    check(bad, (module.Mine, "-1.0"))


def leave_a_child(path: str, exits: bool, environment: dict[str, str] | None) -> None:
    """In a session of its own, and the child of a program that has ended."""
    program = f"sleep 100000 & echo $! > {path}"
    subprocess.run(["sh", "-c", program], start_new_session=True, env=environment, check=True)
    if exits:
        os.killpg(0, signal.SIGKILL)
    hang()


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of orphans")
@pytest.mark.parametrize("exits", [False, True])
def test_what_a_call_has_started_ends_with_it(backend, exits, tmp_path):
    """When its worker is killed, and when that ends by itself, with its group."""
    settings = {"path": str(tmp_path / "pid"), "exits": exits, "environment": {"PATH": os.environ["PATH"]}}
    (call,) = Sheet(leave_a_child, [settings], MINUTES if exits else SOON).run(backend)
    check(call, (WorkerDied, "killed by SIGKILL") if exits else (TimeoutError, ""))
    assert ends(int((tmp_path / "pid").read_text()))


# ------------------------------------------------------------------------------------------------------- processes


MAIN_SCRIPT = """
import os
import subprocess
import sys
from dash_trl.rewards import MathAccuracyReward
from dash_trl.workers import Call, ProcessCalls, call_all
print("once", {"torch", "trl", "transformers", "datasets", "math_verify", "sympy"} & set(sys.modules), flush=True)

class Mine(Exception):
    pass

class Row:
    def __init__(self, x):
        self.x = x

def helper(row):
    if row.x == 2:
        raise Mine("two")
    return row

def reward(row):
    return helper(row)

def work():
    child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    with open("pid", "w") as file:
        print(os.getpid(), child.pid, file=file)
    sum(range(10**15))

backend = ProcessCalls(2)
calls = call_all(backend.submit, reward, [{"row": Row(x)} for x in range(3)], timeout=300)
print([type(call.error) is Mine or (type(call.value) is Row, call.value.x) for call in calls], flush=True)
child = os.fork()
if child == 0:
    print([call.value for call in call_all(backend.submit, lambda: 7, [{}], timeout=300)], flush=True)
    backend.close()
    os._exit(0)
os.waitpid(child, 0)
backend.submit([Call(work, {}, timeout=3000, done=print)])
print(open("pid").read(), end="", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a child")
@pytest.mark.parametrize("killed", [False, True])
def test_workers_of_a_main_script_end_with_it(tmp_path, killed):
    """It has no main guard, what it calls is its own, a forked child of it calls, and a worker is in C as it ends.

    So does a program that the worker has started in another session.
    """
    os.mkfifo(tmp_path / "pid")
    (tmp_path / "script.py").write_text(MAIN_SCRIPT)
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment, **pipes)
    with process:
        *said, pids = (process.stdout.readline() for _ in range(4))
        if killed:
            process.kill()
        else:
            process.stdin.close()
        process.wait(MINUTES)
        assert all(ends(int(pid)) for pid in pids.split()), errors.read_text()
    assert said == ["once set()\n", "[(True, 0), (True, 1), True]\n", "[7]\n"]
    assert (process.returncode, errors.read_text()) == (-signal.SIGKILL if killed else 0, "")


def test_neither_an_alarm_that_a_call_leaves_behind_nor_the_end_of_an_idle_worker_costs_a_call():
    with closing(ProcessCalls(1)) as backend:
        for function in (lambda: signal.setitimer(signal.ITIMER_REAL, 0.1), lambda: time.sleep(0.3)):
            (call,) = Sheet(function, [{}]).run(backend)
            assert call.error is None
        for _ in range(3):
            (call,) = Sheet(os.getpid, [{}]).run(backend)
            os.kill(call.value, signal.SIGKILL)


class Odd:
    """A score that hangs, exits or fails when it is looked at."""

    def __init__(self, number: int):
        self.number = number

    def __float__(self) -> float:
        if self.number == 1:
            threading.Event().wait()
        if self.number == 2:
            sys.exit(3)
        return 1.0


def odd(completion: str, number: int) -> Odd:
    return Odd(number)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_reading_a_score_is_a_part_of_its_call(backend):
    """Rows whose scores hang or exit when they are read are unscored, and take no other along."""
    from dash_trl.rewards import RewardRunner, Score  # here: each worker imports this file

    with RewardRunner(odd, backend=backend, timeout=2.0, max_concurrency=2) as runner:
        request = runner.submit([{"prompt": "", "completion": "", "number": i} for i in range(6)])
        waiting = threading.Thread(target=request.wait, daemon=True)
        waiting.start()
        waiting.join(60)
        (outcomes,) = request.outcomes
    assert isinstance(outcomes[1], TimeoutError) and isinstance(outcomes[2], (SystemExit, RuntimeError))
    assert [outcomes[i] for i in (0, 3, 4, 5)] == [Score(1.0)] * 4


class OddPickle(Exception):
    """Reading its pickle calls a function; as a value, and as an error that refuses notes."""

    def __init__(self, *call: object):
        self.call, self.__notes__ = call, "none"

    def __reduce__(self) -> tuple:
        return self.call[0], self.call[1:]


def exit_elsewhere(process: int) -> None:
    if os.getpid() != process:
        sys.exit(1)


def odd_pickle(number: int) -> object:
    odd = {1: OddPickle(sys.exit, 1), 2: OddPickle(time.sleep, 1e6), 3: OddPickle(OddPickle)}.get(number, number)
    if number == 5:
        return OddPickle(exit_elsewhere, os.getpid())
    if number in (1, 2):
        return odd
    if number in (3, 4):
        raise OddPickle(sys.exit, 1) if number == 4 else odd
    return odd


def test_pickles_that_exit_or_block_when_they_are_read_cost_their_own_calls():
    with closing(ProcessCalls(1)) as backend:
        timeouts = [SOON if i == 2 else MINUTES for i in range(7)]
        calls = Sheet(odd_pickle, [{"number": i} for i in range(7)], timeouts).run(backend)
    assert [call.value for call in calls] == [0, None, None, None, None, None, 6]
    kinds = [type(call.error).__name__ for call in calls]
    assert kinds == ["NoneType", "TypeError", "TimeoutError", "OddPickle", "RuntimeError", "RuntimeError", "NoneType"]


async def wait_for(gate: threading.Event) -> None:
    while not gate.is_set():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["thread", "asyncio", "retried"])
def test_close_ends_each_call_once_and_nothing_starts_later(kind):
    """One call runs and two wait; a call that is submitted afterwards does not bring them back."""
    gate, begun, started = threading.Event(), threading.Event(), []

    def blocks(i: int) -> int:
        started.append(i)
        begun.set()
        gate.wait()
        return i

    async def awaits(i: int) -> int:
        started.append(i)
        begun.set()
        await wait_for(gate)
        return i

    backend: Backend = AsyncCalls(1) if kind == "asyncio" else ThreadCalls(1)
    if kind == "retried":
        backend = RetriedCalls(backend, (ConnectionError,), 1)
    function = awaits if kind == "asyncio" else blocks
    sheet = Sheet(function, [{"i": i} for i in range(3)])
    backend.submit(sheet.calls)
    begun.wait(MINUTES)
    backend.close()
    assert sorted(sheet.wait()) == [0, 1, 2]
    assert [type(call.error) for call in sheet.calls] == [GivenUp] * 3
    gate.set()
    if kind != "retried":
        (again,) = Sheet(function, [{"i": 3}]).run(backend)
        assert again.value == 3 and started == [0, 3]
        backend.close()


@pytest.mark.parametrize("kind", ["thread", "asyncio"])
def test_a_call_that_nobody_waits_for_any_more_at_the_end_of_its_pause_is_not_made(kind):
    stop, started = threading.Event(), []
    pace = SimpleNamespace(wait_seconds=lambda: stop.set() or 0.0)

    async def starts_async() -> None:
        started.append(1)

    backend = AsyncCalls(1, pace=pace) if kind == "asyncio" else ThreadCalls(1, pace=pace)
    function = starts_async if kind == "asyncio" else partial(started.append, 1)
    ended: queue.SimpleQueue[Call] = queue.SimpleQueue()
    with closing(backend):
        backend.submit([Call(function, {}, timeout=MINUTES, done=ended.put, stop=stop)])
        assert isinstance(ended.get(timeout=MINUTES).error, GivenUp) and not started


def test_what_is_submitted_when_close_ends_a_call_is_made():
    """On a new loop: the old one takes no more calls."""
    begun = threading.Event()
    later = Sheet(own_number, [{"number": i} for i in range(3)])

    async def awaits() -> None:
        begun.set()
        await asyncio.Event().wait()

    backend = AsyncCalls(1)
    backend.submit([Call(awaits, {}, timeout=MINUTES, done=lambda _: backend.submit(later.calls))])
    begun.wait(MINUTES)
    backend.close()
    later.wait()
    assert [call.value for call in later.calls] == [0, 1, 2]
    backend.close()


async def own_number(number: int) -> int:
    await asyncio.sleep(0.1)
    return number


def test_a_loop_that_was_blocked_when_it_was_closed_ends_when_it_comes_back(monkeypatch):
    monkeypatch.setattr("dash_trl.workers.async_calls.CLOSE_SECONDS", 0.1)
    before, begun, gate = set(threading.enumerate()), threading.Event(), threading.Event()

    async def blocks() -> None:
        begun.set()
        gate.wait()

    backend = AsyncCalls(1)
    sheet = Sheet(blocks, [{}], 60.0)
    backend.submit(sheet.calls)
    begun.wait(MINUTES)
    backend.close()
    check(sheet.calls[0], (GivenUp, "closed"))
    gate.set()
    (loop,) = (one for one in set(threading.enumerate()) - before if "event loop" in one.name)
    loop.join(60)
    assert not loop.is_alive()


@pytest.mark.parametrize("kind", ["thread", "asyncio"])
def test_after_many_late_calls_at_once_others_wait_until_these_come_back(kind, monkeypatch):
    """As where a server answers late for a while: those that were late have no value, and the others are made then."""
    monkeypatch.setattr("dash_trl.workers.threads.MOST_ABANDONED", 4)
    monkeypatch.setattr("dash_trl.workers.threads.PATIENCE", 1000)
    monkeypatch.setattr("dash_trl.workers.async_calls.MOST_DEAF", 4)
    monkeypatch.setattr("dash_trl.workers.async_calls.PATIENCE", 1000)
    gate, started = threading.Event(), []

    def late(i: int) -> int:
        started.append(i)
        gate.wait()
        return i

    async def late_and_deaf(i: int) -> int:
        started.append(i)
        while not gate.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return i

    with closing(ThreadCalls(4) if kind == "thread" else AsyncCalls(4)) as backend:
        function = late if kind == "thread" else late_and_deaf
        sheet = Sheet(function, [{"i": i} for i in range(12)], [SOON] * 4 + [MINUTES] * 8)
        backend.submit(sheet.calls)
        assert sorted(sheet.wait(4)) == [0, 1, 2, 3]
        assert len(started) < 8  # the first to be late were replaced, the last was not
        gate.set()
        assert sorted(sheet.wait(8)) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert all(isinstance(call.error, TimeoutError) for call in sheet.calls[:4])
    assert [call.value for call in sheet.calls[4:]] == [4, 5, 6, 7, 8, 9, 10, 11]


def test_coroutines_that_ignore_their_cancellation_are_counted(monkeypatch):
    """Beyond the limit nothing is started, and where none ends the function is broken."""
    monkeypatch.setattr("dash_trl.workers.async_calls.MOST_DEAF", 4, raising=False)
    started, over = [], threading.Event()

    async def deaf(i: int) -> None:
        started.append(i)
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    with closing(AsyncCalls(2)) as backend:
        calls = Sheet(deaf, [{"i": i} for i in range(12)], 0.1).run(backend)
        over.set()  # `close` cancels them once more
    assert len(started) <= 5
    assert {type(call.error) for call in calls[:4]} == {Overdue} and type(calls[-1].error) is GivenUp


def test_a_call_that_has_ended_is_not_late_afterwards(monkeypatch):
    """Its time limit ends with it: else it would count as a call that ignores its cancellation, and hold up others."""
    monkeypatch.setattr("dash_trl.workers.async_calls.MOST_DEAF", 1)
    monkeypatch.setattr("dash_trl.workers.async_calls.PATIENCE", 0.1 / MINUTES)

    async def waits(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    with closing(AsyncCalls(2)) as backend:
        Sheet(waits, [{"seconds": 0.0}], SOON).run(backend)
        calls = Sheet(waits, [{"seconds": 3 * SOON}], MINUTES).run(backend)  # over the limit of the first
        calls += Sheet(waits, [{"seconds": 0.0}], MINUTES).run(backend)
    assert [call.value for call in calls] == [3 * SOON, 0.0]


def leaves_behind(first: bool) -> object:
    """Folder, environment and timers, changed by the first call and read by the second."""
    if first:
        os.chdir("/")
        os.environ["LEFT"] = "1"
        signal.setitimer(signal.ITIMER_PROF, 1000)
        return None
    return os.getcwd(), os.environ.get("LEFT"), signal.getitimer(signal.ITIMER_PROF)[0]


def test_the_state_of_a_worker_does_not_reach_later_calls():
    with closing(ProcessCalls(1)) as backend:
        calls = Sheet(leaves_behind, [{"first": True}, {"first": False}]).run(backend)
    assert calls[1].value == (os.getcwd(), None, 0.0)


def drop_capabilities() -> None:
    assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0


def begin_where_nothing_can_be_read() -> None:
    os.chdir(tempfile.mkdtemp())
    os.chmod(".", 0o100)
    drop_capabilities()


def moves(row: int) -> int:
    if row == 1:
        os.chdir("/")
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="drops capabilities")
def test_a_folder_to_which_no_way_leads_back_costs_the_worker_and_no_call(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with closing(ProcessCalls(1, prepare=begin_where_nothing_can_be_read)) as backend:
        first, second, *others = (one.value for one in Sheet(moves, [{"row": row} for row in range(4)]).run(backend))
    assert first == second and others[0] == others[1] != first


def lowers_its_limits(row: int, how: str) -> tuple[int, int]:
    """Its process, and how many files it may open."""
    import resource

    if row == 1:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if how == "for good":  # root may raise it again, as long as it has its capabilities
            drop_capabilities()
            hard = 50
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
    return os.getpid(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="drops capabilities")
@pytest.mark.parametrize("how", ["soft", "for good"])
def test_limits_that_a_call_sets_do_not_reach_later_calls(how):
    """A worker whose limits cannot be raised again is replaced, and no call is lost."""
    with closing(ProcessCalls(1)) as backend:
        calls = Sheet(lowers_its_limits, [{"row": row, "how": how} for row in range(6)]).run(backend)
    (first, most), (second, few), *others = (call.value for call in calls)
    assert second == first and few == 50 < most and {files for _, files in others} == {most}
    assert ({process for process, _ in others} == {first}) == (how == "soft")


@pytest.mark.parametrize("kind", ["thread", "asyncio"])
def test_the_child_of_a_call_that_forks_makes_no_other_calls(kind, tmp_path):
    log, children = tmp_path / "log", []

    def forks(i: int) -> int:
        with log.open("a") as file:
            file.write(f"{i}\n")
        if i == 0 and (child := os.fork()):
            children.append(child)
        return i

    async def forks_async(i: int) -> int:
        return forks(i)

    with closing(ThreadCalls(1) if kind == "thread" else AsyncCalls(5)) as backend:
        Sheet(forks if kind == "thread" else forks_async, [{"i": i} for i in range(5)]).run(backend)
        (child,) = children
        assert ends(child)
        os.waitpid(child, 0)
    assert log.read_text().split() == ["0", "1", "2", "3", "4"]


def test_the_child_of_a_coroutine_that_forks_and_awaits_makes_no_other_calls(tmp_path):
    """It would go on with all that runs on the loop, by the connections of its parent."""
    log, children = tmp_path / "log", []

    async def forks(i: int) -> None:
        if i == 0 and (child := os.fork()):
            children.append(child)
        for _ in range(50 if i or children else 10_000):
            await asyncio.sleep(0)
        with log.open("a") as file:
            file.write(f"{i}\n")

    with closing(AsyncCalls(3)) as backend:
        Sheet(forks, [{"i": i} for i in range(3)]).run(backend)
        (child,) = children
        assert ends(child)
        os.waitpid(child, 0)
    assert sorted(log.read_text().split()) == ["0", "1", "2"]


def test_late_calls_end_though_no_thread_can_be_started(monkeypatch):
    """As at the system's limit of threads: no thread takes the place of one that hangs, and the watch goes on."""
    gate, begun = threading.Event(), threading.Event()
    start = threading.Thread.start

    def hangs(i: int) -> None:
        begun.set()
        gate.wait()

    def refuse(self: threading.Thread) -> None:
        if self.name == "dash_trl call":
            raise RuntimeError("can't start new thread")
        start(self)

    backend = ThreadCalls(1)
    sheet = Sheet(hangs, [{"i": i} for i in range(3)], SOON)
    backend.submit(sheet.calls)
    begun.wait(MINUTES)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert sorted(sheet.wait()) == [0, 1, 2]
    assert [type(call.error) for call in sheet.calls] == [Overdue, RuntimeError, RuntimeError]
    monkeypatch.undo()
    gate.set()
    assert Sheet(lambda i: i, [{"i": 5}]).run(backend)[0].value == 5
    backend.close()


def test_workers_that_do_not_start(capfd):
    with closing(ProcessCalls(2, prepare=refuse)) as backend:
        for call in Sheet(repr_of, [{"x": 1}] * 3).run(backend):
            check(call, (WorkerDied, "worker processes do not start: exit code 1"))
    assert "Asked: not today" in capfd.readouterr().err


def refuse() -> None:
    raise Asked("not today")


# ------------------------------------------------------------------------------------------------------------- Ray


def kill_parent(i: int) -> int:
    """Ray's worker is the parent of the watch over this process."""
    if i == 3:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        hang()
    return i


def test_a_ray_is_started_where_there_is_none(cluster):
    """It listens on this machine alone, and has this process's share of its CPUs."""
    import ray

    assert cluster.startswith("127.0.0.1:") and ray.util.get_node_ip_address() == "127.0.0.1"
    assert ray.cluster_resources()["CPU"] == 2


def test_a_cluster_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConnectionError, match="RAY_ADDRESS = 127.0.0.1:1 does not answer"):
        RayCalls()


def test_rows_whose_ray_worker_is_lost_are_tried_once_more(cluster):
    with closing(RayCalls()) as backend:
        Sheet(kill_parent, [{"i": 0}] * 300).run(backend)  # so fast that many go together
        for i, call in enumerate(Sheet(kill_parent, [{"i": i} for i in range(12)]).run(backend)):
            check(call, (WorkerDied, "Ray lost its task: ") if i == 3 else i)


def test_no_more_rows_are_in_flight_than_asked_for(cluster, tmp_path):
    with closing(RayCalls(in_flight=1)) as backend:
        calls = Sheet(alone, [{"path": str(tmp_path / "taken")}] * 8).run(backend)
    assert [call.error for call in calls] == [None] * 8


def alone(path: str) -> None:
    os.mkdir(path)
    time.sleep(0.05)
    os.rmdir(path)


ANOTHER_TRAINING = """
import sys
from pathlib import Path
from dash_trl.workers import RayCalls, call_all

def mark(path):
    Path(path).touch()
    return 7

print([call.value for call in call_all(RayCalls().submit, mark, [{"path": sys.argv[1]}] * 3, timeout=300)])
"""


def test_two_trainings_share_a_cluster(cluster, tmp_path):
    """Another process finds it by RAY_ADDRESS, with functions of its main script."""
    (tmp_path / "script.py").write_text(ANOTHER_TRAINING)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "1")]
    environment = {**os.environ, "RAY_ADDRESS": cluster}
    with closing(RayCalls()) as backend:
        sheet = Sheet(meet, [{"folder": str(tmp_path), "i": 0, "wait_for": 1}])
        backend.submit(sheet.calls)
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=MINUTES)
        assert (done.returncode, done.stdout) == (0, "[7, 7, 7]\n"), done.stderr
        sheet.wait()
        check(sheet.calls[0], 0)


def test_a_cluster_without_a_free_cpu_is_given_up(cluster, tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(ray_calls, "QUIET_SECONDS", SOON)
    monkeypatch.setattr(ray_calls, "START_SECONDS", 0.0)
    other = ray.remote(num_cpus=2)(meet).remote(str(tmp_path), 0, 1)
    with closing(RayCalls()) as backend:
        (call,) = Sheet(repr_of, [{"x": 1}], SOON).run(backend)
        check(call, (WorkerDied, "Ray gave no outcome for 1 s: are all CPUs of the cluster taken?"))
        (tmp_path / "1").touch()
        ray.get(other)
        monkeypatch.undo()
        check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")


# ------------------------------------------------------------------------------------ faults of rewards, by all of them

TIMEOUT = 2.0  # seconds: some rows hang until then
# What befalls a row, and the reason that is told.
FATES = {
    "raise": (lambda: raise_(ConnectionError("away")), "raised ConnectionError: away"),
    "NaN": (lambda: math.nan, "returned nan"),
    "inf": (lambda: -math.inf, "returned -inf"),
    "None": (lambda: None, ""),
    "wrong type": (lambda: (1.0, 2.0), "returned (1.0, 2.0)"),
    "die": (lambda: os.kill(os.getpid(), signal.SIGKILL), "raised WorkerDied"),
    "hang": (hang, f": took more than {TIMEOUT:g} s"),
}


def fated(completion: str, completion_ids: list[int]) -> object:
    return FATES[completion][0]() if completion else sum(completion_ids)


async def fated_async(completion: str, completion_ids: list[int]) -> object:
    if completion == "hang":
        await asyncio.sleep(1e6)
    return fated(completion, completion_ids)


@pytest.mark.parametrize(
    ("backend", "first"), [("thread", "NaN"), ("asyncio", "hang"), ("process", "die"), ("ray", "wrong type")]
)
def test_every_row_has_its_score_or_a_reason(cluster, backend, first):
    """The reason of the first that fails is told."""
    from dash_trl.rewards import RewardRunner  # here: worker processes import this file, but not torch

    fates = ["", first, *FATES, ""]
    if backend in ("thread", "asyncio"):
        fates.remove("die")  # in the trainer's own process nothing may
    ids = [[row] * row for row in range(len(fates))]
    with RewardRunner(fated_async if backend == "asyncio" else fated, backend=backend, timeout=TIMEOUT) as runner:
        (reward,) = runner.rewards
        returned = reward(prompts=fates, completions=fates, completion_ids=ids)
    assert returned == [None if fate else sum(one) for fate, one in zip(fates, ids, strict=True)]
    assert reward.failed == [fate not in ("", "None") for fate in fates]
    assert reward.raised == [fate not in ("", "None", "NaN", "inf") for fate in fates]
    assert FATES[first][1] in reward.failure
