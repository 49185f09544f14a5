"""What this site needs beside Sphinx's own extensions: Markdown in docstrings, the list of messages, links to files."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dash_trl"
NAME = re.compile(r"\w+(\.\w+)*")  # of a value, which its placeholder shows
LEAST_WORDS = 3  # of a message, without its placeholders

# --------------------------------------------------------------------------------------------------------- docstrings

NOT_SHOWN = re.compile(r"~(?=[a-zA-Z])")  # of a link in Hugging Face's form: `~trl.GRPOTrainer`; not of a path
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Note|Example|Examples):$")


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's Markdown as RST: code spans, links of Hugging Face's form, tables and indented blocks.

    A `::` before an indented block is RST already, and becomes a colon.

    Google's sections stay as they are; napoleon reads them afterwards.
    """
    converted: list[str] = []
    in_section = False
    for chunk in re.split(r"\n(?:[ ]*\n)+", "\n".join(lines).strip("\n")):
        rows = chunk.split("\n")
        outer = [row for row in rows if row[:1].strip()]
        in_section = bool(SECTION.match(outer[-1])) if outer else in_section
        begin = len(rows)  # of the code in it
        if rows[0].lstrip().startswith("|"):
            begin = 0
        elif not in_section and rows[: len(outer)] == outer:
            begin = len(outer)  # all lines after it are indented
        if begin:
            text = "\n".join(rows[:begin])
            if text.endswith("::") and not in_section:
                text = text[:-1]
            converted += [*paragraph(text).split("\n"), ""]
        if begin < len(rows):
            converted += ["::", "", *(f"    {row}" for row in rows[begin:]), ""]
    return converted


def paragraph(text: str) -> str:
    text = re.sub(r"\[(`[^`\n]+`)\](?!\()", r"\1", text)  # [`DASHTrainer`]
    parts = re.split(r"(``.+?``|(?<!`)`[^`]+`(?!`))", text)
    return "".join(literal(part) if place % 2 else escaped(part) for place, part in enumerate(parts))


def literal(span: str) -> str:
    """RST ends a literal only before a space or a punctuation mark: an empty escape is both."""
    return f"\\ ``{re.sub(NOT_SHOWN, '', span.strip('`'))}``\\ "


def escaped(text: str) -> str:
    """Text without what is markup in RST and none in Markdown."""
    text = re.sub(r"(?<!\*)\*(?!\*)", r"\\*", text.replace("\\", r"\\").replace("|", r"\|"))
    return re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # else napoleon takes what is before a colon in the first line for a type


# -------------------------------------------------------------------------------------------------------------- links

DOCS = ROOT / "docs"
# Files outside of docs/ that are pages, too, by symbolic links in it: file → page.
PAGES = {path.resolve().with_suffix(""): path.with_suffix("") for path in DOCS.iterdir() if path.is_symlink()}
PAGES[ROOT / "README"] = DOCS / "index"
TARGET = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?")


def from_docs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links of a page start at the folder of its file; make them start where the page is.

    A Markdown file that is no page becomes a download, as other files do by themselves.
    """
    path = Path(app.env.doc2path(docname))

    def link(found: re.Match[str]) -> str:
        file = (path.resolve().parent / found[1]).resolve()
        is_page = file.is_relative_to(DOCS) or file.with_suffix("") in PAGES
        target = os.path.relpath(file, path.parent)
        return f"path:{target}" if file.suffix == ".md" and not is_page else target + (found[2] or "")

    if path.suffix == ".md":
        source[0] = TARGET.sub(link, source[0])


def to_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Links to such files lead to their pages: MyST has resolved the symbolic links."""
    for node in doctree.findall(addnodes.pending_xref):
        target = Path(node.get("reftarget", ""))
        for file, page in PAGES.items():
            if target.is_relative_to(file):
                node["reftarget"] = str((page / target.relative_to(file)).relative_to(DOCS))


# ----------------------------------------------------------------------------------------------------------- messages


def messages(source: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of the errors that a module raises and the warnings that it gives, in the order of the source."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise | ast.Call)]
    for node in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, kind = node.exc, ast.unparse(node.exc.func)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("logger.warning", "warnings.warn"):
            call, kind = node, "warning"
        else:
            continue
        text = template(call.args[0]) if call.args else ""
        if len(re.sub(r"\{[^}]*\}", " ", text).split()) >= LEAST_WORDS:
            yield kind, text


def template(node: ast.expr) -> str:
    """The text of an expression, with its names in braces where values stand."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    value = ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)
    return f"{{{value if NAME.fullmatch(value) else '…'}}}"


class Messages(SphinxDirective):
    """`{messages}`: all errors and warnings of the package, by module."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for path in sorted(PACKAGE.rglob("*.py")):
            self.env.note_dependency(str(path))
            items = [item(kind, text) for kind, text in messages(path.read_text(encoding="utf-8"))]
            if items:
                found.append(nodes.rubric(text=str(path.relative_to(ROOT))))
                found.append(nodes.bullet_list("", *items))
        return found


def item(first: str, text: str) -> nodes.list_item:
    return nodes.list_item("", nodes.paragraph("", "", nodes.strong(text=first), nodes.Text(f" {text}")))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", convert, priority=100)  # before napoleon
    app.connect("source-read", from_docs)
    app.connect("doctree-read", to_pages)
    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
