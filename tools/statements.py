"""Counts the statements of the Python files by room, and the words of the documentation, against budgets.toml.

    python tools/statements.py            # what there is, beside its budget
    python tools/statements.py --files    # every file
    python tools/statements.py --lower    # after a change made something smaller: lowers its budget

A statement is every `ast.stmt` except a docstring. Notebooks are not counted. A room of the package is a folder, or `.`
for the modules at its top; elsewhere, it is a folder at the top of the repository. `tests/test_house.py` fails if there
is more than a budget allows, and if a commit raised the sum of the package or of all statements.
"""

import argparse
import ast
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "budgets.toml"
FOLDERS = ("tests", "benchmarks", "examples", "tools")
HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def statements(source: str) -> int:
    """Returns the number of statements in a module's source, without docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = [node for node in nodes if isinstance(node, HAS_DOCSTRING) and ast.get_docstring(node) is not None]
    return sum(isinstance(node, ast.stmt) for node in nodes) - len(documented)


def counted() -> dict[str, dict[str, int]]:
    """Returns what there is, in the form of budgets.toml: {"package": …, "outside": …, "words": …}."""
    package, outside = Counter[str](), Counter[str]()
    for path in (ROOT / "dash_trl").rglob("*.py"):
        package[[*path.relative_to(ROOT / "dash_trl").parts[:-1], "."][0]] += statements(path.read_text())
    for folder in FOLDERS:
        outside[folder] = sum(statements(path.read_text()) for path in (ROOT / folder).rglob("*.py"))
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    words = sum(len(path.read_text().split()) for path in pages)
    return {"package": dict(package), "outside": dict(outside), "words": {"docs": words}}


def sums(budgets: dict[str, dict[str, int]]) -> dict[str, int]:
    """Returns the numbers that only fall: statements of the package, all statements, words."""
    package = sum(budgets["package"].values())
    return {
        "the package": package,
        "all statements": package + sum(budgets["outside"].values()),
        "words": sum(budgets["words"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="one line per file instead of one per room")
    parser.add_argument("--lower", action="store_true", help="lower the budgets to what there is")
    args = parser.parse_args()

    if args.files:
        for path in sorted(path for folder in ("dash_trl", *FOLDERS) for path in (ROOT / folder).rglob("*.py")):
            print(f"{path.relative_to(ROOT)!s:60} {statements(path.read_text()):6d}")
        return
    now, text = counted(), BUDGETS.read_text()
    budgets = tomllib.loads(text)
    for part, rooms in now.items():
        print(f"[{part}]{'':23} {'now':>7} {'budget':>7}")
        for room in sorted(rooms.keys() | budgets[part].keys()):
            print(f"{room:30} {rooms.get(room, 0):7d} {budgets[part].get(room, 0):7d}")
    for name, total in sums(now).items():
        print(f"{name:30} {total:7d} {sums(budgets)[name]:7d}")
    if args.lower:
        head = text[: text.index("[package]")]
        lowered = {
            part: {room: min(count, now[part].get(room, 0)) for room, count in rooms.items()}
            for part, rooms in budgets.items()
        }
        tables = (
            f"[{part}]\n" + "".join(f'"{room}" = {count}\n' for room, count in rooms.items() if count)
            for part, rooms in lowered.items()
        )
        BUDGETS.write_text(head + "\n".join(tables))


if __name__ == "__main__":
    main()
