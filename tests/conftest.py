"""Shared fixtures: a tiny model on disk, scripted rollouts, and TRL beside DASH."""

import importlib.util
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

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

from tests.launching import launch, python  # noqa: E402, F401

hypothesis.settings.register_profile("no clock", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("no clock")
torch.set_num_threads(1)  # the tests' models are so small that a second thread only waits


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects `exhaustive` tests unless they are asked for; runs the tests with vLLM servers, the longest, first."""
    if "exhaustive" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("exhaustive")])
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)


@pytest.fixture(autouse=True)
def _real_vllm(request: pytest.FixtureRequest) -> None:
    """Lets a vLLM test fail, not skip, if vLLM could be installed: a skipped test would look like a passed one."""
    if request.node.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
            pytest.fail("vLLM is not installed: `make test` installs it, and `-m 'not vllm'` leaves these tests out")
        pytest.skip("there is no vLLM for this platform")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a directory with a 2-layer Qwen2 of 32 dimensions and its tokenizer."""
    from tests.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a folder with the toy model and a file of problems, and returns it."""
    from dash_trl.toy import toy_model

    rows = [json.dumps({"prompt": f"{i}+2=", "answer": str(i + 2)}) + "\n" for i in range(16)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    (tmp_path / "model").symlink_to(toy_model())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test fail if weights are loaded: a mistake has to be found before that."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", refuse)
