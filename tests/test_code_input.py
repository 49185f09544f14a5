"""Programs that read standard input: how they are run, and how outputs are compared."""

import pytest

from dash_trl import CodeReward
from dash_trl.sandbox import Sandbox, UnfitTests, same_output
from tests.attacks import programs
from tests.test_code_reward import found
from tests.tiny import refusal

SUMS = [("1 2\n", "3\n"), ("5 6\n", "11"), ("-1 1", "0\n\n")]
ADD = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def box():
    return Sandbox(cpu_seconds=2)


# ----------------------------------------------------------------------------------------------------------- running

RIGHT = programs("""
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
WRONG = programs("""
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


def test_programs_that_read_and_print(box):
    for name, program in RIGHT.items():
        verdict = box.run(program, SUMS)
        assert (verdict.passed, verdict.failed) == (3, 0), (name, verdict)


def test_programs_that_print_something_else(box):
    for name, program in WRONG.items():
        verdict = box.run(program, [("1 2\n", "3\n"), ("1 3\n", "4\n")])
        assert (verdict.passed, verdict.failed) == (0, 2) and verdict.reason, (name, verdict)


def test_inputs_and_scripts_are_counted_together(box):
    program = f"def f(x): return x + 1\nif __name__ == '__main__':\n    {ADD}"
    verdict = box.run(program, ["assert f(1) == 2", ("1 2", "3"), ("1 2", "4")])
    assert (verdict.passed, verdict.failed) == (2, 1)
    assert verdict.reason == "AssertionError: printed '3\\n', expected '4'"


def test_an_endless_program_is_wrong_and_megabytes_of_input_are_read():
    box = Sandbox(cpu_seconds=1)
    assert box.run("while True: pass", [("1", "1")]).reason.startswith("RuntimeError: exit code -24")
    text = "12345678\n" * 600_000
    assert box.run("import sys\nprint(len(sys.stdin.read()), end='')", [(text, str(len(text)))] * 2).right


def test_what_is_no_text_is_an_error_of_the_tests(box):
    for tests in ([("1", None)], [(1, "1")]):
        with pytest.raises(UnfitTests, match="TypeError"):
            box.run(ADD, tests)


# --------------------------------------------------------------------------------------------------------- comparing


SAME = [
    ("1 2\n", "1 2"),
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
OTHER = [
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
    for printed, expected in SAME + OTHER:
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


def test_the_reward_of_a_program_that_reads():
    with CodeReward() as reward:

        def score(program: str, **columns) -> float:
            return reward(f"```python\n{program}\n```", **columns)[0]

        columns = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
        assert [score(ADD, **columns), score("print(3)", **columns)] == [1.0, 0.0]
        assert reward(f"```python\n{'print(3)'}\n```", **columns)[1]["passed"] == 0.5
        assert score(ADD, tests=[], entry_point=None, **columns) == 1.0
        assert "['1', '2'] and outputs ['1'] are not lists of the same number" in refusal(
            score, ADD, inputs=["1", "2"], outputs=["1"]
        )
