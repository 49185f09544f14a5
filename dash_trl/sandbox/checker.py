"""Runs a program and its tests, in two processes that exchange plain values as JSON. This is the sandbox's own program.

The *solution* is the program's process, the *checker* the tests' process. How a test calls a function of the program::

    checker                                                                              solution
    assert f([1, 2]) == 3: f is an `Object` ──► ["call", {"object": 4}, [[1, 2]], {}] ──► object 4 is f: f([1, 2])
    compares 3 == 3                         ◄────────── ["value", 3] ◄─────────────────── returns 3

The program never sees its tests or the expected results. Values of `KINDS` and of numpy are rebuilt in the checker. For
any other value (a function, an instance), which stays in the solution, it gets an `Object` that equals only itself. So
no `__eq__` of the program can decide a test.

The checker reads the job from standard input, and writes the line "ready", a line with the job's nonce just before the
program first runs, and a line with the nonce and the verdict. The program cannot read the nonce.

This module imports nothing from this package: `box.py` starts it in the sandbox, and a sandbox of your own may send its
source to a server.
"""

import ast
import builtins
import ctypes
import importlib
import json
import math
import os
import resource
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import repeat
from numbers import Integral
from typing import Any, TextIO

Test = str | tuple[str, str]  # a script with asserts, or a pair of standard input and expected output

MAX_ANSWER = 8 << 20  # limit of a value or an output of the program, in bytes of JSON
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


class Unfit(BaseException):
    """The tests cannot score any program. `except Exception` in a test must not catch it."""


class SolutionError(Exception):
    """The program's process has ended, or raised an exception that cannot be sent."""


# ------------------------------------------------------------------------------------------------------------- values


def array_of(values: list[Any]) -> Any:
    """Convert a list to an array. In the tests, an empty one stays a list: numpy compares it with anything."""
    array = importlib.import_module("numpy").array(values)
    return array if array.size or "solution" in sys.modules else values


# tag in the JSON data → type, function that converts a value to plainer data, function that converts the data back.
# An instance of a class that derives from one of these types is sent as a value of the first type that fits, but not if
# it is the program's class and has methods.
KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (Integral, hex, lambda text: int(text, 16)),
    "float": (float, float, float),
    "str": (str, str.__str__, str),
    "list": (list, list, list),
    "tuple": (tuple, list, tuple),
    "deque": (deque, list, deque),
    "dict": (dict, lambda value: [[*pair] for pair in dict.items(value)], dict),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "keys": (type({}.keys()), list, lambda keys: dict.fromkeys(keys).keys()),
    "values": (type({}.values()), list, lambda values: dict(enumerate(values)).values()),
    "items": (type({}.items()), list, lambda pairs: dict(pairs).items()),
    "iterator": ((), list, iter),
    "array": ((), list, array_of),
    **{
        kind.__name__: (kind, lambda value: value.__reduce__()[1], (lambda make: lambda parts: make(*parts))(kind))
        for kind in (set, frozenset, range, bytearray, Fraction, Decimal, datetime, date, time, timedelta, timezone)
    },
}


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Convert a value to JSON data. `keep` returns the number of an object without a JSON form."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or kind is int and abs(value) < 1 << 63:
        return value
    if kind is list:
        return [encode(one, keep) for one in value]
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        plain = encode(value.tolist(), keep)
        return {"array": plain} if isinstance(plain, list) else plain
    if kind.__module__ in ("builtins", "itertools") and isinstance(value, Iterator):
        return {"iterator": encode([*value], keep)}
    # A class of the program with methods of its own, such as `class Cache(OrderedDict)`: the tests call them.
    own = kind.__module__ == "solution" and any(name[0] != "_" and callable(one) for name, one in vars(kind).items())
    for tag, (known, plainer, _) in KINDS.items():
        if isinstance(value, known) and not own:
            return {tag: encode(plainer(value), keep)}
    return {"object": keep(value)}


def decode(data: Any, find: Callable[[int], Any]) -> Any:
    """Convert JSON data back to a value. `find` returns the object with a number. Malformed data raises any error."""
    if isinstance(data, list):
        return [decode(one, find) for one in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    return find(content) if tag == "object" else KINDS[tag][2](decode(content, find))


# ----------------------------------------------------------------------------------------------------------- solution


def run_solution(source: TextIO, sink: TextIO) -> None:
    """Run the solution: answer the checker's requests, one per line. The first line is the program."""
    program = json.loads(source.readline())
    module = sys.modules["solution"] = sys.modules["__main__"] = types.ModuleType("solution")
    objects: dict[int, Any] = {0: module}
    if "random" in program:
        importlib.import_module("random").seed(0)  # makes random choices the same in each run

    def keep(value: object) -> int:
        objects[id(value)] = value
        return id(value)

    operations: dict[str, Callable[..., Any]] = {
        "load": lambda: exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__),
        "call": lambda function, arguments, named: function(*arguments, **named),
        "attribute": getattr,
        "set": setattr,
        "print": lambda given: printed(program, given),
    }
    for line in source:
        try:
            operation, *arguments = decode(json.loads(line), objects.__getitem__)
            reply = json.dumps(["value", encode(operations[operation](*arguments), keep)])
        except BaseException as error:
            # If the program defines `class E(ValueError)`, send "ValueError", which the tests can catch.
            known = [one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"]
            reply = json.dumps(["error", known[0], str(error)[:500]])
        print(reply, file=sink, flush=True)


def printed(program: str, given: str) -> str:
    """Run the program as a script in a new Python; return its output. RuntimeError if the exit code is not 0."""
    import subprocess  # here, because programs whose functions are called do not need it

    with open("solution.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(program)
    done = subprocess.run(
        [sys.executable, "-s", file.name], input=given.encode("utf-8", "surrogatepass"), capture_output=True
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-200:].decode('utf-8', 'replace')}")
    return done.stdout.decode("utf-8", "replace")


# ------------------------------------------------------------------------------------------------------------ checker


class Solution:
    """The checker's end of the link to the solution.

    Attributes:
        objects: the program's objects that the tests have got, by number.
        ended: why the solution has ended, if it has.
    """

    def __init__(self, process: int, source: TextIO, sink: TextIO):
        self.process = process
        self.source = source
        self.sink = sink
        self.objects: dict[int, Object] = {}
        self.ended: str | None = None

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Send a request for one of the `operations` of `run_solution`, and wait for the result.

        Raises:
            Exception: the exception of the program, or its nearest built-in base class.
            SolutionError: if the solution has ended; or for what is no `Exception`, or a StopIteration, after which
                `all(map(f, inputs))` would be true.
            Unfit: if an argument cannot be sent.
        """
        try:
            request = json.dumps(encode([operation, *arguments], number_of))
        except Exception as error:  # it is endless, too deep or too large
            raise Unfit(f"they pass the program a value that cannot be sent ({type(error).__name__})") from None
        try:
            print(request, file=self.sink, flush=True)
            kind, *content = json.loads(self.source.readline(MAX_ANSWER))
            if kind == "value":
                return decode(content[0], lambda number: self.objects.setdefault(number, Object(self, number)))
            name, message = map(str, content)
        except Exception as error:  # it has ended, or its answer is malformed
            self.end(f"it was killed, or its answer cannot be read or has more than {MAX_ANSWER:,} bytes ({error})")
            raise SolutionError(self.ended) from None
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception) and known is not StopIteration:
            raise known(message)  # a TypeError if `known` needs more than a message, such as UnicodeDecodeError
        raise SolutionError(f"{name}: {message}")

    def end(self, reason: str) -> None:
        """End the solution, for a reason unless it has ended by itself."""
        if not self.ended:
            os.kill(self.process, signal.SIGKILL)
            _, status = os.waitpid(self.process, 0)
            code = os.waitstatus_to_exitcode(status)
            reasons = {-signal.SIGKILL: reason, -signal.SIGXCPU: "it used more CPU time than allowed"}
            self.ended = f"the program's process ended: {reasons.get(code, f'exit code {code}')}"


class Object:
    """An object of the program, by its number in the solution, which makes its calls. 0 is the program as a module."""

    def __init__(self, solution: "Solution | Nonsense", number: int):
        self.__dict__.update(_solution_=solution, _number_=number)

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        return self._solution_.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._solution_.ask("attribute", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._solution_.ask("set", self, name, value)

    def __instancecheck__(self, instance: object) -> bool:
        raise Unfit("they look at what is an instance of the program's class, not at what it returns")

    __subclasscheck__ = __instancecheck__


class Nonsense(Object):
    """What a bad program answers to every request: equal to everything and true (`right`), or to nothing and false.

    It fails in the end, because `while not queue.is_empty()` would not.
    """

    def __init__(self, right: bool):
        super().__init__(self, 0)
        self.__dict__.update(right=right, answers=repeat(self, 1000))

    def ask(self, *_: object) -> Any:
        return next(self.answers)

    def __eq__(self, other: object) -> bool:
        return self.right

    def __bool__(self) -> bool:
        return self.right


def number_of(value: object) -> int:
    """Return the number of an object of the program; raise `Unfit` for an object of the tests."""
    if not isinstance(value, Object):
        raise Unfit(f"they pass the program a value of type {type(value).__name__!r}, which cannot be sent")
    return value._number_


class Names(dict[str, Any]):
    """Global names of a test script. The entry point is the program's; if it is not known, all other names are.

    Names of built-in functions and of modules are Python's own, unless the entry point has such a name: the program
    could forge `all`. `reached` tells that the script has used a name of the program.
    """

    def __init__(self, solution: Solution | Nonsense, entry_point: str | None):
        super().__init__(__name__="tests")
        self.solution = solution
        self.entry_point = entry_point
        self.reached = False

    def __missing__(self, name: str) -> Any:
        if name != self.entry_point:
            if hasattr(builtins, name):
                raise KeyError(name)  # then Python looks it up in `builtins`
            if name in {*sys.stdlib_module_names, "numpy", "np"}:
                return importlib.import_module("numpy" if name == "np" else name)
            if self.entry_point:  # the program could forge `isclose` or `Counter`
                raise Unfit(f"they do not define {name!r}, which is not the entry point {self.entry_point!r}")
        self.reached = True
        return self.setdefault(name, self.solution.ask("attribute", Object(self.solution, 0), name))


def judges(test: types.CodeType, entry_point: str | None) -> bool:
    """Return whether a script calls the program, and some bad program fails it.

    If it fails before that, it would fail for any program, and `Unfit` is raised.
    """
    for right in (False, True):
        names = Names(Nonsense(right), entry_point)
        try:
            exec(test, names)
        except BaseException as error:
            if not names.reached:
                raise Unfit(f"they fail before they call the program: {error!r}") from None
            return True
    return False


TOLERANCE = 1e-6  # absolute or relative, used if the expected number has a decimal point or an exponent


def same_output(found: str, expected: str) -> bool:
    """Return whether two outputs are equal line by line, except for white space and the last digits of numbers.

    A number with a decimal point or an exponent may differ by 1e-6, absolutely or relatively; integers must be equal.
    """
    lines, wanted = ([line.split() for line in text.strip().split("\n")] for text in (found, expected))
    return [*map(len, lines)] == [*map(len, wanted)] and all(
        same_word(*words) for pair in zip(lines, wanted, strict=True) for words in zip(*pair, strict=True)
    )


def same_word(found: str, expected: str) -> bool:
    with suppress(ValueError):  # a word is no number
        if any(mark in expected for mark in ".eE"):
            return math.isclose(float(found), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return found == expected


# Functions that `compare_shapes` replaces if the tests name them: of numpy, and those with assert_ of numpy.testing.
COMPARE = (
    "allclose",
    "isclose",
    "array_equiv",
    "assert_allclose",
    "assert_array_equal",
    "assert_almost_equal",
    "assert_array_almost_equal",
)


def compare_shapes(module: types.ModuleType, name: str) -> None:
    """Let a function of numpy find values of different shapes not close, except an array and a number.

    By broadcasting, an empty array is close to any number, so a program that returns `[]` would pass.
    """
    numpy = importlib.import_module("numpy")
    plain = getattr(module, name)

    def fit(a: object, b: object, *_: object) -> Any:
        return numpy.shape(a) == numpy.shape(b) or numpy.ndim(b) == 0 and numpy.size(a)

    setattr(module, name, lambda *both, **more: plain(*both, **more) if fit(*both, *more.values()) else plain(0, 1e9))


def check(job: dict[str, Any], solution: Solution, output: TextIO) -> dict[str, Any]:
    """Run tests on the program; return the fields of a `Verdict`, and `unfit`, why no program can be scored.

    The output gets the nonce first: if this process ends before that, the program cannot be the cause.
    """
    passed = 0
    unfit = None
    reason: BaseException | None = None
    try:
        tests = prepared(job["tests"])
        scripts = [one for one in tests if isinstance(one, types.CodeType)]
        if [judges(one, job["entry_point"]) for one in scripts].count(False) == len(tests):
            raise Unfit("they never call the program, or every program passes them")
        print(job["nonce"], file=output, flush=True)
        print(json.dumps(job["program"]), file=solution.sink)
        if scripts:
            solution.ask("load")
        for test in tests:
            try:
                if isinstance(test, types.CodeType):
                    exec(test, Names(solution, job["entry_point"]))
                elif not same_output(found := solution.ask("print", test[0]), test[1]):
                    raise AssertionError(f"printed {found!r:.200}, expected {test[1]!r:.200}")
                if solution.ended:  # the test has caught the error, because it expects some error of the program
                    raise SolutionError(solution.ended)
                passed += 1
            except (Exception, SystemExit) as error:
                if isinstance(error, ImportError) and error.name:  # without a name, the program has raised it
                    raise Unfit(str(error)) from None
                reason = reason or error
    except Unfit as error:
        unfit = str(error)
    except Exception as error:  # the program raised it before it had defined its functions
        reason = error
    solution.end("the tests have ended")
    # No log can write characters such as '\ud800'.
    text = f"{type(reason).__name__}: {reason}"[:500].encode("utf-8", "backslashreplace").decode()
    return {
        "passed": passed,
        "failed": len(job["tests"]) - passed,
        "reason": text if reason else None,
        "unfit": unfit,
    }


def compiled(script: str) -> types.CodeType:
    """Compile a script.

    Raises:
        Unfit: if it looks at what a call changes or prints, or at a class or a coroutine of the program.
    """
    tree = ast.parse(script)
    nodes = [*ast.walk(tree)]
    own = {*dir(builtins), *(getattr(one, "name", None) for one in nodes)}
    own |= {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    catches = "raises" in script or any(isinstance(one, ast.Try) for one in nodes)
    for one in nodes:
        seen: Any = None
        if isinstance(one, ast.ExceptHandler):
            seen = one.type
        elif isinstance(one, ast.Expr) and not catches:
            seen = getattr(one.value, "func", None)
        elif isinstance(one, ast.Call) and ast.unparse(one.func).endswith(("raises", "Raises")):
            seen = ast.Tuple(one.args[:1])
        for name in getattr(seen, "elts", [seen]):
            if isinstance(name, ast.Name) and name.id not in own:
                raise Unfit(f"they look at what {ast.unparse(one)!r} changes, prints or is, not at what it returns")
    if "asyncio" in script:
        raise Unfit("a coroutine cannot be sent to them")
    return compile(tree, "tests.py", "exec")


def prepared(tests: list[Any]) -> list[Any]:
    """Compile the scripts among the tests, or raise `Unfit`."""
    for name in filter(str(tests).__contains__, COMPARE):
        with suppress(ImportError):
            module = "numpy.testing" if name.startswith("assert_") else "numpy"
            compare_shapes(importlib.import_module(module), name)
    try:
        # `str.__str__` raises an error for what is no text.
        return [compiled(one) if isinstance(one, str) else [*map(str.__str__, one)] for one in tests]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Unfit(f"{type(error).__name__}: {error}") from None


# --------------------------------------------------------------------------------------------------------------- both


def main(limits: dict[str, int], user: int | None = None) -> None:
    """Run checker and solution.

    Args:
        limits: names of the module `resource` → limits; {} on a server with limits of its own.
        user: id for the program if the trainer is root, whose processes the kernel does not count.
    """
    # On a server this is also the folder of the program, whose `numpy.py` the tests must not import.
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.getcwd()]
    prctl = ctypes.CDLL(None).prctl
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, 0)  # 0, because else `bwrap` may not kill this process when it ends
    for name, value in limits.items():
        # At the first limit of CPU time, a process gets SIGXCPU, and at the second one SIGKILL.
        resource.setrlimit(getattr(resource, name), (value, value + 1))
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # a process of the same user cannot read the memory or the files of this one
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    source = os.fdopen(os.dup(0))
    output = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):  # what the program and the tests print is not part of the protocol
        os.dup2(null, standard)
    requests, to_solution = os.pipe()
    answers, from_solution = os.pipe()
    child = os.fork()  # before the tests are read, so that the child's memory does not contain them
    if child == 0:
        os.setresuid(*[os.getuid()] * 3)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(requests, 3, inheritable=False)
        os.dup2(from_solution, 4, inheritable=False)
        os.closerange(5, os.sysconf("SC_OPEN_MAX"))
        run_solution(os.fdopen(3), os.fdopen(4, "w"))
        os._exit(0)
    os.close(requests)
    os.close(from_solution)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only signal by which the program could end process 1
    print("ready", file=output, flush=True)
    job = json.load(source)
    solution = Solution(child, os.fdopen(answers), os.fdopen(to_solution, "w"))
    verdict = check(job, solution, output)
    print(job["nonce"], json.dumps(verdict), file=output, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1] if len(sys.argv) > 1 else "[{}]"))
