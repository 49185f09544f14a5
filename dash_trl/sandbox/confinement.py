"""Starts confined processes by fork. This is the sandbox's first process; it imports nothing from this package.

Processes of a sandbox::

    trainer ──► launcher ──► starter: pid 1 of a pid namespace, in a root folder without anything of the user's
                                │   one fork per side of a job, each with a socket to the trainer
                                ├──► supervisor ──► solution: pid 1 of its own namespaces     ◄─┐ calls and values
                                └──► supervisor ──► checker:  pid 1 of its own namespaces     ◄─┘ as text

`box.py` starts it as `python -P -s -S confinement.py SETTINGS`, with an environment of its own and its socket as
standard input. (`-I` is not used because it ignores PYTHONHASHSEED: the order of a set of strings would differ from run
to run.) Forking a running Python takes a few milliseconds, starting a new one about 30. The starter reads neither
programs nor tests, so the data of one job cannot be found in the memory of the next.

Kinds of isolation, best first:

- "namespaces" (Linux 5.12): the process has namespaces of its own for users, processes, files, network, IPC and the
  host name, and runs as nobody, without capabilities. Its root folder is read-only and holds Python, its packages and
  the system's libraries. Only /tmp is writable; it lies in memory and has a limited size. The program starts there, in
  an empty folder. RLIMIT_NPROC is effective, because it counts per user namespace.
- "landlock" (Linux 5.13): Landlock gives access to the same files and a temporary folder. seccomp refuses sockets, and
  signals to other processes. The supervisor counts threads and files, and ends a program that has too many.
- "rlimits": only seccomp's part; programs of root run as nobody. The user's files and the memory of the user's other
  processes are not protected. This kind has to be asked for by name.

All kinds limit CPU time, memory, file size and open files. A program may start processes only with namespaces and only
if the user allows it; then the supervisor adds up their CPU time. When the trainer ends, even by SIGKILL, its sockets
close. The starter and the supervisors then end, each with its namespace. Without namespaces the launcher then removes
the programs' files; if the launcher was killed, the next launcher does.
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
PREFIX = "dash_trl_programs_"  # prefix of a launcher's folder among the temporary files
TASK_FOLDER = "/tmp/dash_trl_task"  # empty folder for a program; /tmp may also hold the user's Python environment
OPEN_FILES = 64  # limit of open files
LOOK = 0.05  # seconds between the supervisor's checks of what the kernel does not limit
LONG = 0.1  # seconds; the trainer waits many times longer before it asks why a process has not ended
INODES = 4096  # limit of files and folders
DEEP = 64  # limit of nested folders, whose paths the supervisor follows
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
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
        OSError: if it fails, with the function's name.
    """
    result = getattr(libc, function)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
    return result


def readable_paths() -> list[str]:
    """Return the paths that Python needs to read: the system's libraries, Python itself and its packages."""
    # Only parts of the prefix, because it may be ~/.local or the home folder itself.
    prefixes, parts = {sys.base_prefix, sys.base_exec_prefix}, ("bin", "lib", "lib64", "share/zoneinfo")
    own = [os.path.join(prefix, part) for prefix in prefixes for part in parts]
    own += [sysconfig.get_path(one) for one in ("stdlib", "platstdlib")]
    paths: list[str] = []
    for path in [*SYSTEM, *map(os.path.realpath, [*own, *package_folders()])]:
        if os.path.exists(path) and not any(f"{path}/".startswith(f"{other}/") for other in paths):
            paths.append(path)
    return paths


def package_folders() -> list[str]:
    """Return the site-packages folders of the trainer's Python, which -S leaves out."""
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
    """Enter new namespaces, among them a user namespace with only this process's own user and group ids.

    Args:
        flags: flags of unshare(2).
        proc: open file of the folder /proc.
    """
    user, group = os.geteuid(), os.getegid()
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise /proc/self belongs to root after a change of user
    call("unshare", flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


def make_root() -> None:
    """Replace the root folder of this mount namespace by a read-only one with `readable_paths` and nothing else."""
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
    """Return the version of the kernel's Landlock; below 1 if there is none."""
    return int(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def restrict_files(readable: list[str], writable: str) -> None:
    """Restrict this process and its children to some files, by Landlock.

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
X32 = 0x40000000  # where x86-64's second set of system call numbers begins
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


# System calls that programs with Python and NumPy make, found by tracing MBPP+'s solutions and the standard library.
# Every other system call fails with ENOSYS. The C library then uses an older one (`clone` instead of `clone3`).
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
# Allowed only with namespaces, which confine their effects: changes of the rights and times of files, and signals to
# threads, reach nothing outside. The size of all files together stays limited, including files that only a socket holds
# and files whose space is allocated faster than it could be written. No list allows a program to lower its priority: it
# would look like a program that waits for a CPU because the machine is busy.
ALLOWED_ALONE = calls("""
tkill:200:130 sched_setaffinity:203:122 mknod:133 mknodat:259:33 chmod:90 fchmod:91:52 fchmodat:268:53
fchmodat2:452:452 utime:132 utimes:235 utimensat:280:88 truncate:76:45 fallocate:285:47 sendmsg:46:211""")
# Allowed only with `Sandbox(children=True)`, which requires namespaces.
ALLOWED_CHILDREN = calls("""
fork:57 vfork:58 execve:59:221 execveat:322:281 pidfd_open:434:434 setsid:112:157 setpgid:109:154""")
PRCTLS = (15, 16, 23)  # set and get a thread's name; ask for a capability
FCNTLS = (*range(8), 1030)  # copy file numbers, flags, locks; not: who gets a signal when a file is ready
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal or not, its size; bytes to read, blocking, close
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF instructions
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE = 0, 4  # offsets in the data that a filter sees
ALL_BITS = 0xFFFFFFFF
BLOCK = 16  # system calls in one block of a filter

# (argument, mask of its bits, values, whether only these values pass or only these do not)
Condition = tuple[float, int, tuple[int, ...], bool]


def conditions(*, alone: bool, children: bool) -> dict[str, list[Condition]]:
    """Return the conditions of system calls that are allowed with some arguments only.

    Args:
        alone: whether the process has namespaces of its own.
        children: whether the process may start others.

    Returns:
        Name of a system call → its conditions, all of which have to hold.
    """
    own: list[Condition] = [(0, ALL_BITS, (os.getpid(),), True), (1, ALL_BITS, (signal.SIGKILL,), False)]
    limited: dict[str, list[Condition]] = {
        "prctl": [(0, ALL_BITS, PRCTLS, True)],
        "fcntl": [(1, ALL_BITS, FCNTLS, True)],
        "ioctl": [(1, ALL_BITS, IOCTLS, True)],
        "prlimit64": [(2, ALL_BITS, (0,), True), (2.5, ALL_BITS, (0,), True)],  # only ask for a limit
        # asyncio needs it; a socket without a connection could reach /dev/log
        "socketpair": [(0, ALL_BITS, (socket.AF_UNIX,), True), (1, 0xF, (socket.SOCK_STREAM,), True)],
        "clone": [(0, ALL_NEW | CLONE_THREAD, (0, CLONE_THREAD) if children else (CLONE_THREAD,), True)],
    }
    if not alone:
        limited["kill"] = own
        limited["tgkill"] = [own[0], (2, *own[1][1:])]
        if landlock_version() < 3:  # these versions limit writing to files, but not O_TRUNC without writing
            kept = (0, 1, 2, 3, os.O_TRUNC | os.O_WRONLY, os.O_TRUNC | os.O_RDWR)
            limited["open"] = [(1, os.O_TRUNC | os.O_ACCMODE, kept, True)]
            limited["openat"] = [(2, *limited["open"][0][1:])]
    return limited


def make_filter(*, alone: bool, children: bool = False) -> bytes:
    """Create a seccomp filter.

    Args:
        alone: whether the filter is for a process with namespaces of its own. Otherwise it is for this process, which
            may send signals to itself only.
        children: whether the process may start others.

    Returns:
        The filter's instructions.

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
            # an argument has 8 bytes, the low half first
            body += [(LOAD, 0, 0, int(16 + 8 * argument)), (AND, 0, 0, bits)]
            if only:
                body += [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
                body += [(RETURN, 0, 0, REFUSE | EPERM)]
            else:
                body += [one for value in values for one in ((EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSE | EPERM))]
        if column < len(numbers):
            bodies[numbers[column]] = body
    # In blocks, so that a call passes through one block only: the kernel runs a new filter once for each known number.
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
        instructions: instructions of `make_filter`.
    """
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    said = struct.pack("HP", len(instructions) // struct.calcsize("HBBI"), ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, 2, said, 0, 0)


# -------------------------------------------------------------------------------------------------- starter and sides


class Place:
    """Confines the starter's processes by one kind of isolation, which is prepared once.

    Args:
        kind: "namespaces", "landlock" or "rlimits".

    Attributes:
        alone: whether each process has namespaces of its own.
        landlock: whether Landlock is used.
        in_tmp: readable paths below /tmp.
        proc: open file of the folder /proc.
        filter: seccomp filter for all processes; None if each needs its own.
        folder: folder for the programs' folders, if there are no namespaces.

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
        # Created once here. In a fork it would take a millisecond, because each page of memory in use would be copied.
        self.filter = make_filter(alone=True, children=SETTINGS["children"]) if self.alone else None
        if self.alone:
            if os.geteuid() == 0:
                call("unshare", CLONE_NEWNS | CLONE_NEWPID)
            else:
                enter_user_namespace(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID, self.proc)
            make_root()
        elif self.landlock and landlock_version() < 1:
            raise OSError("this kernel has no Landlock, or does not use it")
        if not self.alone:  # otherwise a program could write into the memory of tests and supervisor through /proc
            call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
            self.folder = locked_folder()

    def enter(self) -> str:
        """Enter the namespaces of a job, in a supervisor.

        Returns:
            The folder in which the program may write.
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
        """Return the seconds for which a process was ready to run but had no CPU, for the thread with the most.

        Args:
            handle: file descriptor of the process (pidfd).

        Returns:
            Seconds; None if the kernel does not report them.
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
            folder: the process's folder.
            spent: CPU time of its processes, see `cpu_of_all`.

        Returns:
            Description of the limit that the process exceeds; None if it exceeds none.
        """
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
            process = self.number(handle)
            if self.alone:  # with namespaces the kernel enforces all other limits
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
        """Add up the CPU seconds of a process and its descendants, as far as they were seen.

        Args:
            process: number of the process in `proc`.
            spent: number of a process → its CPU seconds when last seen; updated here, and kept for ended processes.
        """
        found = [process]
        while found:
            one = found.pop()
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
                ticks = self.read(f"{one}/stat").rpartition(")")[2].split()[11:13]
                spent[one] = sum(map(int, ticks)) / TICKS
                for thread in self.names(f"{one}/task"):
                    found += self.read(f"{one}/task/{thread}/children").split()
        return sum(spent.values())

    def files(self, folder: str, process: str) -> tuple[int, int]:
        """Count a process's files.

        Args:
            folder: the process's folder.
            process: number of the process in `proc`.

        Returns:
            Number of files and folders in the folder; their bytes, including deleted files that are still open.

        Raises:
            OSError: if files cannot be counted.
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
        with suppress(PermissionError):  # with "rlimits" and an ordinary user
            held = {}
            mapped = self.mapped(folder, process)
            for thread in self.names(f"{process}/task"):
                with suppress(PermissionError, FileNotFoundError, ProcessLookupError):  # the thread has ended
                    for number in self.names(f"{process}/task/{thread}/fd"):
                        with suppress(FileNotFoundError):
                            status = os.stat(f"{process}/task/{thread}/fd/{number}", dir_fd=self.proc)
                            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                                held[status.st_ino] = 512 * status.st_blocks
            if (mapped - held.keys()) & self.mapped(folder, process):
                raise OSError(errno.EBUSY, "deleted files in memory")
            size += sum(held.values())
        return count, size

    def mapped(self, folder: str, process: str) -> set[int]:
        """Return the inodes of a folder's deleted files that are mapped into memory.

        The kernel reports the size of such a file only if it is also open.

        Args:
            folder: the process's folder.
            process: number of the process in `proc`.
        """
        lines: list[str] = []
        for thread in self.names(f"{process}/task"):
            with suppress(PermissionError, FileNotFoundError, ProcessLookupError):  # the thread has ended
                lines = lines or self.read(f"{process}/task/{thread}/maps").splitlines()
        beginning = f" {os.path.realpath(folder)}/"
        return {int(line.split()[4]) for line in lines if beginning in line and line.endswith(" (deleted)")}

    def number(self, handle: int) -> str:
        """Return a process's number in `proc`, which is a /proc from outside the process's namespace.

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
        """Confine this process; afterwards it has access to nothing but its folder and the readable paths.

        Args:
            folder: the folder in which it may write.

        Raises:
            OSError: if it cannot be confined.
        """
        if not self.alone and not self.landlock:
            if os.geteuid() == 0:
                os.chown(folder, NOBODY, NOBODY)
            become_nobody()
            os.listdir(sysconfig.get_path("stdlib"))  # if only root can read it, hardly any program would run: fail now
        os.setsid()  # otherwise kill(0, …) would reach processes of the same group outside of the namespace
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
            call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # lets `files` see its open files; Landlock keeps programs away
        filter_calls(self.filter or make_filter(alone=False))


def become_nobody() -> None:
    """Change from root to the user nobody.

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
        processes: number of threads and processes, including the supervisor and this process; None: no limit.
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
    """Run one side of a job in a confined process until it ends or the trainer closes `control`.

    Then report to `control` how it ended: its exit code or signal, its CPU seconds, the exceeded limit (`Place.excess`)
    if that is why it was killed, and `Place.run_delay` if the trainer did not wait for its end.

    Args:
        place: confines the process.
        control: socket to the trainer.
        side: function that runs in the confined process.
        keep: file descriptors that the confined process keeps, besides `control`.
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
    _, status, usage = os.wait4(child, 0)  # pid 1 of a namespace ends last
    code = os.waitstatus_to_exitcode(status)
    report = {"ended": code, "cpu": usage.ru_utime + usage.ru_stime, "delay": delay, "excess": excess}
    send(control, json.dumps(report).encode())  # before the folder is removed: a program may have made it very deep
    if not place.alone:
        remove(folder)


def locked_folder() -> str:
    """Create a folder for the programs' folders. An open file of launcher, starter and supervisors keeps it locked."""
    new = tempfile.mkdtemp(prefix=f"new_{PREFIX}")  # gets the name that `sweep` looks for once it is locked
    os.chmod(new, 0o711)  # with "rlimits", programs of root run as nobody
    fcntl.flock(os.open(new, os.O_RDONLY), fcntl.LOCK_EX)
    folder = os.path.join(os.path.dirname(new), os.path.basename(new).removeprefix("new_"))
    os.rename(new, folder)
    return folder


def sweep() -> None:
    """Remove this user's folders that no process has locked, because their launchers were killed."""
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
    """Remove a folder of any depth. Each inner folder is first moved to the top, where its path is short.

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
    """Fork a supervisor. If it cannot confine its process, it reports that to `control`, and no program runs.

    Args:
        place: see `supervise`.
        control: see `supervise`.
        other: sockets that the supervisor closes.
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
    """Begin a job for each pair of sockets that the trainer sends, until the trainer closes the channel.

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
            except OSError as error:  # no process could be started: this job has no verdict, but the next one may
                send(checker, json.dumps({"unconfined": str(error)}).encode())


def begin(place: Place, channel: socket.socket, solution: socket.socket, checker: socket.socket) -> None:
    """Start both sides of a job, with a link between them.

    Args:
        place: confines the processes.
        channel: socket to the trainer, which the sides close.
        solution: the trainer's socket for the solution.
        checker: the trainer's socket for the checker.
    """
    one, other = socket.socketpair()
    with one, other:
        start(place, solution, [checker, other, channel], lambda: run_solution(solution, one), [one.fileno()])
        start(place, checker, [solution, one, channel], lambda: run_checker(checker, other), [other.fileno()])


def try_out(place: Place) -> None:
    """Start one confined process that does nothing.

    Args:
        place: confines the process.

    Raises:
        OSError: if it cannot be confined.
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
    """Wait, in the launcher, until the starter and all its processes have ended; then remove their files.

    Args:
        place: holds the folder of these files.
    """
    with suppress(OSError):
        sweep()
    with suppress(ChildProcessError):
        while True:
            os.wait()
    if not place.alone:
        remove(place.folder)


def main() -> None:
    """Run launcher and starter."""
    channel = socket.socket(fileno=os.dup(0))
    try:
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # all forks inherit it
            file.write("1000")  # if the machine runs out of memory, the kernel kills a program before the trainer
        place = Place(SETTINGS["isolation"])
        # With namespaces the starter is pid 1, and nothing outlives it. Otherwise its orphans become the launcher's.
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.fork():
            channel.close()
            os.close(0)
            wait_for_all(place)
            return
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        sys.path.extend(package_folders())
        with suppress(Exception):  # if this fails, a program that imports numpy gets the error
            import numpy  # noqa: F401
        try_out(place)
    except OSError as error:
        send(channel, json.dumps({"error": str(error)}).encode())
        return
    gc.freeze()  # forks share these pages until one of them writes to them, which a garbage collection would do
    send(channel, json.dumps({"error": None}).encode())
    serve(place, channel)


if __name__ == "__main__":
    SETTINGS.update(json.loads(sys.argv[1]))
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from checker import receive, run_checker, run_solution, send

    del sys.path[0]
    main()
