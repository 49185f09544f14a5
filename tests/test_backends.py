"""The backends of rewards: whatever a call does, it ends once, with its own outcome, and takes no other along."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dash_trl.workers import ray_calls
from dash_trl.workers.calls import Backend, Call
from dash_trl.workers.process_calls import ProcessCalls, WorkerDied
from dash_trl.workers.processes import FUNCTIONS_KEPT
from dash_trl.workers.ray_calls import RayCalls
from tests.agent_run import TIMEOUT, picked, value

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


def act(what: str, i: int) -> object:
    return i if what == "own number" else FAULTS[what][0]()


BACKENDS: dict[str, Callable[[], Backend]] = {"process": lambda: ProcessCalls(2), "ray": lambda: RayCalls(in_flight=64)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[str]:
    """The address of a Ray of this machine, which leaves nothing in the home folder."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_calls.LOCAL_RAY.items():
            patch.setenv(name, value)
        patch.delenv("RAY_AUTH_MODE", raising=False)  # Ray sets it
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("PYTHONPATH", str(ROOT))
        import ray

        folder = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have 107 characters at most
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield context.address_info["gcs_address"]
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
    """Calls and how often each of them was finished."""

    def __init__(self, function: Callable, arguments: Sequence[dict], timeout: float | Sequence[float] = MINUTES):
        self.order: list[int] = []
        self.stops = [threading.Event() for _ in arguments]
        self._one = threading.Semaphore(0)
        timeouts = [timeout] * len(arguments) if isinstance(timeout, float) else timeout
        self.calls = [
            Call(function, one, timeout=seconds, done=lambda _, i=i: self._done(i), stop=self.stops[i])
            for i, (one, seconds) in enumerate(zip(arguments, timeouts, strict=True))
        ]

    def _done(self, i: int) -> None:
        self.order.append(i)
        self._one.release()

    def wait(self, count: int | None = None) -> list[Call]:
        for _ in range(len(self.calls) if count is None else count):
            assert self._one.acquire(timeout=MINUTES), f"of {len(self.calls)} calls, {sorted(self.order)} are done"
        return self.calls

    def run(self, backend: Backend) -> list[Call]:
        backend.submit(self.calls)
        self.wait()
        assert sorted(self.order) == list(range(len(self.calls)))
        return self.calls


def check(call: Call, expected: object) -> None:
    if isinstance(expected, tuple):
        kind, text = expected
        assert type(call.error) is kind and text in str(call.error) and call.value is None, repr(call.error)
    else:
        assert call.error is None, repr(call.error)
        assert call.value == expected or call.value != call.value and expected != expected


def test_a_call_ends_with_its_own_outcome_and_takes_no_other_along(backend):
    """All faults at once, among calls without any."""
    whats = [*FAULTS, *["own number"] * len(FAULTS) * 2]
    random.Random(0).shuffle(whats)
    arguments = [{"what": what, "i": i} for i, what in enumerate(whats)]
    calls = Sheet(act, arguments, [SOON if "hang" in what else MINUTES for what in whats]).run(backend)
    for i, (what, call) in enumerate(zip(whats, calls, strict=True)):
        check(call, FAULTS[what][1] if what in FAULTS else i)


def note(path: str, i: int, last: int) -> int:
    """Some are slow, the first come last, and some take their worker with them; each writes that it was called."""
    with open(path, "a") as file:
        file.write(f"{i}\n")
    if i % 100 == 7:
        time.sleep(0.2)
    if i % 50 == 11:
        os._exit(1)
    return last - i


def test_each_is_called_once_whatever_becomes_of_its_neighbours(backend, tmp_path):
    count = 200
    calls = Sheet(note, [{"path": str(tmp_path / "log"), "i": i, "last": count} for i in range(count)]).run(backend)
    for i, call in enumerate(calls):
        check(call, (WorkerDied, "exit code 1") if i % 50 == 11 else count - i)
    assert Counter(map(int, (tmp_path / "log").read_text().split())) == Counter(range(count))


def meet(folder: str, i: int, wait_for: int | None) -> int:
    """Returns after another one has."""
    while wait_for is not None and not Path(folder, str(wait_for)).exists():
        time.sleep(0.01)
    Path(folder, str(i)).touch()
    return i


def test_what_comes_back_in_reverse_order_belongs_to_its_call(backend, tmp_path):
    sheet = Sheet(meet, [{"folder": str(tmp_path), "i": i, "wait_for": 9 if i == 0 else None} for i in range(2)])
    backend.submit(sheet.calls)
    sheet.wait(1)
    assert sheet.order == [1]
    (tmp_path / "9").touch()
    sheet.wait(1)
    assert [call.value for call in sheet.calls] == [0, 1]


def test_an_error_tells_where_in_the_worker_it_was_raised(backend):
    (call,) = Sheet(act, [{"what": "raise", "i": 0}]).run(backend)
    assert "in raise_\n    raise error" in "".join(call.error.__notes__)


def test_what_is_too_large_for_a_socket_at_once(backend):
    """Both ways at the same time, while neither side reads."""
    arguments = [{"text": str(i % 10) * (1 << 20)} for i in range(48)]
    calls = Sheet(lambda text: text[::-1], arguments).run(backend)
    assert all(call.value == one["text"] for call, one in zip(calls, arguments, strict=True))


def test_functions_that_are_made_anew_for_each_call_beside_one_that_stays(backend):
    """A worker keeps some of them, and is sent the others again."""
    for i in range(FUNCTIONS_KEPT + 3):
        (new,), (old,) = Sheet(lambda x, i=i: x * i, [{"x": 3}]).run(backend), Sheet(repr_of, [{"x": i}]).run(backend)
        assert (new.value, old.value) == (3 * i, str(i)), (new.error, old.error)


class Stateful:
    """It compares by value, so that it has no hash."""

    def __init__(self) -> None:
        self.base = 40

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stateful)

    def __call__(self, x: int) -> int:
        return self.base + x

    def compute_score(self, x: int) -> int:
        return self.base - x


def test_methods_and_callable_objects(backend):
    for function, expected in ((Stateful(), 42), (Stateful().compute_score, 38)):
        assert [call.value for call in Sheet(function, [{"x": 2}] * 3).run(backend)] == [expected] * 3


def test_a_function_that_cannot_be_sent_is_refused_at_once(backend):
    lock = threading.Lock()

    def guarded() -> None:
        lock.acquire()

    with pytest.raises(
        ValueError, match=r"'.*guarded' cannot be sent to another process \(TypeError: .*Make that within"
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
    sheet.wait(2)
    check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")
    assert sorted(sheet.order) == [0, 3] and not (tmp_path / "1").exists()


def test_a_call_may_be_submitted_when_another_is_done(backend):
    sheet = Sheet(repr_of, [{"x": 2}])
    first = Call(repr_of, {"x": 1}, timeout=MINUTES, done=lambda _: backend.submit(sheet.calls))
    backend.submit([first])
    check(sheet.wait()[0], "2")


def test_close_ends_what_hangs_and_a_later_call_starts_again(backend_name, tmp_path):
    backend = BACKENDS[backend_name]()
    sheet = Sheet(meet, [{"folder": str(tmp_path), "i": i, "wait_for": 9 if i else None} for i in range(3)])
    backend.submit(sheet.calls)
    sheet.wait(1)
    backend.close()
    backend.close()
    for call in sheet.wait(2)[1:]:
        check(call, (WorkerDied, "were"))
    check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")
    backend.close()


def load(path: Path):
    """As `--reward_path` does."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_of_a_file_that_no_import_finds(backend, tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(
        "class Mine(Exception):\n    pass\n\n\ndef half(x):\n    return x / 2\n\n\n"
        "def reward(x):\n    if x < 0:\n        raise Mine(x)\n    return half(x)\n"
    )
    monkeypatch.setitem(sys.modules, "my_reward", None)
    module = load(tmp_path / "my_reward.py")
    good, bad = Sheet(module.reward, [{"x": 3.0}, {"x": -1.0}]).run(backend)
    check(good, 1.5)
    check(bad, (module.Mine, "-1.0"))


def leave_a_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "100000"])
    Path(path).write_text(str(child.pid))
    child.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_a_call_has_started_ends_with_it(backend, tmp_path):
    (call,) = Sheet(leave_a_child, [{"path": str(tmp_path / "pid")}], SOON).run(backend)
    check(call, (TimeoutError, ""))
    ended(int((tmp_path / "pid").read_text()))


def ended(pid: int) -> None:
    """Waits until there is no such process, or a dead one that init has not reaped yet."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(int(MINUTES / 0.01)):
        try:
            if stat.read_text().split()[2] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} lives")


# ------------------------------------------------------------------------------------------------------- processes


def script(code: str, path: Path, **variables: str | None) -> subprocess.CompletedProcess:
    (path / "script.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, str(path / "script.py")]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=MINUTES)


def test_functions_and_errors_of_the_main_script(tmp_path):
    """Which has no main guard, and whose workers are still at work as it ends."""
    done = script(
        """
import threading
from dash_trl.workers import Call, ProcessCalls, call_all
print("once")

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

backend = ProcessCalls(2)
calls = call_all(backend.submit, reward, [{"row": Row(x)} for x in range(3)], timeout=300)
print([type(call.error) is Mine or (type(call.value) is Row, call.value.x) for call in calls])
backend.submit([Call(lambda: sum(range(10**15)), {}, timeout=300, done=print)])
""",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == ["once", "[(True, 0), (True, 1), True]"]


def set_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def pause() -> None:
    time.sleep(0.3)


def test_an_alarm_that_a_call_leaves_behind_strikes_no_other():
    backend = ProcessCalls(1)
    calls = Sheet(set_alarm, [{}]).run(backend) + Sheet(pause, [{}]).run(backend)
    backend.close()
    assert [call.error for call in calls] == [None, None]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a child")
def test_workers_die_with_a_killed_parent_in_c_code_too(tmp_path):
    (tmp_path / "script.py").write_text(
        f"""
import os
from dash_trl.workers import ProcessCalls, call_all

def work():
    with open({str(tmp_path / "pid")!r}, "w") as file:
        file.write(str(os.getpid()))
    sum(range(10**15))

call_all(ProcessCalls(1).submit, work, [{{}}], timeout=3000)
"""
    )
    process = subprocess.Popen([sys.executable, tmp_path / "script.py"], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        time.sleep(0.01)
    process.kill()
    process.wait()
    ended(int((tmp_path / "pid").read_text()))


def test_a_worker_that_is_ended_between_calls_costs_no_call():
    backend = ProcessCalls(1)
    for _ in range(3):
        (call,) = Sheet(os.getpid, [{}]).run(backend)
        os.kill(call.value, signal.SIGKILL)
    backend.close()


def test_workers_that_do_not_start(capfd):
    backend = ProcessCalls(2, prepare=refuse)
    for call in Sheet(repr_of, [{"x": 1}] * 3).run(backend):
        check(call, (WorkerDied, "worker processes do not start: exit code 1"))
    assert "Asked: not today" in capfd.readouterr().err
    backend.close()


def refuse() -> None:
    raise Asked("not today")


# ------------------------------------------------------------------------------------------------------------- Ray


def kill_parent(i: int) -> int:
    if i == 3:
        os.kill(os.getppid(), signal.SIGKILL)
        hang()
    return i


def test_rows_whose_ray_worker_is_lost_are_tried_once_more(cluster):
    backend = RayCalls()
    Sheet(kill_parent, [{"i": 0}] * 300).run(backend)  # so fast that many go together
    for i, call in enumerate(Sheet(kill_parent, [{"i": i} for i in range(12)]).run(backend)):
        check(call, (WorkerDied, "Ray lost its task: ") if i == 3 else i)
    backend.close()


def test_no_more_rows_are_in_flight_than_asked_for(cluster, tmp_path):
    backend = RayCalls(in_flight=1)
    calls = Sheet(alone, [{"path": str(tmp_path / "taken")}] * 8).run(backend)
    assert [call.error for call in calls] == [None] * 8
    backend.close()


def alone(path: str) -> None:
    os.mkdir(path)
    time.sleep(0.05)
    os.rmdir(path)


def test_two_trainings_share_a_cluster(cluster, tmp_path):
    """Another process finds it by RAY_ADDRESS, with functions of its main script."""
    backend = RayCalls()
    sheet = Sheet(meet, [{"folder": str(tmp_path), "i": 0, "wait_for": 1}])
    backend.submit(sheet.calls)
    done = script(
        f"""
from pathlib import Path
from dash_trl.workers import RayCalls, call_all

def mark():
    Path({str(tmp_path)!r}, "1").touch()
    return 7

backend = RayCalls()
print([call.value for call in call_all(backend.submit, mark, [{{}}] * 3, timeout=300)])
""",
        tmp_path,
        RAY_ADDRESS=cluster,
    )
    assert (done.returncode, done.stdout) == (0, "[7, 7, 7]\n"), done.stderr
    check(sheet.wait()[0], 0)
    backend.close()


def test_a_cluster_without_a_free_cpu_is_given_up(cluster, tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(ray_calls, "QUIET_SECONDS", SOON)
    monkeypatch.setattr(ray_calls, "START_SECONDS", 0.0)
    backend = RayCalls()
    other = ray.remote(num_cpus=2)(meet).remote(str(tmp_path), 0, 1)
    (call,) = Sheet(repr_of, [{"x": 1}], SOON).run(backend)
    check(call, (WorkerDied, "Ray gave no outcome for 1 s: are all CPUs of the cluster taken?"))
    (tmp_path / "1").touch()
    ray.get(other)
    monkeypatch.undo()
    check(Sheet(repr_of, [{"x": 1}]).run(backend)[0], "1")
    backend.close()


def test_what_is_cancelled_as_it_begins_leaves_its_cpu(cluster, tmp_path):
    """Ray loses some of such cancellations."""
    import ray

    for _ in range(2):
        backend = RayCalls()
        Sheet(repr_of, [{"x": 1}] * 8).run(backend)  # its workers have started
        sheet = Sheet(meet, [{"folder": str(tmp_path), "i": i, "wait_for": 9 if i else None} for i in range(3)])
        backend.submit(sheet.calls)
        sheet.wait(1)
        backend.close()
        assert ray.get(ray.remote(num_cpus=2)(repr_of).remote(1), timeout=MINUTES / 3) == "1"


def test_a_ray_of_this_machine_is_started_where_there_is_none(tmp_path):
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray")
    code = """
from dash_trl.workers import RayCalls, call_all
backend = RayCalls()
print([call.value for call in call_all(backend.submit, lambda x: x + 1, [{"x": 1}], timeout=300)])
import ray
print(ray.util.get_node_ip_address())
"""
    home = {"HOME": str(tmp_path), "RAY_TMPDIR": folder}
    done = script(code, tmp_path, RAY_ADDRESS=None, RAY_AUTH_MODE=None, RAY_AUTH_TOKEN_PATH=None, **home)
    shutil.rmtree(folder, ignore_errors=True)
    assert (done.returncode, done.stdout) == (0, "[2]\n127.0.0.1\n"), done.stderr


def test_a_cluster_that_is_not_there(tmp_path):
    pytest.importorskip("ray")
    done = script("from dash_trl.workers import RayCalls\nRayCalls()", tmp_path, RAY_ADDRESS="127.0.0.1:1")
    assert "ConnectionError: RAY_ADDRESS = 127.0.0.1:1 does not answer" in done.stderr


# ---------------------------------------------------------------------------------- faults in a run, on 1 and 2 ranks

AGENT_BACKENDS = ("thread", "asyncio", "process", "ray")
REASONS = {
    "raise": "raised ConnectionError: away",
    "die": "raised WorkerDied",
    "NaN": "returned nan",
    "inf": "returned -inf",
    "wrong type": "returned (1.0, 2.0)",
    "hang": f"raised TimeoutError: took more than {TIMEOUT:g} s",
}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.exhaustive), 2])
def befallen(request, cluster, tiny_model, tmp_path_factory):
    """What each function said on each rank of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    environment["RAY_ADDRESS"] = cluster
    launch = ["torch.distributed.run", f"--nproc_per_node={request.param}", "--master_addr=127.0.0.1"]
    output = tmp_path_factory.mktemp("agent")
    script = [str(ROOT / "tests" / "agent_run.py"), str(output), tiny_model, *AGENT_BACKENDS]
    command = [sys.executable, "-m", *launch, f"--master_port={port}", *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((output / f"seen_{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.distributed
@pytest.mark.parametrize("fault", [*REASONS, "None", "slow"])
@pytest.mark.parametrize("kind", AGENT_BACKENDS)
def test_every_row_has_its_score_or_a_reason(befallen, kind, fault):
    if fault == "die" and kind in ("thread", "asyncio"):
        return  # that is the trainer's own process
    befell = 0
    for rank in befallen:
        ids, returned, failed, raised, failure = rank[f"{kind} {fault}"]
        faulty = [row == 0 if fault == "hang" else picked(one) for row, one in enumerate(ids)]
        befell += sum(faulty)
        right = [value(one) for one in ids]
        if fault == "slow":
            assert returned == right and not any(failed)
            continue
        assert returned == [None if bad else one for bad, one in zip(faulty, right, strict=True)]
        assert failed == [bad and fault != "None" for bad in faulty]
        assert raised == [bad and fault not in ("None", "NaN", "inf") for bad in faulty]
        assert REASONS.get(fault, "") in failure and bool(failure) == any(failed)
    assert befell, "the fault befell no row"
