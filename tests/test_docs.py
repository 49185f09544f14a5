"""The documentation: the site builds without a warning, its pages are true, its code runs."""

import ast
import functools
import re
import sys
from collections import defaultdict
from dataclasses import fields
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sft import SupervisedConfig
from trl import GRPOTrainer, ModelConfig
from trl.trainer import grpo_trainer

from dash_trl import DASHConfig
from dash_trl.evaluation import metrics_of
from dash_trl.monitoring import Recorder
from tests.tiny import figure_names

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path += [str(DOCS), str(ROOT / "tools")]

import extension  # noqa: E402
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
    done = python("-m", "sphinx", "-q", "--fail-on-warning", DOCS, out, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-5000:]
    return out


def test_the_site_has_the_api_and_every_message(site):
    api, errors = ((site / "reference" / f"{name}.html").read_text() for name in ("api", "errors"))
    assert 'id="dash_trl.DASHTrainer"' in api and 'id="dash_trl.rewards.JudgeReward"' in api
    assert "does not go with {other}: {reason}. Leave one of the two out." in errors
    assert not list(site.rglob("*.md"))


def test_messages_are_the_texts_of_the_source():
    source = """
def check(value, other):
    if value:
        raise ValueError(f"value={value!r} does not fit " + "here" + f": {other.name}, {len(value)}")
    raise KeyError(value)
logger.warning("%s is not so short", value)
raise RuntimeError
"""
    assert list(extension.messages(source)) == [
        ("ValueError", "value={value} does not fit here: {other.name}, {…}"),
        ("warning", "%s is not so short"),
    ]


def test_docstrings_are_markdown():
    markdown = """First `line_`s of [`~trl.GRPOConfig`], with |x|, name_, *args and **bold**.

    prompts ──► `sampler`

| a | b |
|---|---|

Args:
    x: `one
        two`.

    y: another.""".split("\n")
    assert extension.to_rst(markdown) == [
        r"First \ ``line_``\ s of \ ``trl.GRPOConfig``\ , with \|x\|, name\_, \*args and **bold**.",
        *("", "::", "", "        prompts ──► `sampler`", ""),
        *("::", "", "    | a | b |", "    |---|---|", ""),
        *("Args:", r"    x: \ ``one", r"        two``\ .", ""),
        *("    y: another.", ""),
    ]


# ------------------------------------------------------------------------------------------------------ the reference


def test_generated_tables_are_up_to_date():
    for path, text in map(reference.page, reference.GENERATED):
        assert path.read_text() == text, f"{path.name}: run `python tools/reference.py` and commit what it changes"


def own_figures() -> set[str]:
    """The names in the source under which the package logs; `<name>` stands for what it fills in."""
    prefixes = "|".join({name.partition("/")[0] for name in figure_names() if "/" in name})
    pattern = re.compile(rf"({prefixes})/[a-z_<>/]*[a-z>]")
    texts = set()
    for path in (ROOT / "dash_trl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            texts |= set(filter(pattern.fullmatch, text_of(node)))
    logged: dict[str, list[float]] = defaultdict(list)
    every = {"use_vllm": True, "vllm_mode": "server", "reward_pipeline": True, "max_num_gen_batches": 2}
    args, state = SimpleNamespace(device=torch.device("cpu"), **every), SimpleNamespace(global_step=1)
    Recorder(args, state, SimpleNamespace(figures=logged)).end_step()
    return texts | logged.keys()


def text_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(one.value if isinstance(one, ast.Constant) else "<name>" for one in node.values)]
    return []


def test_every_figure_of_the_source_is_documented_and_the_other_way_round():
    """What runs log is looked at in `tests.tiny.run`, by all tests that train."""
    documented, own = figure_names(), own_figures()
    trls = Path(grpo_trainer.__file__).read_text()
    inherited = {name for name in documented if f'"{name.replace("<name>", "{reward_func_name}")}"' in trls}
    transformers = {
        *("loss", "grad_norm", "learning_rate", "epoch", "train_runtime", "train_samples_per_second"),
        *("train_steps_per_second", "train_loss", "total_flos", "eval_loss", "eval_runtime"),
        *("eval_samples_per_second", "eval_steps_per_second"),
    }
    # A name without a slash, one that a function gives, and those of pass@k.
    elsewhere = {"skipped_steps", "rewards/<name>/<note>"} | {
        f"eval_{one}".replace("at_1", "at_<k>") for one in metrics_of([[1.0]], ["a"], [1], group_size=1)
    }
    assert documented - own - inherited - transformers - elsewhere == set()
    assert {name for name in own - documented if not any(matches(name, one) for one in documented)} == set()


def matches(template: str, name: str) -> bool:
    return re.fullmatch(re.sub(r"<\w+>", "[^/]*", re.escape(template)), name) is not None


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
    names: dict[str, Any] = {"__name__": "page"}
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
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known.add(node.value.removeprefix("--"))
    for path in PAGES:
        for flag in re.findall(r"(?<![\w-])--([a-z0-9]+(?:_[a-z0-9]+)+)", path.read_text()):
            assert flag in known, f"{name_of(path)}: --{flag}"


def test_figures_that_pages_name_are_logged():
    documented = figure_names()
    prefixes = {name.partition("/")[0] for name in documented if "/" in name}
    for path in PAGES:
        for name in re.findall(r"`([a-z_]+/[a-z_/]*[a-z_])`", path.read_text()):
            is_file = any((folder / name).exists() for folder in (ROOT, ROOT / "dash_trl"))
            if name.partition("/")[0] in prefixes and not is_file:
                assert any(matches(one, name) for one in documented), f"{name_of(path)}: {name}"
