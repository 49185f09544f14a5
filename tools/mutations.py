"""Mutation test: changes single lines of the package and looks whether a test notices.

    pip install coverage
    python tools/mutations.py record               # once: which test runs which line (the suite with coverage contexts)
    python tools/mutations.py draw --number 60     # draws mutations with a fixed seed into tools/mutations.json
    python tools/mutations.py run                  # runs, for each mutation, the tests that cover its line

A mutation is *killed* when one of its tests fails or runs out of time, and *survives* otherwise. If no recorded test
covers the line (it runs in a process that ended without saving), all tests that cover its file run.

`tools/mutations.json` holds the drawn lines as text, so that a mutation still applies after its line moved. If a line
was rewritten, edit its entry to the line that took its place. An entry with `equivalent` gives the reason why no test
can tell the mutation from the original, and one with `gone` the reason why it has no successor; neither is run.
`run` mutates the checkout it is called in and restores it: call it in a clone of its own.
"""

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Delete)


# --- drawing ----------------------------------------------------------------------------------------------------------


def mutations_of(source: str) -> Iterator[tuple[int, str, str]]:
    """All (line number from 1, line, mutated line) of a module; annotations, strings and imports stay as they are."""
    lines = source.splitlines()

    def replaced(node: ast.expr | ast.stmt, text: str) -> tuple[int, str, str]:
        line = lines[node.lineno - 1].encode()
        mutated = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
        return node.lineno, line.decode(), mutated.decode()

    def visit(node: ast.AST) -> Iterator[tuple[int, str, str]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)
        if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
            return
        code = ast.get_source_segment(source, node) or ""
        if isinstance(node, SIMPLE) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield replaced(node, "pass")
        elif isinstance(node, ast.Return) and node.value is not None and code != "return None":
            yield replaced(node, "return None")
        elif isinstance(node, ast.Compare | ast.BinOp):
            left, right = (node.left, node.comparators[0]) if isinstance(node, ast.Compare) else (node.left, node.right)
            operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
            if type(operator) in SWAPPED and not (isinstance(node, ast.Compare) and len(node.ops) > 1):
                sides = [ast.get_source_segment(source, side) for side in (left, right)]
                yield replaced(node, f"({sides[0]} {SWAPPED[type(operator)]} {sides[1]})")
        elif isinstance(node, ast.BoolOp):
            yield replaced(node, f"(not ({code}))")
            values = [ast.get_source_segment(source, value) for value in node.values]
            yield replaced(node, f"({(' or ' if isinstance(node.op, ast.And) else ' and ').join(map(str, values))})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield replaced(node, ast.get_source_segment(source, node.operand) or "")
        elif isinstance(node, ast.IfExp):
            yield replaced(node, ast.get_source_segment(source, node.body) or "")
            yield replaced(node, ast.get_source_segment(source, node.orelse) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            yield replaced(node, str(not node.value) if isinstance(node.value, bool) else repr(node.value + 1))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                text = ast.get_source_segment(source, keyword)
                if keyword.arg and text and f", {text}" in code:
                    yield replaced(node, code.replace(f", {text}", "", 1))

    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.If | ast.While) and statement.test.lineno == statement.test.end_lineno:
            yield replaced(statement.test, f"not ({ast.get_source_segment(source, statement.test)})")
    yield from visit(ast.parse(source))


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def draw(number: int, seed: int) -> None:
    """Draws lines uniformly over the package, then one mutation of each."""
    by_line: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "dash_trl").rglob("*.py")):
        source = path.read_text()
        for line, before, after in mutations_of(source):
            by_line.setdefault((str(path.relative_to(ROOT)), line), []).append((before, after))
    rng = random.Random(seed)
    drawn = []
    for place in rng.sample(sorted(by_line), 2 * number):
        path, line = place
        before, after = rng.choice(by_line[place])
        lines = (ROOT / path).read_text().splitlines()
        if before != after and parses("\n".join([*lines[: line - 1], after, *lines[line:]])):
            drawn.append({"path": path, "line": line, "before": before, "after": after})
    DRAWN.write_text(json.dumps(drawn[:number], indent=1) + "\n")


# --- recording: which test runs which line ----------------------------------------------------------------------------


class Contexts:
    """pytest plugin: a coverage context for each test."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import coverage

        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(item.nodeid)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """For `-p tools.mutations`."""
    config.pluginmanager.register(Contexts())


def record(extra: list[str]) -> None:
    """The suite once, every process of it under coverage. A process that a test starts counts for that test.

    Only the files of drawn mutations are traced, so that the tests take about as long as otherwise.
    """
    RECORD.mkdir(exist_ok=True)
    files = sorted({str(ROOT / mutation["path"]) for mutation in json.loads(DRAWN.read_text())})
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "coveragerc")
        settings.write_text(
            f"[run]\ninclude = {','.join(files)}\nparallel = true\ndata_file = {folder}/data/coverage\n"
            "context = ${PYTEST_CURRENT_TEST}\ndisable_warnings = no-data-collected, module-not-imported\n"
        )
        Path(folder, "data").mkdir()
        Path(folder, "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        environment = os.environ | {
            "COVERAGE_PROCESS_START": str(settings),
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, str(ROOT), os.environ.get("PYTHONPATH", "")])),
        }
        command = [sys.executable, "-m", "pytest", "-p", "tools.mutations", f"--junitxml={RECORD}/times.xml", *extra]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        combine = [sys.executable, "-m", "coverage", "combine", f"--data-file={RECORD}/coverage", f"{folder}/data"]
        subprocess.run(combine, cwd=ROOT, check=True)


# --- running ----------------------------------------------------------------------------------------------------------


def node_id(context: str) -> str:
    """The test's name, without pytest's phase."""
    return re.sub(r" \((setup|call|teardown)\)$", "", context)


def covering(data: Any, mutation: dict[str, Any], line: int) -> list[str]:
    """Node ids of the tests that run `line` of the file, or any of its lines."""
    measured = next((path for path in data.measured_files() if path.endswith("/" + mutation["path"])), None)
    contexts = data.contexts_by_lineno(measured) if measured else {}

    def tests(found: list[str]) -> set[str]:
        return {node_id(name) for context in found for name in context.split("|")} - {""}

    return sorted(tests(contexts.get(line, [])) or tests([name for names in contexts.values() for name in names]))


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
    began = time.monotonic()
    try:
        path.write_text("".join(lines))
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
            names.write("\n".join(tests))
            names.flush()
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", f"@{names.name}"]
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            try:
                output, _ = process.communicate(timeout=limit + 3 * sum(seconds.get(name, 0.0) for name in tests))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"killed (out of time, {len(tests)} tests)"
    finally:
        path.write_text(original)
    took = time.monotonic() - began
    if process.returncode == 0:
        return f"SURVIVED {len(tests)} tests in {took:.0f} s"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"killed in {took:.0f} s: {failed[0][:150] if failed else f'exit {process.returncode}'}"


def run(only: list[int], limit: float) -> None:
    import xml.etree.ElementTree as ElementTree

    import coverage

    data = coverage.CoverageData(str(RECORD / "coverage"))
    data.read()
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(RECORD / "times.xml").iter("testcase"):
        module = str(case.get("classname")).replace(".", "/") + ".py"
        seconds[node_id(f"{module}::{case.get('name')}")] = float(case.get("time", 0.0))
    for number, mutation in enumerate(json.loads(DRAWN.read_text())):
        if only and number not in only:
            continue
        reason = mutation.get("equivalent") or mutation.get("gone")
        result = f"not run: {reason}" if reason else outcome(mutation, data, seconds, limit)
        print(f"{number:2d} {mutation['path']}:{mutation['line']}\n   - {mutation['before'].strip()}")
        print(f"   + {mutation['after'].strip()}\n   {result}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record", help="anything behind it goes to pytest")
    drawing = commands.add_parser("draw")
    drawing.add_argument("--number", type=int, default=60)
    drawing.add_argument("--seed", type=int, default=23)
    running = commands.add_parser("run")
    running.add_argument("--only", type=int, nargs="*", default=[], help="numbers of mutations; all by default")
    running.add_argument("--limit", type=float, default=180.0, help="seconds beyond three times what the tests took")
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
