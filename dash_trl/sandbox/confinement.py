"""The sandbox's own program, which forks confined processes. Of this package it imports only the file `checker.py`.

A *job* is one program with its tests. It has two *sides*, each in a confined process of its own: the *solution* runs
the program, and the *checker* runs the tests (see `checker.py`). Processes of a sandbox with "namespaces", see below::

    trainer ──► launcher ──► starter: pid 1 of a pid namespace, in a root folder without anything of the user's
                                │   one fork per side of a job, each with a socket to the trainer
                                ├──► supervisor ──► solution: pid 1 of its own namespaces     ◄─┐ calls and values
                                └──► supervisor ──► checker:  pid 1 of its own namespaces     ◄─┘ as text

`box.py`, in the trainer, starts the launcher as `python -P -s -S confinement.py SETTINGS`. The launcher gets only the
environment variables of `box.ENVIRONMENT`, and a socket to the trainer as standard input. (`-I` is not used because it
ignores PYTHONHASHSEED: the order of a set of strings would differ from run to run.)

The starter forks instead of starting a new Python: a fork takes a few milliseconds, a new Python about 30. Forks copy
the starter's memory, so the starter reads neither programs nor tests. Otherwise a program could find the data of
earlier jobs in its memory.

Kinds of isolation, best first:

- "namespaces" (Linux 5.12): each confined process has namespaces of its own for users, processes, files, network, IPC
  and the host name, and has no capabilities. If the trainer runs as root, the process runs as the user nobody. Its root
  folder is read-only, and contains Python, its packages and the system's libraries. Only /tmp is writable; /tmp is in
  memory and has a limited size. The program starts in an empty folder in /tmp. RLIMIT_NPROC limits the number of its
  threads and processes, because the kernel counts them per user namespace.
- "landlock" (Linux 5.13): by Landlock, the process can only read the same files, and write in a temporary folder. By
  seccomp, it cannot use the network or send signals to other processes. The supervisor counts the process's threads
  and files, and kills the process if it has too many.
- "rlimits": like "landlock", but without Landlock. The user's files and the memory of the user's other processes are
  not protected. If the trainer runs as root, the process runs as the user nobody. This kind is used only if the user
  passes `isolation="rlimits"`.

All kinds limit CPU time, memory, file size and open files, and allow only the system calls of the lists below. A
program may start processes only with "namespaces" and `Sandbox(children=True)`. The supervisor then adds up the CPU
time of all its processes.

When the trainer ends, even by SIGKILL, its sockets close. The starter and the supervisors then end, and all processes
in their namespaces are killed. Without namespaces, the launcher then removes the programs' files. If the launcher was
killed, the next launcher without namespaces removes them.
"""

import ctypes
import errno
import fcntl
import gc
import itertools
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NOBODY = 65534
TMP = "/tmp"
PREFIX = "dash_trl_programs_"  # the name of a launcher's temporary folder begins with it
# The program's folder with "namespaces". /tmp itself may contain the user's Python environment.
TASK_FOLDER = "/tmp/dash_trl_task"
OPEN_FILES = 64  # limit of open files
LOOK = 0.05  # seconds between the supervisor's checks of limits that the kernel does not enforce
# Seconds. `Place.run_delay` is measured only for processes that run longer. The trainer needs it only for a process
# that has run for `wall_seconds`, which is many times longer.
LONG = 0.1
INODES = 4096  # limit of a program's files and folders
DEEP = 64  # limit of the depth of a program's nested folders
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# system folders and files that a program may read
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")

TICKS = os.sysconf("SC_CLK_TCK")  # per second

libc = ctypes.CDLL(None, use_errno=True)
SETTINGS: dict[str, Any] = {}  # settings from `box.py`: isolation, limits, packages


def call(function: str, *arguments: Any) -> int:
    """Call a function of the C library.

    Args:
        function: name of the function.
        arguments: its arguments.

    Returns:
        Its return value.

    Raises:
        OSError: if the function fails. The message contains the function's name.
    """
    result = getattr(libc, function)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
    return result


def readable_paths() -> list[str]:
    """Return the paths that Python needs to read: the system's libraries, Python itself and its packages."""
    # Not the whole prefix of Python, because it may be ~/.local or the home folder itself.
    prefixes, parts = {sys.base_prefix, sys.base_exec_prefix}, ("bin", "lib", "lib64", "share/zoneinfo")
    own = [os.path.join(prefix, part) for prefix in prefixes for part in parts]
    own += [sysconfig.get_path(one) for one in ("stdlib", "platstdlib")]
    paths: list[str] = []
    for path in [*SYSTEM, *map(os.path.realpath, [*own, *package_folders()])]:
        if os.path.exists(path) and not any(f"{path}/".startswith(f"{other}/") for other in paths):
            paths.append(path)
    return paths


def package_folders() -> list[str]:
    """Return the site-packages folders of the trainer's Python. Because of `-S`, `sys.path` does not contain them."""
    return [path for path in SETTINGS["packages"] if os.path.isdir(path)]


# ------------------------------------------------------------------------------------------------------- namespaces

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
NEW_NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 0x1000, 0x4000, 0x40000, 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SYS_MOUNT_SETATTR = 442  # this number and Landlock's are the same on every architecture
CAPABILITIES_VERSION_3 = 0x20080522


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2) with its arguments."""
    call("mount", source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)


def enter_user_namespace(flags: int, proc: int) -> None:
    """Create new namespaces and enter them.

    The process keeps its user id and group id. The new user namespace has no other ids.

    Args:
        flags: flags of unshare(2), including CLONE_NEWUSER.
        proc: file descriptor of the folder /proc.
    """
    user, group = os.geteuid(), os.getegid()
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # after a change of user, /proc/self would belong to root
    call("unshare", flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


def make_root() -> None:
    """Replace the root folder of this mount namespace.

    The new root folder is read-only, and contains only `readable_paths`, `DEVICES` and /tmp. In /tmp there is nothing
    but readable paths.
    """
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    paths = readable_paths()
    root = "/proc"  # a folder that certainly contains none of the paths
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    for path in [*paths, *DEVICES]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        mount(path, target, flags=MS_BIND | MS_REC)
    for folder in ("/tmp", "/.old"):
        os.makedirs(root + folder, exist_ok=True)
    call("pivot_root", root.encode(), f"{root}/.old".encode())
    os.chdir("/")
    call("umount2", b"/.old", MNT_DETACH)
    os.rmdir("/.old")
    attributes = struct.pack("4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size)


# --------------------------------------------------------------------------------------------------------- Landlock

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_READ = 1 | 4 | 8  # execute, read a file, read a folder
LANDLOCK_WRITE_FILE = 2
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version → number of rights


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; a number below 1 if the kernel has no Landlock."""
    return int(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def restrict_files(readable: list[str], writable: str) -> None:
    """Restrict, by Landlock, which files this process and its children can use.

    Args:
        readable: paths of files and folders that may be read.
        writable: path of a folder in which everything is allowed.
    """
    everything = (1 << LANDLOCK_RIGHTS.get(landlock_version(), 16)) - 1
    ruleset = call("syscall", LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(everything)), ctypes.c_size_t(8), 0)
    rules = [(path, LANDLOCK_READ if os.path.isdir(path) else 1 | 4) for path in readable]
    rules += [(device, 4 | LANDLOCK_WRITE_FILE) for device in DEVICES] + [(writable, everything)]
    for path, rights in rules:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call("syscall", LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, file), 0)
        os.close(file)
    call("syscall", LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


# ---------------------------------------------------------------------------------------------------------- seccomp

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
X32 = 0x40000000  # on x86-64, system call numbers from here on are a second set (x32), which is refused
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000
ALL_NEW = NEW_NAMESPACES | CLONE_NEWCGROUP


def calls(text: str) -> dict[str, tuple[int, ...]]:
    """Parse a table of system calls.

    Args:
        text: words of the form `NAME:X86_64:ARM64` with the call's numbers. The number on ARM64 may be missing.

    Returns:
        Name → numbers.
    """
    return {name: tuple(map(int, numbers)) for name, *numbers in (one.split(":") for one in text.split())}


# System calls that Python programs with NumPy make, found by tracing MBPP+'s solutions and the standard library. Every
# other system call fails with ENOSYS. The C library then uses an older call instead (`clone` instead of `clone3`).
ALLOWED = calls("""
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 open:2
openat:257:56 close:3:57 close_range:436:436 lseek:8:62 stat:4 fstat:5:80 lstat:6 newfstatat:262:79 statx:332:291
access:21 faccessat:269:48 faccessat2:439:439 getdents:78 getdents64:217:61 readlink:89 readlinkat:267:78 mkdir:83
mkdirat:258:34 rmdir:84 unlink:87 unlinkat:263:35 rename:82 renameat:264:38 renameat2:316:276 link:86 linkat:265:37
symlink:88 symlinkat:266:36 ftruncate:77:46 fsync:74:82 fdatasync:75:83 chdir:80:49 fchdir:81:50
getcwd:79:17 dup:32:23 dup2:33 dup3:292:24 pipe:22 pipe2:293:59 fcntl:72:25 ioctl:16:29 flock:73:32 fadvise64:221:223
sendfile:40:71 copy_file_range:326:285 umask:95:166 statfs:137:43 fstatfs:138:44 listxattr:194:11 llistxattr:195:12
flistxattr:196:13
brk:12:214 mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233 msync:26:227 mincore:27:232
membarrier:324:283
clone:56:220 futex:202:98 set_robust_list:273:99 set_tid_address:218:96 rseq:334:293
arch_prctl:158 prctl:157:167 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 restart_syscall:219:128
kill:62:129 tgkill:234:131 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pause:34 alarm:37 getitimer:36:102 setitimer:38:103
signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201
times:100:153
poll:7 ppoll:271:73 select:23 pselect6:270:72 epoll_create:213 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232
epoll_pwait:281:22 epoll_pwait2:441:441 eventfd2:290:19 socketpair:53:199 sendto:44:206 recvfrom:45:207
recvmsg:47:212 shutdown:48:210 getsockname:51:204 getpeername:52:205 getsockopt:55:209 setsockopt:54:208
getpid:39:172 gettid:186:178 getppid:110:173 getpgid:121:155 getpgrp:111 getsid:124:156 getuid:102:174 geteuid:107:175
getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 getpriority:140:141
getrusage:98:165 getrlimit:97:163 prlimit64:302:261 sched_yield:24:124 sched_getaffinity:204:123
sched_getparam:143:121 sched_getscheduler:145:120 getcpu:309:168 sysinfo:99:179 uname:63:160 getrandom:318:278
""")
# Allowed only with namespaces. There, a program can change the rights and times only of its own files, and can signal
# only its own threads. The kernel also limits the size of all files together. Without namespaces the supervisor checks
# this size, but it would miss an open file that is sent over a socket (`sendmsg`), and between two checks a program
# could allocate much more (`fallocate`) than it could write.
# No list contains `setpriority`: with a lowered priority, a program could wait so long for a CPU that the trainer takes
# the machine for busy, and the row is unscored instead of failed.
ALLOWED_ALONE = calls("""
tkill:200:130 sched_setaffinity:203:122 mknod:133 mknodat:259:33 chmod:90 fchmod:91:52 fchmodat:268:53
fchmodat2:452:452 utime:132 utimes:235 utimensat:280:88 truncate:76:45 fallocate:285:47 sendmsg:46:211""")
# Allowed only with `Sandbox(children=True)`, which requires namespaces.
ALLOWED_CHILDREN = calls("""
fork:57 vfork:58 execve:59:221 execveat:322:281 pidfd_open:434:434 setsid:112:157 setpgid:109:154""")
PRCTLS = (15, 16, 23)  # set and get a thread's name, read the capability bounding set
FCNTLS = (*range(8), 1030)  # copy file descriptors, flags, locks; not F_SETOWN, by which a file sends signals
# terminal attributes and size, number of bytes to read, nonblocking mode, close-on-exec off and on
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF instructions
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE = 0, 4  # offsets in the data of a filter (struct seccomp_data)
ALL_BITS = 0xFFFFFFFF
BLOCK = 16  # system calls in one block of a filter

# (index of an argument, mask of its bits, values, True = only these values are allowed, False = only these are refused)
# Index 2 means the lower 4 bytes of argument 2, index 2.5 the upper 4 bytes.
Condition = tuple[float, int, tuple[int, ...], bool]


def conditions(*, alone: bool, children: bool) -> dict[str, list[Condition]]:
    """Return the conditions on the arguments of system calls that are not allowed with all arguments.

    Args:
        alone: whether the process has namespaces of its own.
        children: whether the process may start other processes.

    Returns:
        Name of a system call → its conditions, which must all be met.
    """
    # A program may not kill itself by SIGKILL: `Sandbox` could not tell this from a limit, or from a kill from outside.
    own: list[Condition] = [(0, ALL_BITS, (os.getpid(),), True), (1, ALL_BITS, (signal.SIGKILL,), False)]
    limited: dict[str, list[Condition]] = {
        "prctl": [(0, ALL_BITS, PRCTLS, True)],
        "fcntl": [(1, ALL_BITS, FCNTLS, True)],
        "ioctl": [(1, ALL_BITS, IOCTLS, True)],
        "prlimit64": [(2, ALL_BITS, (0,), True), (2.5, ALL_BITS, (0,), True)],  # no new limits
        # asyncio needs it. Only stream sockets are allowed, because a datagram socket could send to /dev/log.
        "socketpair": [(0, ALL_BITS, (socket.AF_UNIX,), True), (1, 0xF, (socket.SOCK_STREAM,), True)],
        "clone": [(0, ALL_NEW | CLONE_THREAD, (0, CLONE_THREAD) if children else (CLONE_THREAD,), True)],
    }
    if not alone:
        limited["kill"] = own
        limited["tgkill"] = [own[0], (2, *own[1][1:])]
        if landlock_version() < 3:  # older versions do not prevent O_RDONLY | O_TRUNC, which empties a file
            kept = (0, 1, 2, 3, os.O_TRUNC | os.O_WRONLY, os.O_TRUNC | os.O_RDWR)
            limited["open"] = [(1, os.O_TRUNC | os.O_ACCMODE, kept, True)]
            limited["openat"] = [(2, *limited["open"][0][1:])]
    return limited


def make_filter(*, alone: bool, children: bool = False) -> bytes:
    """Create a seccomp filter, which allows the system calls of the lists above.

    Args:
        alone: whether the filter is for a process with namespaces of its own. Otherwise, only the process that calls
            this function can use the filter: it allows signals to this process only.
        children: whether the process may start other processes.

    Returns:
        The filter's instructions, for `filter_calls`.

    Raises:
        OSError: if the system call numbers of this machine's architecture are unknown.
    """
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"the numbers of system calls are known for {list(ARCHITECTURES)}, not {platform.machine()!r}")
    architecture, column = ARCHITECTURES[platform.machine()]
    limited = conditions(alone=alone, children=children)
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE | EPERM)]
    program += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE | ENOSYS)]
    allowed = {**ALLOWED, **(ALLOWED_ALONE if alone else {}), **(ALLOWED_CHILDREN if children else {})}
    bodies: dict[int, list[tuple[int, int, int, int]]] = {}
    for name, numbers in allowed.items():
        body: list[tuple[int, int, int, int]] = []
        for argument, bits, values, only in limited.get(name, []):
            # an argument has 8 bytes, the lower 4 bytes first
            body += [(LOAD, 0, 0, int(16 + 8 * argument)), (AND, 0, 0, bits)]
            if only:
                body += [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
                body += [(RETURN, 0, 0, REFUSE | EPERM)]
            else:
                body += [one for value in values for one in ((EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSE | EPERM))]
        if column < len(numbers):
            bodies[numbers[column]] = body
    # The checks are sorted by number and split into blocks, so that a call passes through one block only. This saves
    # time when a filter is installed: during the installation, the kernel runs the filter once for each system call
    # number.
    ordered = sorted(bodies)
    for first in range(0, len(ordered), BLOCK):
        block: list[tuple[int, int, int, int]] = []
        for number in ordered[first : first + BLOCK]:
            block += [(EQUAL, 0, len(bodies[number]) + 1, number), *bodies[number], (RETURN, 0, 0, ALLOW)]
        block.append((RETURN, 0, 0, REFUSE | ENOSYS))
        if first + BLOCK < len(ordered):
            program.append((AT_LEAST, len(block), 0, ordered[first + BLOCK]))
        program += block
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def filter_calls(instructions: bytes) -> None:
    """Install a seccomp filter for this process.

    Args:
        instructions: the result of `make_filter`.
    """
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    said = struct.pack("HP", len(instructions) // struct.calcsize("HBBI"), ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, 2, said, 0, 0)


# -------------------------------------------------------------------------------------------------- starter and sides


class Place:
    """Confines processes by one kind of isolation, and checks their limits.

    The launcher creates a `Place` once, with everything that its forks can share.

    Args:
        kind: "namespaces", "landlock" or "rlimits".

    Attributes:
        alone: whether each process has namespaces of its own.
        landlock: whether Landlock is used.
        in_tmp: paths below /tmp that a program may read.
        proc: file descriptor of the folder /proc, opened before the processes' namespaces are created.
        filter: seccomp filter for all processes; None if each process needs its own.
        folder: path of the folder that contains the programs' folders; missing with namespaces.

    Raises:
        OSError: if this machine does not support the kind of isolation.
    """

    def __init__(self, kind: str):
        self.alone = kind == "namespaces"
        self.landlock = kind == "landlock"
        self.in_tmp = [path for path in readable_paths() if path.startswith(f"{TMP}/")]
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if SETTINGS["children"]:
            os.stat("thread-self/children", dir_fd=self.proc)  # `cpu_of_all` needs it
        # Created once here, not in each fork. There it would take a millisecond, because Python would write to memory
        # that the fork shares with the starter, and the kernel would copy each such page.
        self.filter = make_filter(alone=True, children=SETTINGS["children"]) if self.alone else None
        if self.alone:
            if os.geteuid() == 0:
                call("unshare", CLONE_NEWNS | CLONE_NEWPID)
            else:
                enter_user_namespace(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID, self.proc)
            make_root()
        elif self.landlock and landlock_version() < 1:
            raise OSError("this kernel has no Landlock, or does not use it")
        if not self.alone:
            # Without this call, a program could write to the memory of the checker and the supervisor through /proc.
            call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
            self.folder = locked_folder()

    def enter(self) -> str:
        """Create the folder of one side of a job, and enter new namespaces if `alone`. The supervisor calls this.

        Returns:
            Path of the folder, in which the program starts and may write.
        """
        if not self.alone:
            return tempfile.mkdtemp(dir=self.folder)
        become_nobody()
        enter_user_namespace(NEW_NAMESPACES, self.proc)
        covered = [(path, os.open(path, os.O_PATH)) for path in self.in_tmp]
        mount("tmpfs", TMP, "tmpfs", MS_NOSUID | MS_NODEV, f"size={SETTINGS['disk']},nr_inodes={INODES},mode=700")
        for path, file in covered:  # a Python environment in /tmp is mounted again, still read-only
            os.makedirs(path)
            os.fchdir(file)
            mount(".", path, flags=MS_BIND | MS_REC)
            os.close(file)
        os.mkdir(TASK_FOLDER)
        return TASK_FOLDER

    def run_delay(self, handle: int) -> float | None:
        """Return how long a process was ready to run but had to wait for a CPU.

        If the process has several threads, the thread that waited longest counts.

        Args:
            handle: file descriptor of the process (pidfd).

        Returns:
            Seconds; None if the kernel does not report them, or if a thread ends while they are read.
        """
        with suppress(OSError, IndexError):  # a thread may have ended in the meantime
            if self.read("self/schedstat").split() == ["0"] * 3:
                return None
            tasks = f"{self.number(handle)}/task"
            delays = [self.read(f"{tasks}/{thread}/schedstat").split()[1] for thread in self.names(tasks)]
            return max(map(int, delays)) / 1e9
        return None

    def excess(self, handle: int, folder: str, spent: dict[str, float]) -> str | None:
        """Check the limits that the kernel does not enforce.

        Args:
            handle: file descriptor of the process (pidfd).
            folder: path of the process's folder.
            spent: CPU seconds of the process and its descendants, see `cpu_of_all`.

        Returns:
            Description of the limit that the process exceeds; None if it exceeds none.
        """
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended in the meantime
            process = self.number(handle)
            if self.alone:  # with namespaces, the kernel enforces all limits but this one
                over = self.cpu_of_all(process, spent) > SETTINGS["cpu_seconds"]
                return f"more than {SETTINGS['cpu_seconds']} s of CPU time of all its processes" if over else None
            if len(self.names(f"{process}/task")) > SETTINGS["processes"] + 1:
                return f"more than {SETTINGS['processes']} threads beside its first"
            try:
                count, size = self.files(folder, process)
            except (FileNotFoundError, ProcessLookupError):
                raise
            except OSError as error:  # a name is too long, or a folder cannot be read
                return f"files that cannot be counted ({error.strerror})"
            if count > INODES or size > SETTINGS["disk"]:
                return f"more than {SETTINGS['disk']:,} bytes of files, or more than {INODES:,} files"
        return None

    def cpu_of_all(self, process: str, spent: dict[str, float]) -> float:
        """Return the sum of the CPU seconds of a process and all its descendants.

        A descendant that has ended counts with its CPU seconds at the last call during which it was running. If it has
        started and ended between two calls, it does not count.

        Args:
            process: id of the process in `proc`.
            spent: id of a process → its CPU seconds. This method updates it. Each call gets the same dict.
        """
        found = [process]
        while found:
            one = found.pop()
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended in the meantime
                ticks = self.read(f"{one}/stat").rpartition(")")[2].split()[11:13]
                spent[one] = sum(map(int, ticks)) / TICKS
                for thread in self.names(f"{one}/task"):
                    found += self.read(f"{one}/task/{thread}/children").split()
        return sum(spent.values())

    def files(self, folder: str, process: str) -> tuple[int, int]:
        """Return the number and the total size of a process's files.

        Args:
            folder: path of the process's folder.
            process: id of the process in `proc`.

        Returns:
            Number of files and folders in the process's folder; total size in bytes, including deleted files that are
            still open.

        Raises:
            OSError: if the number or the size cannot be found out.
        """
        count = size = 0
        folders = [(folder, 0)]
        while folders and count <= INODES:
            path, depth = folders.pop()
            if depth > DEEP:
                raise OSError(errno.ENAMETOOLONG, "too many folders within folders")
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
                for one in itertools.islice(entries, INODES + 1):
                    with suppress(FileNotFoundError):
                        count, size = count + 1, size + 512 * one.stat(follow_symlinks=False).st_blocks
                        if one.is_dir(follow_symlinks=False):
                            folders.append((one.path, depth + 1))
        with suppress(PermissionError):  # with "rlimits", only root may read a process's open files
            held = {}
            mapped = self.mapped(folder, process)
            for thread in self.names(f"{process}/task"):
                with suppress(PermissionError, FileNotFoundError, ProcessLookupError):  # the thread has ended
                    for number in self.names(f"{process}/task/{thread}/fd"):
                        with suppress(FileNotFoundError):
                            status = os.stat(f"{process}/task/{thread}/fd/{number}", dir_fd=self.proc)
                            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                                held[status.st_ino] = 512 * status.st_blocks
            # A deleted file has an unknown size if it was mapped both before and after the loop, but not open in it.
            if (mapped - held.keys()) & self.mapped(folder, process):
                raise OSError(errno.EBUSY, "deleted files in memory")
            size += sum(held.values())
        return count, size

    def mapped(self, folder: str, process: str) -> set[int]:
        """Return the inodes of deleted files of a folder that a process has mapped into its memory.

        The kernel reports the size of a deleted file only if the file is also open.

        Args:
            folder: path of the process's folder.
            process: id of the process in `proc`.
        """
        lines: list[str] = []
        for thread in self.names(f"{process}/task"):
            with suppress(PermissionError, FileNotFoundError, ProcessLookupError):  # the thread has ended
                lines = lines or self.read(f"{process}/task/{thread}/maps").splitlines()
        beginning = f" {os.path.realpath(folder)}/"
        return {int(line.split()[4]) for line in lines if beginning in line and line.endswith(" (deleted)")}

    def number(self, handle: int) -> str:
        """Return a process's id in `proc`. In its own namespace, the process has another id.

        Args:
            handle: file descriptor of the process (pidfd).
        """
        return self.read(f"self/fdinfo/{handle}").partition("Pid:")[2].split()[0]

    def read(self, path: str) -> str:
        """Read a file below /proc."""
        with open(path, opener=lambda path, flags: os.open(path, flags, dir_fd=self.proc)) as file:
            return file.read()

    def names(self, path: str) -> list[str]:
        """List a folder below /proc."""
        folder = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def confine(self, folder: str) -> None:
        """Confine this process for the rest of its run.

        Except with "rlimits", it can then use no files but its folder, `readable_paths` and `DEVICES`.

        Args:
            folder: path of the folder in which this process may write.

        Raises:
            OSError: if this process cannot be confined.
        """
        if not self.alone and not self.landlock:
            if os.geteuid() == 0:
                os.chown(folder, NOBODY, NOBODY)
            become_nobody()
            # Raises an error if the user nobody cannot read Python's library: hardly any program could run.
            os.listdir(sysconfig.get_path("stdlib"))
        os.setsid()  # in the old process group, kill(0, …) would reach processes outside of the namespace
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        interpreter = int(self.read("self/statm").split()[0]) * resource.getpagesize()
        os.close(self.proc)
        set_limits(SETTINGS["memory"] + interpreter, SETTINGS["processes"] + 2 if self.alone else None)
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        call("capset", struct.pack("2I", CAPABILITIES_VERSION_3, 0), bytes(24))  # drop all capabilities
        if self.landlock:
            restrict_files(readable_paths(), folder)
            # The supervisor's `files` reads this process's open files in /proc, which Landlock closes to programs.
            call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
        filter_calls(self.filter or make_filter(alone=False))


def become_nobody() -> None:
    """Change from root to the user nobody. If this process does not run as root, do nothing.

    The kernel does not limit the number of root's processes, and a program that runs as root could use root's files.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def set_limits(memory: int, processes: int | None) -> None:
    """Set this process's soft and hard limits. A process that reaches the hard limit of CPU time is killed.

    Args:
        memory: address space, in bytes.
        processes: number of threads and processes of this user namespace, including the supervisor and this process;
            None: no limit.
    """
    limits = {
        resource.RLIMIT_CPU: SETTINGS["cpu_seconds"],
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: SETTINGS["disk"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = processes
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def supervise(place: Place, control: socket.socket, side: Callable[[], None], keep: list[int]) -> None:
    """Run one side of a job in a confined process, and report to the trainer how the process ended.

    The process is killed if the trainer closes `control`, or if it exceeds a limit that `Place.excess` checks. The
    report has these keys:

    - `ended`: exit code, or the negative number of the signal.
    - `cpu`: CPU seconds.
    - `excess`: description of the exceeded limit; None if `Place.excess` found none.
    - `delay`: `Place.run_delay` if the supervisor killed the process after more than `LONG` seconds; else None.

    Args:
        place: confines the process.
        control: socket to the trainer.
        side: function that runs in the confined process.
        keep: file descriptors that the confined process keeps open, besides `control`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = place.enter()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                place.confine(folder)
            except BaseException as error:
                send(control, json.dumps({"unconfined": repr(error)}).encode())
                raise
            keep_only([control.fileno(), *keep])
            side()
            code = 0
        finally:
            os._exit(code)
    for number in keep:
        os.close(number)
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLRDHUP)
    begin, delay, excess = time.monotonic(), None, None
    spent: dict[str, float] = {}
    pause = None if place.alone and not SETTINGS["children"] else 1000 * LOOK
    while not (events := poll.poll(pause)):
        if excess := place.excess(handle, folder, spent):
            break
    if all(number != handle for number, _ in events):
        if time.monotonic() - begin > LONG:
            delay = place.run_delay(handle)
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)  # with namespaces, the child is pid 1 and ends after all its descendants
    code = os.waitstatus_to_exitcode(status)
    report = {"ended": code, "cpu": usage.ru_utime + usage.ru_stime, "delay": delay, "excess": excess}
    send(control, json.dumps(report).encode())  # removing a folder with many files may take long
    if not place.alone:
        remove(folder)


def locked_folder() -> str:
    """Create a locked folder, which will contain the programs' folders, and return its path.

    Launcher, starter and supervisors have the folder open. When the last of these processes has ended, the lock ends.
    """
    # Until the folder is locked, another launcher's `sweep` would remove it if its name began with PREFIX.
    new = tempfile.mkdtemp(prefix=f"new_{PREFIX}")
    os.chmod(new, 0o711)  # with "rlimits", programs of root run as nobody
    fcntl.flock(os.open(new, os.O_RDONLY), fcntl.LOCK_EX)
    folder = os.path.join(os.path.dirname(new), os.path.basename(new).removeprefix("new_"))
    os.rename(new, folder)
    return folder


def sweep() -> None:
    """Remove the folders of this user's launchers that were killed: no process locks these folders any more."""
    temporary = tempfile.gettempdir()
    for name in os.listdir(temporary):
        if name.startswith(PREFIX):
            with suppress(OSError):
                folder = os.open(os.path.join(temporary, name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(folder).st_uid == os.geteuid():
                        remove(os.path.join(temporary, name))
                finally:
                    os.close(folder)


def remove(top: str) -> None:
    """Remove a folder with nested folders of any depth, without an error if a file cannot be removed.

    Each inner folder is first moved into `top`, because the path of a deeply nested folder may be too long.

    Args:
        top: path of the folder.
    """
    folders = [top]
    while folders:
        path = folders.pop()
        with suppress(OSError):
            with os.scandir(path) as entries:
                found = list(entries)
            for one in found:
                if one.is_dir(follow_symlinks=False):
                    os.chmod(one.path, 0o700)  # a program may have removed its own rights
                    folders.append(os.path.join(top, os.urandom(16).hex()))
                    os.rename(one.path, folders[-1])
                else:
                    os.unlink(one.path)
            if path != top:
                os.rmdir(path)
    with suppress(OSError):
        os.rmdir(top)


def keep_only(numbers: list[int]) -> None:
    """Close all other files, and connect standard input, output and error to /dev/null.

    Args:
        numbers: file descriptors to keep.
    """
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    lowest = 3
    for number in sorted(numbers):
        os.closerange(lowest, number)
        lowest = number + 1
    os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))


def start(place: Place, control: socket.socket, other: list[socket.socket], side: Callable[[], None], keep: list[int]):
    """Fork a supervisor, which calls `supervise`.

    If the supervisor cannot start a confined process, it reports this to the trainer, and `side` does not run.

    Args:
        place: see `supervise`.
        control: see `supervise`.
        other: sockets of the starter that the supervisor does not need and closes.
        side: see `supervise`.
        keep: see `supervise`.
    """
    if os.fork():
        return
    try:
        for one in other:
            one.close()
        try:
            supervise(place, control, side, keep)
        except OSError as error:
            send(control, json.dumps({"unconfined": str(error)}).encode())
    finally:
        os._exit(0)


def serve(place: Place, channel: socket.socket) -> None:
    """Run the starter: begin a job for each pair of sockets that the trainer sends, until the trainer closes `channel`.

    Args:
        place: confines the processes.
        channel: socket to the trainer.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors and processes of killed supervisors
    while True:
        message, numbers, _, _ = socket.recv_fds(channel, 1, 2)
        if not message:
            return
        solution, checker = (socket.socket(fileno=number) for number in numbers)
        with solution, checker:
            try:
                begin(place, channel, solution, checker)
            except OSError as error:  # no fork was possible: this job gets no verdict, but the next job may
                send(checker, json.dumps({"unconfined": str(error)}).encode())


def begin(place: Place, channel: socket.socket, solution: socket.socket, checker: socket.socket) -> None:
    """Start both sides of a job, and connect them by a pair of sockets.

    Args:
        place: confines the processes.
        channel: the starter's socket to the trainer, of which the supervisors close their copies.
        solution: socket to the trainer for the solution.
        checker: socket to the trainer for the checker.
    """
    one, other = socket.socketpair()
    with one, other:
        start(place, solution, [checker, other, channel], lambda: run_solution(solution, one), [one.fileno()])
        start(place, checker, [solution, one, channel], lambda: run_checker(checker, other), [other.fileno()])


def try_out(place: Place) -> None:
    """Check that processes can be confined, by starting a confined process that does nothing.

    Args:
        place: confines the process.

    Raises:
        OSError: if the process cannot be confined.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start(place, theirs, [ours], lambda: None, [])
        theirs.close()
        ours.settimeout(SETTINGS["start_seconds"])
        answer = json.loads(receive(ours) or b'{"ended": "before it could say anything"}')
    if answer.get("ended") != 0:
        raise OSError(answer.get("unconfined") or f"a confined process ended with {answer['ended']}")


def wait_for_all(place: Place) -> None:
    """Run the launcher after its fork: wait until the starter and all its processes have ended, and remove their files.

    Before it waits, it also removes the files of killed launchers.

    Args:
        place: has the path of the folder with the files.
    """
    with suppress(OSError):
        sweep()
    with suppress(ChildProcessError):
        while True:
            os.wait()
    if not place.alone:
        remove(place.folder)


def main() -> None:
    """Run the launcher, which prepares the isolation and forks the starter. The fork runs the starter."""
    channel = socket.socket(fileno=os.dup(0))
    try:
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # all forks inherit it
            file.write("1000")  # if the machine runs out of memory, the kernel kills a program before the trainer
        place = Place(SETTINGS["isolation"])
        # With namespaces the starter is pid 1, and all processes end with it. Without, the launcher becomes the parent
        # of processes that are still running when the starter has ended, so that `wait_for_all` waits for them.
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.fork():
            channel.close()
            os.close(0)
            wait_for_all(place)
            return
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        sys.path.extend(package_folders())
        # Imported here once for all forks. If this import fails, a program that imports numpy gets the error.
        with suppress(Exception):
            import numpy  # noqa: F401
        try_out(place)
    except OSError as error:
        send(channel, json.dumps({"error": str(error)}).encode())
        return
    gc.freeze()  # else a garbage collection in a fork would write to all pages that it shares with the starter
    send(channel, json.dumps({"error": None}).encode())
    serve(place, channel)


if __name__ == "__main__":
    SETTINGS.update(json.loads(sys.argv[1]))
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from checker import receive, run_checker, run_solution, send

    del sys.path[0]
    main()
