"""The backends of rewards: whatever a call does, it gets exactly one outcome, its own, and harms no other call.

The same tests run on each backend, in a class of its own. Ray starts once, by `ray_cluster`.
"""

import asyncio
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pebble.pool.process import PoolManager

from dash_trl.rewards import load_reward
from dash_trl.workers import (
    AsyncCalls,
    Backend,
    GivenUp,
    Overdue,
    ProcessCalls,
    RayCalls,
    ThreadCalls,
    WorkerDied,
    call_all,
)
from tests.launching import ROOT, ends

MINUTES = 300.0  # for what takes no time, on a machine however busy
SOON = 0.5  # after which a call that hangs is given up


class Asked(Exception):
    """Raised as asked."""


class TwoArguments(Exception):
    """It cannot be read back: its pickle has one argument."""

    def __init__(self, text: str, number: int):
        super().__init__(text)


class Odd:
    """A score that does something when it is looked at."""

    def __init__(self, act: Callable[[], object]):
        self.act = act

    def __float__(self) -> float:
        self.act()
        return 1.0


def hang() -> None:
    while True:
        time.sleep(1)


def hang_in_c() -> None:
    """Deaf to signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sum(range(10**15))


def raise_(error: BaseException) -> None:
    raise error


def leave_a_child(path: str, then: Callable[[], object]) -> None:
    Path(path).write_text(str(subprocess.Popen(["sleep", "100000"], env={"PATH": os.environ["PATH"]}).pid))
    then()


# What a call does, and its outcome: a value, or the type of its error and what that says. Of one that hangs: `late`.
ANYWHERE = {
    "a value": (lambda: "mine", "mine"),
    "None": (lambda: None, None),
    "NaN": (lambda: math.nan, math.nan),
    "raise": (lambda: raise_(Asked("as asked")), (Asked, "as asked")),
    "stop": (lambda: next(iter(())), (RuntimeError, "StopIteration")),
    "hang": (hang, None),
}
IN_A_PROCESS = {
    "hang in C": (hang_in_c, None),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), (WorkerDied, "killed by SIGKILL")),
    "os._exit": (lambda: os._exit(3), (WorkerDied, "exit code 3")),
    "sys.exit": (lambda: sys.exit(3), (RuntimeError, "SystemExit: 3")),
    "out of memory": (lambda: len(bytearray(64 << 30)), (MemoryError, "")),
    "value that cannot be sent": (threading.Lock, (TypeError, "cannot pickle '_thread.lock' object")),
    "error that cannot be read": (lambda: raise_(TwoArguments("unread", 1)), (RuntimeError, "TwoArguments: unread")),
}
FAULTS = {**ANYWHERE, **IN_A_PROCESS}


def act(what: str, i: int, log: str) -> object:
    """It writes that it was called."""
    with open(log, "a") as file:
        file.write(f"{i}\n")
    return i if what == "own number" else FAULTS[what][0]()


async def act_async(what: str, i: int, log: str) -> object:
    if what == "hang":
        act("None", i, log)
        await asyncio.Event().wait()
    return act(what, i, log)


TIMEOUT = 2.0  # seconds: some rows hang until then
# What befalls a row, and the reason that is told.
FATES = {
    "raise": (lambda: raise_(ConnectionError("away")), "raised ConnectionError: away"),
    "NaN": (lambda: math.nan, "returned nan"),
    "exit when it is read": (lambda: Odd(partial(sys.exit, 3)), "SystemExit: 3"),
    "hang when it is read": (lambda: Odd(hang), f": took more than {TIMEOUT:g} s"),
    "die": (lambda: os.kill(os.getpid(), signal.SIGKILL), "raised WorkerDied"),
}


def fated(completion: str, completion_ids: list[int]) -> object:
    return FATES[completion][0]() if completion else sum(completion_ids)


async def fated_async(completion: str, completion_ids: list[int]) -> object:
    return fated(completion, completion_ids)


def check(outcome: object, expected: object, row: object = None) -> None:
    if isinstance(expected, tuple):
        kind, text = expected
        assert type(outcome) is kind and text in str(outcome), (row, repr(outcome))
    else:
        assert outcome == expected or outcome != outcome and expected != expected, (row, repr(outcome))


def one(backend: Backend, function: Callable, timeout: float = MINUTES, **arguments: object):
    return call_all(backend, function, [arguments], timeout=timeout)[0]


# --------------------------------------------------------------------------------------------------- every backend


class Everywhere:
    """The tests of all backends.

    Attributes:
        kind: name of the backend in `RewardRunner`. make: makes one.
        act, fated: the functions that are called.
        faults: what may befall a call.
        late: type of the error of a call that hangs.
        fates: what may befall a row of `RewardRunner`; the reason of the first one is told.
    """

    kind = ""
    late = Overdue
    make: Callable[[], Backend]
    act = staticmethod(act)
    fated = staticmethod(fated)
    faults: Sequence[str] = tuple(FAULTS)
    fates: Sequence[str] = tuple(FATES)

    @pytest.fixture(scope="class")
    def backend(self) -> Iterator[Backend]:
        with closing(self.make()) as backend:
            yield backend

    def test_a_call_ends_once_with_its_own_outcome_and_takes_no_other_along(self, backend, tmp_path):
        """All faults at once, among calls without any; each is called once, whatever becomes of its neighbours."""
        whats = [*self.faults, *["own number"] * len(self.faults) * 2]
        random.Random(0).shuffle(whats)
        arguments = [{"what": what, "i": i, "log": str(tmp_path / "log")} for i, what in enumerate(whats)]
        for i, call in enumerate(call_all(backend, self.act, arguments, timeout=TIMEOUT)):
            late = self.late, f"took more than {TIMEOUT:g} s"
            check(call, late if "hang" in whats[i] else FAULTS.get(whats[i], (None, i))[1], whats[i])
        assert Counter(map(int, (tmp_path / "log").read_text().split())) == Counter(range(len(whats)))

    def test_close_ends_what_hangs_and_a_later_call_starts_again(self, backend, tmp_path):
        log = str(tmp_path / "log")
        hanging = backend.submit(self.act, {"what": "hang", "i": 0, "log": log}, timeout=MINUTES)
        while not Path(log).exists():
            time.sleep(0.01)
        backend.close()
        backend.close()
        assert hanging.cancelled()
        check(one(backend, self.act, what="a value", i=2, log=log), "mine")
        assert Path(log).read_text().split() == ["0", "2"]

    def test_every_row_has_its_score_or_a_reason(self):
        """The reason of the first that fails is told."""
        from dash_trl.rewards import RewardRunner, failure_of  # here: worker processes import this file, but not torch

        fates = ["", *self.fates, ""]
        ids = [[row] * row for row in range(len(fates))]
        with RewardRunner(self.fated, backend=self.kind, timeout=TIMEOUT) as runner:
            (reward,) = runner.rewards
            returned = reward(prompts=fates, completions=fates, completion_ids=ids)
        assert returned == [None if fate else sum(one) for fate, one in zip(fates, ids, strict=True)]
        raised = [fate not in ("", "NaN") for fate in fates]
        assert [isinstance(one, BaseException) for one in reward.outcomes] == raised
        assert FATES[fates[1]][1] in failure_of(reward.outcomes)[0]


class TestThreads(Everywhere):
    kind = "thread"
    faults = tuple(ANYWHERE)
    fates = ("NaN", "raise", "exit when it is read", "hang when it is read")  # in the trainer's process nothing may die
    make = staticmethod(partial(ThreadCalls, 4))


class TestEventLoop(Everywhere):
    kind = "asyncio"
    faults = tuple(ANYWHERE)
    fates = ("raise", "NaN", "exit when it is read")
    act = staticmethod(act_async)
    fated = staticmethod(fated_async)
    make = staticmethod(partial(AsyncCalls, 4))


# ------------------------------------------------------------------------------------------------- other processes


def count_calls(calls: list[int] = []) -> int:  # noqa: B006  # kept by the worker
    calls.append(1)
    return len(calls)


def as_it_is(x: object) -> object:
    return x


class InAnotherProcess(Everywhere):
    late = TimeoutError

    def test_an_error_tells_where_in_the_worker(self, backend, tmp_path):
        error = one(backend, self.act, what="raise", i=0, log=str(tmp_path / "log"))
        assert "in raise_\n    raise error" in "".join(error.__notes__)

    def test_what_is_large_and_what_cannot_be_sent(self, backend):
        texts = [str(i % 10) * (1 << 20) for i in range(12)]
        arguments = [{"x": text} for text in texts] + [{"x": threading.Lock()}]
        *calls, bad = call_all(backend, as_it_is, arguments, timeout=MINUTES)
        assert calls == texts and isinstance(bad, (ValueError, TypeError))
        assert "pickle '_thread.lock' object" in str(bad)
        lock = threading.Lock()
        with pytest.raises(ValueError, match=r"<lambda> cannot be sent to another process \(TypeError: .*Create this"):
            type(backend)([lambda: lock.acquire()], 1)

    def test_what_a_call_has_started_ends_with_its_worker(self, backend, tmp_path):
        for then, late in ((partial(os._exit, 3), False), (hang, True)):
            path = str(tmp_path / f"{late}")
            error = one(backend, leave_a_child, TIMEOUT, path=path, then=then)
            assert isinstance(error, TimeoutError if late else WorkerDied)
            assert ends(int(Path(path).read_text()))


MAIN_SCRIPT = """
import multiprocessing
import os
import sys
from dash_trl.rewards import MathAccuracyReward
from dash_trl.workers import ProcessCalls, call_all
print("once", {"torch", "trl", "transformers", "datasets", "math_verify", "sympy"} & set(sys.modules), flush=True)

class Mine(Exception):
    pass

class Row:
    def __init__(self, x):
        self.x = x

def reward(row):
    if row.x == 2:
        raise Mine("two")
    return row

def closure(number):
    return lambda: number

def work():
    with open("pid", "w") as file:
        print(os.getpid(), file=file)
    sum(range(10**15))

seven = closure(7)
backend = ProcessCalls([reward, seven, work], 2)
calls = call_all(backend, reward, [{"row": Row(x)} for x in range(3)], timeout=300)
print([type(call) is Mine or (type(call) is Row, call.x) for call in calls], flush=True)
def fork():
    print(call_all(backend, seven, [{}], timeout=300), flush=True)

child = multiprocessing.get_context("fork").Process(target=fork)  # it waits for its children before it exits
child.start()
child.join()
backend.submit(work, {}, timeout=3000)
print(open("pid").read(), end="", flush=True)
sys.stdin.read()
"""


def refuse() -> None:
    raise Asked("not today")


class TestProcesses(InAnotherProcess):
    kind = "process"
    fates = tuple(reversed(FATES))
    make = staticmethod(partial(ProcessCalls, [act, as_it_is, leave_a_child], 2))

    def test_the_call_before_a_death_keeps_its_value(self, monkeypatch, tmp_path):
        """The pool reads late what its workers have sent."""
        read = PoolManager.process_next_message
        whats = ["own number", "own number", "SIGKILL", "own number"]
        monkeypatch.setattr(PoolManager, "process_next_message", lambda *given: (time.sleep(0.3), read(*given)))
        with closing(ProcessCalls([act], 1)) as backend:
            arguments = [{"what": what, "i": 7, "log": str(tmp_path / "log")} for what in whats]
            for call, what in zip(call_all(backend, act, arguments, timeout=MINUTES), whats, strict=True):
                check(call, FAULTS.get(what, (None, 7))[1], what)

    def test_a_call_whose_outcome_is_lost_ends_all_the_same(self, monkeypatch):
        """After 1,200 seconds and 17 times its timeout. The pool reads nothing of what its worker has sent."""
        monkeypatch.setattr(PoolManager, "process_next_message", lambda *given: time.sleep(0.1))
        with closing(ProcessCalls([as_it_is], 1)) as backend:
            check(one(backend, as_it_is, -70.4, x=1), (GivenUp, "no outcome has come"))

    @pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a child")
    @pytest.mark.parametrize("killed", [False, True])
    def test_workers_of_a_main_script_end_with_it(self, tmp_path, killed):
        """It has no main guard, what it calls is its own, a forked child calls, and a worker is in C as it ends."""
        os.mkfifo(tmp_path / "pid")
        (tmp_path / "script.py").write_text(MAIN_SCRIPT)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment, **pipes) as process:
            *said, pid = (process.stdout.readline() for _ in range(4))
            if killed:
                process.kill()
            else:
                process.stdin.close()
            process.wait(MINUTES)
            assert ends(int(pid))
        assert said == ["once set()\n", "[(True, 0), (True, 1), True]\n", "[7]\n"]
        assert process.returncode == (-signal.SIGKILL if killed else 0)

    def test_workers_that_start_as_the_backend_closes_say_nothing(self, capfd):
        for _ in range(3):
            with closing(ProcessCalls([dict], 8)) as backend:  # one worker is ready after the first call
                assert one(backend, dict, x=1) == {"x": 1}
        assert capfd.readouterr() == ("", "")

    def test_a_call_from_a_thread_that_ends_leaves_the_workers(self):
        """On Linux, a process can end with the thread that has started it."""
        with closing(ProcessCalls([count_calls], 1)) as backend:
            for number in (1, 2):
                found: list[int] = []
                thread = threading.Thread(target=lambda: found.append(one(backend, count_calls)))  # noqa: B023
                thread.start()
                thread.join()
                assert found[0] == number

    def test_a_function_of_a_file_that_no_import_finds(self, tmp_path):
        """As of --reward_path."""
        file = tmp_path / "my_reward.py"
        file.write_text("def half(x): return x / 2\n\n\ndef reward(x): return half(x)\n")
        reward = load_reward(file, "reward")
        with closing(ProcessCalls([reward], 1)) as backend:
            check(one(backend, reward, x=3.0), 1.5)

    def test_workers_that_do_not_start(self, capfd):
        with closing(ProcessCalls([as_it_is], 2, prepare=refuse)) as backend:
            for call in call_all(backend, as_it_is, [{"x": "1" * (1 << 20)}] * 9, timeout=MINUTES):
                check(call, (WorkerDied, "the workers do not start"))
        assert "Asked: not today" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------- Ray


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory) -> Iterator[str]:
    """The address of a Ray on this machine. It leaves nothing in the home folder."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    folder = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have 107 characters at most
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        ray = pytest.importorskip("ray")
        for address in ("", "local"):
            patch.setenv("RAY_ADDRESS", address)
            with pytest.raises(ValueError, match="set RAY_ADDRESS to one, or call ray.init"):
                RayCalls([as_it_is])
        patch.delenv("RAY_ADDRESS")
        ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def kill_ray_worker(path: str) -> int:
    """Ray's worker is the parent of this process. Once."""
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        hang()
    return 7


def alone(path: str) -> None:
    os.mkdir(path)
    time.sleep(0.05)
    os.rmdir(path)


ANOTHER_TRAINING = """
from dash_trl.workers import RayCalls, call_all

def mark():
    return 7

print(call_all(RayCalls([mark]), mark, [{}] * 3, timeout=300))
"""


@pytest.mark.usefixtures("ray_cluster")
class TestRay(InAnotherProcess):
    kind = "ray"
    make = staticmethod(partial(RayCalls, [act, as_it_is, leave_a_child], 64))

    def test_a_call_whose_ray_worker_is_lost_is_made_once_more(self, tmp_path):
        with closing(RayCalls([kill_ray_worker])) as backend:
            check(one(backend, kill_ray_worker, path=str(tmp_path / "once")), 7)

    def test_no_more_calls_are_in_flight_than_asked_for(self, tmp_path):
        with closing(RayCalls([alone], 1)) as backend:
            calls = call_all(backend, alone, [{"path": str(tmp_path / "taken")}] * 4, timeout=MINUTES)
        assert calls == [None] * 4

    def test_two_trainings_share_a_cluster(self, ray_cluster, python, tmp_path):
        """Another process finds it by RAY_ADDRESS, with functions of its main script."""
        (tmp_path / "script.py").write_text(ANOTHER_TRAINING)
        done = python(tmp_path / "script.py", env={**os.environ, "RAY_ADDRESS": ray_cluster})
        assert done.stdout == "[7, 7, 7]\n", done.stderr


def test_a_cluster_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConnectionError, match="RAY_ADDRESS = 127.0.0.1:1 does not answer"):
        RayCalls([as_it_is])


# ------------------------------------------------------------------------------- threads and loops of this process


class Gated:
    """Calls that wait until the gate is open, as a function and as coroutine functions."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.started = []

    def blocks(self, i: int) -> int:
        self.started.append(i)
        self.open.wait()
        return i

    async def ignores(self, i: int) -> int:
        """Its cancellation."""
        self.started.append(i)
        while not self.open.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return i

    async def blocks_the_loop(self, i: int) -> int:
        return i if i else self.blocks(i)


def test_calls_that_hang_do_not_starve_others_and_their_number_is_limited():
    """A hundred at a time, with room for two; and when they come back, calls are made as before."""
    gate = Gated()
    with closing(ThreadCalls(100)) as backend:
        calls = call_all(backend, gate.blocks, [{"i": i} for i in range(400)], timeout=0.05)
        assert {type(call) for call in calls[:256]} == {Overdue} and len(gate.started) < 400
        given_up = calls[-1]
        assert (
            type(given_up) is GivenUp
            and " calls hang, so no more" in str(given_up)
            and "backend='process'" in str(given_up)
        )
        assert type(one(backend, gate.blocks, i=0)) is GivenUp
        gate.open.set()
        deadline = time.monotonic() + MINUTES
        while one(backend, gate.blocks, i=7) != 7 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert one(backend, gate.blocks, i=7) == 7


def test_a_thread_that_hangs_does_not_keep_the_interpreter():
    script = (
        "import threading\nfrom dash_trl.workers import ThreadCalls, call_all\n"
        "print(call_all(ThreadCalls(1), threading.Event().wait, [{}], timeout=0.1)[0])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("took more than 0.1 s\n", "", 0)


def test_coroutines_that_block_their_loop_or_ignore_their_cancellation():
    """Each ends in time, and what comes later runs on a new loop."""
    gate = Gated()
    with closing(AsyncCalls(4)) as backend:
        assert type(one(backend, gate.ignores, SOON, i=0)) is Overdue
        blocking = one(backend, gate.blocks_the_loop, SOON, i=0)
        check(blocking, (Overdue, "a call blocks the event loop. An async function must await"))
        assert one(backend, gate.blocks_the_loop, i=1) == 1
        gate.open.set()
