"""Runs a program and its tests inside the sandbox, in two processes that exchange plain values as JSON.

The *solution* is the program's process, the *checker* the tests' process. How a test calls a function of the program::

    checker                                                                                    solution
    assert f([1, 2]) == 3: f is a `Remote` ──► ["ask", 4, "call", ARGUMENTS] ──► object 4 is f: f([1, 2])
    compares 3 == 3                        ◄────── ["value", 3, null]        ◄── returns 3

The program never sees its tests or the expected results, only the arguments of calls. The checker rebuilds a returned
value from JSON if the value has a type of Python's or numpy's own. Any other object (a generator, an instance of the
program's class, a regular-expression match) stays in the solution, and the checker gets a `Remote` for it. A `Remote`
forwards calls, iteration, indexing, attributes, `len`, `bool` and `str` to the solution, but it equals only itself. So
no `__eq__` of the program can decide a test. The program gets a `Remote` for each function of the tests. If a call
changes a container among its arguments, the caller's container is changed, too.

A test may also be a pair (input, expected output). For each pair, the solution runs the program with this standard
input, and the checker compares the program's output with the expected output.

This module imports nothing from this package, because it runs without the package: `confinement.py` imports it as a
plain file, and `remote.py` sends its source to a server.
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
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

Test = str | tuple[str, str]  # a script with asserts, or a pair of standard input and expected output

MAX_MESSAGE = 8 << 20  # limit of one call or value, in bytes
MAX_TEXT = MAX_MESSAGE - 1000  # limit of an input or output, which leaves room for the rest of its message
MAX_JOB = 64 << 20  # limit of all tests of a program, in bytes
LARGEST_JSON_INT = 2**53  # larger integers are sent as hexadecimal text
# Names that a program with a class `Solution` may use without an import, as on LeetCode.
PREDEFINED = ("Any", "Callable", "Dict", "List", "Optional", "Set", "Tuple", "Union")


class CannotCross(BaseException):
    """Raised if the tests pass the program an argument that cannot be sent.

    It derives from `BaseException`, so that `except Exception` in the tests does not catch it.
    """


class SolutionError(Exception):
    """Raised in the tests in place of an exception of the program that they cannot be given (see `Peer.ask`).

    Also raised if the program's process has ended or violates the protocol.
    """


# ---------------------------------------------------------------------------------------------------------- messages


def send(to: socket.socket, message: bytes) -> None:
    """Send the length of a message, and then the message.

    Args:
        to: the socket.
        message: the message.
    """
    to.sendall(len(message).to_bytes(4, "big") + message)


def receive(source: socket.socket, most: int = MAX_MESSAGE) -> bytes | None:
    """Receive the next message.

    Args:
        source: the socket.
        most: largest allowed length of the message, in bytes.

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
    """Receive exactly `count` bytes; None if the other side has closed the socket."""
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(min(count - len(parts), 1 << 16))
        if not part:
            return None
        parts += part
    return bytes(parts)


# ------------------------------------------------------------------------------------------------------------- values

# The type names below are also the tags by which the JSON data names the type of a value.
SEQUENCES: dict[str, type] = {one.__name__: one for one in (list, tuple, set, frozenset, collections.deque)}
MAPPINGS: dict[str, type] = {one.__name__: one for one in (dict, collections.OrderedDict, collections.Counter)}
# An instance of a class that derives from one of these types is sent as a value of the first type that fits.
BASES = (*SEQUENCES.values(), bytearray, bytes, *MAPPINGS.values(), int, float, complex, str)
# tag → type, function that converts a value to JSON data, function that converts the JSON data back
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
    """Converts values to JSON data and back. An object without a JSON form is kept in `own`, and its number is sent.

    Args:
        there: function that creates the `Remote` for an object of the other side from the object's number.
        is_kept: function that returns whether an object may be kept and sent as a number.

    Attributes:
        own: number → object of this side, to which the other side refers by this number.
        numbers: `id` of an object in `own` → its number.
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
            SolutionError: raised instead of `CannotCross` if the other side, the program, has sent the value's type.
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
            # If the program has returned the type (such as `object`), and the tests have made an instance of it, the
            # program is wrong, and not the tests.
            wrong = SolutionError if kind in self.types else CannotCross
            raise wrong(f"an argument of type {kind.__name__!r}, which is no plain value and no function")
        return ["mine", self.keep(value)]

    def _encode_array(self, value: Any) -> Any:
        """Convert a numpy scalar or array to JSON data; return None for any other object of numpy's."""
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.generic) and value.dtype.kind in PLAIN_ARRAYS:
            return ["scalar", [value.dtype.str, self.encode(value.item())]]
        if type(value) is numpy.ndarray and value.dtype.kind in PLAIN_ARRAYS:
            return ["array", [value.dtype.str, list(value.shape), self.encode(value.ravel().tolist())]]
        return None

    def keep(self, value: Any) -> int:
        """Keep an object in `own`, so that the other side can refer to it, and return its number.

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
    """Convert an instance of a subclass to the built-in type `base`, by methods of `base`."""
    if base in (int, float, complex):
        return base.__pos__(value)  # type: ignore[attr-defined]
    if base in MAPPINGS.values():
        return base(dict.items(value)) if base is not collections.Counter else collections.Counter(dict(value))
    return base(base.__iter__(value))  # type: ignore[attr-defined, call-arg]


def update(old: Any, new: Any) -> None:
    """Change a container in place, after a call has changed its copy on the other side.

    If an inner container still has the same type, it is changed in place, too, because the caller may hold it.

    Args:
        old: the container on this side.
        new: the changed copy. If it has another type than `old`, nothing is changed.
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
    """If both values are mutable containers of the same type, update `old` and return it; otherwise return `new`."""
    if type(old) is type(new) and isinstance(old, (list, dict, set, bytearray, collections.deque)):
        update(old, new)
        return old
    return new


# ----------------------------------------------------------------------------------------------------- the two ends


class Peer:
    """One end of the link between the two processes.

    It sends requests to the other end. While it waits for a result, it answers requests of the other end: the program
    may call a function that a test has passed to it.

    Args:
        link: socket to the other end.
        trusted: whether this is the tests' end. The program may call functions of the tests, but may not read their
            attributes. Otherwise it could find the expected results by `__globals__` of a function or `gi_frame` of a
            generator.

    Attributes:
        codec: converts arguments and results.
        operations: operations that the other end may request.
        catch: exceptions of an operation that are sent to the other end as the answer.
        calls: number of calls that this end has requested.
        ended: description of how the other process ended or violated the protocol; None if it did neither.
    """

    def __init__(self, link: socket.socket, *, trusted: bool):
        self.link = link
        self.codec = Codec(lambda number: Remote(self, number), is_kept=is_harmless if trusted else lambda value: True)
        self.operations = {name: OPERATIONS[name] for name in (HARMLESS if trusted else OPERATIONS)}
        # The tests' end also catches `CannotCross`. If the program calls a function of the tests, the result may depend
        # on the program's argument (such as `object`). If that result cannot be sent, the tests are not unfit.
        self.catch = (Exception, CannotCross) if trusted else BaseException
        self.calls = 0
        self.ended: str | None = None

    def ask(self, number: int, operation: str, /, *arguments: Any, **named: Any) -> Any:
        """Request that the other side applies an operation to one of its objects, and wait for the result.

        Args:
            number: number of the object on the other side.
            operation: a key of `OPERATIONS`.
            arguments: positional arguments of the operation.
            named: keyword arguments of the operation.

        Returns:
            Result of the operation.

        Raises:
            Exception: the exception that the operation raised. If its class is not built in, the nearest built-in base
                class is raised, with the same message.
            SolutionError: in place of an exception that is no `Exception` (such as SystemExit), that cannot be created
                from its message, or that is StopIteration but not from `next`. Also if the other process has ended or
                violates the protocol.
            CannotCross: if an argument cannot be sent.
        """
        if self.ended:
            raise SolutionError(self.ended)
        self.calls += operation == "call"
        parts = [list(arguments), named]
        request = json.dumps(["ask", number, operation, [self.codec.encode(part) for part in parts]])
        if len(request) > MAX_MESSAGE:
            # If the tests have called the program before, the argument may be a value that the program returned. Then
            # the program is at fault, and the tests are not unfit.
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
        # Only `next` may raise StopIteration. If a call raised it, `all(map(f, inputs))` would end early and be true.
        is_end = known is StopIteration and operation != "next"
        if isinstance(known, type) and issubclass(known, Exception) and not is_end:
            with suppress(TypeError):  # UnicodeDecodeError needs five arguments
                raised = known(message)
        raise raised

    def answer(self, number: int, operation: str, parts: list[Any]) -> None:
        """Apply an operation to an object of this side, and send the result or the error to the other side.

        Args:
            number: number of the object in `codec.own`.
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
            # If the program defines `class E(ValueError)`, send "ValueError", which the tests can catch.
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
    """Stands for an object of the other side: each use is sent there as a request.

    It equals only itself, so that no `__eq__` of a program decides a test.

    Args:
        peer: this side's end of the link.
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
        return self._peer_.ask(self._number_, "iterate")  # returns a `Remote` for the `Lasting`

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
    """Return whether the tests may pass an object to the program as a `Remote`.

    Only callables and iterators may be passed: the program can use them without reading their attributes.

    Args:
        value: the object.
    """
    return callable(value) or hasattr(type(value), "__next__")


class Lasting(Iterator[Any]):
    """Wraps an iterator, so that `Codec.encode` always keeps it and sends its number.

    Without the wrapper, an iterator of a class that derives from `list` would be sent as a list.

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
PROGRAM, PRINTED = 0, 1  # numbers of the solution's functions `names` and `printed`, see `run_solution`


# ---------------------------------------------------------------------------------------------------------- solution


def run_solution(control: socket.socket, link: socket.socket) -> None:
    """Run the solution: read a program, and answer the checker's requests, which run it.

    Args:
        control: socket to the trainer, which sends the program.
        link: socket to the checker.
    """
    job = json.loads(receive(control) or b"{}")
    program = job["program"]  # KeyError if the trainer has closed the socket: no result is needed any more
    control.close()
    # Makes random choices the same in each run. PYTHONHASHSEED in box.py does the same for the order of sets.
    random.seed(0)
    module = types.ModuleType("solution")  # dataclasses and pickle look up the module of a class
    sys.modules["solution"] = module
    if "class Solution" in program:
        module.__dict__.update({name: getattr(typing, name) for name in PREDEFINED})
    peer = Peer(link, trusted=False)

    def load() -> BaseException | None:
        try:
            exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            return error
        return None

    loaded = [load()] if job.get("ahead") else []  # the program already runs while the checker reads the tests

    def names(wanted: list[str]) -> dict[str, Any]:
        error = loaded.pop() if loaded else load()
        if error is not None:
            raise error
        return {name: called_here(module.__dict__[name]) for name in wanted if name in module.__dict__}

    peer.codec.keep(names)
    peer.codec.keep(functools.partial(printed, program))
    peer.answer_all()


def called_here(value: Any) -> Any:
    """Wrap a built-in type that the program uses as a function (`f = list`), so that calls of it run in the solution.

    Without the wrapper, the type would be sent by name, and the tests would call their own `list`, not the program.

    Args:
        value: a value of the program. It is returned unchanged if it is no built-in type, or a built-in exception.
    """
    is_own = isinstance(value, type) and value.__module__ == "builtins" and not issubclass(value, BaseException)
    return functools.partial(value) if is_own else value


def printed(program: str, given: str) -> str:
    """Run the program as a script, and return its standard output.

    Standard input and output are real files, so that `open(0)`, `sys.stdin.buffer` and `os.write(1, …)` work, too.

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
        finally:  # the program may have closed 0 or 1, and the next run's temporary files would get these numbers
            os.dup2(source.fileno(), 0)
            os.dup2(sink.fileno(), 1)
        for thread in threading.enumerate():  # as Python does at its exit; some programs do all their work in a thread
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for file in (sys.stdout, output):  # the program may have replaced `sys.stdout`, or closed a file
            with suppress(Exception):
                file.flush()
        module.__dict__.clear()
        gc.collect()  # flushes files that the program has not closed, and frees memory for the next run
        sink.seek(0)
        return sink.read(MAX_MESSAGE).decode("utf-8", "replace")


# ----------------------------------------------------------------------------------------------------------- checker


_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
TOLERANCE = 1e-6  # absolute or relative, used if the expected number has a decimal point or an exponent


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
    """Replace numpy's comparison functions, so that values of different shapes are never equal.

    numpy's own functions broadcast the values, and an empty array is close to any number. So a program that returns
    `[]` would pass. After the change, `allclose` and `isclose` return False for different shapes, and the asserts of
    `numpy.testing` fail. One case is still allowed: a nonempty array as the first value, a number as the second.

    Args:
        numpy: the module numpy, whose functions are replaced.
        tests: the tests. Functions of `numpy.testing` are replaced only if the tests contain the word "testing".
    """
    compared = [(numpy, "allclose"), (numpy, "isclose")]
    if "testing" in str(tests):  # importing numpy.testing is slow
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
    """Context manager that counts the test in its body as passed or failed, and suppresses its `Exception`.

    If the program's process has ended, the test counts as failed even if its body raised nothing: the test may have
    caught the `SolutionError` because it expects some error of the program.

    Args:
        peer: the tests' end of the link.

    Attributes:
        passed: number of tests that passed.
        failed: number of tests that failed.
        reason: error of the first failure; None if no test failed.
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
        """Count a failed test.

        Args:
            error: the test's exception.
        """
        self.failed += 1
        self.reason = self.reason or f"{type(error).__name__}: {_text(error)}"[:500]


class CountTests(ast.NodeTransformer):
    """Puts each test of a script into a `with` statement of `Count`.

    A test is an assert, or one iteration of a `for` loop that has asserts in its body.
    """

    NAME = "__test__"

    def counted(self, body: list[ast.stmt], like: ast.stmt) -> ast.stmt:
        """Put statements into a `with` statement that counts them as one test.

        Args:
            body: the statements.
            like: the new statement gets the line and column of this statement.
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
    """Run the checker: read tests, run them on the program, and send the verdict to the trainer.

    Args:
        control: socket to the trainer, which sends the tests.
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
    """Import modules that the tests use, in case the tests do not import these modules themselves.

    A name counts as a module if it is `numpy`, `np` or a module of the standard library, and the tests use it only with
    a dot (`math.isclose`).

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
        with suppress(ImportError):  # this machine lacks the module; the program may define the name
            found[name] = importlib.import_module("numpy" if name == "np" else name)
    return found


def check(tests: list[Test], entry_point: str | None, peer: Peer, before: Callable[[], None]) -> dict[str, Any]:
    """Run tests on the program, and return the verdict.

    Scripts use the functions and classes that the program defines. But if the program defines the name of a built-in
    function or of a module (see `modules`), the scripts get Python's own. Otherwise the program could forge `all`,
    `isinstance` or `math.isclose`. Only the entry point may have such a name (a task of MBPP is to write `sum`).

    Args:
        tests: scripts, or pairs of an input and the expected output.
        entry_point: name of the function that the scripts call; None if it is not known.
        peer: the tests' end of the link.
        before: function that is called before the first request to the program. If this process ends without a verdict
            before this call, the program cannot be the cause.

    Returns:
        A dict with `passed` and `failed` (numbers of tests), `reason` (error of the first failure, or None), `unfit`
        (why the tests cannot score any program, or None) and `ended` (see `Peer.ended`).
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
            before()  # if this process runs out of time or memory after this line, the program may be the cause
        if scripts:
            given = peer.ask(PROGRAM, "names", wanted)
            names |= {name: given[name] for name in wanted if name in given}  # the program may send other names, too
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
    except Exception as error:  # the program raised an error before it had defined its functions
        total.fail(error)
    return {
        "passed": total.passed,
        "failed": total.failed,
        "reason": total.reason,
        "unfit": unfit,
        "ended": peer.ended,
    }


# ----------------------------------------------------------------------------------------- both, on a remote server


def run_both() -> None:
    """Run checker and solution on a server that runs Python programs, such as SandboxFusion (see `remote.py`).

    It reads a program, its tests and a nonce from standard input. It prints one line before it runs the program, and
    one line with the verdict. Both lines begin with the nonce, which the program does not know.
    """
    import ctypes  # imported here, because a confined checker does not need it

    prctl = ctypes.CDLL(None).prctl
    prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the child cannot read this process's memory
    control, its_control = socket.socketpair()
    link, its_link = socket.socketpair()
    if os.fork() == 0:  # before the tests are read, so that the child's memory does not contain them
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: if the server kills the parent, the child ends, too
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
