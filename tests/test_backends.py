"""The backends of rewards: whatever a call does, it gets exactly one outcome, its own, and harms no other call.

The same tests run on each backend, in a class of its own. Ray starts once, by `ray_cluster`.
"""

import asyncio
import ctypes
import importlib.util
import math
import os
import queue
import random
import resource
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
from tests.test_workers import ends

ROOT = Path(__file__).parents[1]
MINUTES = 300.0  # for what takes no time, on a machine however busy
SOON = 0.2  # after which a call that hangs is given up


class Asked(Exception):
    """Raised as asked."""


class OddPickle(Exception):
    """Reading its pickle calls a function; as a value, and as an error that refuses notes."""

    def __init__(self, *call: object):
        self.call, self.__notes__ = call, "none"

    def __reduce__(self) -> tuple:
        return self.call[0], self.call[1:]


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
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sum(range(10**15))


def raise_(error: BaseException) -> None:
    raise error


def fork() -> None:
    """The child comes back from the call, too."""
    os.fork()


def exit_elsewhere(process: int) -> None:
    if os.getpid() != process:
        sys.exit(1)


# What a call does, and its outcome: a value, or the type of its error and what that says. Of one that hangs: `late`.
ANYWHERE = {
    "a value": (lambda: "mine", "mine"),
    "None": (lambda: None, None),
    "NaN": (lambda: math.nan, math.nan),
    "inf": (lambda: -math.inf, -math.inf),
    "raise": (lambda: raise_(Asked("as asked")), (Asked, "as asked")),
    "hang": (hang, None),
}
IN_A_PROCESS = {
    "hang in C": (hang_in_c, None),
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), (WorkerDied, "killed by SIGKILL")),
    "os._exit": (lambda: os._exit(0), (WorkerDied, "exit code 0")),
    "sys.exit": (lambda: sys.exit(3), (RuntimeError, "SystemExit: 3")),
    "out of memory": (lambda: len(bytearray(64 << 30)), (MemoryError, "")),
    "fork": (fork, None),
    "value that cannot be sent": (threading.Lock, (TypeError, "returned a lock, which cannot be sent back")),
    "value that exits when it is read": (lambda: OddPickle(sys.exit, 1), (TypeError, "cannot be sent back")),
    "value that exits elsewhere": (lambda: OddPickle(exit_elsewhere, os.getpid()), (RuntimeError, "cannot be read")),
    "value that hangs when it is read": (lambda: OddPickle(time.sleep, 1e6), None),
    "error that cannot be sent": (lambda: raise_(OddPickle(threading.Lock())), (RuntimeError, "OddPickle")),
    "error that cannot be read": (lambda: raise_(OddPickle(int, "a")), (RuntimeError, "OddPickle")),
    "error that exits when it is read": (lambda: raise_(OddPickle(sys.exit, 1)), (RuntimeError, "OddPickle")),
    "error without notes": (lambda: raise_(OddPickle(OddPickle)), (OddPickle, "")),
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


TIMEOUT = 1.0  # seconds: some rows hang until then
# What befalls a row, and the reason that is told.
FATES = {
    "raise": (lambda: raise_(ConnectionError("away")), "raised ConnectionError: away"),
    "NaN": (lambda: math.nan, "returned nan"),
    "inf": (lambda: -math.inf, "returned -inf"),
    "None": (lambda: None, ""),
    "wrong type": (lambda: (1.0, 2.0), "returned (1.0, 2.0)"),
    "hang": (hang, f": took more than {TIMEOUT:g} s"),
    "exit when it is read": (lambda: Odd(partial(sys.exit, 3)), "SystemExit: 3"),
    "hang when it is read": (lambda: Odd(hang), f": took more than {TIMEOUT:g} s"),
    "die": (lambda: os.kill(os.getpid(), signal.SIGKILL), "raised WorkerDied"),
}


def fated(completion: str, completion_ids: list[int]) -> object:
    return FATES[completion][0]() if completion else sum(completion_ids)


async def fated_async(completion: str, completion_ids: list[int]) -> object:
    if completion == "hang":
        await asyncio.sleep(1e6)
    return fated(completion, completion_ids)


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


def check(call: Call, expected: object, row: object = None) -> None:
    if isinstance(expected, tuple):
        kind, text = expected
        assert type(call.error) is kind and text in str(call.error) and call.value is None, (row, repr(call.error))
    else:
        assert call.error is None, (row, repr(call.error))
        assert call.value == expected or call.value != call.value and expected != expected, row


def repr_of(x: object) -> str:
    return repr(x)


def meet(folder: str, i: int, wait_for: int | None) -> int:
    """Returns after another one has."""
    while wait_for is not None and not Path(folder, str(wait_for)).exists():
        time.sleep(0.01)
    Path(folder, str(i)).touch()
    return i


# --------------------------------------------------------------------------------------------------- every backend


class Everywhere:
    """The tests of all backends.

    Attributes:
        kind: name of the backend in `RewardRunner`.
        act, fated: the functions that are called.
        faults: what may befall a call.
        late: type of the error of a call that hangs.
        fates: what may befall a row of `RewardRunner`; the first one is told as the reason.
    """

    kind, late = "", Overdue
    act, fated = staticmethod(act), staticmethod(fated)
    faults: Sequence[str] = tuple(FAULTS)
    fates: Sequence[str] = tuple(FATES)

    def sheet(self, log: Path, whats: Sequence[str]) -> Sheet:
        arguments = [{"what": what, "i": i, "log": str(log)} for i, what in enumerate(whats)]
        return Sheet(self.act, arguments, [SOON if "hang" in what else MINUTES for what in whats])

    def test_a_call_ends_once_with_its_own_outcome_and_takes_no_other_along(self, backend, tmp_path):
        """All faults at once, among calls without any; each is called once, whatever becomes of its neighbours."""
        whats = [*self.faults, *["own number"] * len(self.faults) * 2]
        random.Random(0).shuffle(whats)
        calls = self.sheet(tmp_path / "log", whats).run(backend)
        for i, (what, call) in enumerate(zip(whats, calls, strict=True)):
            expected = (self.late, "took more than 0.2 s") if "hang" in what else FAULTS.get(what, (None, i))[1]
            check(call, expected, what)
        assert Counter(map(int, (tmp_path / "log").read_text().split())) == Counter(range(len(whats)))

    def test_cancelled_calls_are_left_out(self, backend, tmp_path):
        cancelled, kept = (self.sheet(tmp_path / name, ["own number"] * 2) for name in ("cancelled", "kept"))
        for stop in cancelled.stops:
            stop.set()
        backend.submit([*cancelled.calls, *kept.calls])
        kept.wait()
        check(self.sheet(tmp_path / "kept", ["None"]).run(backend)[0], None)
        assert not (tmp_path / "cancelled").exists() and len((tmp_path / "kept").read_text().split()) == 3

    def test_a_call_may_be_submitted_when_another_is_done(self, backend, tmp_path):
        second = self.sheet(tmp_path / "log", ["a value"])
        arguments = {"what": "own number", "i": 5, "log": str(tmp_path / "log")}
        backend.submit([Call(self.act, arguments, timeout=MINUTES, done=lambda _: backend.submit(second.calls))])
        second.wait()
        check(second.calls[0], "mine")

    def test_every_row_has_its_score_or_a_reason(self):
        """The reason of the first that fails is told."""
        from dash_trl.rewards import RewardRunner  # here: worker processes import this file, but not torch

        fates = ["", *self.fates, ""]
        ids = [[row] * row for row in range(len(fates))]
        with RewardRunner(self.fated, backend=self.kind, timeout=TIMEOUT) as runner:
            (reward,) = runner.rewards
            returned = reward(prompts=fates, completions=fates, completion_ids=ids)
        assert returned == [None if fate else sum(one) for fate, one in zip(fates, ids, strict=True)]
        assert reward.failed == [fate not in ("", "None") for fate in fates]
        assert reward.raised == [fate not in ("", "None", "NaN", "inf") for fate in fates]
        assert FATES[fates[1]][1] in reward.failure


class TestThreads(Everywhere):
    kind, faults = "thread", tuple(ANYWHERE)
    fates = ("NaN", *(fate for fate in FATES if fate not in ("NaN", "die")))  # in the trainer's process nothing may die

    @pytest.fixture(scope="class")
    def backend(self) -> Iterator[Backend]:
        with closing(ThreadCalls(4)) as backend:
            yield backend


class TestEventLoop(Everywhere):
    kind, faults, fates = "asyncio", tuple(ANYWHERE), ("hang", "raise", "inf", "None", "exit when it is read")
    act, fated = staticmethod(act_async), staticmethod(fated_async)

    @pytest.fixture(scope="class")
    def backend(self) -> Iterator[Backend]:
        with closing(AsyncCalls(4)) as backend:
            yield backend


# ------------------------------------------------------------------------------------------------- other processes


@dataclass
class Stateful:
    """It compares by value, so that it has no hash."""

    base: int = 40

    def __call__(self, x: int) -> int:
        return self.base + x


PLAIN = {"environment": {"PATH": os.environ["PATH"]}}


def leave_a_child(path: str, exits: bool, environment: dict[str, str] | None) -> None:
    """In a session of its own, and the child of a program that has ended."""
    program = f"sleep 100000 & echo $! > {path}.new; mv {path}.new {path}"
    subprocess.run(["sh", "-c", program], start_new_session=True, env=environment, check=True)
    if exits:
        os.killpg(0, signal.SIGKILL)
    hang()


class InAnotherProcess(Everywhere):
    late = TimeoutError

    def test_an_error_tells_where_in_the_worker(self, backend, tmp_path):
        (call,) = self.sheet(tmp_path / "log", ["raise"]).run(backend)
        assert "in raise_\n    raise error" in "".join(call.error.__notes__)

    def test_what_is_too_large_for_a_socket_at_once(self, backend):
        """Both ways at the same time, while neither side reads."""
        arguments = [{"text": str(i % 10) * (1 << 20)} for i in range(12)]
        calls = Sheet(lambda text: text[::-1], arguments).run(backend)
        assert all(call.value == one["text"] for call, one in zip(calls, arguments, strict=True))

    def test_functions_of_all_kinds(self, backend):
        """Many that are made anew, beside one that stays: a worker keeps some, and is sent the others again."""
        functions = [lambda x, i=i: x * i for i in range(40)]
        sheets = [Sheet(one, [{"x": 3}]) for function in functions for one in (function, repr_of)]
        sheets += [Sheet(one, [{"x": 2}]) for one in (Stateful(), Stateful().__call__, functions[0])]
        backend.submit([call for sheet in sheets for call in sheet.calls])
        for sheet in sheets:
            sheet.wait()
        values = [sheet.calls[0].value for sheet in sheets]
        assert values[:80:2] == [3 * i for i in range(40)] and values[1:80:2] == ["3"] * 40
        assert values[80:] == [42, 42, 0]

    def test_what_cannot_be_sent(self, backend):
        """A function is refused at once; arguments are their call's error."""
        lock = threading.Lock()

        def guarded() -> None:
            lock.acquire()

        text = r"'.*guarded' cannot be sent to another process \(TypeError: .*Create this object within"
        with pytest.raises(ValueError, match=text):
            backend.submit(Sheet(guarded, [{}]).calls)
        good, bad = Sheet(repr_of, [{"x": 1}, {"x": threading.Lock()}]).run(backend)
        check(good, "1")
        check(bad, (ValueError, "its arguments cannot be sent to another process: TypeError: cannot pickle"))

    def test_a_function_of_a_file_that_no_import_finds(self, backend, tmp_path, monkeypatch):
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

    def test_close_ends_what_hangs_and_a_later_call_starts_again(self, backend, tmp_path):
        Sheet(repr_of, [{"x": 1}] * 8).run(backend)  # its workers have started
        sheet = Sheet(meet, [{"folder": str(tmp_path), "i": i, "wait_for": 9 if i else None} for i in range(3)])
        backend.submit(sheet.calls)
        sheet.wait(1)
        backend.close()
        backend.close()
        for number in sheet.wait(2):
            check(sheet.calls[number], (WorkerDied, "were"))
        check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")

    @pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of orphans")
    def test_what_a_call_has_started_ends_with_its_worker(self, backend, tmp_path):
        """Though the worker takes its group along as it ends."""
        (call,) = Sheet(leave_a_child, [{"path": str(tmp_path / "pid"), "exits": True, **PLAIN}]).run(backend)
        check(call, (WorkerDied, "killed by SIGKILL"))
        assert ends(int((tmp_path / "pid").read_text()))


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
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def drop_capabilities() -> None:
    assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0


def state() -> tuple[object, ...]:
    """Folder, environment, timers and a limit of this process."""
    timers = [signal.getitimer(timer)[0] for timer in TIMERS]
    return os.getcwd(), os.environ.get("LEFT"), timers, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def leave_behind(row: int, for_good: bool) -> tuple[int, tuple[object, ...]]:
    """Its process, and the state that it leaves: the second row changes it."""
    if row == 1:
        os.chdir("/")
        os.environ["LEFT"] = "1"
        for timer in TIMERS:
            signal.setitimer(timer, 1000)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if for_good:  # root may raise it again, as long as it has its capabilities
            drop_capabilities()
            hard = 50
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
    return os.getpid(), state()


def refuse() -> None:
    raise Asked("not today")


class TestProcesses(InAnotherProcess):
    kind, fates = "process", ("die", *(fate for fate in FATES if fate != "die"))

    @pytest.fixture(scope="class")
    def backend(self) -> Iterator[Backend]:
        with closing(ProcessCalls(2)) as backend:
            yield backend

    @pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a child")
    @pytest.mark.parametrize("killed", [False, True])
    def test_workers_of_a_main_script_end_with_it(self, tmp_path, killed):
        """It has no main guard, what it calls is its own, a forked child calls, and a worker is in C as it ends.

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

    @pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of orphans")
    def test_what_a_call_has_started_ends_when_its_worker_is_killed(self, tmp_path):
        path, backend = tmp_path / "pid", ProcessCalls(1)
        sheet = Sheet(leave_a_child, [{"path": str(path), "exits": False, **PLAIN}])
        backend.submit(sheet.calls)
        while not path.exists():
            assert sheet.calls[0].error is None
            time.sleep(0.01)
        backend.close()
        check(sheet.calls[0], (WorkerDied, "were"))
        assert ends(int(path.read_text()))

    def test_the_end_of_an_idle_worker_costs_no_call(self):
        with closing(ProcessCalls(1)) as backend:
            for _ in range(3):
                (call,) = Sheet(os.getpid, [{}]).run(backend)
                os.kill(call.value, signal.SIGKILL)

    @pytest.mark.skipif(sys.platform != "linux", reason="drops capabilities")
    @pytest.mark.parametrize("for_good", [False, True])
    def test_the_state_of_a_worker_does_not_reach_later_calls(self, for_good):
        """A worker whose limits cannot be raised again is replaced, and no call is lost."""
        with closing(ProcessCalls(1)) as backend:
            calls = Sheet(leave_behind, [{"row": row, "for_good": for_good} for row in range(4)]).run(backend)
        (first, _), (second, changed), *others = (call.value for call in calls)
        assert second == first and changed != state() and [left for _, left in others] == [state()] * 2
        assert ({process for process, _ in others} == {first}) == (not for_good)

    def test_workers_that_do_not_start(self, capfd):
        with closing(ProcessCalls(2, prepare=refuse)) as backend:
            for call in Sheet(repr_of, [{"x": 1}] * 3).run(backend):
                check(call, (WorkerDied, "worker processes do not start: exit code 1"))
        assert "Asked: not today" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------- Ray


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory) -> Iterator[str]:
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


def kill_parent(i: int) -> int:
    """Ray's worker is the parent of the watch over this process."""
    if i == 3:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        hang()
    return i


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


@pytest.mark.usefixtures("ray_cluster")
class TestRay(InAnotherProcess):
    kind, fates = "ray", ("wrong type", *(fate for fate in FATES if fate != "wrong type"))

    @pytest.fixture(scope="class")
    def backend(self, ray_cluster) -> Iterator[Backend]:
        with closing(RayCalls(in_flight=64)) as backend:
            yield backend

    def test_a_ray_is_started_where_there_is_none(self, ray_cluster):
        """It listens on this machine alone, and has this process's share of its CPUs."""
        import ray

        assert ray_cluster.startswith("127.0.0.1:") and ray.util.get_node_ip_address() == "127.0.0.1"
        assert ray.cluster_resources()["CPU"] == 2

    def test_close_ends_what_hangs_and_a_later_call_starts_again(self, backend, tmp_path):
        """It leaves no CPU taken."""
        import ray

        super().test_close_ends_what_hangs_and_a_later_call_starts_again(backend, tmp_path)
        assert ray.get(ray.remote(num_cpus=2)(repr_of).remote(1), timeout=MINUTES) == "1"

    def test_rows_whose_ray_worker_is_lost_are_tried_once_more(self, backend):
        Sheet(kill_parent, [{"i": 0}] * 300).run(backend)  # so fast that many go together
        for i, call in enumerate(Sheet(kill_parent, [{"i": i} for i in range(12)]).run(backend)):
            check(call, (WorkerDied, "Ray lost its task: ") if i == 3 else i)

    def test_no_more_rows_are_in_flight_than_asked_for(self, tmp_path):
        with closing(RayCalls(in_flight=1)) as backend:
            calls = Sheet(alone, [{"path": str(tmp_path / "taken")}] * 4).run(backend)
        assert [call.error for call in calls] == [None] * 4

    def test_two_trainings_share_a_cluster(self, backend, ray_cluster, tmp_path):
        """Another process finds it by RAY_ADDRESS, with functions of its main script."""
        (tmp_path / "script.py").write_text(ANOTHER_TRAINING)
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "1")]
        environment = {**os.environ, "RAY_ADDRESS": ray_cluster}
        sheet = Sheet(meet, [{"folder": str(tmp_path), "i": 0, "wait_for": 1}])
        backend.submit(sheet.calls)
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=MINUTES)
        assert (done.returncode, done.stdout) == (0, "[7, 7, 7]\n"), done.stderr
        sheet.wait()
        check(sheet.calls[0], 0)

    def test_a_cluster_without_a_free_cpu_is_given_up(self, tmp_path, monkeypatch):
        import ray

        monkeypatch.setattr(ray_calls, "QUIET_SECONDS", SOON)
        monkeypatch.setattr(ray_calls, "START_SECONDS", 0.0)
        other = ray.remote(num_cpus=2)(meet).remote(str(tmp_path), 0, 1)
        with closing(RayCalls()) as backend:
            (call,) = Sheet(repr_of, [{"x": 1}], SOON).run(backend)
            check(call, (WorkerDied, "Ray gave no outcome for 0.4 s: are all CPUs of the cluster taken?"))
            (tmp_path / "1").touch()
            ray.get(other)
            monkeypatch.undo()
            check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")


def test_a_cluster_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConnectionError, match="RAY_ADDRESS = 127.0.0.1:1 does not answer"):
        RayCalls()


# ------------------------------------------------------------------------------- threads and loops of this process


class Gated:
    """Calls that begin, and then wait until the gate is open, as a function and as a coroutine function."""

    def __init__(self) -> None:
        self.begun, self.open, self.started = threading.Event(), threading.Event(), []

    def blocks(self, i: int) -> int:
        self.started.append(i)
        self.begun.set()
        self.open.wait()
        return i

    async def awaits(self, i: int) -> int:
        self.started.append(i)
        self.begun.set()
        while not self.open.is_set():
            await asyncio.sleep(0.01)
        return i

    async def ignores(self, i: int) -> int:
        """Its cancellation."""
        self.started.append(i)
        while not self.open.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return i

    async def blocks_the_loop(self, i: int) -> int:
        return i if i == 1 else self.blocks(i)


@pytest.mark.parametrize("kind", ["thread", "asyncio", "retried"])
def test_close_ends_each_call_once_and_nothing_starts_later(kind):
    """One call runs and two wait; a call that is submitted afterwards does not bring them back."""
    gate, backend = Gated(), AsyncCalls(1) if kind == "asyncio" else ThreadCalls(1)
    if kind == "retried":
        backend = RetriedCalls(backend, (ConnectionError,), 1)
    function = gate.awaits if kind == "asyncio" else gate.blocks
    sheet = Sheet(function, [{"i": i} for i in range(3)])
    backend.submit(sheet.calls)
    gate.begun.wait(MINUTES)
    backend.close()
    assert sorted(sheet.wait()) == [0, 1, 2]
    assert [type(call.error) for call in sheet.calls] == [GivenUp] * 3
    gate.open.set()
    if kind != "retried":
        (again,) = Sheet(function, [{"i": 3}]).run(backend)
        assert again.value == 3 and gate.started == [0, 3]
        backend.close()


@pytest.mark.parametrize("kind", ["thread", "asyncio"])
def test_a_call_that_nobody_waits_for_any_more_at_the_end_of_its_pause_is_not_made(kind):
    stop, gate = threading.Event(), Gated()
    pace = SimpleNamespace(wait_seconds=lambda: stop.set() or 0.0)
    ended: queue.SimpleQueue[Call] = queue.SimpleQueue()
    with closing(AsyncCalls(1, pace=pace) if kind == "asyncio" else ThreadCalls(1, pace=pace)) as backend:
        function = gate.awaits if kind == "asyncio" else gate.blocks
        backend.submit([Call(function, {"i": 0}, timeout=MINUTES, done=ended.put, stop=stop)])
        assert isinstance(ended.get(timeout=MINUTES).error, GivenUp) and not gate.started


@pytest.mark.parametrize("kind", ["thread", "asyncio"])
def test_after_many_late_calls_at_once_others_wait_until_these_come_back(kind, monkeypatch):
    """As where a server answers late for a while: those that were late have no value, and the others are made then."""
    monkeypatch.setattr("dash_trl.workers.threads.MOST_ABANDONED", 4)
    monkeypatch.setattr("dash_trl.workers.threads.PATIENCE", 1000)
    monkeypatch.setattr("dash_trl.workers.async_calls.MOST_DEAF", 4)
    monkeypatch.setattr("dash_trl.workers.async_calls.PATIENCE", 1000)
    gate = Gated()
    with closing(ThreadCalls(4) if kind == "thread" else AsyncCalls(4)) as backend:
        function = gate.blocks if kind == "thread" else gate.ignores
        sheet = Sheet(function, [{"i": i} for i in range(12)], [SOON] * 4 + [MINUTES] * 8)
        backend.submit(sheet.calls)
        assert sorted(sheet.wait(4)) == [0, 1, 2, 3]
        assert len(gate.started) < 8  # the first to be late were replaced, the last was not
        gate.open.set()
        assert sorted(sheet.wait(8)) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert all(isinstance(call.error, TimeoutError) for call in sheet.calls[:4])
    assert [call.value for call in sheet.calls[4:]] == [4, 5, 6, 7, 8, 9, 10, 11]


def test_coroutines_that_ignore_their_cancellation_are_counted(monkeypatch):
    """Beyond the limit nothing is started, and where none ends the function is broken."""
    monkeypatch.setattr("dash_trl.workers.async_calls.MOST_DEAF", 4)
    gate = Gated()
    with closing(AsyncCalls(2)) as backend:
        calls = Sheet(gate.ignores, [{"i": i} for i in range(12)], 0.1).run(backend)
        gate.open.set()
    assert len(gate.started) <= 5
    assert {type(call.error) for call in calls[:4]} == {Overdue} and type(calls[-1].error) is GivenUp


def test_a_call_that_has_ended_is_not_late_afterwards(monkeypatch):
    """Its time limit ends with it: else it would count as a call that ignores its cancellation, and hold up others."""
    monkeypatch.setattr("dash_trl.workers.async_calls.MOST_DEAF", 1)
    monkeypatch.setattr("dash_trl.workers.async_calls.PATIENCE", SOON / MINUTES)

    async def waits(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def returns(seconds: float) -> float:
        return seconds

    with closing(AsyncCalls(2)) as backend:
        Sheet(returns, [{"seconds": 0.0}], SOON).run(backend)
        calls = Sheet(waits, [{"seconds": 2 * SOON}]).run(backend)  # over the limit of the first
        calls += Sheet(waits, [{"seconds": 0.0}]).run(backend)
    assert [call.value for call in calls] == [2 * SOON, 0.0]


def test_what_is_submitted_when_close_ends_a_call_is_made():
    """On a new loop: the old one takes no more calls."""
    gate, later = Gated(), Gated()
    later.open.set()
    sheet = Sheet(later.awaits, [{"i": i} for i in range(3)])
    backend = AsyncCalls(1)
    backend.submit([Call(gate.awaits, {"i": 0}, timeout=MINUTES, done=lambda _: backend.submit(sheet.calls))])
    gate.begun.wait(MINUTES)
    backend.close()
    sheet.wait()
    assert [call.value for call in sheet.calls] == [0, 1, 2]
    backend.close()


def test_a_loop_that_was_blocked_when_it_was_closed_ends_when_it_comes_back(monkeypatch):
    monkeypatch.setattr("dash_trl.workers.async_calls.CLOSE_SECONDS", 0.1)
    before, gate, backend = set(threading.enumerate()), Gated(), AsyncCalls(1)
    sheet = Sheet(gate.blocks_the_loop, [{"i": 0}])
    backend.submit(sheet.calls)
    gate.begun.wait(MINUTES)
    backend.close()
    check(sheet.calls[0], (GivenUp, "closed"))
    gate.open.set()
    (loop,) = (one for one in set(threading.enumerate()) - before if "event loop" in one.name)
    loop.join(60)
    assert not loop.is_alive()


def test_after_too_many_blocked_loops_calls_are_given_up(monkeypatch):
    """A call after one that blocks is made on a new loop."""
    monkeypatch.setattr("dash_trl.workers.async_calls.MOST_BLOCKED_LOOPS", 2)
    gate = Gated()
    with closing(AsyncCalls(1)) as backend:
        calls = Sheet(gate.blocks_the_loop, [{"i": i} for i in range(4)], SOON).run(backend)
        gate.open.set()
    assert [type(call.error) for call in calls] == [Overdue, type(None), Overdue, GivenUp] and calls[1].value == 1
    assert "the event loop did not answer" in str(calls[0].error)


@pytest.mark.parametrize("kind", ["thread", "asyncio", "asyncio that awaits"])
def test_the_child_of_a_call_that_forks_makes_no_other_calls(kind, tmp_path):
    """It would go on with all that runs on the loop, by the connections of its parent."""
    log, children = tmp_path / "log", []

    def forks(i: int) -> None:
        if i == 0 and (child := os.fork()):
            children.append(child)
        with log.open("a") as file:
            file.write(f"{i}\n")

    async def forks_async(i: int) -> None:
        forks(i)

    async def forks_and_awaits(i: int) -> None:
        if i == 0 and (child := os.fork()):
            children.append(child)
        for _ in range(50 if i or children else 10_000):
            await asyncio.sleep(0)
        forks(i or -1)

    function = {"thread": forks, "asyncio": forks_async}.get(kind, forks_and_awaits)
    with closing(ThreadCalls(1) if kind == "thread" else AsyncCalls(5)) as backend:
        Sheet(function, [{"i": i} for i in range(5)]).run(backend)
        (child,) = children
        assert ends(child)
        os.waitpid(child, 0)
    # The child of the first two comes to the end of its own call, and to no other.
    assert Counter(log.read_text().split()) == Counter(
        ["-1", "1", "2", "3", "4"] if kind == "asyncio that awaits" else ["0", "0", "1", "2", "3", "4"]
    )


def test_late_calls_end_though_no_thread_can_be_started(monkeypatch):
    """As at the system's limit of threads: no thread takes the place of one that hangs, and the watch goes on."""
    gate, start = Gated(), threading.Thread.start

    def refuse_threads(self: threading.Thread) -> None:
        if self.name == "dash_trl call":
            raise RuntimeError("can't start new thread")
        start(self)

    backend = ThreadCalls(1)
    sheet = Sheet(gate.blocks, [{"i": i} for i in range(3)], SOON)
    backend.submit(sheet.calls)
    gate.begun.wait(MINUTES)
    monkeypatch.setattr(threading.Thread, "start", refuse_threads)
    assert sorted(sheet.wait()) == [0, 1, 2]
    assert [type(call.error) for call in sheet.calls] == [Overdue, RuntimeError, RuntimeError]
    monkeypatch.undo()
    gate.open.set()
    assert Sheet(gate.blocks, [{"i": 5}]).run(backend)[0].value == 5
    backend.close()
