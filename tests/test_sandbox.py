"""The sandbox: each attack is contained and scored as failed, and the next program is scored as if there was none."""

import os
import select
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dash_trl import CodeReward
from dash_trl.sandbox import PROTECTS, Sandbox, SandboxError, UnfitTests
from dash_trl.sandbox.box import ENVIRONMENT, STRICT, is_idle
from tests.attacks import CHILDREN, FILES, FORGED, LEFT_BEHIND, OUTWARD, TOO_MUCH, UNSCORED, programs
from tests.test_workers import ends

ROOT = Path(__file__).resolve().parents[1]

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # folders are removed a hundred times faster there
SECRET = "the-key-that-nobody-may-read"
RIGHT = "def f(x):\n    return x + 1"
TESTS = ["assert f(1) == 2", "assert f(41) == 42"]
LIMITS = {"cpu_seconds": 1, "memory": 512 << 20, "disk": 8 << 20, "processes": 2, "count": 2}
WITH_CHILDREN = ("a fork bomb", "a hundred children", "a daemon", "a daemon that stays when its program exits")
ATTACKS = {
    "namespaces": TOO_MUCH | FORGED | OUTWARD | UNSCORED | FILES | LEFT_BEHIND,
    "landlock": TOO_MUCH | OUTWARD | UNSCORED | FILES | LEFT_BEHIND,  # how tests are answered is the same code
    "rlimits": OUTWARD | UNSCORED,
    "children": CHILDREN | {name: (OUTWARD | LEFT_BEHIND)[name] for name in WITH_CHILDREN},
}
# A second or more each of what others show, too.
LONG = {
    *("an endless loop", "an endless loop while it is loaded", "threads that never end", "printing 1 GB and more"),
    "deep recursion without Python's limit",
}
# Attacks on a limit that another test tries in this kind of isolation, too.
SEEN = {
    "namespaces": {"a fork bomb"},
    "landlock": {
        *("a fork bomb", "an endless loop that ignores all signals", "10 GB bit by bit", "a huge value"),
        "a number with a million digits",
    },
    "rlimits": {"a fork bomb"},
    "children": {"CPU time of children one after the other"},
}

# By rlimits, programs of root are nobody's, who may not read a Python in root's home; `as_user` makes a way to it.
KINDS = [kind for kind in PROTECTS if kind != "rlimits" or os.geteuid() or os.stat("/root").st_mode & 0o005 == 0o005]


@pytest.fixture(scope="module")
def boxes():
    os.environ["DASH_TRL_TEST_API_KEY"] = SECRET
    ENVIRONMENT["TMPDIR"] = folder = tempfile.mkdtemp(dir=IN_MEMORY)
    made = {kind: Sandbox(isolation=kind, **LIMITS) for kind in KINDS}
    made["children"] = Sandbox(isolation="namespaces", children=True, **LIMITS)
    yield made
    for one in made.values():
        one.close()
    del os.environ["DASH_TRL_TEST_API_KEY"], ENVIRONMENT["TMPDIR"]
    os.rmdir(folder)  # no file of a program is left, however deep its folders were


@pytest.fixture
def box(boxes):
    return boxes["namespaces"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What the attacks are after, as the words in capitals."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "secret").write_text(SECRET)
    folder.chmod(0o777)
    (folder / "secret").chmod(0o666)  # so that only the sandbox is in the way
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield {
            "FOLDER": folder,
            "HOME": Path.home(),
            "SECRET": SECRET,
            "PID": os.getpid(),
            "PORT": server.getsockname()[1],
        }
        with pytest.raises(BlockingIOError):
            server.accept()  # nobody came through


def check_all(check, rows) -> None:
    """Calls a check with each row, in two threads; raises the first failure."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda row: check(*row), rows))


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", [*KINDS, "children"])
def test_attacks(boxes, places, kind, more):
    secret = places["FOLDER"] / "secret"

    def check(name: str, program: str) -> None:
        for word, value in places.items():
            program = program.replace(word, str(value))
        verdict = boxes[kind].run(program, TESTS)
        assert not verdict.right and verdict.passed == 0 and verdict.reason, (name, verdict)
        assert secret.read_text() == SECRET and secret.stat().st_mode & 0o777 == 0o666, name
        assert boxes[kind].run(RIGHT, TESTS).right, name

    later = LONG | SEEN[kind]
    check_all(check, [(name, program) for name, program in ATTACKS[kind].items() if (name in later) == more])


def test_nothing_of_one_program_reaches_the_next(box):
    """Not by a file, by a module, by a name, nor by a process."""
    modules = "import json, builtins, os\n"
    mark = f"{modules}open('mark', 'w').write('x')\njson.mark = builtins.mark = 1\n{RIGHT}"
    look = f"{modules}def f(x): return [os.listdir('.'), hasattr(json, 'mark'), hasattr(builtins, 'mark')]"
    assert box.run(mark, TESTS).right
    assert box.run(look, ["assert f(1) == [[], False, False]"]).right


# -------------------------------------------------------------------------------------------------- its own processes


def parents() -> dict[int, int]:
    """Each process of the machine and its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def below(process: int) -> set[int]:
    """The processes that this one has started, and those that they have."""
    known = parents()
    found, new = set(), {process}
    while new:
        found |= new
        new = {child for child, parent in known.items() if parent in new} - found
    return found - {process}


def launcher_of(box: Sandbox) -> int:
    """The first process of a sandbox that has not run before."""
    before = {one for one, parent in parents().items() if parent == os.getpid()}
    assert box.run(RIGHT, TESTS).right
    (launcher,) = {one for one, parent in parents().items() if parent == os.getpid()} - before
    return launcher


def test_no_process_is_left(boxes, places):
    for one in boxes.values():
        assert one.run(RIGHT, TESTS).right
    before = below(os.getpid())
    for name in ("a daemon", "a daemon that stays when its program exits", "a hundred children"):
        boxes["children"].run({**LEFT_BEHIND, **OUTWARD}[name], TESTS)
    assert all(map(ends, below(os.getpid()) - before))


@pytest.mark.parametrize("kind", STRICT)
def test_the_machine_without_memory_ends_programs_before_the_trainer(kind):
    with Sandbox(isolation=kind, **LIMITS) as box:
        launcher, scores = launcher_of(box), set()
        for process in [launcher, *below(launcher)]:
            with suppress(FileNotFoundError, ProcessLookupError):  # the last program's, which has ended
                scores.add(Path(f"/proc/{process}/oom_score_adj").read_text())
        assert scores == {"1000\n"}


TRAINER = """
import sys, threading
from dash_trl.sandbox.box import ENVIRONMENT, STRICT, Sandbox
ENVIRONMENT["TMPDIR"] = sys.argv[1]
sleep = "import os, time\\nos.makedirs('a/b')\\nopen('a/b/ready', 'w')\\ndef f(x): time.sleep(600)"
for kind in STRICT:
    box = Sandbox(isolation=kind, cpu_seconds=600, wall_seconds=900, count=2)
    assert box.run("def f(x): return x", ["assert f(1) == 1"]).right
    threading.Thread(target=box.run, args=(sleep, ["assert f(1) == 1"])).start()
print("at work", flush=True)
"""


def test_all_of_it_ends_with_the_trainer(tmp_path):
    """Killed with SIGKILL, while programs sleep in each kind of isolation."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "at work\n"
    # In each kind: the launcher, the starter, two supervisors, the program, its tests.
    while len(started := below(trainer.pid)) < 12 or not list(tmp_path.glob("*/*/a/b/ready")):
        time.sleep(0.01)
    launchers = {one for one, parent in parents().items() if parent == trainer.pid}
    assert len(launchers) == 2
    handles = {}
    for one in started:
        with suppress(ProcessLookupError):  # of the first program
            handles[one] = os.pidfd_open(one)
    trainer.kill()
    trainer.wait()
    assert all(map(ends, launchers))
    # A process that has ended may stay in /proc for a moment after its launcher, so /proc does not tell.
    ended, _, _ = select.select(handles.values(), [], [], 0)
    assert set(ended) == set(handles.values()), "a process has outlived the launcher"
    for handle in ended:
        os.close(handle)
    assert os.listdir(tmp_path) == [], "files were left behind"


def test_files_of_a_killed_launcher_are_removed_by_the_next(tmp_path, monkeypatch):
    """But not those of one that is at work. The killed one is started again."""
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))
    with Sandbox(isolation="landlock", **LIMITS) as killed, Sandbox(isolation="landlock", **LIMITS) as other:
        launcher = launcher_of(killed)
        started = below(launcher)
        os.kill(launcher, 9)
        assert all(map(ends, {launcher, *started}))
        (left,) = tmp_path.iterdir()
        (left / "program").mkdir()
        (left / "program" / "file").write_text("x")
        assert other.run(RIGHT, TESTS).right
        while left.exists():
            time.sleep(0.01)
        (at_work,) = tmp_path.iterdir()
        assert killed.run(RIGHT, TESTS).right and other.run(RIGHT, TESTS).right
        assert at_work.exists()
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------------------- the clock, the users

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


def test_a_program_that_waits_for_nothing_is_wrong():
    """A busy machine may be the cause at first, so that it gets more time."""

    def check(kind: str, name: str) -> None:
        verdict, wall = None, 1.5
        while verdict is None:
            with Sandbox(isolation=kind, cpu_seconds=1, wall_seconds=wall) as one, suppress(TimeoutError):
                verdict = one.run(WAITING[name], TESTS)
            wall *= 2
            assert wall < 1000, name
        assert (verdict.passed, verdict.right) == (0, False) and "wait for something" in verdict.reason, name

    check_all(check, [*(("namespaces", name) for name in WAITING), ("landlock", "a deadlock")])


def test_what_tells_a_busy_machine_from_a_sleeping_program():
    assert is_idle(60.0, 0.5, 3.0)
    assert not is_idle(60.0, 56.0, 0.0) and not is_idle(60.0, 20.0, 20.0)
    assert not is_idle(60.0, None, 0.0) and not is_idle(60.0, 0.0, None)


def shown() -> str:
    """Shell commands that hide closed folders above Python and this checkout, and put these two into their place."""
    inside = {Path(sys.base_prefix): "/mnt/0", ROOT: "/mnt/1"}
    closed = {path: next((top for top in reversed(path.parents) if not opened(top)), None) for path in inside}
    hidden = [path for path in inside if closed[path]]
    return "".join(
        [
            *(["mount -t tmpfs none /mnt; "] if hidden else []),
            *(f"mkdir {inside[path]}; mount --bind '{path}' {inside[path]}; " for path in hidden),
            *(f"mount -t tmpfs -o mode=755 none '{top}'; " for top in {closed[path] for path in hidden}),
            *(f"mkdir -p '{path}'; mount --bind {inside[path]} '{path}'; " for path in hidden),
        ]
    )


def opened(folder: Path) -> bool:
    """Whether other users may look into a folder."""
    return folder.stat().st_mode & 0o005 == 0o005


def as_user(script: str, user: int | None) -> list[str]:
    """What a script prints, as this user. (A Python or a checkout in a folder that is closed to others is shown.)"""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    if os.geteuid() == 0:
        become = f"setpriv --reuid {user} --regid {user} --clear-groups --inh-caps=-all " if user else ""
        command = ["unshare", "--mount", "sh", "-ec", f'{shown()}exec {become}"$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("user", [65533, None])
def test_what_holds_for_other_users(user):
    """As root, these tests have rights that a user has not; by rlimits, programs of root are nobody's."""
    assert as_user(ATTACKED, user) == (["rlimits True"] if user is None else [f"{kind} True" for kind in PROTECTS])


ATTACKED = """
import os
from concurrent.futures import ThreadPoolExecutor
from dash_trl.sandbox import PROTECTS, Sandbox
from tests.attacks import LEFT_BEHIND, OUTWARD, UNSCORED
tests, uncounted, is_user = ["assert f(1) == 2", "assert f(41) == 42"], "large files deleted", os.getuid() != 0
attacks = {
    "namespaces": {"a fork bomb": OUTWARD["a fork bomb"]},
    "landlock": LEFT_BEHIND,
    "rlimits": {**OUTWARD, **UNSCORED, **(LEFT_BEHIND if is_user else {})},
}
for kind in PROTECTS if is_user else ["rlimits"]:
    with Sandbox(cpu_seconds=1, disk=8 << 20, isolation=kind, count=2) as box, ThreadPoolExecutor(2) as pool:
        program = "import sqlite3, os\\ndef f(): return os.getuid()"
        print(kind, box.run(program, [f"assert f() == {os.getuid() or 65534}"]).right)
        names = [name for name in attacks[kind] if kind == "namespaces" or name != "a fork bomb"]
        names = [name for name in names if kind != "rlimits" or not name.startswith(uncounted)]
        made = [attacks[kind][name].replace("PID", str(os.getpid())).replace("PORT", "1") for name in names]
        for name, verdict in zip(names, pool.map(lambda program: box.run(program, tests), made)):
            if verdict.passed:
                print(name)
"""


# ---------------------------------------------------------------------------------------------------- right and wrong


def test_a_program_holds_no_file_but_its_link_to_the_tests(boxes):
    program = (
        "import os\ndef is_open(n):\n    try: return bool(os.fstat(n))\n    except OSError: return False\n"
        "def f(): return [n for n in range(1024) if is_open(n)]"
    )
    for box in boxes.values():
        assert box.run(program, ["files = f()\nassert files[:3] == [0, 1, 2] and len(files) == 4"]).right


FORGES_AN_ANSWER = """
import gc
for one in gc.get_objects():
    if type(one).__name__ == 'Peer':
        one.operations = one.operations | {'names': lambda *a: {'f': f, '__builtins__': {'all': len}}}
def f(x): return 0
"""
ALONE = "import os\ndef f(x): return [os.getpid(), os.getppid(), os.path.exists('/proc/self')]"
IS_CLOSE = "def f(x): return x\nclass {}:\n    isclose = staticmethod(lambda *a: True)"


EXIT = "import os\ndef f(x): os._exit(0)"
STOPPED = ("all(map(f, [1]))", "all(map(lambda x: f(x) == 2, [1]))", "list(filter(f, [1])) == []")
CLOSE = "import numpy as np\nassert np.allclose"
ASSERTS = ("allclose", "almost_equal", "array_almost_equal", "array_equal")
RAISES = "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False"
ENDLESS = ("def f(x): return range(10**9)", "assert list(f(1)) == [2]")
WRONG = [
    # what a program gives its tests to work on for ever
    ("def f(x): return range(10**15)", "assert sum(f(1)) == 2"),
    ENDLESS,
    ("def f(x): return 'x' * ((8 << 20) - 30)", "assert f(f(1)) == 2"),
    # names of Python's own, and of modules that the tests do not import
    ("def f(x): return 0\ndef all(x): return True", "assert all([f(1) == 2])"),
    ("def f(x): return 0\ndef isinstance(x, y): return True", "assert isinstance(f(1), str)"),
    (FORGES_AN_ANSWER, "assert all([f(1) == 2])"),
    *[(IS_CLOSE.format(name), f"assert {name}.isclose(f(1), 2)") for name in ("math", "cmath", "np", "numpy")],
    # an end of the process, or of an iterator, where the test expects something else
    (EXIT, "try:\n    f(1)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"),
    (EXIT, "for x in [1, 2]:\n    try: y = f(x)\n    except Exception: y = 2\n    assert y == 2"),
    (EXIT, "try:\n    f(1)\nexcept:\n    pass"),
    *[("def f(x): raise StopIteration", f"assert {test}") for test in STOPPED],
    # an empty list is close to everything, and a number to all of a list
    ("def f(x): return []", f"{CLOSE}(f(1), 2.5)"),
    ("def f(x): return []", f"{CLOSE}(f(1), [2.5])"),
    ("def f(x): return 0", f"{CLOSE}(f(1), [])"),
    ("def f(x): return 0", f"{CLOSE}(f(1), [0.0, 0.0])"),
    ("def f(x): return [[]]", f"{CLOSE}(f(1), [])"),
    ("import numpy\ndef f(x): return numpy.array([])", f"{CLOSE}(f(1), 2.5)"),
    ("def f(x): return []", "import numpy as np\nassert np.isclose(f(1), [2.5]).all()"),
    ("def f(x): return []", "from numpy import allclose\nassert allclose(f(1), 2.5)"),
    *[("def f(x): return []", f"import numpy\nnumpy.testing.assert_{name}(f(1), 2.5)") for name in ASSERTS],
    # nothing to call, or a type by which a function of the tests makes what cannot be sent
    ("def f(g): return g(object)", "assert f(lambda t: t()) == 3"),
    ("def f(x: List[int]): return 2", "assert f(1) == 2"),  # only `Solution` has names without an import
    ("f = 5", "try:\n    f(1)\nexcept TypeError:\n    pass"),
]


def test_what_is_wrong(box):
    def check(program: str, test: str) -> None:
        verdict = box.run(program, [test], entry_point="f")
        assert (verdict.passed, verdict.right) == (0, False) and verdict.reason, (program, test, verdict)

    check_all(check, WRONG)


def test_what_is_right(box):
    rows = [
        (ALONE, "assert f(1) == [1, 0, False]", None),  # of processes it sees its own
        *[(IS_CLOSE.format(name), f"assert {name}.isclose(f(1), 1)", None) for name in ("math", "cmath", "np")],
        # a module's name for a function that the tests call, and for what they test
        ("def bisect(x): return x", "assert bisect(1) == 1", None),
        ("def math(): pass\nmath.f = lambda x: x", "assert math.f(1) == 1", "math"),
        # a type as a function, and a dict's views
        ("f = list", "assert f('ab') == ['a', 'b']", "f"),
        ("f = int", "assert f('1') == 1 and f() == 0", None),
        ("def f(x): return x.keys()", "assert f({1: 2, (3, 4): 5}) == {1, (3, 4)}", None),
        ("def f(x): return x.items()", "assert f({1: [2]}) == {1: [2]}.items()", None),
        ("def f(x): return sorted(x)", "assert f({1: 2, 3: 4}.values()) == [2, 4]", None),
        # values of the same shape, and an array against a number
        ("def f(x): return [0.1 + 0.2, 1]", f"{CLOSE}(f(1), [0.3, 1]) and np.allclose(f(1)[0], 0.3)", None),
        ("import numpy\ndef f(x): return numpy.zeros((2, 2))", f"{CLOSE}(f(1), 0) and np.isclose(f(1), 0).all()", None),
        ("def f(x): return []", f"{CLOSE}(f(1), [])", None),
        ("def f(x): return x", "import numpy\nnumpy.testing.assert_allclose(actual=f([1.0]), desired=[1.0])", None),
        ("class Solution:\n    def f(self, x: List[int]): return x", "assert Solution().f([1]) == [1]", "Solution"),
        ("class No(ValueError): pass\ndef f(x): raise No('no')", RAISES, None),
        ("def f(x): return iter([x])", "x = f(1)\nassert next(x) == 1\nassert next(x, 2) == 2", None),
    ]

    def check(program: str, test: str, entry_point: str | None) -> None:
        verdict = box.run(program, [test], entry_point)
        assert verdict.right, (program, test, verdict)

    check_all(check, rows)


def test_tests_that_never_name_the_entry_point_are_unfit(box):
    for program in (RIGHT, "x = 1"):
        with pytest.raises(UnfitTests, match="they never call anything"):
            box.run(program, ["assert 1 == 1"], "f")
    assert not box.run("x = 1", ["try:\n    f(1)\nexcept NameError: pass"], "f").right


def test_the_reason_can_be_written_to_a_log(box):
    verdict = box.run("def f(x): raise ValueError('\\ud800é')", ["assert f(1)"])
    assert verdict.reason.encode() == "ValueError: \\ud800é".encode()


# -------------------------------------------------------------------------------------- what a program may and may not


def test_all_but_the_folder_is_read_only(box):
    """Also to a user whom Python and its packages belong to."""
    program = "import os\ndef f(path): return bool(os.statvfs(path).f_flag & os.ST_RDONLY)"
    paths = ("/", "/usr", sys.base_prefix, os.path.realpath(sysconfig.get_path("purelib")))
    tests = [f"assert f({path!r})" for path in paths]
    assert box.run(program, [*tests, "assert not f('/tmp')"]).right


@pytest.mark.parametrize("kind", KINDS)
def test_packages_of_an_environment_in_tmp(kind, monkeypatch):
    """Where programs have a /tmp of their own, or may not read it, they still import what is installed there."""
    real = sysconfig.get_path
    program = (
        "import os, installed_in_tmp\n"
        "def f(x): return x + installed_in_tmp.ONE\n"
        "def begins_empty(): return os.listdir('.') == []\n"
        "def is_read_only(): return bool(os.statvfs(installed_in_tmp.__file__).f_flag & os.ST_RDONLY)"
    )
    tests = [*TESTS, "assert begins_empty()", *["assert is_read_only()"] * (kind == "namespaces")]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        packages = Path(folder, "environment", "site-packages")
        packages.mkdir(parents=True)
        Path(packages, "installed_in_tmp.py").write_text("ONE = 1")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(packages) if name == "purelib" else real(name))
        with Sandbox(isolation=kind, **LIMITS) as box:
            verdict = box.run(program, tests)
    assert verdict.right, verdict


UNUSUAL = {  # on x86-64 and ARM64
    "shmat": (30, 196),
    "msgsnd": (69, 189),
    "vmsplice": (278, 75),
    "socket": (41, 198),
    "futimesat": (261, 1000),
    "setxattrat": (463, 463),
    # a program that lowers its own priority would be unscored: the machine looks busy to it
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "fork": (57, 1000),
    "execve": (59, 221),
    "no kernel's yet": (1000, 1000),
}


def test_calls_that_no_program_needs_are_refused(boxes):
    column = ["x86_64", "aarch64"].index(os.uname().machine)
    program = (
        "import ctypes, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def f(number): return libc.syscall(number, -1, 0, 0, 0), ctypes.get_errno()\n"
        "def pair(family, kind):\n    try: return bool(socket.socketpair(family, kind))\n"
        "    except OSError as error: return error.errno"
    )
    tests = [f"assert f({numbers[column]}) == (-1, 38), {name!r}" for name, numbers in UNUSUAL.items()]
    # of sockets only pairs that are connected: no other reaches /dev/log
    tests += ["assert [pair(1, kind) for kind in (1, 2, 5)] == [True, 1, 1]", "assert pair(16, 1) == 1"]
    for kind in KINDS:
        verdict = boxes[kind].run(program, tests)
        assert verdict.right, (kind, verdict)


OWN_PROCESSES = "processes of its own"
USES = {
    "threads, timers, an event loop": """
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
    "files and formats": """
import gzip, mmap, os, pathlib, shutil, sqlite3, tempfile, uuid, zipfile
import numpy
def f():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pathlib.Path('a').write_text('x')
        shutil.copyfile('a', 'b')
        os.replace('b', 'c')
        os.symlink('c', 'd')
        with gzip.open('e', 'w') as file: file.write(b'x')
        with zipfile.ZipFile('f', 'w') as file: file.write('a')
        with zipfile.ZipFile('f') as file: file.extractall('g')
        with sqlite3.connect('h') as base: base.execute('create table t (x)')
        with tempfile.TemporaryFile() as file: file.truncate(9)
        numpy.save('i.npy', numpy.ones(3))
        numpy.load('i.npy', mmap_mode='r').sum()
        mmap.mmap(-1, 4096).flush()
        os.listdir(), os.statvfs('.'), os.access('a', os.R_OK), list(os.walk('.')), uuid.uuid1()
        os.chdir('..')
    return numpy.linalg.inv(numpy.eye(99)).sum() == 99
""",
    OWN_PROCESSES: """
import os, shutil, subprocess, sys
def f():
    open('a', 'w').close()
    os.chmod('a', 0o700)
    shutil.copy2('a', 'b')
    os.system('true')
    return subprocess.run([sys.executable, '-S', '-c', 'print(1)'], capture_output=True, text=True).stdout == '1\\n'
""",
}


def test_what_programs_use_of_the_standard_library(boxes):
    for kind in [*KINDS, "children"]:
        for use in [OWN_PROCESSES] if kind == "children" else USES.keys() - {OWN_PROCESSES}:
            verdict = boxes[kind].run(USES[use], ["assert f()"])
            assert verdict.right, (kind, use, verdict)


def test_threads_that_end_while_files_are_counted_are_no_excess():
    """Hundreds of them, under many looks."""
    program = """
import threading, time
def f(x):
    for _ in range(300):
        threads = [threading.Thread(target=time.sleep, args=(0.0005,)) for _ in range(4)]
        for one in threads: one.start()
        for one in threads: one.join()
    return x + 1
"""
    with Sandbox(isolation="landlock", count=1) as one:
        assert one.run(program, ["assert f(1) == 2"]).right


# --------------------------------------------------------------------------- the tables of docs/reference/rewards.md


def table(head: str) -> dict[str, list[str]]:
    """{first cell: the others} of the rows below the table's head."""
    text = (Path(__file__).parents[1] / "docs" / "reference" / "rewards.md").read_text()
    rows = text.partition(f"\n{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {first: others for first, *others in cells}


SLEEPS = "import time\ndef f(x): time.sleep(600)"
OWN_CLASS = "class Node: pass\nassert f(Node()) == 1"


@pytest.mark.parametrize("kind", STRICT)
def test_what_is_unscored(boxes, kind, monkeypatch):
    begins = ["the same on a busy machine", "tests that are not valid Python", "something outside", "no sandbox"]
    rows = [row for row, (score,) in table("| what happens | score |").items() if score == "unscored"]
    assert all(row.startswith(begin) for row, begin in zip(rows, begins, strict=True))
    for test in ("assert f(", "assert 1 == 1", OWN_CLASS):
        check_unscored(boxes[kind], RIGHT, [test])
    with killing(boxes[kind]):
        check_unscored(boxes[kind], SLEEPS)
    with Sandbox(isolation=kind, cpu_seconds=1, wall_seconds=1.5) as box:
        monkeypatch.setattr("dash_trl.sandbox.box.IDLE", 0.0)
        check_unscored(box, SLEEPS)


def test_without_a_sandbox_there_is_no_score_and_no_weaker_kind(monkeypatch):
    monkeypatch.setattr("dash_trl.sandbox.box.ENVIRONMENT", {"PYTHONHASHSEED": "nonsense"})
    with Sandbox() as box, pytest.raises(SandboxError, match="Landlock .5.13 or newer.*isolation='rlimits'") as error:
        CodeReward(box)(fenced(RIGHT), TESTS)
    assert [f"'{kind}': " in str(error.value) for kind in PROTECTS] == [True, True, False]


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def check_unscored(box: Sandbox, program: str, tests: list[str] = TESTS) -> None:
    with pytest.raises((SandboxError, TimeoutError, UnfitTests)):
        CodeReward(box)(fenced(program), tests)


@contextmanager
def killing(box: Sandbox):
    """Kills the next program and its tests, as the kernel does when the machine has no memory left."""
    assert box.run(RIGHT, TESTS).right
    before = below(os.getpid())

    def kill():
        while len(started := below(os.getpid()) - before) < 4:  # two supervisors and what they supervise
            time.sleep(0.01)
        for process in started:
            if not below(process):
                with suppress(ProcessLookupError):  # ended with the other one
                    os.kill(process, 9)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


# By the words that begin a row: the attacks that it withstands.
PROMISES = {
    "CPU time, memory": ("an endless loop in C", "10 GB at once", "a file of 1 GB"),
    "the network": ("a socket to this machine", "a socket to the world", "a socket to the machine's host"),
    "signals to other processes": ("the trainer killed", "every process killed", "the trainer's limits lowered"),
    "memory of other processes": ("the trainer's memory", "the memory of its tests", "the trainer traced"),
    "reading the user's files": ("a file of the user's", "the trainer's environment", "the environment's keys"),
    "writing and deleting": ("a file of the user's overwritten", "all files deleted", "a file in Python's packages"),
    "size and number": ("the temporary folder filled", "ten thousand files", "large files deleted while they are open"),
    "threads": ("a hundred threads",),
    "processes of its own": ("a child", "a program of the system"),
    "what it leaves behind": ("a daemon", "a daemon that stays when its program exits"),
}


def test_the_table_of_what_holds():
    """`test_attacks` makes these attacks; rlimits, by name only, is attacked as users in a test of its own."""
    rows = table("| | `namespaces` | `landlock` | `rlimits` |")
    assert rows.pop("needs")
    for row, cells in rows.items():
        (names,) = [names for begin, names in PROMISES.items() if row.startswith(begin)] or pytest.fail(
            f"{row}: no case"
        )
        for kind, cell in zip(PROTECTS, cells, strict=True):
            assert kind == "rlimits" or "**not" not in cell and set(names) <= ATTACKS[kind].keys(), (row, kind)
