"""Attacks on the sandbox, with its limits: programs whose f(x) returns x + 1, the right value, only if they succeed.

A test replaces the words in capitals.
"""

import re


def programs(text: str) -> dict[str, str]:
    """Splits a text with a line `## name` before each program; returns {name: program}."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


TOO_MUCH = programs("""
## an endless loop
def f(x):
    while True: pass
## an endless loop while it is loaded
while True: pass
## an endless loop that ignores all signals
import signal
for one in range(1, 65):
    try: signal.signal(one, signal.SIG_IGN)
    except (OSError, ValueError): pass
def f(x):
    while True: pass
## an endless loop in C
def f(x): return 0 in iter(int, 1)
## threads that never end
import threading
def loop():
    while True: pass
def f(x):
    for _ in range(3): threading.Thread(target=loop).start()
    loop()
## printing 1 GB and more
def f(x):
    while True: print('x' * (1 << 20))
## 10 GB at once
def f(x):
    held = bytearray(10 << 30)
    return x + 1
## 10 GB bit by bit
def f(x):
    held = [b'%d' % i * (1 << 20) for i in range(10240)]
    return x + 1
## 10 GB of mapped memory
import mmap
def f(x):
    held = [mmap.mmap(-1, 1 << 28) for _ in range(40)]
    return x + 1
## 10 GB of memory without an address
import os
def f(x):
    for _ in range(40): os.truncate(os.memfd_create('x'), 1 << 28)
    return x + 1
## a file of 1 GB
def f(x):
    with open('big', 'wb') as file:
        for _ in range(1 << 10): file.write(b'x' * (1 << 20))
    return x + 1
## deep recursion
def f(x): return f(x)
## deep recursion without Python's limit
import sys
sys.setrecursionlimit(1 << 30)
def f(x): return [f(x)]
## deep recursion in C without Python's limit
import sys
sys.setrecursionlimit(1 << 30)
class A:
    def __repr__(self): return repr(self)
def f(x): return repr(A())
## a huge value
def f(x): return 'x' * (64 << 20)
## a deep value
def f(x):
    one = []
    for _ in range(100000): one = [one]
    return one
## a value that holds itself
def f(x):
    one = []
    one.append(one)
    return one
## a number with a million digits
def f(x): return 10 ** 1000000
## thousands of open files
import os
def f(x):
    held = [os.dup(1) for _ in range(5000)]
    return x + 1
## more CPU time by setrlimit
import resource
def f(x):
    resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
    return x + 1
""")

FORGED = programs("""
## exit 0 while it is loaded
import os
os._exit(0)
## exit 0 in a call
import os
def f(x): os._exit(0)
## sys.exit while it is loaded
import sys
sys.exit(0)
## sys.exit in a call
import sys
def f(x): sys.exit(0)
## a forged success line
def f(x):
    print('OK'); print('{"passed": 2, "failed": 0}')
## a forged verdict on every open file
import os
VERDICT = b'{"passed": 2, "failed": 0, "unfit": null, "ended": null, "reason": null}'
def f(x):
    for n in range(64):
        try: os.write(n, len(VERDICT).to_bytes(4, 'big') + VERDICT)
        except OSError: pass
    os._exit(0)
## garbage on the protocol's pipe
import os
def f(x):
    for n in range(3, 64):
        try: os.write(n, b'garbage' * 99)
        except OSError: pass
    return x + 1
## a message of 4 GB announced on the protocol's pipe
import os
def f(x):
    for n in range(3, 64):
        try: os.write(n, b'\\xff' * 4)
        except OSError: pass
    return x + 1
## the protocol's pipe closed
import os
def f(x):
    os.closerange(0, 64)
    return x + 1
## an answer nested beyond what can be read
import os
def f(x):
    text = b'["value", ' + b'["list", [' * 200000 + b']]' * 200000 + b', null]'
    for n in range(3, 64):
        try: os.write(n, len(text).to_bytes(4, 'big') + text)
        except OSError: pass
## an __eq__ that always agrees
class Yes:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def f(x): return Yes()
## an int whose __eq__ always agrees
class Yes(int):
    __hash__ = None
    def __eq__(self, other): return True
def f(x): return Yes(7)
## a list whose __eq__ always agrees
class Yes(list):
    def __eq__(self, other): return True
def f(x): return Yes()
## a __class__ that lies
class Yes:
    __class__ = int
    def __eq__(self, other): return True
def f(x): return Yes()
## the expected value from a stack frame
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        names = {**frame.f_globals, **frame.f_locals}
        if any('f(41) =' + '= 42' in one for one in names.values() if isinstance(one, str)): return x + 1
        frame = frame.f_back
## the expected value from the memory
import gc
def f(x):
    wanted = 'f(41) =' + '= 42'
    for one in gc.get_objects():
        for held in gc.get_referents(one):
            if type(held) in (str, bytes) and held is not wanted and wanted in str(held): return x + 1
## the test file read and rewritten
import glob
def f(x):
    for path in glob.glob('/tmp/**', recursive=True) + glob.glob('**', recursive=True) + glob.glob('/proc/*/fd/*'):
        try:
            if 'f(41)' in open(path).read(): return x + 1
            open(path, 'w').write('')
        except OSError: pass
## builtins of its own
import builtins
builtins.AssertionError = SystemExit
builtins.isinstance = lambda *a: True
def f(x): raise SystemExit(0)
## json of its own
import json
json.dumps = lambda *a: '["value", true, null]'
def f(x): return x + 1
## the server's own functions replaced
import sys
def f(x):
    frame = sys._getframe(1)
    for one in frame.f_globals.values():
        if hasattr(one, '__code__'): one.__code__ = (lambda *a: True).__code__
    return True
## an exception that calls itself passed
class AssertionError(BaseException): pass
def f(x): raise AssertionError('passed')
## StopIteration
def f(x): raise StopIteration
## a test's exit
def f(x): raise SystemExit
## an infinite iterator
import itertools
def f(x): return itertools.count()
## a crash
import ctypes
def f(x): return ctypes.string_at(0)
## an abort
import os
def f(x): os.abort()
""")

OUTWARD = programs("""
## the memory of its tests
import os
def f(x): return x + bool(open(f'/proc/{os.getppid()}/mem', 'rb'))
## the files of its tests
import os
def f(x): return x + bool(os.listdir(f'/proc/{os.getppid()}/fd'))
## its tests traced
import ctypes, os
def f(x): return x + 1 if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else 0
## the keys of the user's session
import ctypes
def f(x): return x + 1 if ctypes.CDLL(None).syscall(250, 0, -3, 0) > 0 else 0
## memory that no limit counts
import os
def f(x): return x + 1 if os.memfd_create('x') else 0
## semaphores that no limit counts
import ctypes
def f(x): return x + 1 if ctypes.CDLL(None).semget(0, 32000, 0o600) >= 0 else 0
## messages that no limit counts
import ctypes
def f(x): return x + 1 if ctypes.CDLL(None).msgget(0, 0o600) >= 0 else 0
## attributes of files that no limit counts
import os
def f(x):
    open('a', 'w').close()
    os.setxattr('a', 'user.a', b'x' * 65536)
    return x + 1
## memory that a pipe holds
import ctypes, os
def f(x): return x + 1 if ctypes.CDLL(None).vmsplice(os.pipe()[1], None, 0, 0) >= 0 else 0
## asynchronous input and output, whose number is limited for the whole machine
import ctypes
def f(x): return x + 1 if ctypes.CDLL(None).syscall(206, 1, (ctypes.c_ulong * 1)()) == 0 else 0
## sockets by io_uring
import ctypes
def f(x): return x + 1 if ctypes.CDLL(None).syscall(425, 8, bytes(120)) > 0 else 0
## a new root folder
import ctypes
def f(x): return x + 1 if ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 else 0
## a fork bomb
import os
def f(x):
    while True:
        try: os.fork()
        except OSError: pass
## a hundred children
import os, time
def f(x):
    children = [os.fork() for _ in range(100)]
    return x + 1
## a socket to this machine
import socket
def f(x):
    socket.create_connection(('127.0.0.1', PORT), timeout=5)
    return x + 1
## a socket to the world
import socket
def f(x):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.connect(('8.8.8.8', 53))
    return x + 1
## a socket to the machine's host
import socket
def f(x):
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    return x + 1
## a socket to the kernel
import socket
def f(x):
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    return x + 1
## every process killed
import os, signal
def f(x):
    os.kill(-1, signal.SIGKILL)
    return x + 1
## every process of its group killed
import os, signal
def f(x): os.killpg(0, signal.SIGKILL)
## the trainer killed
import os, signal
def f(x):
    os.kill(PID, signal.SIGKILL)
    return x + 1
## the trainer stopped by a thread's signal
import ctypes
def f(x):
    return x + 1 if ctypes.CDLL(None).syscall(200, PID, 19) == 0 else 0
## the trainer told when a file is ready, by fcntl
import fcntl, socket
def f(x):
    fcntl.fcntl(socket.socketpair()[0], fcntl.F_SETOWN, PID)
    return x + 1
## the trainer told when a file is ready, by fcntl with a kind of owner
import fcntl, socket, struct
def f(x):
    fcntl.fcntl(socket.socketpair()[0], 15, struct.pack('2i', 1, PID))
    return x + 1
## the trainer told when a file is ready, by ioctl
import fcntl, socket, struct
def f(x):
    fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', PID))
    return x + 1
## the trainer told when a socket is ready, by ioctl
import fcntl, socket, struct
def f(x):
    fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', PID))
    return x + 1
## the trainer traced
import ctypes
def f(x):
    return x + 1 if ctypes.CDLL(None).ptrace(16, PID, 0, 0) == 0 else 0
## the trainer's limits lowered
import resource
def f(x):
    resource.prlimit(PID, resource.RLIMIT_NOFILE, (64, 64))
    return x + 1
## namespaces of its own, in which it is root
import ctypes
def f(x):
    return x + 1 if ctypes.CDLL(None).unshare(0x10000000) == 0 else 0
## namespaces of its own by clone3
import ctypes, struct
def f(x):
    pid = ctypes.CDLL(None).syscall(435, struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
    if pid == 0: ctypes.CDLL(None)._exit(0)
    return x + 1 if pid > 0 else 0
## System V memory that outlives it
import ctypes
def f(x):
    return x + 1 if ctypes.CDLL(None).shmget(0x1234, 4096, 0o1600) >= 0 else 0
## the environment's keys
import os
def f(x): return x + 1 if 'SECRET' in str(os.environ) else 0
## the environment's keys in C
import ctypes
def f(x):
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    return x + 1 if libc.getenv(b'DASH_TRL_TEST_API_KEY') else 0
""")

# By which a program would choose to have no score instead of 0.
UNSCORED = programs("""
## SIGKILL of its tests
import os
def f(x): os.kill(os.getppid(), 9)
## its tests stopped
import os
def f(x): os.kill(os.getppid(), 19)
## a lower priority
import os
def f(x): return x + 1 if os.nice(19) else 0
## SIGKILL of itself
import os
def f(x): os.kill(os.getpid(), 9)
## an answer that its tests cannot read, nor say why
import os
def f(x):
    text = b'["value", ["' + bytes((195, 169)) * 3000000 + b'", 1], null]'
    text = len(text).to_bytes(4, 'big') + text
    for n in range(3, 64):
        try:
            while text: text = text[os.write(n, text):]
        except OSError: pass
    return 0
## SIGKILL raised
import signal
def f(x): signal.raise_signal(9)
## SIGKILL by its own limit
import resource
def f(x):
    resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
    while True: pass
## SIGKILL by a timer
import ctypes, struct, time
def f(x):
    timer, when = ctypes.create_string_buffer(8), struct.pack('4q', 0, 0, 0, 1)
    ctypes.CDLL(None).syscall(222, 1, struct.pack('qiiqqqqqq', 0, 9, 0, 0, 0, 0, 0, 0, 0), timer)
    ctypes.CDLL(None).syscall(223, struct.unpack('i', timer[:4])[0], 0, when, None)
    time.sleep(0.1)
## SIGKILL by a file that is ready
import fcntl, os, socket
def f(x):
    a, b = socket.socketpair()
    fcntl.fcntl(a, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(a, 10, 9)
    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)
    b.send(b'x')
""")

FILES = programs("""
## the trainer's environment
def f(x): return x + 1 if b'SECRET' in open('/proc/PID/environ', 'rb').read() else 0
## the first process's environment
def f(x): return x + 1 if open('/proc/1/environ', 'rb').read() is not None else 0
## the trainer's memory
def f(x): return x + 1 if open('/proc/PID/mem', 'rb') else 0
## a file of the user's
def f(x): return x + 1 if 'SECRET' in open('FOLDER/secret').read() else 0
## a file of the user's by a symbolic link
import os
def f(x):
    os.symlink('FOLDER/secret', 'link')
    return x + 1 if 'SECRET' in open('link').read() else 0
## a file of the user's by a path through the root
def f(x): return x + 1 if 'SECRET' in open('/proc/self/root/../../..' + 'FOLDER/secret').read() else 0
## the home folder
import os
def f(x): return x + 1 if [one for one in os.listdir('HOME') if not one.startswith('.pyenv')] else 0
## the machine's users
def f(x): return x + 1 if open('/etc/passwd').read() else 0
## a file of the user's overwritten
def f(x):
    open('FOLDER/secret', 'w').write('gone')
    return x + 1
## a file of the user's deleted
import os
def f(x):
    os.remove('FOLDER/secret')
    return x + 1
## all files deleted
import shutil
def f(x):
    failures = []
    shutil.rmtree('FOLDER', onerror=lambda *a: failures.append(a))
    return x + 1 if not failures else 0
## a file of the user's made executable
import os
def f(x):
    os.chmod('FOLDER/secret', 0o777)
    return x + 1
## a file in Python's packages
import json
def f(x):
    with open(json.__file__, 'a'): return x + 1
## a file in the system's folders
def f(x):
    with open('/usr/lib/dash_trl_test', 'w'): return x + 1
## the device of the disk
import os
def f(x):
    for major in (8, 253, 254, 259):
        try: os.mknod('disk', 0o60666, os.makedev(major, 0)); return x + 1
        except OSError: pass
## out of the root folder
import os
def f(x):
    os.chroot('.')
    return x + 1
""")
# Files and threads beyond the limits of the tests, and a daemon.
LEFT_BEHIND = programs("""
## a hundred threads
import threading, time
def f(x):
    threading.stack_size(32768)
    for _ in range(100): threading.Thread(target=time.sleep, args=(600,)).start()
    time.sleep(600)
    return x + 1
## large files deleted while they are open
import os, time
def f(x):
    held = []
    for _ in range(40):
        held.append(open('deleted', 'wb', buffering=0))
        os.remove('deleted')
        held[-1].write(b'x' * (1 << 20))
    time.sleep(600)
    return x + 1
## large files deleted while they are mapped
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def f(x):
    for _ in range(40):
        file = os.open('deleted', os.O_RDWR | os.O_CREAT)
        os.remove('deleted')
        os.write(file, b'x' * (1 << 20))
        libc.mmap(None, 4096, 1, 2, file, 0)
        os.close(file)
    time.sleep(600)
    return x + 1
## large files deleted while a socket holds them
import os, socket, time
def f(x):
    one, other = socket.socketpair()
    for _ in range(40):
        file = os.open('deleted', os.O_RDWR | os.O_CREAT)
        os.remove('deleted')
        os.write(file, b'x' * (1 << 20))
        socket.send_fds(one, [b'x'], [file])
        os.close(file)
    time.sleep(600)
    return x + 1
## large files behind a name that is too long
import os, time
def f(x):
    for _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)
    for i in range(40): open(str(i), 'wb').write(b'x' * (1 << 20))
    time.sleep(600)
    return x + 1
## large files below a hundred folders
import os, time
def f(x):
    for _ in range(100): os.mkdir('d'); os.chdir('d')
    for i in range(40): open(str(i), 'wb').write(b'x' * (1 << 20))
    time.sleep(600)
    return x + 1
## large files in a folder that cannot be read
import os, time
def f(x):
    os.mkdir('a', 0o300)
    for i in range(40): open(f'a/{i}', 'wb').write(b'x' * (1 << 20))
    time.sleep(600)
    return x + 1
## a thousand folders within each other
import os
def f(x):
    for _ in range(1200): os.mkdir('d'); os.chdir('d')
    os._exit(0)
## the temporary folder filled
def f(x):
    for i in range(1000): open(f'file{i}', 'wb').write(b'x' * (1 << 20))
    return x + 1
## the shared memory filled
def f(x):
    for i in range(1000): open(f'/dev/shm/{i}', 'wb').write(b'x' * (1 << 20))
    return x + 1
## the folder of devices filled
def f(x):
    open('/dev/file', 'w').write('x')
    return x + 1
## a daemon
import os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.01)
    return 0
## a daemon that stays when its program exits
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
os._exit(0)
""")

RENAMES = (
    "import os\ntry: os.rename({!r}, '/tmp/other')\nexcept OSError: pass\ndef f(): return os.path.exists('/tmp/other')"
)
# A second or more each, of what others show, too.
LONG = {
    *("an endless loop", "an endless loop while it is loaded", "threads that never end", "printing 1 GB and more"),
    *("deep recursion without Python's limit", "an endless loop that ignores all signals", "10 GB bit by bit"),
    *("a fork bomb", "a huge value", "a daemon that stays when its program exits", "the test file read and rewritten"),
    *("its tests stopped", "deep recursion in C without Python's limit"),
}
TESTS = ["assert f(1) == 2", "assert f(41) == 42"]
LIMITS = {"cpu_seconds": 1, "wall_seconds": 10, "memory": 512 << 20, "disk": 8 << 20, "processes": 2}
