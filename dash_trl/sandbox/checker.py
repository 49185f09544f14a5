"""Runs a program and its tests inside the sandbox, in two processes that exchange plain values as text.

How a test calls the program (left: the tests' process, the checker; right: the program's process, the solution)::

    checker: assert f([1, 2]) == 3 ──► f is a `Remote` ──► ["call", ["own", 4], [["list", [1, 2]]], …] ──► solution
             3 == 3, here          ◄──────────────────────────────────── ["value", 3, None]        ◄── f([1, 2])

The program never sees its tests or the expected results, only the arguments of calls. The checker rebuilds returned
values from JSON: values of Python's and numpy's own types, but never an object with its own `__eq__`. Any other object
(a generator, an instance of the program's class, a match) stays in the solution. The checker gets a `Remote` for it,
which can be called, iterated and indexed, can be asked for attributes, its length, its truth value and its text, and
equals only itself. Functions of the tests are passed to the program in the same way. If a call changes a container
among its arguments, the caller's container is changed, too.

A test may also be a pair (input, expected output). Then the solution runs the program again with this standard input,
and the checker compares its output.

This module imports nothing from this package, see `confinement.py`.
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

Test = str | tuple[str, str]  # a script with asserts, or a pair of standard input and expected output

MAX_MESSAGE = 8 << 20  # limit of one call or value, in bytes
MAX_TEXT = MAX_MESSAGE - 1000  # limit of an input or output, which leaves room for the rest of its message
MAX_JOB = 64 << 20  # limit of all tests of a program, in bytes
LARGEST_JSON_INT = 2**53


class CannotCross(BaseException):
    """The tests pass an argument that cannot be sent. It is no `Exception`, so that the tests do not catch it."""


class SolutionError(Exception):
    """Raised in the tests for an error of the program that is no built-in exception.

    Also raised if the program's process has ended or violates the protocol.
    """


# ------------------------------------------------------------------------------------------------------------ frames


def send(to: socket.socket, message: bytes) -> None:
    """Send a message with its length before it.

    Args:
        to: the socket.
        message: the message.
    """
    to.sendall(len(message).to_bytes(4, "big") + message)


def receive(source: socket.socket, most: int = MAX_MESSAGE) -> bytes | None:
    """Receive the next message.

    Args:
        source: the socket.
        most: limit of the message, in bytes.

    Returns:
        The message; None if the other side has closed the socket.

    Raises:
        ValueError: if the message is too long.
    """
    head = _exactly(source, 4)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > most:
        raise ValueError(f"a message of {length:,} bytes, of {most:,} at most")
    return _exactly(source, length)


def _exactly(source: socket.socket, count: int) -> bytes | None:
    """Receive a number of bytes; None if the other side has closed the socket."""
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
VIEWS: dict[str, Callable[[list[Any]], Any]] = {  # views of a dict
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "dict_values": lambda values: dict(enumerate(values)).values(),
    "dict_items": lambda items: dict(items).items(),
}
TAGS = {kind: tag for tag, (kind, _, _) in WRITTEN.items()}
PLAIN_ARRAYS = "biufcSU"  # kinds of numpy arrays whose items are values of Python's own types


def _integers(texts: list[str]) -> Iterator[int]:
    return (int(text, 16) for text in texts)


def _builtin_type(name: str) -> type:
    found = getattr(builtins, name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no type")
    return found


class Codec:
    """Converts values to JSON and back. An object that JSON cannot express stays in `own`, and its number is sent.

    Args:
        there: creates the stand-in for an object of the other side from its number.
        is_kept: returns whether an object may be kept and sent as a number.

    Attributes:
        own: number → object that the other side knows by this number.
        numbers: `id` of such an object → its number.
        types: built-in types that the other side has sent.
    """

    def __init__(self, there: Callable[[int], Any], is_kept: Callable[[Any], bool]):
        self.is_kept = is_kept
        self.own: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # `own` keeps these objects alive, so that no id is used twice
        self.there = there
        self.types: set[type] = set()

    def encode(self, value: Any) -> Any:
        """Convert a value to JSON data.

        Args:
            value: any object.

        Raises:
            CannotCross: if the value can neither be converted nor kept.
            SolutionError: instead, if the program has sent the type of the value.
        """
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
        for base in BASES:  # a named tuple, an IntEnum or a subclass of list is sent as a value of its built-in type
            if isinstance(value, base):
                return self.encode(base.__str__(value) if base is str else _plain(base, value))
        if not self.is_kept(value):
            # If the program handed over the type, the value is the program's fault.
            wrong = SolutionError if kind in self.types else CannotCross
            raise wrong(f"an argument of type {kind.__name__!r}, which is no plain value and no function")
        return ["mine", self.keep(value)]

    def _encode_array(self, value: Any) -> Any:
        """Convert a numpy scalar or array; return None for any other object of numpy's."""
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.generic) and value.dtype.kind in PLAIN_ARRAYS:
            return ["scalar", [value.dtype.str, self.encode(value.item())]]
        if type(value) is numpy.ndarray and value.dtype.kind in PLAIN_ARRAYS:
            return ["array", [value.dtype.str, list(value.shape), self.encode(value.ravel().tolist())]]
        return None

    def keep(self, value: Any) -> int:
        """Keep an object for the other side, and return its number.

        Args:
            value: the object.
        """
        number = self.numbers.setdefault(id(value), len(self.own))
        self.own[number] = value
        return number

    def decode(self, data: Any) -> Any:
        """Convert JSON data of `encode` back to a value.

        Args:
            data: the JSON data.

        Raises:
            Exception: if the data is malformed.
        """
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
    """Convert a value to the built-in type from which its type derives, with the methods of the built-in type."""
    if base in (int, float, complex):
        return base.__pos__(value)  # type: ignore[attr-defined]
    if base in MAPPINGS.values():
        return base(dict.items(value)) if base is not collections.Counter else collections.Counter(dict(value))
    return base(base.__iter__(value))  # type: ignore[attr-defined, call-arg]


def update(old: Any, new: Any) -> None:
    """Change a container in place to what it has become on the other side; keep inner containers of the same type.

    Args:
        old: the container on this side.
        new: its new content.
    """
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
    """Return the old container, updated, if it fits the new value; else the new value."""
    if type(old) is type(new) and isinstance(old, (list, dict, set, bytearray, collections.deque)):
        update(old, new)
        return old
    return new


# ----------------------------------------------------------------------------------------------------- the two ends


class Peer:
    """One end of the link between the two processes. It sends requests, and answers requests while it waits.

    Args:
        link: socket to the other end.
        trusted: whether this is the tests' end. The program may call functions of the tests, but not read attributes:
            those of a function (`__globals__`) or a generator (`gi_frame`) would lead to the expected results.

    Attributes:
        codec: converts values.
        operations: operations that the other end may request.
        catch: exceptions that are sent back as the answer to a request.
        calls: number of calls requested so far.
        ended: how the other process ended or violated the protocol; None if it did not.
    """

    def __init__(self, link: socket.socket, *, trusted: bool):
        self.link = link
        self.codec = Codec(lambda number: Remote(self, number), is_kept=is_harmless if trusted else lambda value: True)
        self.operations = {name: OPERATIONS[name] for name in (HARMLESS if trusted else OPERATIONS)}
        # `CannotCross` is caught at the tests' end, too: a function of the tests may return something that depends on
        # the program's argument (such as `object`) and cannot be sent, which must not make these tests unfit.
        self.catch = (Exception, CannotCross) if trusted else BaseException
        self.calls = 0
        self.ended: str | None = None

    def ask(self, number: int, operation: str, /, *arguments: Any, **named: Any) -> Any:
        """Let the other side apply an operation to one of its objects, and wait for the result.

        Args:
            number: number of the object.
            operation: a key of `OPERATIONS`.
            arguments: positional arguments of the operation.
            named: keyword arguments of the operation.

        Returns:
            Result of the operation.

        Raises:
            Exception: the error of the operation, if it is a built-in exception.
            SolutionError: if the operation raised any other error, or the other process has ended or violates the
                protocol.
            CannotCross: if the tests' arguments cannot be sent.
        """
        if self.ended:
            raise SolutionError(self.ended)
        self.calls += operation == "call"
        parts = [list(arguments), named]
        request = json.dumps(["ask", number, operation, [self.codec.encode(part) for part in parts]])
        if len(request) > MAX_MESSAGE:
            # After an earlier call this may be the program's own value, which must not make the tests unfit.
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
        # `all(map(test, inputs))` would take a StopIteration for the end of its inputs, and pass.
        is_end = known is StopIteration and operation != "next"
        if isinstance(known, type) and issubclass(known, Exception) and not is_end:
            with suppress(TypeError):  # UnicodeDecodeError needs five arguments
                raised = known(message)
        raise raised

    def answer(self, number: int, operation: str, parts: list[Any]) -> None:
        """Answer a request of the other side.

        Args:
            number: number of the object.
            operation: name of the operation.
            parts: encoded positional and keyword arguments.
        """
        try:
            if operation not in self.operations:
                raise AttributeError(f"objects of the tests have no {operation}")
            arguments, named = map(self.codec.decode, parts)
            before = json.dumps(parts)
            value = self.operations[operation](self.codec.own[number], *arguments, **named)
            after = [self.codec.encode(part) for part in (arguments, named)]
            # a single list, so that the other side can decode it in one call
            changed = None if json.dumps(after) == before else ["list", after]
            reply = json.dumps(["value", self.codec.encode(value), changed])
            if len(reply) > MAX_MESSAGE:
                raise ValueError(f"a value of {len(reply):,} bytes, of {MAX_MESSAGE:,} at most")
        except self.catch as error:
            # for a program's own `class E(ValueError)` send the built-in base, which the tests can catch
            known = [one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"]
            reply = json.dumps(["error", known[0], _text(error)])
        send(self.link, reply.encode())

    def answer_all(self) -> None:
        """Answer requests until the other side closes the link."""
        while (text := receive(self.link)) is not None:
            _, *content = json.loads(text)
            self.answer(*content)


def _text(error: BaseException) -> str:
    """Return the message of an error, shortened, without characters that no log can write (such as '\\ud800')."""
    try:
        return str(error)[:1000].encode("utf-8", "backslashreplace").decode()
    except BaseException:
        return ""


class Remote:
    """Stand-in for an object of the other side. It equals only itself, so that no `__eq__` of a program decides a test.

    Args:
        peer: this end of the link.
        number: the object's number on the other side.
    """

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
        return self._peer_.ask(self._number_, "iterate")  # also a `Remote`, of a `Lasting`

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
    """Return whether an object of the tests is useful without its attributes: a function or an iterator.

    Args:
        value: the object.
    """
    return callable(value) or hasattr(type(value), "__next__")


class Lasting(Iterator[Any]):
    """Wraps an iterator, so that it is kept in `own` instead of being sent as a list of its values.

    Args:
        iterator: the iterator.
    """

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
PROGRAM, PRINTED = 0, 1  # numbers of the objects that return the program's names, and run it with an input


# ---------------------------------------------------------------------------------------------------------- solution


def run_solution(control: socket.socket, link: socket.socket) -> None:
    """Read a program, run it, and answer the checker's requests.

    Args:
        control: socket to the trainer.
        link: socket to the checker.
    """
    job = json.loads(receive(control) or b"{}")
    program = job["program"]  # raises KeyError if the trainer has closed the socket: nobody waits any more
    control.close()
    # Random choices are the same in each run, and so is the order of sets (see PYTHONHASHSEED in box.py).
    random.seed(0)
    module = types.ModuleType("solution")  # dataclasses and pickle look up the module of a class
    sys.modules["solution"] = module
    peer = Peer(link, trusted=False)

    def load() -> BaseException | None:
        try:
            exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            return error
        return None

    loaded = [load()] if job.get("ahead") else []  # runs while the checker reads the tests

    def names(wanted: list[str]) -> dict[str, Any]:
        error = loaded.pop() if loaded else load()
        if error is not None:
            raise error
        return {name: called_here(module.__dict__[name]) for name in wanted if name in module.__dict__}

    peer.codec.keep(names)
    peer.codec.keep(functools.partial(printed, program))
    peer.answer_all()


def called_here(value: Any) -> Any:
    """Wrap a built-in type (`f = list`), so that the type is not sent and its calls run in the program's process.

    Args:
        value: a value of the program.
    """
    is_own = isinstance(value, type) and value.__module__ == "builtins" and not issubclass(value, BaseException)
    return functools.partial(value) if is_own else value


def printed(program: str, given: str) -> str:
    """Run the program as a script, and return what it prints.

    Standard input and output are files, so that `open(0)`, `sys.stdin.buffer` and `os.write(1, …)` work, too.

    Args:
        program: Python source code.
        given: standard input.

    Raises:
        Exception: the program's error, or `RuntimeError` for an exit code other than 0.
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
        # Python itself defines exit and quit only if it imports `site`
        module.__dict__.update(exit=sys.exit, quit=sys.exit, __file__=os.path.abspath("solution.py"))
        try:
            exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"exit code {end.code}") from end
        finally:  # the program may have closed them, and the next run's files would get their numbers
            os.dup2(source.fileno(), 0)
            os.dup2(sink.fileno(), 1)
        for thread in threading.enumerate():  # as at the end of a process; some programs do all their work in a thread
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for file in (sys.stdout, output):  # which the program may have replaced or closed
            with suppress(Exception):
                file.flush()
        module.__dict__.clear()
        gc.collect()  # flushes files that were not closed, and frees memory for the next run
        sink.seek(0)
        return sink.read(MAX_MESSAGE).decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------- checker


_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
TOLERANCE = 1e-6  # absolute or relative, for numbers that are expected with a decimal point or an exponent


def same_output(found: str, expected: str) -> bool:
    """Return whether two outputs are equal line by line, except for white space and the last digits of numbers.

    Empty lines at the end and white space around words do not count. Integers must be exactly equal, because an answer
    modulo 10^9 + 7 is close to many wrong ones.

    Args:
        found: the program's output.
        expected: the expected output.
    """
    lines, wanted = found.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(found: str, expected: str) -> bool:
    """Compare two lines word by word."""
    words, wanted = found.split(), expected.split()
    return words == wanted or len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(found: str, expected: str) -> bool:
    """Compare two words, as numbers if both are numbers."""
    if found == expected:
        return True
    if not (_DECIMAL.fullmatch(found) and _DECIMAL.fullmatch(expected)):
        return False
    if not any(mark in expected for mark in ".eE"):  # an integer is expected; it may be printed as 3.0
        return any(mark in found for mark in ".eE") and _exactly_equal(found, expected)
    return math.isclose(float(found), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _exactly_equal(found: str, expected: str) -> bool:
    """Compare two numbers exactly. `float` would keep only 16 digits, and turn large numbers into infinity."""
    with suppress(decimal.InvalidOperation):  # the exponent is too large
        return decimal.Decimal(found) == decimal.Decimal(expected)
    return False


def compare_shapes(numpy: types.ModuleType, tests: Any) -> None:
    """Make numpy's comparisons fail for values of different shapes.

    `allclose` and `isclose` then return False, and the asserts of `numpy.testing` fail. By itself numpy broadcasts, and
    it accepts an empty list: `return []` would be close to any number. Only the second value may be a number that is
    compared with a whole array.

    Args:
        numpy: the module, which is changed.
        tests: the tests.
    """
    compared = [(numpy, "allclose"), (numpy, "isclose")]
    if "testing" in str(tests):  # only if needed, because importing numpy.testing is slow
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
    """Context manager around one test, which counts the test and continues after its failure.

    A test fails if the program's process has ended: the test may expect an error, but not this one.

    Args:
        peer: the tests' end of the link.

    Attributes:
        passed: number of tests that passed.
        failed: number of tests that failed.
        reason: reason of the first failure.
    """

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
        """Count a failure.

        Args:
            error: its reason.
        """
        self.failed += 1
        self.reason = self.reason or f"{type(error).__name__}: {_text(error)}"[:500]


class CountTests(ast.NodeTransformer):
    """Changes scripts so that their tests are counted. A test is an assert, or one iteration of a loop with asserts."""

    NAME = "__test__"

    def counted(self, body: list[ast.stmt], like: ast.stmt) -> ast.stmt:
        """Put statements into a `with` statement that counts them as one test.

        Args:
            body: the statements.
            like: statement whose position the new one gets.
        """
        return ast.copy_location(ast.With([ast.withitem(ast.Name(self.NAME, ast.Load()))], body), like)

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self.counted([node], node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        if any(isinstance(one, ast.Assert) for one in node.body):
            node.body = [self.counted(node.body, node)]
            return node
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        return node  # asserts within `try` may be meant to fail


def run_checker(control: socket.socket, link: socket.socket) -> None:
    """Read tests, run them with the program's names, and send the verdict to the trainer.

    Args:
        control: socket to the trainer.
        link: socket to the solution.
    """
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
    """Import the names that are modules of the standard library or numpy and are only used as such (`math.isclose`).

    Args:
        nodes: all nodes of the tests' syntax trees.
        names: names that the tests use.

    Returns:
        Name → module.
    """
    dotted = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = names - {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in dotted}
    found = {}
    for name in names & {*sys.stdlib_module_names, "numpy", "np"}:
        with suppress(ImportError):  # the program may define this name
            found[name] = importlib.import_module("numpy" if name == "np" else name)
    return found


def check(tests: list[Test], entry_point: str | None, peer: Peer, before: Callable[[], None]) -> dict[str, Any]:
    """Run tests with the program's names.

    Built-in names are Python's own, not the program's, and so are modules that the tests use without importing them.
    Otherwise the program could forge `all`, `isinstance` or `math.isclose`. Only the entry point may be such a name
    (MBPP has a `sum`).

    Args:
        tests: scripts, or pairs of an input and the expected output.
        entry_point: name of the function that the scripts call.
        peer: the tests' end of the link.
        before: called before the first request to the program.

    Returns:
        A dict of `passed` and `failed` (numbers of tests), `reason` (of the first failure), `unfit` (why the tests
        cannot score a program, or None) and `ended` (how the program's process ended or violated the protocol, or
        None).
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
            before()  # from here on the program may be the cause if this process runs out of time or memory
        if scripts:
            given = peer.ask(PROGRAM, "names", wanted)
            names |= {name: given[name] for name in wanted if name in given}  # only requested names
        for script in scripts:
            counted = total.passed + total.failed
            try:
                exec(script, {**names, CountTests.NAME: total, "__name__": "tests"})
            except SystemExit as error:
                if error.code:
                    total.fail(error)
            except Exception as error:
                total.fail(error)
            if total.passed + total.failed == counted:  # the script has no asserts
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
    except Exception as error:  # the program's own error: it failed before it defined its names
        total.fail(error)
    return {
        "passed": total.passed,
        "failed": total.failed,
        "reason": total.reason,
        "unfit": unfit,
        "ended": peer.ended,
    }


# ------------------------------------------------------------------------------------------ both, on another's server


def run_both() -> None:
    """Score a program that is read from standard input together with its tests, on a server that runs Python programs.

    It prints a line before it runs the program, and a line with the verdict. Both lines begin with the nonce from
    standard input.
    """
    import ctypes  # imported here, because a confined checker does not need it

    prctl = ctypes.CDLL(None).prctl
    prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the child cannot read this process's memory
    control, its_control = socket.socketpair()
    link, its_link = socket.socketpair()
    if os.fork() == 0:  # before the tests are read
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the parent, which the server may end
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
