"""DDP, ZeRO-2, ZeRO-3 and FSDP2 with two real processes on gloo: equal counts of passes, equal updates, equal ranks.

The checks are in `distributed_run.py`. Importing torch and trl takes longer than most of them, so one launch runs many.
"""

import importlib.util
from collections.abc import Callable

import pytest
from transformers import AutoModelForCausalLM

from tests.launching import CONFIGS, ROOT

BACKENDS = {
    "ddp": CONFIGS / "cpu.yaml",
    "zero2": ROOT / "tests" / "accelerate" / "zero2.yaml",
    "zero3": ROOT / "tests" / "accelerate" / "zero3.yaml",
    "fsdp2": CONFIGS / "fsdp2.yaml",  # accelerate's type is forced, since it takes FSDP for GPUs alone
}
# pytest's -k: which checks run each time. ZeRO-3 shards the model that passes run, ZeRO-2 only what a step changes.
CHOSEN = {
    "ddp": "not smoke",
    "zero2": "test_the_update_is or silent_and_spoiled or own_schedule or entropy_bonus",
    "zero3": "not (window or dapo or iterations or credit_of or dynamic)",
    "fsdp2": "trls and (dapo or grpo or iterations or pipeline or untied or multimodal) or streamed or from_the_middle",
}


@pytest.fixture
def two_ranks(launch, tmp_path) -> Callable[..., str]:
    """Return a function that launches checks on two ranks and returns their output."""

    def launched(backend: str, *options: str) -> str:
        """Args: options: of pytest."""
        if backend.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed (`pip install dash_trl[deepspeed]`)")
        script = ROOT / "tests" / "distributed_run.py"
        ranks = ("--num_processes", "2", "--mixed_precision", "no")
        done = launch(script, tmp_path, *options, config=BACKENDS[backend], options=ranks)
        assert " passed" in done.stdout, done.stdout[-9000:]
        return done.stdout

    return launched


@pytest.mark.smoke
@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_smoke(backend, two_ranks):
    """One update, which is TRL's."""
    assert "1 passed" in two_ranks(backend, "-k", "smoke")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend, two_ranks, tiny_model, tmp_path):
    """What two ranks saved is one model, though ZeRO-3 and FSDP share its head out."""
    two_ranks(backend, "-k", CHOSEN[backend])
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["zero2", "zero3", "fsdp2"])
def test_two_ranks_with_all_checks(backend, two_ranks):
    two_ranks(backend)
