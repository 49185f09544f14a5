"""The sandbox: each attack is contained and scored as failed, and the next program is scored as if there was none."""

import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from dash_trl import CodeReward
from dash_trl.sandbox import PROTECTS, Sandbox, SandboxError, UnfitTests, confinement
from dash_trl.sandbox.box import ENVIRONMENT, STRICT, _Starter, is_idle
from dash_trl.sandbox.confinement import ALLOWED, ALLOWED_ALONE, ALLOWED_CHILDREN, ARCHITECTURES
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
    "landlock": TOO_MUCH | FORGED | OUTWARD | UNSCORED | FILES | LEFT_BEHIND,
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
    ("namespaces", "a fork bomb"),
    ("landlock", "a fork bomb"),
    ("rlimits", "a fork bomb"),
    ("landlock", "an endless loop that ignores all signals"),
    ("landlock", "10 GB bit by bit"),
    ("landlock", "a huge value"),
    ("landlock", "a number with a million digits"),
    ("children", "CPU time of children one after the other"),
}


# By rlimits, programs of root are nobody's, who may not read a Python in root's home; `as_user` makes a way to it.
KINDS = [kind for kind in PROTECTS if kind != "rlimits" or os.geteuid() or os.stat("/root").st_mode & 0o005 == 0o005]


def attacks():
    for kind, some in ATTACKS.items():
        if kind == "rlimits" and kind not in KINDS:
            continue
        for name in some:
            is_long = name in LONG or (kind, name) in SEEN
            yield pytest.param(kind, name, marks=[pytest.mark.exhaustive] * is_long)


@pytest.fixture(scope="module")
def boxes():
    os.environ["DASH_TRL_TEST_API_KEY"] = SECRET
    ENVIRONMENT["TMPDIR"] = folder = tempfile.mkdtemp(dir=IN_MEMORY)
    made = {kind: Sandbox(isolation=kind, **LIMITS) for kind in KINDS}
    made["children"] = Sandbox(isolation="namespaces", children=True, **LIMITS)
    yield made
    for one in made.values():
        one.close()
    confinement.remove(folder)
    del os.environ["DASH_TRL_TEST_API_KEY"], ENVIRONMENT["TMPDIR"]


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


@pytest.mark.parametrize(("kind", "name"), attacks())
def test_attacks(boxes, places, kind, name):
    program, secret = ATTACKS[kind][name], places["FOLDER"] / "secret"
    for word, value in places.items():
        program = program.replace(word, str(value))
    verdict = boxes[kind].run(program, TESTS)
    assert not verdict.right and verdict.passed == 0 and verdict.reason, verdict
    assert secret.read_text() == SECRET and secret.stat().st_mode & 0o777 == 0o666
    assert boxes[kind].run(RIGHT, TESTS).right


def test_nothing_of_one_program_reaches_the_next(box):
    """Not by a file, by a module, by a name, nor by a process."""
    modules = "import json, builtins, os\n"
    mark = f"{modules}open('mark', 'w').write('x')\njson.mark = builtins.mark = 1\n{RIGHT}"
    look = f"{modules}def f(x): return [os.listdir('.'), hasattr(json, 'mark'), hasattr(builtins, 'mark')]"
    assert box.run(mark, TESTS).right
    assert box.run(look, ["assert f(1) == [[], False, False]"]).right


def test_no_process_is_left(boxes, places):
    for one in boxes.values():
        assert one.run(RIGHT, TESTS).right
    before = below(os.getpid())
    for name in ("a daemon", "a daemon that stays when its program exits", "a hundred children"):
        boxes["children"].run({**LEFT_BEHIND, **OUTWARD}[name], TESTS)
    assert all(map(ends, below(os.getpid()) - before))


def below(process: int) -> set[int]:
    """The processes that this one has started, and those that they have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = set(), {process}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new} - found
    return found - {process}


def test_the_machine_without_memory_ends_programs_before_the_trainer(boxes):
    for one in boxes.values():
        assert one.run(RIGHT, TESTS).right
        scores = set()
        for process in [one._starter.process.pid, *below(one._starter.process.pid)]:
            with suppress(FileNotFoundError, ProcessLookupError):  # the last program's, which has ended
                scores.add(Path(f"/proc/{process}/oom_score_adj").read_text())
        assert scores == {"1000\n"}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_older_landlock_empties_no_file(version, tmp_path, monkeypatch):
    """Those before version 3 do not know of it."""
    packages, folder = tmp_path / "packages", tmp_path / "folder"
    for one in (packages, folder):
        one.mkdir()
    (packages / "module.py").write_text("untouched")
    monkeypatch.setattr(confinement, "landlock_version", lambda: version)
    child = os.fork()
    if child == 0:
        try:
            confinement.call("prctl", confinement.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            confinement.restrict_files([str(packages)], str(folder))
            confinement.filter_calls(confinement.make_filter(alone=False))
            for access in (os.O_RDONLY, os.O_ACCMODE):
                with suppress(OSError):
                    os.open(packages / "module.py", access | os.O_TRUNC)
            with suppress(OSError):
                os.truncate(packages / "module.py", 0)
            for _ in range(2):
                (folder / "own").write_text("x")
        finally:
            os._exit((folder / "own").read_text() != "x")
    assert os.waitpid(child, 0)[1] == 0
    assert (packages / "module.py").read_text() == "untouched"


TRAINER = """
import sys, threading
from dash_trl.sandbox.box import ENVIRONMENT, Sandbox
ENVIRONMENT["TMPDIR"] = sys.argv[2]
box = Sandbox(isolation=sys.argv[1], cpu_seconds=600, wall_seconds=900, count=2)
assert box.run("def f(x): return x", ["assert f(1) == 1"]).right
sleep = "import os, time\\nos.makedirs('a/b')\\nopen('a/b/ready', 'w')\\ndef f(x): time.sleep(600)"
threading.Thread(target=box.run, args=(sleep, ["assert f(1) == 1"])).start()
print("at work", flush=True)
"""


@pytest.fixture
def temporary(monkeypatch):
    """The temporary folder of sandboxes. Not `tmp_path`: of a deep tree pytest's own removal would not end."""
    folder = tempfile.mkdtemp(dir=IN_MEMORY)
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", folder)
    yield Path(folder)
    confinement.remove(folder)


@pytest.mark.parametrize("kind", STRICT)
def test_all_of_it_ends_with_the_trainer(kind, temporary):
    """Killed with SIGKILL, while a program sleeps."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, kind, temporary], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "at work\n"
    while len(started := below(trainer.pid)) < 6:
        time.sleep(0.01)  # the launcher, the starter, two supervisors, the program, its tests
    while kind == "landlock" and not list(temporary.glob("*/*/a/b/ready")):
        time.sleep(0.01)
    (launcher,) = [one for one in started if len(below(one)) == len(started) - 1]
    trainer.kill()
    trainer.wait()
    assert ends(launcher)
    left = [one for one in started - {launcher} if Path(f"/proc/{one}").exists()]
    assert left == [], "a process has outlived the launcher"
    assert os.listdir(temporary) == [], "files were left behind"


def test_files_of_a_killed_launcher_are_removed_by_the_next(temporary):
    """But not those of one that is at work."""
    with Sandbox(isolation="landlock", **LIMITS) as killed, Sandbox(isolation="landlock", **LIMITS) as other:
        assert killed.run(RIGHT, TESTS).right
        started = below(killed._starter.process.pid)
        killed._starter.process.kill()
        killed._starter.process.wait()
        assert all(map(ends, started))
        (left,) = temporary.iterdir()
        (left / "program").mkdir()
        (left / "program" / "file").write_text("x")
        assert other.run(RIGHT, TESTS).right
        while left.exists():
            time.sleep(0.01)
        (at_work,) = temporary.iterdir()
        assert killed.run(RIGHT, TESTS).right and other.run(RIGHT, TESTS).right
        assert at_work.exists()
    assert os.listdir(temporary) == []


def test_a_folder_of_any_depth_is_removed(temporary):
    top = temporary / "top"
    depth = os.open(temporary, os.O_RDONLY)
    for name in ["top", *["d" * 200] * 1200]:
        os.mkdir(name, 0o700, dir_fd=depth)
        above, depth = depth, os.open(name, os.O_RDONLY, dir_fd=depth)
        os.close(above)
    os.symlink(temporary, "link", dir_fd=depth)
    os.mkdir("without rights", 0, dir_fd=depth)
    os.close(depth)
    (temporary / "kept").write_text("x")
    confinement.remove(top)
    assert os.listdir(temporary) == ["kept"]


def test_the_starter_killed_is_started_again(box):
    assert box.run(RIGHT, TESTS).right
    box._starter.process.kill()
    box._starter.process.wait()
    assert box.run(RIGHT, TESTS).right


@pytest.mark.parametrize("kind", STRICT)
def test_closed_while_a_forked_child_has_its_socket(kind):
    box = Sandbox(isolation=kind, **LIMITS)
    assert box.run(RIGHT, TESTS).right
    starter = box._starter.process
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    box.close()
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert starter.returncode == 0, "it had to be killed"


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


@pytest.mark.parametrize("name", WAITING)
@pytest.mark.parametrize("kind", STRICT)
def test_a_program_that_waits_for_nothing_is_wrong(kind, name, monkeypatch):
    """Whatever else the machine does: how long it waited for a CPU tells (here: never long enough)."""
    monkeypatch.setattr("dash_trl.sandbox.box.IDLE", 1e9)
    with Sandbox(isolation=kind, cpu_seconds=1, wall_seconds=1.5) as one:
        verdict = one.run(WAITING[name], TESTS)
        assert (verdict.passed, verdict.right) == (0, False) and "wait for something" in verdict.reason


@pytest.mark.parametrize("kind", STRICT)
def test_a_program_that_makes_a_very_deep_folder_is_wrong(boxes, kind):
    program = "import os\ndef f(x):\n    for _ in range(1200): os.mkdir('d'); os.chdir('d')\n    os._exit(0)"
    verdict = boxes[kind].run(program, TESTS)
    assert (verdict.passed, verdict.right) == (0, False) and verdict.reason, verdict


def test_the_sandbox_s_own_start_takes_no_time_from_a_program(monkeypatch):
    real, more = _Starter.__init__, [0.0]

    def takes_long(self, settings):
        real(self, settings)
        more[0] += 1000

    monkeypatch.setattr(_Starter, "__init__", takes_long)
    monkeypatch.setattr("dash_trl.sandbox.box.time", SimpleNamespace(monotonic=lambda: time.monotonic() + more[0]))
    with Sandbox(**LIMITS) as box:
        assert box.run(RIGHT, TESTS).right


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
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_an_ordinary_user_gets_the_same():
    """As root, these tests have rights that a user has not."""
    assert as_user(USER, 65533) == ["namespaces", "True", "False"]


USER = """
from dash_trl.sandbox.box import Sandbox
with Sandbox(cpu_seconds=1) as box:
    print(box.kind)
    print(box.run("def f(x): return x + 1", ["assert f(1) == 2"]).right)
    print(box.run("import os\\ndef f(x): return [os.fork() for _ in range(100)] and x + 1", ["assert f(1) == 2"]).right)
"""


@pytest.mark.parametrize(("kind", "user"), [("rlimits", 65533), ("rlimits", None), ("landlock", 65533)])
def test_what_holds_without_namespaces_whoever_the_user_is(kind, user):
    """By rlimits programs of root are nobody's, and do not reach their tests."""
    said = as_user(f"kind = {kind!r}\n{ATTACKED}", user)
    assert said[0] == "True" and set(said[1:]) == {"False"}


ATTACKED = """
import os
from dash_trl.sandbox.box import Sandbox
from tests.attacks import LEFT_BEHIND, OUTWARD, UNSCORED
tests, uncounted = ["assert f(1) == 2", "assert f(41) == 42"], "large files deleted"
with Sandbox(cpu_seconds=1, disk=8 << 20, isolation=kind) as box:
    print(box.run("import sqlite3, os\\ndef f(): return os.getuid()", [f"assert f() == {os.getuid() or 65534}"]).right)
    attacks = (OUTWARD | UNSCORED if kind == "rlimits" else {}) | (LEFT_BEHIND if os.getuid() else {})
    for name, program in attacks.items():
        if name != "a fork bomb" and not (kind == "rlimits" and name.startswith(uncounted)):
            verdict = box.run(program.replace("PID", str(os.getpid())).replace("PORT", "1"), tests)
            print(name if verdict.passed else "False")
"""


def test_weak_isolation_is_not_chosen_unasked(monkeypatch):
    real = _Starter.__init__

    def fails(self, settings):
        if settings["isolation"] != "rlimits":
            raise SandboxError("this machine has none")
        real(self, settings)

    monkeypatch.setattr(_Starter, "__init__", fails)
    with Sandbox() as box, pytest.raises(SandboxError, match="Landlock .5.13 or newer.*isolation='rlimits'"):
        box.run(RIGHT, TESTS)


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


@pytest.mark.parametrize(
    ("program", "test"),
    [
        # what a program gives its tests to work on for ever
        ("def f(x): return range(10**15)", "assert sum(f(1)) == 2"),
        ("def f(x): return range(10**9)", "assert list(f(1)) == [2]"),
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
    ],
)
def test_what_is_wrong(box, program, test):
    verdict = box.run(program, [test], entry_point="f")
    assert (verdict.passed, verdict.right) == (0, False) and verdict.reason, verdict


@pytest.mark.parametrize(
    ("program", "test", "entry_point"),
    [
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
    ],
)
def test_what_is_right(box, program, test, entry_point):
    verdict = box.run(program, [test], entry_point)
    assert verdict.right, verdict


def test_tests_that_never_name_the_entry_point_are_unfit(box):
    for program in (RIGHT, "x = 1"):
        with pytest.raises(UnfitTests, match="they never call anything"):
            box.run(program, ["assert 1 == 1"], "f")
    assert not box.run("x = 1", ["try:\n    f(1)\nexcept NameError: pass"], "f").right


def test_the_reason_can_be_written_to_a_log(box):
    verdict = box.run("def f(x): raise ValueError('\\ud800é')", ["assert f(1)"])
    assert verdict.reason.encode() == "ValueError: \\ud800é".encode()


def test_what_else_is_in_python_s_folder_is_not_readable(tmp_path, monkeypatch):
    """Python may be installed in ~/.local, or in the home folder."""
    for name in ("bin", "lib", "share"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setitem(confinement.SETTINGS, "packages", [])
    own = [path for path in confinement.readable_paths() if path.startswith(str(tmp_path))]
    assert sorted(own) == [str(tmp_path / name) for name in ("bin", "lib")]


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


@pytest.mark.parametrize(
    ("column", "header"), [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")], ids=ARCHITECTURES
)
def test_the_numbers_of_system_calls_are_the_kernel_s(column, header):
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip("the kernel's headers are not installed")
    known = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", path.read_text(), re.MULTILINE)
    known = {name: int(number) for name, number in known}
    listed = {**ALLOWED, **ALLOWED_ALONE, **ALLOWED_CHILDREN}.items()
    allowed = {name: numbers[column] for name, numbers in listed if column < len(numbers)}
    assert {name: known.get(name, number) for name, number in allowed.items()} == allowed  # headers may be older


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


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_no_program_needs_are_refused(boxes, kind):
    column = list(ARCHITECTURES).index(os.uname().machine)
    program = (
        "import ctypes, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def f(number): return libc.syscall(number, -1, 0, 0, 0), ctypes.get_errno()\n"
        "def pair(family, kind):\n    try: return bool(socket.socketpair(family, kind))\n"
        "    except OSError as error: return error.errno"
    )
    tests = [f"assert f({numbers[column]}) == (-1, 38), {name!r}" for name, numbers in UNUSUAL.items()]
    # of sockets only pairs that are connected: no other reaches /dev/log
    tests += ["assert [pair(1, kind) for kind in (1, 2, 5)] == [True, 1, 1]", "assert pair(16, 1) == 1"]
    verdict = boxes[kind].run(program, tests)
    assert verdict.right, verdict


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


@pytest.mark.parametrize(
    ("kind", "use"),
    [(kind, use) for kind in [*KINDS, "children"] for use in USES if (kind == "children") == (use == OWN_PROCESSES)],
)
def test_what_programs_use_of_the_standard_library(boxes, kind, use):
    verdict = boxes[kind].run(USES[use], ["assert f()"])
    assert verdict.right, verdict


# --------------------------------------------------------------------------- the tables of docs/reference/rewards.md


def table(head: str) -> dict[str, list[str]]:
    """{first cell: the others} of the rows below the table's head."""
    text = (Path(__file__).parents[1] / "docs" / "reference" / "rewards.md").read_text()
    rows = text.partition(f"\n{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {first: others for first, *others in cells}


SCORES = table("| what happens | score |")
SLEEPS = "import time\ndef f(x): time.sleep(600)"
OWN_CLASS = "class Node: pass\nassert f(Node()) == 1"
# By the words that begin a row: programs, or (program, test).
CAUSES = {
    "an assert fails": ["def f(x): return 0", "def f(x): 1 / 0", EXIT, FORGED["a crash"], "def f(x) return 2"],
    "more than its CPU time": [TOO_MUCH["an endless loop"]],
    "more than its memory": [TOO_MUCH["10 GB at once"], TOO_MUCH["10 GB of mapped memory"]],
    "more than its files": [LEFT_BEHIND["the temporary folder filled"], LEFT_BEHIND["ten thousand files"]],
    "more than its threads": [LEFT_BEHIND["a hundred threads"]],
    "a child process": [OUTWARD["a child"], OUTWARD["a program of the system"]],
    "a value that cannot": [TOO_MUCH["a value that holds itself"]],
    "a value whose comparison": [("def f(x): return range(10**9)", "assert list(f(1)) == [2]")],
    "60 s by the clock": [SLEEPS],
    "the same on a busy machine": [SLEEPS],
    "tests that are not valid Python": [(RIGHT, "assert f("), (RIGHT, "assert 1 == 1"), (RIGHT, OWN_CLASS)],
    "something outside killed it": [SLEEPS],
    "no sandbox": [RIGHT],
}


@pytest.mark.parametrize(
    ("kind", "row"),
    [(kind, row) for kind in STRICT for row in SCORES if kind == "namespaces" or not row.startswith("with children")],
)
def test_the_table_of_scores(boxes, kind, row, monkeypatch):
    box = boxes[kind]
    if row == "no program in the completion":
        assert scored(box, "I do not know.") == SCORES[row][0]
        return
    if row.startswith("with children"):  # in namespaces only
        assert scored(boxes["children"], fenced(CHILDREN["CPU time of children one after the other"])) == SCORES[row][0]
        return
    (case,) = [case for begin, case in CAUSES.items() if row.startswith(begin)] or pytest.fail("a row without a case")
    with ExitStack() as stack:
        if row.startswith(("60 s", "the same")):
            box = stack.enter_context(Sandbox(isolation=kind, cpu_seconds=1, wall_seconds=1.5))
            monkeypatch.setattr("dash_trl.sandbox.box.IDLE", 1e9 if row.startswith("60 s") else 0.0)
        if row.startswith("no sandbox"):
            box = stack.enter_context(Sandbox(isolation=kind))
            monkeypatch.setattr("dash_trl.sandbox.box.ENVIRONMENT", {"PYTHONHASHSEED": "nonsense"})
        for one in case:
            program, *tests = [one] if isinstance(one, str) else one
            if row.startswith("something outside"):
                stack.enter_context(killing(box))
            assert scored(box, fenced(program), tests or TESTS) == SCORES[row][0], program


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def scored(box: Sandbox, completion: str, tests: list[str] = TESTS) -> str:
    try:
        return f"{CodeReward(box)(completion, tests)[0]:g}"
    except (SandboxError, TimeoutError, UnfitTests):
        return "unscored"


@contextmanager
def killing(box: Sandbox):
    """Kills the next program and its tests, as the kernel does when the machine has no memory left."""
    assert box.run(RIGHT, TESTS).right
    starter = box._starter.process.pid
    before = below(starter)

    def kill():
        while len(started := below(starter) - before) < 4:  # two supervisors and what they supervise
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


def test_threads_that_end_while_files_are_counted_are_no_excess():
    """Hundreds of them, under many looks."""
    program = """
import threading, time
def f(x):
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        threads = [threading.Thread(target=time.sleep, args=(0.0005,)) for _ in range(4)]
        for one in threads: one.start()
        for one in threads: one.join()
    return x + 1
"""
    with Sandbox(isolation="landlock", count=1) as one:
        assert one.run(program, ["assert f(1) == 2"]).right
