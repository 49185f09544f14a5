"""Counts the tokens of code, the words of docstrings and the words of the documentation, against budgets.toml.

    python tools/budgets.py            # what there is, beside its budget
    python tools/budgets.py --files    # every file
    python tools/budgets.py --write    # writes what there is into budgets.toml

A token is one of Python's, without comments, docstrings, line ends and indentation; a name counts once, however long.
Notebooks are not counted. A folder of the package counts by itself; `dash_trl` stands for the modules at its top.
`tests/test_structure.py` fails if a folder is over its budget, if a sum is over its ceiling, or if a ceiling has risen.
"""

import argparse
import ast
import io
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "budgets.toml"
FOLDERS = ("dash_trl", "tests", "benchmarks", "examples", "tools")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Ceiling → the table of budgets.toml, and the folders at the top whose numbers it bounds.
SUMS = {
    "package": ("tokens", ("dash_trl",)),
    "package docstrings": ("docstrings", ("dash_trl",)),
    "tests": ("tokens", ("tests",)),
    "examples and benchmarks": ("tokens", ("examples", "benchmarks")),
    "docs": ("words", ("docs",)),
}

Table = dict[str, dict[str, int]]


def size(source: str) -> tuple[int, int]:
    """Return the number of tokens of a module's source, and the number of words of its docstrings."""
    documents = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    places = {(one.lineno, one.col_offset) for one in documents}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [one for one in tokens if one.type not in LAYOUT and one.start not in places]
    return len(code), sum(len(str(one.value).split()) for one in documents)


def folder_of(path: Path) -> str:
    first, *others = path.relative_to(ROOT).parts[:-1]
    return f"{first}/{others[0]}" if first == "dash_trl" and others else first


def files(ending: str, *folders: str) -> list[Path]:
    """Return the files of the repository in some folders, without those that an install or a build has made."""
    found = (path for folder in folders for path in (ROOT / folder).rglob(f"*.{ending}"))
    return sorted(path for path in found if not {"build", "_build"} & {*path.relative_to(ROOT).parts})


def counted() -> Table:
    """Return what there is, in the form of budgets.toml: {"tokens": …, "docstrings": …, "words": …}."""
    tokens = Counter[str]()
    docstrings = Counter[str]()
    for path in files("py", *FOLDERS):
        code, words = size(path.read_text())
        tokens[folder_of(path)] += code
        docstrings[folder_of(path)] += words
    words = sum(len(path.read_text().split()) for path in files("md", "docs"))
    return {"tokens": dict(tokens), "docstrings": dict(docstrings), "words": {"docs": words}}


def sums(table: Table) -> dict[str, int]:
    """Return the numbers that the ceilings bound."""
    return {
        name: sum(count for folder, count in table[part].items() if folder.split("/")[0] in folders)
        for name, (part, folders) in SUMS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="one line per file instead of one per folder")
    parser.add_argument("--write", action="store_true", help="write what there is into budgets.toml")
    args = parser.parse_args()

    if args.files:
        for path in files("py", *FOLDERS):
            code, words = size(path.read_text())
            print(f"{path.relative_to(ROOT)!s:60} {code:7d} {words:7d}")
        return
    now = counted()
    text = BUDGETS.read_text()
    budgets = tomllib.loads(text)
    for part, folders in [*now.items(), ("ceilings", sums(now))]:
        print(f"[{part}]{'':23} {'now':>7} {'budget':>7}")
        for folder in sorted(folders.keys() | budgets[part].keys()):
            print(f"{folder:30} {folders.get(folder, 0):7d} {budgets[part].get(folder, 0):7d}")
    if args.write:
        head = text[: text.index("[tokens]")]
        tables = (
            f"[{part}]\n" + "".join(f'"{folder}" = {folders[folder]}\n' for folder in sorted(folders))
            for part, folders in now.items()
        )
        BUDGETS.write_text(head + "\n".join(tables))


if __name__ == "__main__":
    main()
