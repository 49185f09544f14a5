"""The code reward: which program of a completion is run, what crosses between it and its tests, and how they count.

And programs that read standard input: how they are run, and how outputs are compared.
"""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from dash_trl import CodeReward, load_code_dataset
from dash_trl.sandbox import Sandbox, UnfitTests, Verdict, same_output
from tests.attacks import programs
from tests.launching import SHARED, needs_data
from tests.tiny import assistant, refused

RIGHT = "def f(x): return x + 1"
TESTS = ["assert f(1) == 2", "assert f(2) == 3", "assert f(-1) == 0"]


@pytest.fixture(scope="module")
def reward():
    with pickle.loads(pickle.dumps(CodeReward(Sandbox(cpu_seconds=2)))) as reward:
        yield reward


class Own:
    """A sandbox that runs nothing, and keeps what it is given."""

    count = 3

    def __init__(self):
        self.given = []

    def run(self, program, tests, entry_point=None):
        self.given.append((program, list(tests), entry_point))
        return Verdict(1, 1, "why")


def found(completion: str, *columns: object, tests: str | None = "assert f(1)", **more: object) -> str | None:
    """The program of a completion that the reward runs."""
    sandbox = Own()
    CodeReward(sandbox)(completion, tests, *columns, **more)
    return sandbox.given[0][0] if sandbox.given else None


def test_any_object_with_run_is_a_sandbox():
    sandbox = Own()
    reward = CodeReward(sandbox)
    score, notes = reward(fenced(RIGHT), ["assert f(1)"], "f", inputs=["1"], outputs=["2"])
    assert (score, notes) == (0.0, {"passed": 0.5, "explanation": "why"})
    assert sandbox.given == [(RIGHT, ["assert f(1)", ("1", "2")], "f")]
    assert reward.max_concurrency == 3


def fenced(program: str, language: str = "python") -> str:
    return f"```{language}\n{program}\n```"


# ---------------------------------------------------------------------------------------------- which program is run


F = "def f(x):\n    return x"
G = "def g(x):\n    return 0"
USE = "print(f(1))"


OTHER = "def f(x): return 2"
DOCUMENTED = 'def f(x):\n    """As in\n    ```python\n    f(1)\n    ```\n    """\n    return x'
# program → the completions of which it is run, with the entry point f
COMPLETIONS = {
    F: [
        fenced(F),
        fenced(F, ""),
        *(fenced(F, one) for one in ("Python", "python 3", 'python id="f"', "python:f.py", "{.python}")),
        f"Here it is:\n\n{fenced(F)}\n\nIt returns x.",
        f"1. Write it\n   ```python\n{F}\n   ```",
        f"~~~python\n{F}\n~~~",
        f"````python\n{F}\n````",
        # several: the last one that defines the function, not the example of its use
        f"{fenced(G)}\n{fenced(F)}",
        f"{fenced(F)}\nUse it:\n{fenced(USE)}",
        f"{fenced(F)}\n{fenced('pip install f', 'bash')}\n{fenced('1', 'text')}",
        # no fence, or one that does not end
        F,
        f"```python\n{F}",
        # a fence that the prompt opened
        f"{F}\n```",
        f"{F}\n```\n\nIt returns x.",
        f"{F}\n```\nUse it:\n{fenced(USE)}",
        f"from this we get\n{fenced(F, '')}",
        f"from this we get\n{fenced(F)}",
        # a longer end
        f"```python\n{F}\n`````\nIt returns x.",
        # what was only thought
        f"<think>{fenced(G)}</think>{fenced(F)}",
        f"{fenced(G)}</think>{fenced(F)}",
        f"<think>{fenced(G)}</think>\n<answer>\n{F}\n</answer>",
    ],
    # a helper in an earlier block
    f"{G}\n{F} + g(0)": [f"{fenced(G)}\nThen:\n{fenced(F + ' + g(0)')}"],
    "f = print": ["It is\n```f = print```\nand no more.", "```python f = print```"],
    OTHER: [f"{fenced(F)}\n{fenced(OTHER)}", f"{F}\n```\nOr:\n{fenced(OTHER)}"],
    # fences in its docstring
    DOCUMENTED: [fenced(DOCUMENTED), f"{fenced(F)}\n{fenced(DOCUMENTED)}\nIt returns x."],
    # another kind of line ends
    "f = 1": ["```python\r\nf = 1\r\n```\r\nIt is 1."],
    # a helper that the program names as an argument, too
    f"{G}\ng = abs(g)\n{F}": [f"{fenced(G)}\n" + fenced(f"g = abs(g)\n{F}")],
    # defined otherwise
    "f = lambda x: x": [fenced("f = lambda x: x")],
    "class f: pass": [fenced("class f: pass")],
    # another name is a program, too, though a wrong one; and so is what fails
    G: [fenced(G)],
    "def f(x) return x": [fenced("def f(x) return x")],
    None: [
        f"<think>{fenced(F)}</think>I do not know.",
        f"<think>{fenced(F)}",
        "I do not know.",
        "",
        "42",
        fenced("f(x) = x", "haskell"),
        "The function is f(x) = x + 1.",
        "(" * 100_000,
    ],
}


def test_the_program_of_a_completion():
    for program, completions in COMPLETIONS.items():
        for completion in completions:
            text = found(completion, "f")
            assert (text and text.strip()) == program, completion
    for use in (USE, "y = f(1)\nprint(y)"):
        assert found(f"{fenced(F)}\n{fenced(use)}").strip() == F, "without an entry point"


def test_a_program_is_found_in_linear_time():
    """In quadratic time this would take minutes, beyond the CPU time that the suite allows a case."""
    for run in ("`", "~", " ", "\t", "\n", "~~~\n", "```\n", "```python\n", "~ ", "a = \n", "<think>"):
        half = 60_000 // len(run)
        for text in (run * half, f"```python\n{run * half}" + " " * 60_000 + "`"):
            found(text)
            found(text, "f")


# ------------------------------------------------------------------------------------------------- what it is scored


def test_scores(reward):
    assert reward(fenced(RIGHT), TESTS) == (1.0, {"passed": 1.0})
    assert reward(assistant(fenced(RIGHT)), "\n".join(TESTS), entry_point="f")[0] == 1.0
    score, notes = reward(fenced("def f(x): return 2"), TESTS)
    assert (score, notes) == (0.0, {"passed": pytest.approx(1 / 3), "explanation": "AssertionError: "})
    assert reward("I do not know.", TESTS) == (0.0, {"passed": 0.0, "explanation": "no program"})


FAILING = (
    "from solution import f",
    "from math import no_name",
    "x = 1 / 0",
    "open('no file')",
    "import sys\nsys.exit(1)",
)


def test_tests_that_score_no_program_are_an_error(reward):
    for tests, error, reason in [
        *[(empty, ValueError, "this row has no tests") for empty in (None, [], "", [" "], [""])],
        ("assert f(1) ==", UnfitTests, "SyntaxError"),
        ("assert 1 == 1", UnfitTests, "never call the program"),
        ("def check(candidate):\n    assert candidate(1) == 2", UnfitTests, "never call the program"),
        ("class Node: pass\nassert f(Node()) == 1", UnfitTests, "a value of type 'Node'"),
        # they fail by themselves
        *[(f"{one}\nassert f(1) == 2", UnfitTests, "fail before they call") for one in FAILING],
        (["assert f(1) == 2", "import no_package"], UnfitTests, "fail before they call"),
        ("assert f(1) == 2\nfrom no_package import name", UnfitTests, "No module named 'no_package'"),
        # an argument without an end
        ("a = {}\na[1] = (a,)\nassert f(a)", UnfitTests, "RecursionError"),
    ]:
        refused(reason, reward, fenced(RIGHT), tests, error=error)
    # a name that they do not define is not the program's, which could forge it
    refused(
        "do not define 'isclose'",
        reward,
        fenced(f"{RIGHT}\ndef isclose(*a): return True"),
        "assert isclose(f(1), 5)",
        "f",
        error=UnfitTests,
    )
    for inputs, outputs in (("12", "24"), ('["1"]', '["2"]'), (["1"], "2")):
        refused("are not lists", reward, fenced("print(input())"), inputs=inputs, outputs=outputs)


def test_what_counts_as_a_test(reward):
    """Each script is one."""
    for tests, passed, failed in [
        (["assert f(1) == 2\nassert f(1) == 0", "assert f(2) == 3"], 1, 1),
        (["for x in range(5):\n    y = f(x)\n    assert y > 0", "assert f('a') == 2", "assert g(1) == 2"], 1, 2),
        (["def check(f):\n    assert f(1) == 2\ncheck(f)"], 1, 0),
        (["if f(1) != 2: raise AssertionError", "if f(1) == 2: raise AssertionError"], 1, 1),
        (["try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass"], 1, 0),
        (["import sys\nassert f(1) == 2\nsys.exit(1)"], 0, 1),
    ]:
        verdict = reward.sandbox.run(RIGHT, tests)
        assert (verdict.passed, verdict.failed, verdict.right) == (passed, failed, not failed), tests


VALUES = """
None; True; 0; -5; 2**53 + 1; -2**70; 10**5000; 0.1; 1e300; -0.0; float('inf'); 1j; complex(float('inf'), -0.0)
''; 'é\\n\\ud800'; b'\\0\\xff'; bytearray(b'ab'); []; [1, [2.5, None]]; (); (1,); ((1, 2), [3]); set(); {1, 'a'}
frozenset({(1, 2)}); {}; {1: 'a', (1, 2): {3: [4]}}; range(3); range(5, -7, -2); deque([1, 2])
Fraction(-1, 3); Decimal('0.10'); date(2020, 2, 29); time(1, 2); timedelta(1, 2, 3); timezone.utc
datetime(2020, 1, 2, 3, tzinfo=timezone.utc)
"""
IMPORTS = "from collections import *\nfrom datetime import *\nfrom decimal import *\nfrom fractions import *\n"


def test_values_cross_both_ways(reward):
    """As an argument and as a result, of the same type; text that `repr` writes tells -0.0 from 0.0."""
    for value in [one.strip() for line in VALUES.strip().splitlines() for one in line.split(";")]:
        program = (
            f"{IMPORTS}def f(x):\n    want = {value}\n    assert repr(x) == repr(want) and type(x) is type(want)\n"
        )
        program += "    return want"
        tests = f"{IMPORTS}want = {value}\ngot = f(want)\nassert repr(got) == repr(want) and type(got) is type(want)"
        verdict = reward.sandbox.run(program, [tests])
        assert verdict.right, (value, verdict)


EXCHANGED = programs("""
## a generator
def f(x):
    while x:
        yield x
        x -= 1
---
assert list(f(3)) == [3, 2, 1]
## an iterator
def f(x): return map(str, x)
---
assert set(f([1, 2])) == {'1', '2'}
## a match
import re
def f(x): return re.match('a', x)
---
assert f('ab') and not f('b')
assert f('ab').group() == 'a'
## a function
def f(x): return lambda y: x + y
---
assert f(1)(2) == 3
## a named tuple
from collections import namedtuple
P = namedtuple('P', 'a b')
def f(): return P(1, 2)
---
assert f() == (1, 2)
## an IntEnum
import enum
class E(enum.IntEnum):
    A = 3
def f(): return E.A
---
assert f() == 3
## a str's subclass
class S(str): pass
def f(): return [S('a')]
---
assert f() == ['a']
## a loop until the program ends it
class Q:
    def __init__(self): self.items = [1, 2]
    def is_empty(self): return not self.items
    def pop(self): return self.items.pop()
---
q = Q()
found = []
while not q.is_empty():
    found.append(q.pop())
assert found == [2, 1]
## an instance and its attributes
class A:
    def __init__(self, x): self.x = x
    def g(self): return self.x
---
a = A(3)
assert a.g() == 3 and a.x == 3
## arguments that stay as they were
def f(x): x.append(4); x[0][0] = 9
---
x = [[1], 2]
assert f(x) is None and x == [[1], 2]
## a dictionary of its own kind
from collections import Counter, defaultdict
def f(): return defaultdict(list, a=[1]), Counter('ab')
---
assert f() == ({'a': [1]}, {'a': 1, 'b': 1})
## an instance passed back
class A: pass
def f(a): return isinstance(a, A)
---
assert f(A())
## a constant
TABLE = [1, 2]
def f(): return 1
---
assert TABLE[f()] == 2
## an exception
def f(x): raise KeyError(x)
---
try:
    f(1)
except KeyError:
    ok = True
assert ok
## an array
import numpy as np
def f(x): return np.array(x) * 2.5
---
assert (f([1, 2]) == [2.5, 5]).all() and f([[1]]).shape == (1, 1)
## numpy's scalars
import numpy as np
def f(x): return np.float32(x), np.int64(2), np.bool_(True)
---
a, b, c = f(0.5)
assert a == 0.5 and b == 2 and c
## an array of the test's
def f(x): return x.sum()
---
import numpy as np
assert f(np.ones((2, 3))) == 6
## a dataclass
from dataclasses import dataclass
@dataclass
class P:
    a: int
def f(): return P(1)
---
assert f().a == 1
## state between calls
def f(x):
    global n
    n = globals().get('n', 0) + x
    return n
---
assert f(1) == 1 and f(1) == 2
## a thread
import threading
def f():
    t = threading.Thread(target=print)
    t.start(); t.join()
    return 1
---
assert f() == 1
## a file
def f():
    open('a', 'w').write('x')
    return open('a').read()
---
assert f() == 'x'
## iterators of other kinds
from itertools import chain, permutations
def f(x): return reversed(x), chain(x, x), permutations(x), iter('ab'), iter({1: 2}.items())
---
a, b, c, d, e = map(list, f([1, 2]))
assert (a, b, c, d, e) == ([2, 1], [1, 2, 1, 2], [(1, 2), (2, 1)], ['a', 'b'], [(1, 2)])
## an iterator of its own class
class A:
    n = 3
    __iter__ = lambda self: self
    __next__ = lambda self: 1
---
assert A().n == 3
## an empty array of the test's
def f(x): return float(x.sum())
---
import numpy as np
assert f(np.array([])) == 0.0
## a tree that the test builds
class Node:
    def __init__(self, value): self.value, self.left = value, None
def depth(node): return 1 + depth(node.left) if node else 0
---
root = Node(1)
root.left = Node(2)
root.left.left = Node(3)
assert depth(root) == 3 and root.left.left.value == 3
## the same instance
import enum
class E(enum.Enum):
    A = object()
    B = object()
def f(x): return x
---
assert f(E.A) is E.A and f(E.A) == E.A and f(E.A) != E.B
## a class that derives from Python's own and has methods
from collections import OrderedDict
class Cache(OrderedDict):
    def put(self, key, value): self[key] = value
---
a = Cache()
a.put(1, 2)
assert a.get(1) == 2
## a function in a dict
def f(x): return {1: f} if x else 0
---
assert f(1)[1](0) == 0
## keywords of any name
def f(self, one, number, operation): return [self, one, number, operation]
---
assert f(operation=1, number=2, one=3, self=4) == [4, 3, 2, 1]
## a number of another package
import numbers
class Number:
    def __init__(self, value): self.value = value
    def __index__(self): return self.value
numbers.Integral.register(Number)
def f(x): return Number(x)
---
assert f(10**30) == 10**30
## a main block
if __name__ == '__main__':
    input()
def f(): return 1
---
assert f() == 1
""")


def test_what_programs_and_tests_exchange(reward):
    """As above the line, a program; below it, what holds of it."""
    for name, text in EXCHANGED.items():
        program, test = text.split("---\n")
        verdict = reward.sandbox.run(program, [test])
        assert verdict.right, (name, verdict)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(a): a.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
        ("class A: pass\nclass B(A): pass", "assert isinstance(B(), (int, A))"),
        ("class Bad(Exception): pass\ndef f(): raise Bad", "import pytest\nwith pytest.raises(Bad):\n    f()"),
        ("class Bad(Exception): pass\ndef f(): raise Bad", "try:\n    f()\nexcept (KeyError, Bad):\n    pass"),
        ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1"),
        ("def f(): return 1", "assert (f() == 2, 'f() is 2')"),
        ("def f(): return 1", "try:\n    assert f() == 2\nexcept Exception as error:\n    print(error)"),
    ],
)
def test_what_cannot_be_sent_to_tests_is_unscored(program, test, reward):
    refused("at what it returns|coroutine|every program", reward.sandbox.run, program, [test], error=UnfitTests)


def test_a_set_has_the_same_order_in_every_sandbox():
    program = "import random\ndef f(): return str([list({'a', 'b', 'c', 'd', 'e'}), random.random()])\n"
    program += "def g(x): raise ValueError(x)"
    reasons = {Sandbox().run(program, ["assert g(f())"]).reason for _ in range(2)}
    assert len(reasons) == 1 and "ValueError: [[" in reasons.pop()


# ---------------------------------------------------------------------------------------------------------- MBPP+


@needs_data
def test_mbpp_plus_solutions_pass_their_tests_and_fail_the_next_ones(reward):
    """Of a sample; all 378 by benchmarks/code_reward.py."""
    problems = list(load_code_dataset(SHARED / "mbppplus", split="all", solution=True))
    chosen = {i for i, one in enumerate(problems) if one["entry_point"] in ("sum", "freq_count")} | {*range(0, 378, 48)}
    with ThreadPoolExecutor(4) as pool:

        def score(code: int, problem: int) -> float:
            one = problems[problem]
            return reward(f"```python\n{problems[code]['solution']}\n```", one["tests"], one["entry_point"])[0]

        assert all(one == 1.0 for one in pool.map(lambda i: score(i, i), chosen))
        assert all(one == 0.0 for one in pool.map(lambda i: score(i, (i + 1) % 378), chosen))


# ----------------------------------------------------------------------------------- programs that read and print

SUMS = [("1 2\n", "3\n"), ("5 6\n", "11"), ("-1 1", "0\n\n")]
ADD = "print(sum(map(int, input().split())))"


READERS = programs("""
## input
print(sum(map(int, input().split())))
## stdin's bytes
import sys
sys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer.read().split())))
## open
print(sum(map(int, open(0).read().split())))
## file numbers
import os
os.write(1, b'%d' % sum(map(int, os.read(0, 100).split())))
## a main block
def main():
    print(sum(map(int, input().split())))
if __name__ == '__main__':
    main()
## sys.exit
import sys
print(sum(map(int, input().split())))
sys.exit()
## exit
print(sum(map(int, input().split())))
exit(0)
## a thread
import sys, threading
def main():
    print(sum(map(int, sys.stdin.readline().split())))
threading.stack_size(1 << 26)
threading.Thread(target=main).start()
## at the end
import atexit, io, os, sys
file = sys.stdout = io.StringIO()
atexit.register(lambda: os.write(1, file.getvalue().encode()))
print(sum(map(int, input().split())))
## a stdout of its own
import os, sys
class Fast:
    def __init__(self): self.parts = []
    def write(self, text): self.parts.append(text)
    def flush(self): os.write(1, ''.join(self.parts).encode()); self.parts = []
sys.stdout = Fast()
print(sum(map(int, input().split())))
## nothing is left of the run before
import builtins
assert 'seen' not in globals()
seen = True
print(sum(map(int, input().split())))
## an output of its own at the end
import atexit, io, sys
input = iter(sys.stdin.read().splitlines()).__next__
sys.stdout = io.StringIO()
@atexit.register
def write(): sys.__stdout__.write(sys.stdout.getvalue())
print(sum(map(int, input().split())))
## other forms of the same files
import io, sys
sys.stdin = io.TextIOWrapper(sys.stdin.buffer)
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')
print(sum(map(int, input().split())))
## a file that is not closed
out = open(1, 'w', closefd=False)
def write(text): out.write(text)
write(str(sum(map(int, input().split()))))
## the files of devices
with open('/dev/fd/0') as given, open('/dev/stdout', 'w') as out:
    out.write(str(sum(map(int, given.read().split()))))
## arguments and its own path
import os, sys
assert os.path.isdir(os.path.dirname(__file__)) and len(sys.argv) == 1
print(sum(map(int, input().split())))
## large variables
held = bytearray(400 << 20)
def main(): print(sum(map(int, input().split())) + held[0])
main()
## a class
from dataclasses import dataclass
@dataclass
class Pair:
    a: int
    b: int
import pickle
pair = pickle.loads(pickle.dumps(Pair(*map(int, input().split()))))
print(pair.a + pair.b)
""")
MISREADERS = programs("""
## another answer
print(int(input().split()[0]))
## an error behind the answer
print(sum(map(int, input().split())))
1 / 0
## an exit code
import sys
print(sum(map(int, input().split())))
sys.exit(1)
## more input than there is
print(sum(map(int, input().split())))
input()
## no Python
print(sum(map(int, input().split()))
## the outputs of its tests
import os
print(3 if any(os.access(f'/proc/1/{name}', os.R_OK) for name in ('mem', 'environ', 'fd/0')) else 0)
## 100 MB
import os
while True: os.write(1, bytes(1 << 20))
""")


def test_programs_that_read_and_print(reward):
    for name, program in READERS.items():
        verdict = reward.sandbox.run(program, SUMS)
        assert (verdict.passed, verdict.failed) == (3, 0), (name, verdict)


def test_programs_that_print_something_else(reward):
    for name, program in MISREADERS.items():
        verdict = reward.sandbox.run(program, [("1 2\n", "3\n"), ("1 3\n", "4\n")])
        assert (verdict.passed, verdict.failed) == (0, 2) and verdict.reason, (name, verdict)


def test_inputs_and_scripts_are_counted_together(reward):
    program = f"def f(x): return x + 1\nif __name__ == '__main__':\n    {ADD}"
    verdict = reward.sandbox.run(program, ["assert f(1) == 2", ("1 2", "3"), ("1 2", "4")])
    assert (verdict.passed, verdict.failed) == (2, 1)
    assert verdict.reason == "AssertionError: printed '3\\n', expected '4'"


def test_an_endless_program_is_wrong_and_megabytes_of_input_are_read(reward):
    assert reward.sandbox.run("while True: pass", [("1", "1")]).reason.startswith("RuntimeError: exit code -24")
    text = "12345678\n" * 600_000
    assert reward.sandbox.run("import sys\nprint(len(sys.stdin.read()), end='')", [(text, str(len(text)))] * 2).right


def test_what_is_no_text_is_an_error_of_the_tests(reward):
    for tests in ([("1", None)], [(1, "1")]):
        refused("TypeError", reward.sandbox.run, ADD, tests, error=UnfitTests)


# --------------------------------------------------------------------------------------------------------- comparing


SAME = [
    ("1 2\n", "\n1 2"),
    ("1 2  \n3\n\n\n", "1 2\n3"),
    ("1 2\r\n3\r\n", "1 2\n3\n"),
    ("1  2", "1 2"),
    ("", "\n"),
    # numbers with a point: the last digits are free
    ("0.3333333", "0.333333333333"),
    ("1e-9", "0.0"),
    ("1000000.5", "1000000.4"),
    ("2", "2.000"),
    ("x 0.5000000001", "x 0.5"),
    ("-0.0", "0.000000"),
]
DIFFERENT = [
    ("1\n2", "1 2"),
    ("1\n\n2", "1\n2"),
    ("1", "1 1"),
    ("yes", "YES"),
    ("ab", "a b"),
    ("0.3333", "0.333333333333"),
    ("100.5", "100.4"),
    # integers are not
    ("3.0", "3"),
    ("1e18", "1000000000000000001"),
    ("1000000006", "1000000007"),
    ("0101", "101"),
    ("nan", "1.0"),
    ("inf", "1.0"),
    ("x", "1.0"),
]


def test_which_outputs_are_the_same():
    for printed, expected in SAME + DIFFERENT:
        assert same_output(printed, expected) is ((printed, expected) in SAME), (printed, expected)


# ---------------------------------------------------------------------------------------- completions and datasets


def test_the_program_is_the_block_that_reads():
    for completion, program in [
        (f"```python\n{ADD}\n```\nFor 1 2 it prints\n```\n3\n```", ADD),
        (f"```python\ndef f(): pass\n```\nAll of it:\n```python\n{ADD}\n```", ADD),
        (
            "```python\nimport sys\nprint(sys.stdin.read())\n```\nRun it:\n```bash\npython a.py\n```",
            "import sys\nprint(sys.stdin.read())",
        ),
        ("```python\nprint(3)\n```", "print(3)"),
        # a draft, whose names are a method and a variable of the program
        *[
            (
                f"```python\ndef {name}(): pass\nprint(int(input()))\n```\nBetter:\n```python\n{ADD}; {use}\n```",
                f"{ADD}; {use}",
            )
            for name, use in (("pop", "a = [1]; a.pop()"), ("total", "pass\ntotal = 1\nprint(total)"))
        ],
    ]:
        assert found(completion, inputs=["1 2"], outputs=["3"]) == program, completion


def test_the_reward_of_a_program_that_reads(reward):
    def score(program: str, **columns) -> float:
        return reward(fenced(program), **columns)[0]

    columns = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
    assert [score(ADD, **columns), score("print(3)", **columns)] == [1.0, 0.0]
    assert reward(fenced("print(3)"), **columns)[1]["passed"] == 0.5
    assert score(ADD, tests=[], entry_point=None, **columns) == 1.0
    said = r"\['1', '2'\] and outputs \['1'\] are not lists of the same number"
    refused(said, score, ADD, inputs=["1", "2"], outputs=["1"])
