"""The sandbox: each attack is contained and scored as failed, and the next program is scored as if there was none."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dash_trl.sandbox.box import PROTECTS, Sandbox
from tests.attacks import FILES, FORGED, LEFT_BEHIND, OUTWARD, TOO_MUCH, UNSCORED

SECRET = "the-key-that-nobody-may-read"
RIGHT = "def f(x):\n    return x + 1"
TESTS = ["assert f(1) == 2", "assert f(41) == 42"]
LIMITS = {"cpu_seconds": 1, "memory": 512 << 20, "disk": 8 << 20, "processes": 4, "count": 2}
ATTACKS = {
    "namespaces": TOO_MUCH | FORGED | OUTWARD | UNSCORED | FILES | LEFT_BEHIND,
    "landlock": OUTWARD | UNSCORED | FILES,
    "rlimits": OUTWARD | UNSCORED,
}


@pytest.fixture(scope="module")
def boxes():
    os.environ["DASH_TRL_TEST_API_KEY"] = SECRET
    made = {kind: Sandbox(isolation=kind, **LIMITS) for kind in PROTECTS}
    yield made
    for one in made.values():
        one.close()
    del os.environ["DASH_TRL_TEST_API_KEY"]


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


def filled(program: str, places: dict) -> str:
    for word, value in places.items():
        program = program.replace(word, str(value))
    return program


def processes() -> set[str]:
    """Of this machine, by what the kernel says of them."""
    return {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, some in ATTACKS.items() for name in some])
def test_attacks(boxes, places, kind, name):
    secret = places["FOLDER"] / "secret"
    verdict = boxes[kind].run(filled(ATTACKS[kind][name], places), TESTS)
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


def test_programs_do_not_see_each_other(box):
    alone = "import os\ndef f(x): return [os.getpid(), os.getppid(), os.path.exists('/proc/self')]"
    verdict = box.run(alone, ["assert f(1) == [1, 0, False]"])
    assert verdict.right, verdict


def test_no_process_is_left(boxes, places):
    for one in boxes.values():
        assert one.run(RIGHT, TESTS).right
    before = below(os.getpid())
    for name in ("a daemon", "a daemon that stays when its program exits", "a hundred children"):
        boxes["namespaces"].run({**LEFT_BEHIND, **OUTWARD}[name], TESTS)
    assert all(map(ends, below(os.getpid()) - before))


def below(process: int) -> set[str]:
    """The processes that this one has started, and those that they have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[path.parent.name] = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            pass
    found, new = set(), {str(process)}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new} - found
    return found - {str(process)}


def ends(process: str) -> bool:
    """Whether it has gone, or goes by itself."""
    try:
        handle = os.pidfd_open(int(process))
    except ProcessLookupError:
        return True
    gone = bool(select.select([handle], [], [], 60)[0])
    os.close(handle)
    return gone


TRAINER = """
import sys, threading
from dash_trl.sandbox.box import Sandbox
box = Sandbox(isolation=sys.argv[1], cpu_seconds=600, wall_seconds=900, count=2)
assert box.run("def f(x): return x", ["assert f(1) == 1"]).right
sleep = "import time\\ndef f(x): time.sleep(600)"
threading.Thread(target=box.run, args=(sleep, ["assert f(1) == 1"])).start()
print("at work", flush=True)
"""


@pytest.mark.parametrize("kind", PROTECTS)
def test_all_of_it_ends_with_the_trainer(kind):
    """Killed with SIGKILL, while a program sleeps."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, kind], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "at work\n"
    while len(started := below(trainer.pid)) < (6 if kind == "namespaces" else 5):
        time.sleep(0.01)  # the starter (and its launcher), two supervisors, the program, its tests
    trainer.kill()
    trainer.wait()
    assert all(map(ends, started)), "a process has outlived the trainer"


def test_the_starter_killed_is_started_again(box):
    assert box.run(RIGHT, TESTS).right
    box._starter.process.kill()
    box._starter.process.wait()
    assert box.run(RIGHT, TESTS).right


@pytest.mark.parametrize("kind", PROTECTS)
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


def test_many_threads_at_once(boxes):
    """Each gets its own verdict."""
    program = "def f(x): return x + {}"
    with ThreadPoolExecutor(8) as pool:
        verdicts = pool.map(lambda i: boxes["namespaces"].run(program.format(i % 3), TESTS).right, range(24))
        assert list(verdicts) == [i % 3 == 1 for i in range(24)]


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return range(10**15)", "assert sum(f(1)) == 2"),
        ("def f(x): return range(10**9)", "assert list(f(1)) == [2]"),
        ("def f(x): return 'x' * ((8 << 20) - 30)", "assert f(f(1)) == 2"),
    ],
)
def test_what_a_program_gives_its_tests_to_work_on_for_ever_is_wrong(box, program, test):
    verdict = box.run(program, [test])
    assert (verdict.passed, verdict.right) == (0, False) and verdict.reason


def test_out_of_time_by_the_clock_alone_is_no_verdict():
    with Sandbox(cpu_seconds=1, wall_seconds=1.5) as one:
        with pytest.raises(TimeoutError, match="more than 1.5 s by the clock, but not more than 1 s of CPU time"):
            one.run("import time\ndef f(x): time.sleep(600)", TESTS)
        assert one.run(RIGHT, TESTS).right


def test_an_ordinary_user_gets_the_same():
    """As root, these tests have rights that a user has not. (To a Python in root's home a way is made for this one.)"""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{USER}"]
    if os.geteuid() == 0:
        python, top = sys.base_prefix, "/" + sys.base_prefix.split("/")[1]
        way = f"mount --bind {python} /mnt; mount -t tmpfs -o mode=755 none {top}; mkdir -p {python}; "
        way = "" if os.stat(top).st_mode & 0o005 == 0o005 else f"{way}mount --bind /mnt {python}; "
        user = "exec setpriv --reuid 65533 --regid 65533 --clear-groups --inh-caps=-all"
        command = ["unshare", "--mount", "sh", "-ec", f'{way}{user} "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.stdout.splitlines() == ["namespaces", "True", "False"], done.stderr[-3000:]


USER = """
from dash_trl.sandbox.box import Sandbox
with Sandbox(cpu_seconds=1) as box:
    print(box.kind)
    print(box.run("def f(x): return x + 1", ["assert f(1) == 2"]).right)
    print(box.run("import os\\ndef f(x): return [os.fork() for _ in range(100)] and x + 1", ["assert f(1) == 2"]).right)
"""


def test_a_program_holds_no_file_but_its_link_to_the_tests(boxes):
    program = (
        "import os\ndef is_open(n):\n    try: return bool(os.fstat(n))\n    except OSError: return False\n"
        "def f(): return [n for n in range(1024) if is_open(n)]"
    )
    for box in boxes.values():
        assert box.run(program, ["files = f()\nassert files[:3] == [0, 1, 2] and len(files) == 4"]).right


def test_no_name_of_python_s_own_is_the_program_s(box):
    forged = "def f(x): return 0\ndef all(x): return True\ndef isinstance(x, y): return True"
    assert not box.run(forged, ["assert all([f(1) == 2])"]).right
    assert not box.run(forged, ["assert isinstance(f(1), str)"], entry_point="f").right


def test_no_name_is_the_program_s_that_was_not_asked_for(box):
    """Not by an answer of its own making."""
    forged = (
        "import gc\nfor one in gc.get_objects():\n    if type(one).__name__ == 'Peer':\n"
        "        one.operations = one.operations | {'names': lambda *a: {'f': f, '__builtins__': {'all': len}}}\n"
        "def f(x): return 0"
    )
    verdict = box.run(forged, ["assert all([f(1) == 2])"])
    assert not verdict.right, verdict


@pytest.mark.parametrize("name", ["math", "cmath", "np", "numpy"])
def test_no_module_that_the_tests_do_not_import_is_the_program_s(box, name):
    forged = f"def f(x): return x\nclass {name}:\n    isclose = staticmethod(lambda *a: True)"
    assert not box.run(forged, [f"assert {name}.isclose(f(1), 2)"]).right
    assert box.run(forged, [f"assert {name}.isclose(f(1), 1)"]).right


def test_a_function_may_have_a_module_s_name(box):
    """Where the tests call it; and where it is the entry point."""
    assert box.run("def bisect(x): return x", ["assert bisect(1) == 1"]).right
    assert box.run("def math(): pass\nmath.f = lambda x: x", ["assert math.f(1) == 1"], entry_point="math").right


def test_all_but_the_folder_is_read_only(box):
    """Also to a user whom Python and its packages belong to."""
    program = "import os\ndef f(path): return bool(os.statvfs(path).f_flag & os.ST_RDONLY)"
    paths = ("/", "/usr", sys.base_prefix, os.path.realpath(sysconfig.get_path("purelib")))
    tests = [f"assert f({path!r})" for path in paths]
    assert box.run(program, [*tests, "assert not f('/tmp')"]).right


@pytest.mark.parametrize("kind", PROTECTS)
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
