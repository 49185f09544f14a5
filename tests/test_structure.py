"""Rules of the structure: who imports what, which seams of TRL are used, how large each folder may be."""

import ast
import graphlib
import inspect
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest
from transformers import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from tools.budgets import BUDGETS, counted, sums

PACKAGE = Path(__file__).parents[1] / "dash_trl"
# Math and state machines: these folders but for some modules, and some modules of other folders.
PURE_FOLDERS = {"update": {"padding_free", "trees", "mixers"}, "rollout": {"prompts"}}
PURE = [
    "process_rewards.credit",
    "process_rewards.diagnostics",
    "evaluation.figures",
    "monitoring.metrics",
    "monitoring.recorder",
    "collect.dynamic_sampling",
]
for folder, others in PURE_FOLDERS.items():
    stems = {path.stem for path in (PACKAGE / folder).glob("*.py")}
    PURE += sorted(f"{folder}.{stem}" for stem in stems - others - {"__init__"})
IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted(sys.modules.keys() & %r))
"""


def heavy_imports(modules: list[str], *heavy: str) -> list[str]:
    """Of modules that are imported one after the other, the names, each with the heavy ones that are loaded by then."""
    command = [sys.executable, "-c", IMPORTS % {*heavy, "trl", "vllm", "transformers", "accelerate", "aiohttp"}]
    return subprocess.run([*command, *modules], capture_output=True, text=True, check=True).stdout.splitlines()


def test_what_a_notebook_imports_first_is_light():
    folders = ["dash_trl", "dash_trl.rewards"]
    assert heavy_imports(folders, "torch", "datasets", "deepspeed", "matplotlib", "numpy") == folders


def test_what_vllm_and_workers_load_is_light():
    modules = ["dash_trl.data", "dash_trl.vllm_plugin", "dash_trl.server_key"]
    assert heavy_imports(modules) == modules


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
FOLDERS = {module_of(path) for path in PACKAGE.rglob("__init__.py")} - {"dash_trl"}


def imports(module: str) -> list[tuple[str, str]]:
    """(module, name) of what a module imports from this package."""
    nodes = [node for node in ast.walk(MODULES[module]) if isinstance(node, ast.ImportFrom) and node.module]
    return [(str(node.module), one.name) for node in nodes for one in node.names if "dash_trl" in str(node.module)]


PUBLIC_NAMES = {(folder, name): target for folder in FOLDERS for target, name in imports(folder)}


def folder_of(module: str) -> str:
    """The innermost folder, or the module itself where it lies at the top."""
    return max((folder for folder in FOLDERS if f"{module}.".startswith(f"{folder}.")), key=len, default=module)


def outer(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_a_folder_imports_another_only_by_its_public_names():
    for module in MODULES:
        for target, _ in imports(module):
            folder = folder_of(target)
            within = f"{folder_of(module)}.".startswith(f"{folder}.")  # it may import the folder around it
            assert target == folder or within or module in FOLDERS, f"{module} imports {target}: import from {folder}"


@pytest.mark.parametrize("folders", [False, True])
def test_imports_go_one_way(folders):
    """No module imports the trainer, and there is no cycle, of modules or of folders."""
    edges: dict[str, set[str]] = {}
    for module in MODULES.keys() - FOLDERS - {"dash_trl"}:
        targets = {PUBLIC_NAMES.get(one, one[0]) for one in imports(module)} - {"dash_trl._lazy"}
        assert "dash_trl.trainer" not in targets, module
        if folders:
            module = outer(module)
            targets = set(map(outer, targets))
        edges.setdefault(module, set()).update(targets - {module})
    graphlib.TopologicalSorter(edges).prepare()  # raises with the cycle


def libraries(module: str, found: dict[str, set[str]]) -> set[str]:
    """The libraries that a module uses, or a module of this package from which it imports a name; there is no cycle."""
    if module not in found:
        found[module] = {*re.findall(r"^ *(?:from|import) (\w+)", ast.unparse(MODULES[module]), re.MULTILINE)}
        for target in (PUBLIC_NAMES.get(one, one[0]) for one in imports(module)):
            found[module] |= libraries(target, found)
    return found[module]


def test_pure_modules_use_neither_trl_nor_vllm():
    found: dict[str, set[str]] = {}
    for name in PURE:
        heavy = {"trl", "vllm", "transformers", "accelerate", "aiohttp"} & libraries(f"dash_trl.{name}", found)
        assert not heavy, f"{name} uses {heavy}"
    assert {"torch", "numpy"} <= set().union(*found.values())


def test_names_that_are_imported_lazily_are_those_for_type_checkers():
    for package in map(import_module, ("dash_trl", "dash_trl.rewards")):
        names = {name for _, name in imports(package.__name__)} - {"lazy", "installed", "refuse_other_trl"}
        assert names == {*dir(package)} and all(hasattr(package, name) for name in names)


def test_the_seams_of_trl():
    """Methods that DASH overrides or relies on, and that run on GPUs only. The others fail in any test that trains."""
    expected = {
        VLLMGeneration._fix_param_name_to_vllm: "self, name, extra_prefixes",
        VLLMGeneration.generate: "self, prompts, images, num_generations, profiler",
        VLLMClient.init_communicator: "self, device",
        VLLMClient.weight_update: "self",
        VLLMClient.update_named_params: "self, metadata, named_params",
    }
    assert {method: ", ".join(inspect.signature(method).parameters) for method in expected} == expected


def attributes(tree: ast.AST, *owners: str) -> set[tuple[str, bool]]:
    """(name, whether it is set) of what is used of variables and attributes with these names, as in `self.trainer`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", getattr(node.value, "attr", None))
            if owner in owners:
                found.add((node.attr, isinstance(node.ctx, ast.Store)))
    return found


def names_of(*owners: type) -> set[str]:
    """What classes have, and what their methods set."""
    found = {name for owner in owners for name in dir(owner)}
    for owner in owners:
        found |= {name for name, is_set in attributes(ast.parse(inspect.getsource(owner)), "self") if is_set}
    return found


def test_the_attributes_of_trl():
    """What DASH sets, or uses of what is private, is TRL's: under a new name it would be an attribute of our own."""
    trls = names_of(Trainer, GRPOTrainer)
    (dash,) = [node for node in ast.parse((PACKAGE / "trainer.py").read_text()).body if isinstance(node, ast.ClassDef)]
    begins = [node for node in dash.body if getattr(node, "name", None) in ("__init__", "_begin_run")]
    ours = {name for node in begins for name, is_set in attributes(node, "self") if is_set and name.startswith("_")}
    ours |= {"ranks", "recorder"}
    assert not ours & trls
    methods = {node.name for node in dash.body if isinstance(node, ast.FunctionDef)}
    settings = {(target.id, True) for node in dash.body if isinstance(node, ast.Assign) for target in node.targets}
    used = attributes(dash, "self") | settings
    for path in PACKAGE.rglob("*.py"):
        used |= attributes(ast.parse(path.read_text()), "trainer")
    names = {name for name, is_set in used if is_set or name.startswith("_")} - ours - methods
    assert names - trls == set()
    assert {"_step", "_tokenizer", "use_vllm"} <= names


def test_a_benchmark_overrides_a_method_as_it_is(monkeypatch):
    """The suite does not run benchmarks, so a method that got another parameter would break them unnoticed."""
    folder = PACKAGE.parent / "benchmarks"
    found = []
    monkeypatch.syspath_prepend(folder)
    for module in (import_module(path.stem) for path in folder.glob("*.py")):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and kind.__base__.__module__.startswith("dash_trl"):
                found += [(one, getattr(kind.__base__, name, one)) for name, one in vars(kind).items() if callable(one)]
    assert found
    for one, theirs in found:
        assert inspect.signature(one).parameters.keys() == inspect.signature(theirs).parameters.keys(), one


# A library will replace the sandbox; until then its tests may look inside. This file reads structure.
# On the device that computes nothing (fake_cuda), no trial can read values.
INSIDE = {"test_sandbox.py", "__main__.py", Path(__file__).name}


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of functions, classes and attributes that are set."""
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return found | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def privates() -> set[str]:
    """Private names that the package defines, without those of TRL and Transformers that it overrides or sets."""
    nodes = [node for tree in MODULES.values() for node in ast.walk(tree)]
    theirs = names_of(Trainer, GRPOTrainer, VLLMGeneration)
    return {name for name in defined(nodes) - theirs if name.startswith("_") and not name.endswith("__")}


def looks_inside(path: Path, private: set[str]) -> list[str]:
    """What a file of the tests uses of the package that is not for others: not public, private, or patched."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = []
    own = defined(nodes)
    for node in nodes:
        line = getattr(node, "lineno", 0)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        targets = names if isinstance(node, ast.Import) else [f"{getattr(node, 'module', '')}.{one}" for one in names]
        if isinstance(node, ast.Constant) and re.fullmatch(r"dash_trl(\.\w+){2,}", str(node.value)):
            targets = [node.value]  # of monkeypatch
        for target in targets:
            module = max((one for one in MODULES if f"{target}.".startswith(f"{one}.")), key=len, default="")
            name = target.rpartition(".")[2]
            if module and (folder_of(module) != module or name.startswith("_") and not name.endswith("__")):
                found.append(f"{line}: {target}")
        used = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)  # or a name to patch
        if isinstance(used, str) and used in private - own:
            found.append(f"{line}: .{used}")
    return found


def test_tests_use_public_names():
    """A test that looks inside a folder breaks when the folder is rebuilt, and guards nothing that a user would see."""
    private = privates()
    paths = [path for path in Path(__file__).parent.rglob("*.py") if path.name not in INSIDE]
    found = {path.name: inside for path in paths if (inside := looks_inside(path, private))}
    assert not found, "\n".join(f"{name}: {inside}" for name, inside in sorted(found.items()))


def test_no_folder_is_over_its_budget_and_no_sum_over_its_ceiling():
    budgets = tomllib.loads(BUDGETS.read_text())
    now = counted()
    for part, counts in [*now.items(), ("ceilings", sums(now))]:
        over = {name: count for name, count in counts.items() if count > budgets[part].get(name, 0)}
        assert not over, f"over the numbers of budgets.toml: {over}. Make something simpler in the same commit"


def test_ceilings_only_fall():
    """Compares budgets.toml with all its versions in the history of git that have ceilings."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=BUDGETS.parent, capture_output=True, text=True).stdout

    # Branches that were merged had ceilings of their own. An archive has no history.
    commits = git("log", "--first-parent", "--format=%H", "--", BUDGETS.name).split()
    texts = [BUDGETS.read_text(), *(git("show", f"{commit}:{BUDGETS.name}") for commit in commits)]
    ceilings = [found for text in texts if (found := tomllib.loads(text).get("ceilings"))]
    for newer, older in itertools.pairwise(ceilings):
        assert all(newer[name] <= older[name] for name in older), f"a ceiling rose from {older} to {newer}"
