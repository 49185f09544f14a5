"""Counts the statements of the tracked Python files, by folder.

    python tools/statements.py            # the package by folder, then tests, benchmarks, examples, ...
    python tools/statements.py --files    # every file

A statement is every `ast.stmt` except a docstring. Lines are all lines of the file. Notebooks are not counted.
"""

import argparse
import ast
import subprocess
from collections import defaultdict
from pathlib import Path

HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def statements(source: str) -> int:
    """Returns the number of statements in a module's source, without docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = [node for node in nodes if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node) is not None]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(documented)


def room(path: Path) -> str:
    """Returns the folder under which a file is counted: two levels inside the package, one level elsewhere."""
    folders = path.parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("dash_trl",) else 1]) or "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="one line per file instead of one per folder")
    args = parser.parse_args()

    listed = subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True).stdout.split()
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path in filter(Path.exists, map(Path, listed)):
        source = path.read_text()
        count = (1, len(source.splitlines()), statements(source))
        groups = [str(path) if args.files else room(path), "all tracked Python"]
        if path.parts[0] == "dash_trl":
            groups.append("the package")
        for group in groups:
            totals[group] = [a + b for a, b in zip(totals[group], count, strict=True)]

    print(f"{'':40} {'files':>6} {'lines':>7} {'statements':>11}")
    summary = ("the package", "all tracked Python")
    for group in [*sorted(set(totals) - set(summary)), *summary]:
        print("{:40} {:6d} {:7d} {:11d}".format(group, *totals[group]))


if __name__ == "__main__":
    main()
