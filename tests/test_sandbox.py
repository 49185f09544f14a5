"""The sandbox: each attack is contained and scored as failed, and what is no fault of a program is not scored."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dash_trl.sandbox import Sandbox, SandboxError
from dash_trl.sandbox.box import ENVIRONMENT
from tests.attacks import FILES, FORGED, LEFT_BEHIND, LIMITS, LONG, OUTWARD, TESTS, TOO_MUCH, UNSCORED, programs
from tests.launching import ROOT, ends
from tests.tiny import refused

# By this fixture a case says that it takes long.
not_quick = pytest.mark.usefixtures("python")
SECRET = "the-key-that-nobody-may-read"
RIGHT = "def f(x):\n    return x + 1"
# If the trainer is root, a test can become root, but gets no rights.
AS_ROOT = """
user = os.getuid()
if 0 in os.getresuid(): os.setresuid(0, 0, 0)
rights, writable = open('/proc/self/status').read(), os.access('/proc/sys/kernel/core_pattern', os.W_OK)
os.setresuid(user, user, -1)
assert f() and not writable and ('CapEff:\t00000000000000c0' in rights or 'CapEff:\t0000000000000000' in rights)
"""
ATTACKS = TOO_MUCH | FORGED | OUTWARD | UNSCORED | FILES | LEFT_BEHIND


@pytest.fixture(scope="module")
def box():
    return Sandbox(**LIMITS)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What the attacks are after, as the words in capitals."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "secret").write_text(SECRET)
    folder.chmod(0o777)
    (folder / "secret").chmod(0o666)  # so that only the sandbox is in the way
    os.environ["DASH_TRL_TEST_API_KEY"] = SECRET
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        words = {"FOLDER": folder, "HOME": Path.home(), "SECRET": SECRET, "PID": os.getpid()}
        yield {**words, "PORT": server.getsockname()[1]}
        with pytest.raises(BlockingIOError):
            server.accept()  # nobody came through
    del os.environ["DASH_TRL_TEST_API_KEY"]


def check_all(check, rows) -> None:
    """Call a check with each row, in two threads; raise the first failure."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda row: check(*row), rows))


@not_quick
@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_attacks(box, places, more):
    secret = places["FOLDER"] / "secret"

    def check(name: str, program: str) -> None:
        for word, value in places.items():
            program = program.replace(word, str(value))
        verdict = box.run(program, TESTS)
        assert not verdict.right and verdict.passed == 0 and verdict.reason, (name, verdict)
        assert secret.read_text() == SECRET and secret.stat().st_mode & 0o777 == 0o666, name

    check_all(check, [(name, program) for name, program in ATTACKS.items() if (name in LONG) == more])
    assert box.run(RIGHT, TESTS).right


def test_nothing_of_one_program_reaches_the_next(box):
    """Not by a file, by a module, by a name, nor by a process."""
    modules = "import json, builtins, os\n"
    mark = f"{modules}open('mark', 'w').write('x')\njson.mark = builtins.mark = 1\n{RIGHT}"
    look = f"{modules}def f(x): return [os.listdir('.'), hasattr(json, 'mark'), hasattr(builtins, 'mark')]"
    assert box.run(mark, TESTS).right
    assert box.run(look, ["assert f(1) == [[], False, False]"]).right


def test_a_program_sees_its_own_files_and_processes(box):
    program = (
        "import os\ndef f():\n    files = [n for n in range(64) if os.path.exists(f'/proc/self/fd/{n}')]\n"
        "    return files, [one for one in os.listdir('/proc') if one.isdigit()]\n"
        "def is_read_only(path): return bool(os.statvfs(path).f_flag & os.ST_RDONLY)"
    )
    tests = [
        "assert f() == ([0, 1, 2, 3, 4], ['1', '2'])",
        "assert not is_read_only('/tmp')",
        *(f"assert is_read_only({path!r})" for path in ("/", "/usr", sys.base_prefix + "/lib", "/dev", "/proc")),
        AS_ROOT,
    ]
    assert box.run(program, tests).right


def test_packages_of_an_environment_in_tmp(monkeypatch):
    """Where programs have a /tmp of their own, they still import what is installed there."""
    program = "import os, installed_in_tmp\ndef f(x): return (x + installed_in_tmp.ONE, os.listdir('.'))"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "installed_in_tmp.py").write_text("ONE = 1")
        monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", folder)
        assert Sandbox(**LIMITS).run(program, ["assert f(1) == (2, [])"]).right


# ----------------------------------------------------------------------------------------- other users, other machines


def shown() -> str:
    """Shell commands that hide closed folders above Python and this checkout, and put these two into their place."""
    inside = {Path(sys.base_prefix): "/mnt/0", Path(sys.prefix): "/mnt/1", ROOT: "/mnt/2"}
    closed = {
        path: next((top for top in reversed(path.parents) if top.stat().st_mode & 0o005 != 0o005), None)
        for path in inside
    }
    hidden = [path for path in inside if closed[path]]
    return "".join(
        [
            *(["mount -t tmpfs none /mnt; "] if hidden else []),
            *(f"mkdir {inside[path]}; mount --bind '{path}' {inside[path]}; " for path in hidden),
            *(f"mount -t tmpfs -o mode=755 none '{top}'; " for top in {closed[path] for path in hidden}),
            *(f"mkdir -p '{path}'; mount --bind {inside[path]} '{path}'; " for path in hidden),
        ]
    )


def said(script: str, *become: str) -> list[str]:
    """What a script prints, as root's child if this is root. (Closed folders above Python and the checkout open.)"""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    if become:
        command = ["unshare", "--mount", "sh", "-ec", f'{shown()}exec "$@"', "sh", *become, *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


ATTACKED = """
import os, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from dash_trl.sandbox import Sandbox
from dash_trl.sandbox.box import ENVIRONMENT
from tests.launching import ROOT, ends
from tests.tiny import refused
from tests.attacks import FILES, LEFT_BEHIND, LIMITS, LONG, OUTWARD, RENAMES, TESTS
box, attacks = Sandbox(**LIMITS), OUTWARD | FILES | LEFT_BEHIND
names = [name for name in attacks if name not in LONG]
made = [attacks[name].replace("PID", str(os.getpid())).replace("FOLDER", sys.base_prefix) for name in names]
with ThreadPoolExecutor(2) as pool:
    passed = [name for name, verdict in zip(names, pool.map(lambda one: box.run(one, TESTS), made)) if verdict.passed]
right = box.run("import os, sqlite3\\ndef f(): return os.getuid()", ["assert f() == %d" % os.getuid()]).right
print(os.getuid(), right)
print(passed)
with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # that contains the packages, and a program makes another one
    os.mkdir(folder + "/packages")
    ENVIRONMENT["PYTHONPATH"] = folder + "/packages"
    print(box.run(RENAMES.format(folder), ["assert not f()"]).right)
"""


@not_quick
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are an ordinary user's")
def test_what_holds_for_an_ordinary_user():
    user = ("setpriv", "--reuid", "65533", "--regid", "65533", "--clear-groups", "--inh-caps=-all")
    assert said(ATTACKED, *user) == ["65533 True", "[]", "True"]


def test_a_machine_without_namespaces_is_an_error_with_the_remedies():
    """As in a container that has one user only."""
    script = "from dash_trl import CodeReward\ntry: CodeReward()\nexcept ValueError as error: print(error)"
    text = " ".join(said(script, "unshare", "--user", "--map-root-user"))
    for remedy in (
        "apparmor_restrict_unprivileged_userns",
        "--security-opt",
        "a sandbox of your own",
        "'rlimits'",
        "bwrap: ",
    ):
        assert remedy in text, remedy


def test_rlimits_limit_resources_and_say_so(caplog):
    box = Sandbox(isolation="rlimits", **LIMITS)
    assert "programs can use the network, and read" in caplog.text and box.kind == "rlimits"
    for name in ("an endless loop", "10 GB at once", "a file of 1 GB", "thousands of open files", "exit 0 in a call"):
        verdict = box.run((TOO_MUCH | FORGED)[name], TESTS)
        assert verdict.passed == 0 and verdict.reason, name
    assert box.run("import os\ndef f(): return os.listdir('.')", ["assert f() == []"]).right


def test_settings_that_cannot_be():
    for settings, message in [
        ({"cpu_seconds": 0}, "wall_seconds=60.0 must be more than cpu_seconds=0"),
        ({"wall_seconds": 2}, "wall_seconds=2 must be more than cpu_seconds=4"),
        ({"isolation": "docker"}, "isolation='docker' is unknown. Choose 'namespaces' or 'rlimits'"),
    ]:
        refused(message, Sandbox, **settings)


# --------------------------------------------------------------------------------------------- processes and the clock


def below(process: int) -> set[int]:
    """The processes that this one has started, and those that they have."""
    return {one.pid for one in psutil.Process(process).children(recursive=True)}


TRAINER = """
import threading
from dash_trl.sandbox import Sandbox
daemon = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(600)\\n"
sleep = "import time\\ndef f(x): time.sleep(600)"
for kind, program in (("namespaces", daemon + sleep), ("rlimits", sleep)):
    box = Sandbox(isolation=kind, wall_seconds=900)
    threading.Thread(target=box.run, args=(program, ["assert f(1) == 1"])).start()
print("at work", flush=True)
"""


def test_all_of_it_ends_with_the_trainer():
    """Killed with SIGKILL, while programs sleep."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert trainer.stdout.readline() == "at work\n"
    while len(started := below(trainer.pid)) < 6:  # bwrap, tests, program, daemon; without bwrap: tests, program
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    assert all(map(ends, started)), "a process has outlived the trainer"


def test_what_something_else_ends_is_not_scored(box):
    sleeping = "import time\ndef f(x): time.sleep(600)"
    others = below(os.getpid())  # such as servers of other tests
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(box.run, sleeping, TESTS)
        while not verdict.done():
            for one in sorted(below(os.getpid()) - others):  # bwrap first: without its program, the checker gives 0
                with suppress(ProcessLookupError):
                    os.kill(one, 9)
            time.sleep(0.01)
        refused("could not be run", verdict.result, error=SandboxError)


CROWDED = """
import os
from dash_trl.sandbox import Sandbox
box = Sandbox()
open("/sys/fs/cgroup/memory/dash_trl_test/cgroup.procs", "w").write(str(os.getpid()))
try: print(box.run("def f(x): return len(bytearray(600 << 20))", ["assert f(1) == 600 << 20"]))
except Exception as error: print(error)
"""


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="needs root and control groups of version 1"
)
def test_a_program_that_the_kernel_kills_for_lack_of_memory_is_not_scored():
    group = Path("/sys/fs/cgroup/memory/dash_trl_test")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
        assert said(CROWDED) == ["the machine ran out of memory while the program ran"]
    finally:
        group.rmdir()


WAITING = programs("""
## asleep while it is loaded
import time
time.sleep(600)
## a deadlock
import threading
lock = threading.Lock()
def f(x):
    with lock, lock: return x + 1
## a thread that never ends
import threading, time
def f(x):
    threading.Thread(target=time.sleep, args=(600,)).start()
    time.sleep(600)
""")


@not_quick
def test_a_program_that_waits_for_nothing_is_wrong():
    """A busy machine may be the cause at first, so that it gets more time."""

    def check(name: str) -> None:
        verdict = None
        wall = 1.5
        while verdict is None:
            with suppress(TimeoutError):
                verdict = Sandbox(cpu_seconds=1, wall_seconds=wall).run(WAITING[name], TESTS)
            wall *= 2
            assert wall < 1000, name
        assert verdict.passed == 0 and "wait for something" in verdict.reason, (name, verdict)

    check_all(check, [(name,) for name in WAITING])


BUSY = """
import os
from dash_trl.sandbox import Sandbox
parent = os.getpid()
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
box = Sandbox(cpu_seconds=2, wall_seconds=12)
for _ in range(15):
    if os.fork() == 0:
        os.setsid()  # else the kernel gives this session no more CPU time than that of the program
        while os.getppid() == parent: pass
        os._exit(0)
for program, test in ("def f(x):\\n    while True: pass", "assert f(1)"), ("print(sum(range(6 * 10**6)))", ("", "1")):
    try: print(box.run(program, [test] * 50))
    except TimeoutError as error: print(error)
"""


@not_quick
def test_a_program_that_has_to_wait_for_a_cpu_is_not_scored():
    """Neither in one call, nor in the processes of many inputs, most of which have ended."""
    lines = said(BUSY)
    assert [line.endswith("12 s of wall time: the machine is busy") for line in lines] == [True, True], lines


BUSY_ITSELF = """
import os
from dash_trl.sandbox import Sandbox
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
program = "import os\\ndef f(x):\\n    [os.fork() for _ in range(4)]\\n    while True: pass"
print(Sandbox(cpu_seconds=1, wall_seconds=10, processes=20).run(program, ["assert f(1)"]).reason)
"""


@not_quick
def test_a_program_that_keeps_the_cpus_busy_is_wrong():
    (line,) = said(BUSY_ITSELF)
    assert line.endswith("for each other")


AS_PROCESS_1 = """
import os
from pathlib import Path
from dash_trl.sandbox import Sandbox
for kind in ("namespaces", "rlimits"):
    box = Sandbox(isolation=kind, cpu_seconds=1, wall_seconds=2)
    print(box.run("import time\\ndef f(x): time.sleep(600)", ["assert f(1)"]).passed)
print(os.getpid(), [one for one in Path("/proc").glob("[0-9]*/stat") if ") Z " in one.read_text()])
"""


@not_quick
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_trainer_that_is_process_1_keeps_no_zombies():
    assert said(AS_PROCESS_1, "unshare", "--pid", "--fork", "--mount-proc") == ["0", "0", "1 []"]


# ---------------------------------------------------------------------------------------------------- right and wrong

FORGES_AN_ANSWER = """
import sys
def f(x): return 0
frame = sys._getframe()
while frame:
    if "operations" in frame.f_locals: frame.f_locals["operations"]["name"] = lambda name: {"all": len, "f": f}[name]
    frame = frame.f_back
"""
IS_CLOSE = "def f(x): return 0\nclass {}:\n    isclose = staticmethod(lambda *a: True)"
EXIT = "import os\ndef f(x): os._exit(0)"
STOPPED = ("all(map(f, [1]))", "all(map(lambda x: f(x) == 2, [1]))", "list(filter(f, [1])) == []")
CLOSE = "import numpy as np\nassert np.allclose"
RAISES = "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False"
ASSERTS = ("allclose", "array_equal", "almost_equal", "array_almost_equal")
WRONG = [
    # what a program gives its tests to work on for ever
    ("def f(x): return range(10**15)", "assert sum(f(1)) == 2"),
    ("def f(x): return range(10**9)", "assert list(f(1)) == [2]"),
    # names of Python's own, and of modules that the tests do not import
    ("def f(x): return 0\ndef all(x): return True", "assert all([f(1) == 2])"),
    ("def f(x): return 0\ndef isinstance(x, y): return True", "assert isinstance(f(1), str)"),
    (FORGES_AN_ANSWER, "assert all([f(1) == 2])"),
    *[(IS_CLOSE.format(name), f"assert {name}.isclose(f(1), 2)") for name in ("math", "cmath", "np", "numpy")],
    ("pass", "assert sum([1]) == 1"),  # `sum` is the entry point, which the program lacks
    # an end of the process, or of an iterator, where the test expects something else
    (EXIT, "try:\n    f(1)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"),
    *[("def f(x): raise StopIteration", f"assert {test}") for test in STOPPED],
    # an empty list is close to everything, and a number to all of a list
    ("def f(x): return []", f"{CLOSE}(f(1), 2.5)"),
    ("def f(x): return []", f"{CLOSE}(f(1), [2.5])"),
    ("def f(x): return 0", f"{CLOSE}(f(1), [0.0, 0.0])"),
    ("import numpy\ndef f(x): return numpy.array([])", f"{CLOSE}(f(1), 2.5)"),
    ("import numpy\ndef f(x): return numpy.array([[]])", "assert (f(1) == 2.5).all()"),
    ("def f(x): return []", "import numpy as np\nassert np.isclose(f(1), [2.5]).all()"),
    ("def f(x): return []", "from numpy import allclose\nassert allclose(f(1), 2.5)"),
    ("def f(x): return []", "assert np.allclose(f(1), 2.5)"),
    *[("def f(x): return []", f"import numpy as np\nnp.testing.assert_{name}(f(1), 2.5)") for name in ASSERTS],
    ("f = 5", "assert f(1) == 5"),
    ("def f(x): import no_package", "assert f(1)"),
]


def test_what_is_wrong(box):
    def check(program: str, test: str) -> None:
        verdict = box.run(program, [test], entry_point="sum" if program == "pass" else "f")
        assert (verdict.passed, verdict.right) == (0, False) and verdict.reason, (program, test, verdict)

    check_all(check, WRONG)


USES = [
    # a signal to its tests
    "import os\ndef f(): return os.kill(os.getppid(), 2) is None",
    # threads, timers, an event loop
    """
import asyncio, signal, threading, time
from concurrent.futures import ThreadPoolExecutor
async def both():
    await asyncio.sleep(0.001)
    return await asyncio.to_thread(abs, -1)
def f():
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while not rung: time.sleep(0.001)
    with ThreadPoolExecutor(1) as pool:
        return asyncio.run(both()) == 1 and list(pool.map(abs, [-1])) == [1]
""",
    # files and formats
    """
import gzip, mmap, os, shutil, sqlite3, tempfile, uuid, zipfile
import numpy
def f():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        open('a', 'w').write('x')
        shutil.copy2('a', 'b')
        os.symlink('b', 'd')
        with gzip.open('e', 'w') as file: file.write(b'x')
        with zipfile.ZipFile('f', 'w') as file: file.write('a')
        with sqlite3.connect('h') as base: base.execute('create table t (x)')
        numpy.save('i.npy', numpy.ones(3))
        numpy.load('i.npy', mmap_mode='r').sum()
        mmap.mmap(-1, 4096).flush(), uuid.uuid1()
        os.chdir('..')
    return numpy.linalg.inv(numpy.eye(99)).sum() == 99
""",
    # processes of its own
    """
import multiprocessing, os, subprocess, sys
def f():
    with multiprocessing.Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
    os.system('true')
    return subprocess.run([sys.executable, '-S', '-c', 'print(1)'], capture_output=True, text=True).stdout == '1\\n'
""",
]


def test_what_is_right():
    rows = [(program, "assert f()") for program in USES] + [
        ("def sum(x): return x", "assert sum(1) == 1", "sum"),
        ("def code(x): return x", "assert code(1) == 1", "code"),
        ("def f(x): return x.keys()", "assert f({1: 2, (3, 4): 5}) == {1, (3, 4)}"),
        ("def f(x): return [0.1 + 0.2, 1]", f"{CLOSE}(f(1), [0.3, 1]) and np.allclose(f(1)[0], 0.3)"),
        ("import numpy\ndef f(x): return numpy.zeros((2, 2))", f"{CLOSE}(f(1), 0) and np.isclose(f(1), 0).all()"),
        ("def f(x): return []", f"{CLOSE}(f(1), [])"),
        ("def f(x): return x", "np.testing.assert_allclose(actual=f(1.0), desired=1, rtol=1e-9)"),
        ("class No(ValueError): pass\ndef f(x): raise No('no')", RAISES),
        ("def f(x): return x", "assert math.isclose(f(1), 1)"),
    ]
    box = Sandbox(**LIMITS | {"processes": 8, "cpu_seconds": 4, "wall_seconds": 60, "memory": 1 << 30})

    def check(program: str, test: str, *entry_point: str) -> None:
        verdict = box.run(program, [test], *entry_point)
        assert verdict.right, (program, test, verdict)

    check_all(check, rows)


def test_the_reason_can_be_written_to_a_log(box):
    verdict = box.run("def f(x): raise ValueError('\\ud800é')", ["assert f(1)"])
    assert verdict.reason == "ValueError: \\ud800é"
