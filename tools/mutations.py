"""Mutation testing: changes single lines of the package and checks whether a test fails.

    pip install coverage
    python tools/mutations.py record               # once: which test runs which line (the suite with coverage contexts)
    python tools/mutations.py draw --number 60     # draws mutations with a fixed seed into tools/mutations.json
    python tools/mutations.py run                  # runs, for each mutation, the tests that cover its line

A mutation is *killed* if one of its tests fails or runs out of time, and *survives* otherwise. If no recorded test
covers the line, for example because a process ended without saving its coverage, the tests that cover the file are run
instead, or else those that cover its folder.

`tools/mutations.json` contains the drawn lines as text, so that a mutation still applies after its line moved. If a
line was rewritten, edit its entry to the new line. An entry is not run if it has one of two fields: `equivalent`, the
reason why no test can distinguish the mutation from the original, or `gone`, the reason why the line has no successor.
`run` changes files of the checkout in which it is called, and restores them: call it in a separate clone.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DRAWN = ROOT / "tools" / "mutations.json"
RECORD = ROOT / ".mutations"  # coverage data and the tests' times
SWAPPED = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"},
}
UNTOUCHED = ("annotation", "returns", "decorator_list", "type_params")


# --- drawing ----------------------------------------------------------------------------------------------------------


def mutations_of(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields all mutations of a module as (line number from 1, line, mutated line).

    Annotations, strings and imports are not mutated.
    """
    lines, tree = source.splitlines(), ast.parse(source)

    def text(node: Any) -> str:
        """Returns the source of a node that lies on one line."""
        return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()

    def inside(node: ast.AST) -> Iterator[Any]:
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in UNTOUCHED:
                    yield from inside(child)
        yield node

    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While)]
    rest = [node for node in inside(tree) if isinstance(node, ast.expr | ast.stmt) and node.lineno == node.end_lineno]
    found = [(test, f"not ({text(test)})") for test in tests if test.lineno == test.end_lineno]
    found += [(node, mutated) for node in rest for mutated in in_place_of(node, text)]
    for node, mutated in found:
        line = lines[node.lineno - 1].encode()
        after = line[: node.col_offset] + mutated.encode() + line[node.end_col_offset :]
        yield node.lineno, line.decode(), after.decode()


def in_place_of(node: ast.expr | ast.stmt, text: Callable[[ast.AST], str]) -> Iterator[str]:
    """Yields the replacements of a node; `text` returns the source of a node."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Raise() | ast.Delete():
            yield "pass"
        case ast.Return(value=ast.expr()) if text(node) != "return None":
            yield "return None"
        case (
            ast.Compare(left=left, ops=[operator], comparators=[right]) | ast.BinOp(left=left, op=operator, right=right)
        ) if type(operator) in SWAPPED:
            yield f"({text(left)} {SWAPPED[type(operator)]} {text(right)})"
        case ast.BoolOp(op=operator, values=values):
            yield f"(not ({text(node)}))"
            yield f"({(' or ' if isinstance(operator, ast.And) else ' and ').join(map(text, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield text(operand)
        case ast.IfExp(body=body, orelse=otherwise):
            yield from (text(body), text(otherwise))
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.Call(keywords=keywords):
            for argument in (f", {text(keyword)}" for keyword in keywords if keyword.arg):
                if argument in text(node):
                    yield text(node).replace(argument, "", 1)


def draw(number: int, seed: int) -> None:
    """Draws lines uniformly over the package, then one mutation of each."""
    by_line: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "dash_trl").rglob("*.py")):
        for line, before, after in mutations_of(path.read_text()):
            by_line.setdefault((str(path.relative_to(ROOT)), line), []).append((before, after))
    rng = random.Random(seed)
    drawn = []
    for name, line in rng.sample(sorted(by_line), 2 * number):
        before, after = rng.choice(by_line[name, line])
        lines = (ROOT / name).read_text().splitlines()
        lines[line - 1] = after
        try:
            ast.parse("\n".join(lines))
        except SyntaxError:
            continue
        if before != after:
            drawn.append({"path": name, "line": line, "before": before, "after": after})
    DRAWN.write_text(json.dumps(drawn[:number], indent=1) + "\n")


# --- recording: which test runs which line ----------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hook for `pytest -p tools.mutations`: starts a coverage context for each test."""
    import coverage

    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(item.nodeid)
    yield


def record(extra: list[str]) -> None:
    """Runs the suite once, with coverage in all processes. Lines in a process that a test starts count for that test.

    Only the files of drawn mutations are traced, so the tests take about as long as without coverage.
    """
    shutil.rmtree(RECORD, ignore_errors=True)
    data = RECORD / "data"
    data.mkdir(parents=True)
    files = sorted({str(ROOT / mutation["path"]) for mutation in json.loads(DRAWN.read_text())})
    settings = RECORD / "coveragerc"
    settings.write_text(
        f"[run]\ninclude = {','.join(files)}\nparallel = true\ndata_file = {data}/coverage\n"
        "context = ${PYTEST_CURRENT_TEST}\ndisable_warnings = no-data-collected, module-not-imported\n"
    )
    Path(RECORD, "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
    environment = os.environ | {
        "COVERAGE_PROCESS_START": str(settings),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(RECORD), str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    tests = ["pytest", "-p", "tools.mutations", f"--junitxml={RECORD}/times.xml", *extra]
    subprocess.run([sys.executable, "-m", *tests], cwd=ROOT, env=environment, check=False)
    combine = ["coverage", "combine", f"--data-file={RECORD}/coverage", str(data)]
    subprocess.run([sys.executable, "-m", *combine], cwd=ROOT, check=True)


# --- running ----------------------------------------------------------------------------------------------------------


def covering(data: Any, mutation: dict[str, Any], line: int) -> list[str]:
    """Returns the ids of the tests that run a line; if there are none, those that run its file, or else its folder."""

    def tests(path: str, line: int | None = None) -> set[str]:
        files = [data.contexts_by_lineno(file) for file in data.measured_files() if f"/{path}" in file]
        found = [names for lines in files for at, names in lines.items() if line in (None, at)]
        names = {name for contexts in found for name in contexts} - {""}
        return {re.sub(r" \((setup|call|teardown)\)$", "", name) for name in names}  # without pytest's phase

    path = mutation["path"]
    return sorted(tests(path, line) or tests(path) or tests(path.rpartition("/")[0] + "/"))


def outcome(mutation: dict[str, Any], data: Any, seconds: dict[str, float], limit: float) -> str:
    path = ROOT / mutation["path"]
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.rstrip("\n") == mutation["before"]]
    if not places:
        return "line not found: edit its entry"
    place = min(places, key=lambda i: abs(i + 1 - mutation["line"]))
    tests = sorted(covering(data, mutation, place + 1), key=lambda name: seconds.get(name, 0.0))
    if not tests:
        return "survived (no test covers the file)"
    lines[place] = mutation["after"] + "\n"
    names = RECORD / "tests.txt"
    names.write_text("\n".join(tests))
    limit += 3 * sum(seconds.get(name, 0.0) for name in tests)
    command = ["timeout", "--signal=KILL", f"{limit}", sys.executable, "-m", "pytest", "-x", "-q", "--no-header"]
    began = time.monotonic()
    try:
        path.write_text("".join(lines))
        done = subprocess.run([*command, "--tb=line", f"@{names}"], cwd=ROOT, capture_output=True, text=True)
    finally:
        path.write_text(original)
    took = time.monotonic() - began
    if took >= limit:
        return f"killed (out of time, {len(tests)} tests)"
    if done.returncode == 0:
        return f"SURVIVED {len(tests)} tests in {took:.0f} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # Exit code 4: pytest does not find a recorded test. With "found no collectors", a test's file cannot be imported,
    # so the mutation is killed.
    if done.returncode == 4 and "found no collectors" not in done.stderr:
        return f"not run: {done.stderr.strip().splitlines()[-1]}"
    return f"killed in {took:.0f} s: {failed[0][:150] if failed else f'exit {done.returncode}'}"


def run(only: list[int], limit: float) -> None:
    import coverage

    data = coverage.CoverageData(str(RECORD / "coverage"))
    data.read()
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(RECORD / "times.xml").iter("testcase"):
        module = str(case.get("classname")).replace(".", "/") + ".py"
        seconds[f"{module}::{case.get('name')}"] = float(case.get("time", 0.0))
    drawn = dict(enumerate(json.loads(DRAWN.read_text())))
    for number in only or drawn:
        mutation = drawn[number]
        reason = mutation.get("equivalent") or mutation.get("gone")
        result = f"not run: {reason}" if reason else outcome(mutation, data, seconds, limit)
        print(f"{number:2d} {mutation['path']}:{mutation['line']}\n   - {mutation['before'].strip()}")
        print(f"   + {mutation['after'].strip()}\n   {result}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=("record", "draw", "run"), help="arguments after `record` go to pytest")
    parser.add_argument("--number", type=int, default=60, help="draw: number of mutations")
    parser.add_argument("--seed", type=int, default=23, help="draw: seed")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="run: numbers of mutations; all by default")
    parser.add_argument(
        "--limit", type=float, default=180.0, help="run: seconds, added to three times the recorded time of the tests"
    )
    args, rest = parser.parse_known_args()
    if rest and args.command != "record":
        parser.error(f"unknown arguments: {rest}")
    if args.command == "record":
        record(rest)
    elif args.command == "draw":
        draw(args.number, args.seed)
    else:
        run(args.only, args.limit)


if __name__ == "__main__":
    main()
