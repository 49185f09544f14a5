"""Runs inside: a program and its tests, in two processes that exchange plain values as text.

    checker: assert f([1, 2]) == 3 ──► f is a `Remote` ──► ["call", ["own", 4], [["list", [1, 2]]], …] ──► solution
             3 == 3, here          ◄──────────────────────────────────── ["value", 3, None]        ◄── f([1, 2])

The program never sees its tests or what they expect, only the arguments of calls. What it returns is rebuilt here from
JSON: values of Python's own types and numpy's, never an object with an `__eq__` of its own. What is no such value (a
generator, an instance of the program's class, a match) stays there; here is a `Remote`, which can be called, iterated,
indexed, asked for attributes, its length, its truth and its text, and equals nothing. Functions of the tests go the
same way in the other direction. After a call, containers that it changed are changed here, too.

A test may also be a pair (input, expected output): the program's process runs the program anew with that standard
input, and what it prints is compared here.

It imports nothing of this package: see `confinement.py`.
"""

import ast
import atexit
import builtins
import collections
import datetime
import decimal
import fractions
import functools
import gc
import importlib
import json
import math
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

Test = str | tuple[str, str]  # a script with asserts; or a program's standard input and the output that is expected

MAX_MESSAGE = 8 << 20  # bytes of one call or value
MAX_TEXT = MAX_MESSAGE - 1000  # of an input or an output, with what a message has beside it
MAX_JOB = 64 << 20  # bytes of all tests of a program
LARGEST_JSON_INT = 2**53


class CannotCross(BaseException):
    """An argument of the tests' is no value that can be sent. No `Exception`: the tests are not to catch it."""


class SolutionError(Exception):
    """Raised in the tests for an error of the program that is none of Python's own, or when its process has ended or
    does not keep to the protocol."""


# ------------------------------------------------------------------------------------------------------------ frames


def send(to: socket.socket, message: bytes) -> None:
    to.sendall(len(message).to_bytes(4, "big") + message)


def receive(source: socket.socket, most: int = MAX_MESSAGE) -> bytes | None:
    """The next message; None when the other side has closed. Raises ValueError for one that is too long."""
    head = _exactly(source, 4)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > most:
        raise ValueError(f"a message of {length:,} bytes, of {most:,} at most")
    return _exactly(source, length)


def _exactly(source: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(min(count - len(parts), 1 << 16))
        if not part:
            return None
        parts += part
    return bytes(parts)


# ------------------------------------------------------------------------------------------------------------- values

SEQUENCES: dict[str, type] = {one.__name__: one for one in (list, tuple, set, frozenset, collections.deque)}
MAPPINGS: dict[str, type] = {one.__name__: one for one in (dict, collections.OrderedDict, collections.Counter)}
BASES = (*SEQUENCES.values(), bytearray, bytes, *MAPPINGS.values(), int, float, complex, str)
WRITTEN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "int": (int, hex, lambda text: int(text, 16)),
    "complex": (complex, lambda one: [one.real, one.imag], lambda parts: complex(*parts)),
    "range": (range, lambda one: [hex(n) for n in (one.start, one.stop, one.step)], lambda n: range(*_integers(n))),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (
        fractions.Fraction,
        lambda one: [hex(one.numerator), hex(one.denominator)],
        lambda n: fractions.Fraction(*_integers(n)),
    ),
    "date": (datetime.date, lambda one: one.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda one: one.isoformat(), datetime.time.fromisoformat),
    "datetime": (datetime.datetime, lambda one: one.isoformat(), datetime.datetime.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda one: [one.days, one.seconds, one.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "ellipsis": (type(...), lambda one: None, lambda _: ...),
    "type": (type, lambda one: one.__name__, lambda name: _builtin_type(name)),
}
VIEWS: dict[str, Callable[[list[Any]], Any]] = {  # of a dict
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "dict_values": lambda values: dict(enumerate(values)).values(),
    "dict_items": lambda items: dict(items).items(),
}
TAGS = {kind: tag for tag, (kind, _, _) in WRITTEN.items()}
PLAIN_ARRAYS = "biufcSU"  # numpy's kinds whose items are Python's own


def _integers(texts: list[str]) -> Iterator[int]:
    return (int(text, 16) for text in texts)


def _builtin_type(name: str) -> type:
    found = getattr(builtins, name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no type")
    return found


class Codec:
    """Values as JSON and back. What has no spelling is kept in `own`, and crosses as a number.

    Args:
        there: makes what stands here for the other side's number.
        is_kept: whether a value may cross as a number.
    """

    def __init__(self, there: Callable[[int], Any], is_kept: Callable[[Any], bool]):
        self.is_kept = is_kept
        self.own: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # by id; `own` keeps these objects, so that no id comes twice
        self.there = there
        self.types: set[type] = set()  # of Python's own, that the other side has sent

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float) or kind is int and abs(value) <= LARGEST_JSON_INT:
            return value
        if SEQUENCES.get(kind.__name__) is kind:
            return [kind.__name__, [self.encode(one) for one in value]]
        if kind is collections.defaultdict:
            kind = dict
        if MAPPINGS.get(kind.__name__) is kind:
            return [kind.__name__, [[self.encode(key), self.encode(one)] for key, one in dict.items(value)]]
        if kind.__name__ in VIEWS and kind.__module__ == "builtins":
            return [kind.__name__, self.encode(list(value))]
        if kind in TAGS and not (kind is type and getattr(builtins, value.__name__, None) is not value):
            return [TAGS[kind], WRITTEN[TAGS[kind]][1](value)]
        if kind.__module__ == "numpy" and (array := self._encode_array(value)):
            return array
        if isinstance(value, Remote):
            return ["yours", value._number_]
        for base in BASES:  # a named tuple, an IntEnum, a list's subclass: what Python's own type says that it is
            if isinstance(value, base):
                return self.encode(base.__str__(value) if base is str else _plain(base, value))
        if not self.is_kept(value):
            # Made by a type that the program handed over, it is the program's doing.
            wrong = SolutionError if kind in self.types else CannotCross
            raise wrong(f"an argument of type {kind.__name__!r}, which is no plain value and no function")
        return ["mine", self.keep(value)]

    def _encode_array(self, value: Any) -> Any:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.generic) and value.dtype.kind in PLAIN_ARRAYS:
            return ["scalar", [value.dtype.str, self.encode(value.item())]]
        if type(value) is numpy.ndarray and value.dtype.kind in PLAIN_ARRAYS:
            return ["array", [value.dtype.str, list(value.shape), self.encode(value.ravel().tolist())]]
        return None

    def keep(self, value: Any) -> int:
        number = self.numbers.setdefault(id(value), len(self.own))
        self.own[number] = value
        return number

    def decode(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        tag, content = data
        if tag in SEQUENCES:
            return SEQUENCES[tag]([self.decode(one) for one in content])
        if tag in MAPPINGS:
            return MAPPINGS[tag]({self.decode(key): self.decode(one) for key, one in content})
        if tag in WRITTEN:
            value = WRITTEN[tag][2](content)
            if tag == "type":
                self.types.add(value)
            return value
        if tag in VIEWS:
            return VIEWS[tag](self.decode(content))
        if tag in ("scalar", "array"):
            import numpy

            kind, *rest = content
            if numpy.dtype(kind).kind not in PLAIN_ARRAYS:
                raise ValueError(f"no array is sent as {kind!r}")
            if tag == "scalar":
                return numpy.dtype(kind).type(self.decode(rest[0]))
            return numpy.array(self.decode(rest[1]), dtype=kind).reshape(rest[0])
        if tag == "yours":
            return self.own[content]
        if tag == "mine":
            return self.there(content)
        raise ValueError(f"no value is spelled {tag!r}")


def _plain(base: type, value: Any) -> Any:
    """The value as its base's, by the base's own methods."""
    if base in (int, float, complex):
        return base.__pos__(value)  # type: ignore[attr-defined]
    if base in MAPPINGS.values():
        return base(dict.items(value)) if base is not collections.Counter else collections.Counter(dict(value))
    return base(base.__iter__(value))  # type: ignore[attr-defined, call-arg]


def update(old: Any, new: Any) -> None:
    """Makes a container what it has become on the other side, with the objects that it held where they still fit."""
    if type(old) is not type(new):
        return
    if isinstance(old, (list, collections.deque, bytearray)):
        merged = [_merged(a, b) for a, b in zip(old, new, strict=False)] + list(new)[len(old) :]
        old.clear()
        old.extend(merged)
    elif isinstance(old, (dict, set)):
        content = {key: _merged(old.get(key), one) for key, one in new.items()} if isinstance(old, dict) else new
        old.clear()
        old.update(content)
    elif isinstance(old, tuple):
        for a, b in zip(old, new, strict=False):
            update(a, b)
    elif type(old).__module__ == "numpy" and getattr(old, "shape", ()) == getattr(new, "shape", None) != ():
        old[...] = new


def _merged(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, (list, dict, set, bytearray, collections.deque)):
        update(old, new)
        return old
    return new


# ----------------------------------------------------------------------------------------------------- the two ends


class Peer:
    """One end of the link: it asks, and answers what is asked while it waits.

    Args:
        trusted: it is the tests' end. A function of theirs may be called by the program, but an attribute of it
            (`__globals__`) or of a generator (`gi_frame`) would lead to what they expect.
    """

    def __init__(self, link: socket.socket, *, trusted: bool):
        self.link = link
        self.codec = Codec(lambda number: Remote(self, number), is_kept=is_harmless if trusted else lambda value: True)
        self.operations = {name: OPERATIONS[name] for name in (HARMLESS if trusted else OPERATIONS)}
        # Of what answering raises, what becomes an answer. What a function of the tests makes of the program's own
        # argument (`object`) must not make these tests unfit.
        self.catch = (Exception, CannotCross) if trusted else BaseException
        self.calls = 0
        self.ended: str | None = None

    def ask(self, number: int, operation: str, /, *arguments: Any, **named: Any) -> Any:
        """What `operation` with these arguments is, done with object `number` of the other side."""
        if self.ended:
            raise SolutionError(self.ended)
        self.calls += operation == "call"
        parts = [list(arguments), named]
        request = json.dumps(["ask", number, operation, [self.codec.encode(part) for part in parts]])
        if len(request) > MAX_MESSAGE:
            # Behind a call it may be the program's own value, by which it must not make its tests unfit.
            kind = SolutionError if self.calls > (operation == "call") else CannotCross
            raise kind(f"arguments of {len(request):,} bytes, of {MAX_MESSAGE:,} at most")
        try:
            send(self.link, request.encode())
            while True:
                text = receive(self.link)
                if text is None:
                    raise EOFError("the process ended")
                kind, *content = json.loads(text)
                if kind == "ask":
                    self.answer(*content)
                    continue
                if kind == "error":
                    break
                value, changed = content
                result = self.codec.decode(value)
                if changed is not None:
                    update(parts, self.codec.decode(changed))
                return result
            name, message = map(str, content)
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.ended = f"{type(error).__name__}: {_text(error)}"
            self.link.close()
            raise SolutionError(self.ended) from error
        known = getattr(builtins, name, None)
        raised: Exception = SolutionError(f"{name}: {message}")
        # `all(map(test, inputs))` takes a StopIteration for the end of its inputs, and passes.
        is_end = known is StopIteration and operation != "next"
        if isinstance(known, type) and issubclass(known, Exception) and not is_end:
            with suppress(TypeError):  # UnicodeDecodeError wants five arguments
                raised = known(message)
        raise raised

    def answer(self, number: int, operation: str, parts: list[Any]) -> None:
        try:
            if operation not in self.operations:
                raise AttributeError(f"objects of the tests have no {operation}")
            arguments, named = map(self.codec.decode, parts)
            before = json.dumps(parts)
            value = self.operations[operation](self.codec.own[number], *arguments, **named)
            after = [self.codec.encode(part) for part in (arguments, named)]
            # one list, so that the other side decodes it at once
            changed = None if json.dumps(after) == before else ["list", after]
            reply = json.dumps(["value", self.codec.encode(value), changed])
            if len(reply) > MAX_MESSAGE:
                raise ValueError(f"a value of {len(reply):,} bytes, of {MAX_MESSAGE:,} at most")
        except self.catch as error:
            # of a program's own `class E(ValueError)` what the tests can catch
            known = [one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"]
            reply = json.dumps(["error", known[0], _text(error)])
        send(self.link, reply.encode())

    def answer_all(self) -> None:
        """Until the other side has closed."""
        while (text := receive(self.link)) is not None:
            _, *content = json.loads(text)
            self.answer(*content)


def _text(error: BaseException) -> str:
    """What it says, cut off, and without what no log can write (a program's '\\ud800')."""
    try:
        return str(error)[:1000].encode("utf-8", "backslashreplace").decode()
    except BaseException:
        return ""


class Remote:
    """An object of the other side. It equals only itself, so that no `__eq__` of a program's decides a test."""

    __slots__ = ("_number_", "_peer_")

    def __init__(self, peer: Peer, number: int):
        object.__setattr__(self, "_peer_", peer)
        object.__setattr__(self, "_number_", number)

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        return self._peer_.ask(self._number_, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer_.ask(self._number_, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer_.ask(self._number_, "set", name, value)

    def __iter__(self) -> Any:
        return self._peer_.ask(self._number_, "iterate")  # a `Remote`, too: of a `Lasting`

    def __next__(self) -> Any:
        return self._peer_.ask(self._number_, "next")

    def __len__(self) -> int:
        return self._peer_.ask(self._number_, "length")

    def __getitem__(self, key: Any) -> Any:
        return self._peer_.ask(self._number_, "item", key)

    def __bool__(self) -> bool:
        return self._peer_.ask(self._number_, "truth") is True

    def __str__(self) -> str:
        return str(self._peer_.ask(self._number_, "text"))

    def __repr__(self) -> str:
        return str(self._peer_.ask(self._number_, "spelling"))


def is_harmless(value: Any) -> bool:
    """Whether a test's object is of use where it has no attributes: a function or an iterator."""
    return callable(value) or hasattr(type(value), "__next__")


class Lasting(Iterator[Any]):
    """Keeps an iterator in `own`, where a list or a generator's values would be sent."""

    def __init__(self, iterator: Iterator[Any]):
        self.iterator = iterator

    def __next__(self) -> Any:
        return next(self.iterator)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda one, /, *arguments, **named: one(*arguments, **named),
    "attribute": getattr,
    "set": setattr,
    "iterate": lambda one: Lasting(iter(one)),
    "next": next,
    "length": len,
    "item": lambda one, key: one[key],
    "truth": bool,
    "text": str,
    "spelling": repr,
    "names": lambda one, wanted: one(wanted),
}
HARMLESS = ("call", "iterate", "next", "length", "item", "truth", "text", "spelling")
PROGRAM, PRINTED = 0, 1  # the numbers of what gives the program's names, and of what runs it with an input


# ---------------------------------------------------------------------------------------------------------- solution


def run_solution(control: socket.socket, link: socket.socket) -> None:
    """Reads a program, runs it, and answers what the checker asks of it."""
    job = json.loads(receive(control) or b"{}")
    program = job["program"]  # without one nobody waits for it any more
    control.close()
    # A set's order and a program's choices are the same in each run (see also PYTHONHASHSEED in box.py).
    random.seed(0)
    module = types.ModuleType("solution")  # dataclasses and pickle look for the module of a class
    sys.modules["solution"] = module
    peer = Peer(link, trusted=False)

    def load() -> BaseException | None:
        try:
            exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            return error
        return None

    loaded = [load()] if job.get("ahead") else []  # while the checker reads the tests

    def names(wanted: list[str]) -> dict[str, Any]:
        error = loaded.pop() if loaded else load()
        if error is not None:
            raise error
        return {name: called_here(module.__dict__[name]) for name in wanted if name in module.__dict__}

    peer.codec.keep(names)
    peer.codec.keep(functools.partial(printed, program))
    peer.answer_all()


def called_here(value: Any) -> Any:
    """A type of Python's own (`f = list`) in a form that does not cross: the tests' calls of it are the program's."""
    is_own = isinstance(value, type) and value.__module__ == "builtins" and not issubclass(value, BaseException)
    return functools.partial(value) if is_own else value


def printed(program: str, given: str) -> str:
    """What the program prints when it is run as a script with this standard input.

    Standard input and output are files, so that `open(0)`, `sys.stdin.buffer` and `os.write(1, …)` work, too.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as sink:
        source.write(given.encode("utf-8", "surrogatepass"))
        source.seek(0)
        os.dup2(source.fileno(), 0)
        os.dup2(sink.fileno(), 1)
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
        output = sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
        sys.argv = ["solution.py"]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        # the first two Python has only with its `site`
        module.__dict__.update(exit=sys.exit, quit=sys.exit, __file__=os.path.abspath("solution.py"))
        try:
            exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"exit code {end.code}") from end
        finally:  # the program may have closed them; in their place the next run would open its files
            os.dup2(source.fileno(), 0)
            os.dup2(sink.fileno(), 1)
        for thread in threading.enumerate():  # as at the end of a process; some programs do all their work in one
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for file in (sys.stdout, output):  # which the program may have replaced or closed
            with suppress(Exception):
                file.flush()
        module.__dict__.clear()
        gc.collect()  # writes what is left in files that were not closed, and frees the memory for the next run
        sink.seek(0)
        return sink.read(MAX_MESSAGE).decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------- checker


_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
TOLERANCE = 1e-6  # of a number that is expected with a decimal point, absolute or relative


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs are the same, line by line, but for white space and the last digits of numbers.

    Lines at the end that are empty do not count, nor does white space around words. Integers have to be the same text,
    since an answer modulo 10^9 + 7 is close to many others.
    """
    lines, wanted = found.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(found: str, expected: str) -> bool:
    words, wanted = found.split(), expected.split()
    return words == wanted or len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not (_DECIMAL.fullmatch(found) and _DECIMAL.fullmatch(expected)):
        return False
    if not any(mark in expected for mark in ".eE"):  # an integer, which may be printed as 3.0
        return any(mark in found for mark in ".eE") and _exactly_equal(found, expected)
    return math.isclose(float(found), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _exactly_equal(found: str, expected: str) -> bool:
    """As numbers with all their digits: a `float` has 16 of them, and every large one is infinite."""
    with suppress(decimal.InvalidOperation):  # an exponent without bounds
        return decimal.Decimal(found) == decimal.Decimal(expected)
    return False


def compare_shapes(numpy: types.ModuleType, tests: Any) -> None:
    """Makes `allclose` and `isclose` false for values of another shape, and the asserts of `numpy.testing` fail. numpy
    broadcasts, and has no objection to an empty list: `return []` would be close to any number. Only the second value
    may be a number for a whole array."""
    compared = [(numpy, "allclose"), (numpy, "isclose")]
    if "testing" in str(tests):  # whose import takes a while
        names = ("allclose", "almost_equal", "array_almost_equal", "array_equal")
        compared += [(importlib.import_module("numpy.testing"), f"assert_{name}") for name in names]
    for module, name in compared:
        plain = getattr(module, name)

        @functools.wraps(plain)
        def compare(*arguments: Any, plain: Any = plain, **named: Any) -> Any:
            a, b = [*arguments, *named.values()][:2]
            is_number = numpy.ndim(b) == 0 and isinstance(a, numpy.ndarray) and a.size
            if is_number or numpy.shape(a) == numpy.shape(b):
                return plain(*arguments, **named)
            if plain.__name__.startswith("assert"):
                raise AssertionError(f"values of the shapes {numpy.shape(a)} and {numpy.shape(b)}")
            return numpy.False_

        setattr(module, name, compare)


class Count(AbstractContextManager[Any]):
    """`with` around one test: counts it, and goes on after its failure. No test passes whose program has ended: it may
    expect an error, but not that one."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.passed = self.failed = 0
        self.reason: str | None = None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None and self.peer.ended:
            self.fail(SolutionError(self.peer.ended))
        elif error is None:
            self.passed += 1
        elif isinstance(error, Exception):
            self.fail(error)
        return isinstance(error, Exception)

    def fail(self, error: BaseException) -> None:
        self.failed += 1
        self.reason = self.reason or f"{type(error).__name__}: {_text(error)}"[:500]


class CountTests(ast.NodeTransformer):
    """A test is an assert, or one turn of a loop that has asserts."""

    NAME = "__test__"

    def counted(self, body: list[ast.stmt], like: ast.stmt) -> ast.stmt:
        return ast.copy_location(ast.With([ast.withitem(ast.Name(self.NAME, ast.Load()))], body), like)

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self.counted([node], node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        if any(isinstance(one, ast.Assert) for one in node.body):
            node.body = [self.counted(node.body, node)]
            return node
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        return node  # whose asserts may be meant to fail


def run_checker(control: socket.socket, link: socket.socket) -> None:
    """Reads tests, runs them with the program's names, and writes the verdict to the trainer."""
    try:
        job = json.loads(receive(control, MAX_JOB) or b"{}")
    except ValueError as error:
        send(
            control, json.dumps({"passed": 0, "failed": 0, "reason": None, "unfit": str(error), "ended": None}).encode()
        )
        return
    if "numpy" in sys.modules:
        compare_shapes(sys.modules["numpy"], job["tests"])
    verdict = check(
        job["tests"], job["entry_point"], Peer(link, trusted=True), before=lambda: send(control, b'{"asked": true}')
    )
    send(control, json.dumps(verdict).encode())


def modules(nodes: list[ast.AST], names: set[str]) -> dict[str, types.ModuleType]:
    """Those of the names that are the standard library's or numpy's, and used as a module only: `math.isclose`."""
    dotted = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = names - {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in dotted}
    found = {}
    for name in names & {*sys.stdlib_module_names, "numpy", "np"}:
        with suppress(ImportError):  # then the program may have it
            found[name] = importlib.import_module("numpy" if name == "np" else name)
    return found


def check(tests: list[Test], entry_point: str | None, peer: Peer, before: Callable[[], None]) -> dict[str, Any]:
    """Runs each script with the program's names, except that no name of Python's own is the program's, nor a module's
    that the tests do not import: it might forge `all`, `isinstance` or `math.isclose`. Only the entry point may be such
    a name (MBPP has a `sum`). A test that is no script is a pair of an input and the expected output.

    before(): before anything is asked of the program.

    passed, failed: numbers of tests. reason: of the first failure. unfit: why the tests say nothing, or None.

    ended: how the program's process left the protocol, if it did.
    """
    total, unfit = Count(peer), None
    texts, pairs = [one for one in tests if isinstance(one, str)], [one for one in tests if not isinstance(one, str)]
    try:
        trees = [ast.parse(text) for text in texts]
        scripts = [compile(ast.fix_missing_locations(CountTests().visit(tree)), "tests.py", "exec") for tree in trees]
        for given, expected in pairs:
            if not (isinstance(given, str) and isinstance(expected, str)):
                raise ValueError(f"an input {given!r:.100} and an output {expected!r:.100}, which have to be texts")
        longest = max((len(json.dumps(text)) for pair in pairs for text in pair), default=0)
        if longest > MAX_TEXT:
            raise ValueError(f"an input or output of {longest:,} bytes, of {MAX_TEXT:,} at most")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        scripts, pairs, unfit = [], [], f"{type(error).__name__}: {error}"
    try:
        names: dict[str, Any] = {}
        wanted: list[str] = []
        if scripts:
            nodes = [node for tree in trees for node in ast.walk(tree)]
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            used = {name for name in used if name == entry_point or not hasattr(builtins, name)}
            names = modules(nodes, used - {entry_point})
            wanted = sorted(used - names.keys())
        if not unfit:
            before()  # whatever ends this process from here on, in time or memory, may be the program's doing
        if scripts:
            given = peer.ask(PROGRAM, "names", wanted)
            names |= {name: given[name] for name in wanted if name in given}  # no more than was asked for
        for script in scripts:
            counted = total.passed + total.failed
            try:
                exec(script, {**names, CountTests.NAME: total, "__name__": "tests"})
            except SystemExit as error:
                if error.code:
                    total.fail(error)
            except Exception as error:
                total.fail(error)
            if total.passed + total.failed == counted:  # it had no asserts
                with total:
                    pass
        if scripts and peer.calls == 0 and not total.failed:
            if entry_point not in wanted or isinstance(names.get(entry_point), Remote):
                unfit = "they never call anything of the program"
            else:
                total.passed = 0
                total.fail(NameError(f"the program has no function {entry_point!r}"))
        for given, expected in pairs:
            with total:
                found = peer.ask(PRINTED, "call", given)
                if not (isinstance(found, str) and same_output(found, expected)):
                    raise AssertionError(f"printed {found!r:.200}, expected {expected!r:.200}")
    except CannotCross as error:
        unfit = str(error)
    except Exception as error:  # the program's own: it has no names to give
        total.fail(error)
    return {
        "passed": total.passed,
        "failed": total.failed,
        "reason": total.reason,
        "unfit": unfit,
        "ended": peer.ended,
    }


# ------------------------------------------------------------------------------------------- both, where others run it


def run_both() -> None:
    """Scores a program that stands in standard input with its tests, and prints a line before it runs the program, and
    one with the verdict; each begins with the nonce that was given, too. For a server that runs one Python program."""
    import ctypes  # which a confined checker does not need

    prctl = ctypes.CDLL(None).prctl
    prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the child cannot read the memory of this process
    control, its_control = socket.socketpair()
    link, its_link = socket.socketpair()
    if os.fork() == 0:  # before the tests are read
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the server ends the parent, if it takes too long
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        control.close()
        link.close()
        run_solution(its_control, its_link)
        os._exit(0)
    its_control.close()
    its_link.close()
    job = json.load(sys.stdin)
    if "numpy" in str(job["tests"]):
        with suppress(ImportError):
            compare_shapes(importlib.import_module("numpy"), job["tests"])
    send(control, json.dumps({"program": job["program"]}).encode())
    peer = Peer(link, trusted=True)
    verdict = check(job["tests"], job["entry_point"], peer, before=lambda: print(job["nonce"], flush=True))
    print(job["nonce"], json.dumps(verdict), flush=True)
    os._exit(0)
