"""The documentation: the site builds without a warning, its pages are true, its code runs."""

import ast
import functools
import re
import sys
from dataclasses import fields
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
from sft import SupervisedConfig
from transformers import trainer, trainer_utils
from trl import GRPOTrainer, ModelConfig
from trl.trainer import grpo_trainer

from dash_trl import DASHConfig
from tests.launching import ROOT
from tests.tiny import figure_names, is_documented

DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "tools"))

import reference  # noqa: E402

# The changelog names what was, too.
PAGES = [ROOT / "README.md", *sorted({path.resolve() for path in DOCS.rglob("*.md")} - {ROOT / "CHANGELOG.md"})]
SOURCES = [path for folder in ("dash_trl", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ----------------------------------------------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(python, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning is an error: a broken link or anchor, a page in no table of contents, bad markup."""
    out = tmp_path_factory.mktemp("site")
    python("-m", "sphinx", "-q", "--fail-on-warning", DOCS, out, cwd=ROOT)
    return out


def test_the_site_has_the_api_and_every_message(site):
    api, errors = ((site / "reference" / f"{name}.html").read_text() for name in ("api", "errors"))
    assert 'id="dash_trl.DASHTrainer"' in api and 'id="dash_trl.rewards.load_reward"' in api
    assert "does not go with {other}: {reason}. Leave one of the two out." in errors
    assert not list(site.rglob("*.md"))


# ------------------------------------------------------------------------------------------------------ the reference


def test_generated_tables_are_up_to_date():
    for path, text in map(reference.page, reference.GENERATED):
        assert path.read_text() == text, f"{path.name}: run `python tools/reference.py` and commit what it changes"


def test_every_figure_of_the_documentation_is_in_a_source():
    """Of ours, of TRL or of Transformers, with a string that ends as its name. What runs log: `tests.tiny.run`."""
    theirs = (Path(one.__file__) for one in (grpo_trainer, trainer, trainer_utils))
    sources = [path.read_text() for path in (*SOURCES, *theirs)]
    for name in figure_names():
        *parts, last = filter(None, re.split(r"<\w+>|/|^(?:eval|train)_", name))
        ends = re.compile(rf"\b_?{last}[\"'{{]")
        assert any(all(part in source for part in parts) and ends.search(source) for source in sources), name


# ------------------------------------------------------------------------------------------------------------- prose

BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n+)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC = ("dash_trl", "dash_trl.rewards", "dash_trl.process_rewards", "dash_trl.sandbox", "dash_trl.evaluation")


@pytest.mark.parametrize("path", [path for path in PAGES if "```python" in path.read_text()], ids=name_of)
def test_code_blocks_run(path, toy, tmp_path, monkeypatch):
    """The blocks of a page run one after the other, with the names of those before.

    One that cannot run here has a line before it, `<!-- not run: the reason -->`, which no reader sees. It still has to
    compile, to import what there is, and to pass arguments that exist.
    """
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    found = BLOCK.findall(text)
    assert len(found) == len(re.findall(r"^ *```python", text, re.MULTILINE)), "a block is indented or not closed"
    names = {"__name__": "__main__"}
    for reason, block in found:
        code = compile(block, name_of(path), "exec")
        check_names(ast.parse(block))
        if not reason:
            exec(code, names)


@functools.cache
def public() -> dict[str, Any]:
    return {
        name: one
        for room in map(import_module, PUBLIC)
        for name in dir(room)
        if callable(one := getattr(room, name))  # modules are not
    }


def check_names(tree: ast.AST) -> None:
    """What is imported of dash_trl is shown there, and its functions and classes take the keyword arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dash_trl"):
            for one in node.names:
                assert one.name in dir(import_module(str(node.module))), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in public():
            takes = signature(GRPOTrainer if node.func.id == "DASHTrainer" else public()[node.func.id]).parameters
            if all(one.kind != Parameter.VAR_KEYWORD for one in takes.values()):
                assert {str(one.arg) for one in node.keywords if one.arg} <= set(takes), ast.unparse(node)


def test_flags_that_pages_name_exist():
    """Those with an underscore, which are ours, TRL's, accelerate's or torchrun's."""
    known = {one.name for kind in (DASHConfig, ModelConfig, SupervisedConfig) for one in fields(kind)}
    known |= {"config_file", "nproc_per_node"}
    for path in SOURCES:  # names of fields, and strings
        known |= set(re.findall(r'(?:^ +|"(?:--)?)(\w+)(?=: |")', path.read_text(), re.MULTILINE))
    for path in PAGES:
        for flag in re.findall(r"(?<![\w-])--([a-z0-9]+(?:_[a-z0-9]+)+)", path.read_text()):
            assert flag in known, f"{name_of(path)}: --{flag}"


def test_figures_that_pages_name_are_logged():
    prefixes = {name.partition("/")[0] for name in figure_names() if "/" in name}
    for path in PAGES:
        for name in re.findall(r"`([a-z_]+/[a-z_/]*[a-z_])`", path.read_text()):
            is_file = any((folder / name).exists() for folder in (ROOT, ROOT / "dash_trl"))
            if name.partition("/")[0] in prefixes and not is_file:
                assert is_documented(name), f"{name_of(path)}: {name}"
