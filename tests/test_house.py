"""The house rules that a test can hold: who imports what, which seams of TRL are used, how large each folder may be."""

import ast
import graphlib
import inspect
import itertools
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from transformers import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from tools.budgets import BUDGETS, counted, sums

PACKAGE = Path(__file__).parents[1] / "dash_trl"
# Math and state machines: these rooms but for some modules, and some modules of other rooms.
PURE_ROOMS = {"update": {"padding_free", "trees", "mixers"}, "rollout": {"prompts"}}
PURE = [
    *(f"process_rewards.{name}" for name in ("credit", "diagnostics")),
    *(f"sampling.{name}" for name in ("health", "checksum", "urls")),
    *("data", "evaluation.figures", "monitoring.metrics", "monitoring.recorder"),
    "collect.dynamic_sampling",
]
for room, others in PURE_ROOMS.items():
    PURE += sorted(f"{room}.{path.stem}" for path in (PACKAGE / room).glob("*.py") if path.stem not in others)
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
    rooms = ["dash_trl", "dash_trl.rewards"]
    assert heavy_imports(rooms, "torch", "datasets", "deepspeed", "matplotlib", "numpy") == rooms


def test_pure_modules_and_what_vllm_loads_import_neither_trl_nor_vllm():
    modules = ["dash_trl.sampling.vllm_plugin", "dash_trl.sampling.server", *(f"dash_trl.{name}" for name in PURE)]
    client = "dash_trl.sampling.vllm"
    assert heavy_imports([*modules, client]) == [*modules, f"{client} aiohttp"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
ROOMS = {module_of(path) for path in PACKAGE.rglob("__init__.py")} - {"dash_trl"}


def imports(module: str) -> list[tuple[str, str]]:
    """(module, name) of what a module imports from this package."""
    nodes = [node for node in ast.walk(MODULES[module]) if isinstance(node, ast.ImportFrom) and node.module]
    return [(str(node.module), one.name) for node in nodes for one in node.names if "dash_trl" in str(node.module)]


def room_of(module: str) -> str:
    """The innermost room, or the module itself where it lies at the top."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default=module)


def outer(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_a_room_imports_another_only_by_what_its_door_names():
    for module in MODULES:
        for target, _ in imports(module):
            room = room_of(target)
            within = f"{room_of(module)}.".startswith(f"{room}.")  # a room within a room knows what surrounds it
            assert target == room or within or module in ROOMS, f"{module} imports {target}: import from {room}"


@pytest.mark.parametrize("rooms", [False, True])
def test_the_way_through_the_house_is_one_directional(rooms):
    """No module imports the trainer, and there is no cycle, of modules or of rooms."""
    doors = {(room, name): target for room in ROOMS for target, name in imports(room)}
    edges: dict[str, set[str]] = {}
    for module in MODULES.keys() - ROOMS - {"dash_trl"}:  # what a door names is imported when it is used
        targets = {doors.get(one, one[0]) for one in imports(module)} - {"dash_trl._lazy"}
        assert "dash_trl.trainer" not in targets, module
        if rooms:
            module, targets = outer(module), set(map(outer, targets))
        edges.setdefault(module, set()).update(targets - {module})
    graphlib.TopologicalSorter(edges).prepare()  # raises with the cycle


def test_the_seams_of_trl():
    """The private methods that DASH overrides or relies on: a new TRL that changes one has to fail here first."""
    expected = {
        GRPOTrainer._generate_and_score_completions: "self, inputs",
        GRPOTrainer._calculate_rewards: "self, inputs, prompts, completions, completion_ids_list",
        GRPOTrainer._prepare_inputs: "self, generation_batch",
        GRPOTrainer._compute_loss: "self, model, inputs",
        GRPOTrainer._tokenize_prompts: "self, prompts",
        GRPOTrainer._get_train_sampler: "self, dataset",
        GRPOTrainer._log_completion_extra: "self, column, values",
        GRPOTrainer.log: "self, logs, start_time",
        GRPOTrainer.training_step: "self, model, inputs, num_items_in_batch",
        GRPOTrainer._init_training_state: (
            "self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial"
        ),
        VLLMGeneration._init_vllm: "self",
        VLLMGeneration._iter_named_params: "self",
        VLLMGeneration._fix_param_name_to_vllm: "self, name, extra_prefixes",
        VLLMGeneration.sync_weights: "self",
        VLLMGeneration.generate: "self, prompts, images, num_generations, profiler",
        VLLMClient.init_communicator: "self, device",
        VLLMClient.weight_update: "self",
        VLLMClient.update_named_params: "self, metadata, named_params",
        Trainer.get_batch_samples: "self, epoch_iterator, num_batches, device",
        Trainer._clip_grad_norm: "self, model",
        Trainer._get_grad_norm: "self, model, grad_norm",
        Trainer._save_rng_state: "self, output_dir",
        Trainer._inner_training_loop: "self, batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval",
        Trainer._prepare_for_training: "self, max_steps, train_dataloader, resume_from_checkpoint",
    }
    assert {method: ", ".join(inspect.signature(method).parameters) for method in expected} == expected
    logps = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert logps[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert {"compute_entropy", "compute_aux_loss", "batch_size"} <= set(logps)


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
    folder, found = PACKAGE.parent / "benchmarks", []
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
INSIDE = {"test_sandbox.py", "test_code_remote.py", "__main__.py", Path(__file__).name}


def privates() -> set[str]:
    """Private names that the package defines, without those of TRL and Transformers that it overrides or sets."""
    nodes = [node for tree in MODULES.values() for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    theirs = names_of(Trainer, GRPOTrainer, VLLMGeneration)
    return {name for name in defined - theirs if name.startswith("_") and not name.endswith("__")}


def looks_inside(path: Path, private: set[str]) -> list[str]:
    """What a file of the tests uses of the package that is not for others: past a door, private, or patched."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    found = []
    for node in nodes:
        line = getattr(node, "lineno", 0)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        targets = names if isinstance(node, ast.Import) else [f"{getattr(node, 'module', '')}.{one}" for one in names]
        if isinstance(node, ast.Constant) and re.fullmatch(r"dash_trl(\.\w+){2,}", str(node.value)):
            targets = [node.value]  # of monkeypatch
        for target in targets:
            module = max((one for one in MODULES if f"{target}.".startswith(f"{one}.")), key=len, default="")
            name = target.rpartition(".")[2]
            if module and (room_of(module) != module or name.startswith("_") and not name.endswith("__")):
                found.append(f"{line}: {target}")
        used = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)  # or a name to patch
        if isinstance(used, str) and used in private - own:
            found.append(f"{line}: .{used}")
    return found


def test_tests_come_in_by_the_doors():
    """A test that looks inside a room breaks when the room is rebuilt, and guards nothing that a user would see."""
    private = privates()
    paths = [path for path in Path(__file__).parent.rglob("*.py") if path.name not in INSIDE]
    found = {path.name: inside for path in paths if (inside := looks_inside(path, private))}
    assert not found, "\n".join(f"{name}: {inside}" for name, inside in sorted(found.items()))


def test_no_folder_is_over_its_budget_and_no_sum_over_its_ceiling():
    budgets, now = tomllib.loads(BUDGETS.read_text()), counted()
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
