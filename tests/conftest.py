"""Shared fixtures: a tiny model on disk, scripted rollouts, and TRL beside DASH."""

import importlib.util
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no look-ups, no telemetry
# As in the Makefile, for the processes that tests start; before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
TRACKED = tempfile.TemporaryDirectory(prefix="trackio-")  # instead of the user's own runs; before trackio is imported
os.environ["TRACKIO_DIR"] = TRACKED.name
EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path += [str(EXAMPLES), str(EXAMPLES / "paper")]

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.launching import launch, python, toy  # noqa: E402, F401

hypothesis.settings.register_profile("no clock", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("no clock")
torch.set_num_threads(1)  # the tests' models are so small that a second thread only waits


# What a case uses is read off its fixtures, the most expensive first. A case without any of these has to be quick.
USES = {
    "servers": {"vllm_servers", "job_with_vllm_servers"},
    "processes": {"launch", "python", "ray_cluster"},
    "training": {"tiny_model", "tool_model", "model", "small_model", "moe", "toy"},
}
# Files of which `make test` runs the first training case of each function.
CORE = {
    *("test_equivalence", "test_contract", "test_one_step", "fuzz", "test_losses", "test_regularizers"),
    *("test_advantages", "test_padding_free", "test_isolation", "test_values"),
    *("test_collect", "test_async", "test_streaming", "test_pipeline", "test_dynamic_sampling", "test_prompts"),
    *("test_queue_training", "test_resume", "test_second_run", "test_skipped_steps", "test_rewards_failures"),
    *("test_tools", "test_tools_training", "test_callbacks", "test_bad_input", "test_process_rewards", "test_seams"),
    *("test_monte_carlo", "test_vllm_faults", "test_evaluation"),
}
MOST_SECONDS = 20.0  # of CPU time, for a case that uses nothing; 5 on most machines, 13 were seen beside other work
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out servers, processes and most training cases")


def use_of(item: pytest.Function) -> str:
    """Return what a case uses: "servers", "processes", "training" or "nothing"."""
    return next((use for use, fixtures in USES.items() if fixtures.intersection(item.fixturenames)), "nothing")


def quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of `make test`: all that use nothing, a choice of those that train, the smoke tests."""
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()  # of each function
    core = {item for item in first if use_of(item) == "training" and item.path.stem in CORE}
    return [item for item in items if use_of(item) == "nothing" or item in core or item.get_closest_marker("smoke")]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the cases of `make test`, puts the longest first, and groups what shares a fixture of its module."""
    chosen = quick(items) if config.option.quick else list(items)
    if "exhaustive" not in config.option.markexpr:
        chosen = [item for item in chosen if not item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=[*set(items).difference(chosen)])
    items[:] = chosen
    items.sort(key=lambda item: [*USES, "nothing"].index(use_of(item)))
    for item in items:
        # One of these makes the kernel kill for memory; those of `serve` take the next free ports.
        if item.path.stem.startswith(("test_sandbox", "test_code", "test_serve")):
            item.add_marker(pytest.mark.xdist_group("sandbox"))
            continue
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(one[-1].scope == "module" for one in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Lets a case of `make test` fail that takes long although it uses nothing."""
    result = yield
    took = cpu_seconds() - item.stash[BEGAN]
    if item.config.option.quick and took > MOST_SECONDS and use_of(item) == "nothing":
        pytest.fail(f"{took:.1f} s of CPU time: let it use one of the fixtures {USES}, or do less")
    return result


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@pytest.fixture(autouse=True)
def _real_vllm(request: pytest.FixtureRequest) -> None:
    """Lets a test of servers fail, not skip, if vLLM could be installed: a skipped test looks like a passed one."""
    if use_of(request.node) == "servers" and importlib.util.find_spec("vllm") is None:
        if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
            pytest.fail("vLLM is not installed: `make test` installs it")
        pytest.skip("there is no vLLM for this platform")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with a 2-layer Qwen2 of 32 dimensions and its tokenizer."""
    from tests.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with a tiny model whose tokenizer knows tools."""
    from tests.scripted_turns import save_tool_model

    return save_tool_model(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def train(tiny_model: str, tmp_path: Path) -> Callable[..., Any]:
    """Return `tests.tiny.run` with DASHTrainer, the tiny model and the test's folder, where nothing else is given."""
    from dash_trl import DASHTrainer
    from tests.tiny import run

    def train(trainer_class: type = DASHTrainer, **settings):
        return run(trainer_class, **{"model": tiny_model, "output": tmp_path, **settings})

    return train


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> object:
    """Return the tokenizer of the tiny model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def start(tiny_model: str) -> dict[str, torch.Tensor]:
    """Return the parameters of the tiny model."""
    from tests.tiny import parameters

    return parameters(tiny_model)


@pytest.fixture
def own_folder(toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """Changes to a folder with the toy model and a file of problems, and returns it."""
    from tests.tiny import write_rows

    write_rows(tmp_path / "own.jsonl", [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(16)])
    (tmp_path / "model").symlink_to(toy)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test fail if weights are loaded: a mistake has to be found before that."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", None)
