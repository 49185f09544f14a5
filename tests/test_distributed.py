"""DDP, ZeRO-2, ZeRO-3 and FSDP2 with two real processes on gloo: equal counts of passes, equal updates, equal ranks."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from dash_trl import DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import OutcomeValue
from tests.tiny import run

ROOT = Path(__file__).parents[1]
CONFIGS = {
    "ddp": ROOT / "accelerate_configs" / "cpu.yaml",
    "zero2": ROOT / "tests" / "accelerate" / "zero2.yaml",
    "zero3": ROOT / "tests" / "accelerate" / "zero3.yaml",
    "fsdp2": ROOT / "accelerate_configs" / "fsdp2.yaml",
}
# The last test of `distributed_run.py` without DeepSpeed: rank 1 fails while rank 0 is in a collective.
FAILS = dict.fromkeys(("ddp", "fsdp2"), {"test_where_the_other_rank_is_in_a_collective"})


def learned_alone(model: str, output: Path) -> list[int]:
    """The rollouts per window in the buffer of one process, which goes on with what two have learned."""
    value = OutcomeValue(min_rollouts=4, min_problems=2)
    settings = {"resume": str(output / "outcome" / "checkpoint-3"), "gradient_accumulation_steps": 8, "max_steps": 4}
    run(DASHTrainer, model, output / "alone", callbacks=[ProcessRewardCallback(value)], **settings)
    return [len(window["outcome"]) for window in value.state_dict()["windows"]]


def check_saved(output: Path) -> None:
    """What two ranks saved is one model, though ZeRO-3 and FSDP share its head out."""
    _, found = AutoModelForCausalLM.from_pretrained(output / "saved", output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"]


def launched(backend: str, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """All of `distributed_run.py` in one launch: importing torch and trl takes longer than training.

    Args:
        options: of pytest.
    """
    if backend.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (`pip install dash_trl[deepspeed]`)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = ["accelerate.commands.launch", "--config_file", str(CONFIGS[backend]), "--main_process_port", port]
    launch += ["--num_processes", "2", "--mixed_precision", "no"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, str(ROOT / "tests" / "distributed_run.py"), str(output), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CI": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    failed = set(re.findall(r"^(?:FAILED|ERROR) .*::(\S+)", done.stdout, re.MULTILINE))
    said = done.stdout[-9000:] + done.stderr[-3000:]
    assert failed == (FAILS.get(backend, set()) if not options else set()), said
    assert (done.returncode != 0) == bool(failed), said
    return done


@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["ddp", "zero2", "zero3", pytest.param("fsdp2", marks=pytest.mark.exhaustive)])
def test_two_ranks(backend, tiny_model, tmp_path):
    done = launched(backend, tmp_path)
    check_saved(tmp_path)
    if backend == "ddp":
        assert "KeyError: 'of rank 1'" in done.stdout
        assert learned_alone(tiny_model, tmp_path) == [32, 16, 32, 32]


@pytest.mark.distributed
def test_fsdp2(tmp_path):
    """The configuration that is shipped; accelerate's type is forced, since it takes FSDP for GPUs alone."""
    chosen = "trls and (dapo or grpo or iterations or pipeline or untied) or from_the_middle"
    assert " passed" in launched("fsdp2", tmp_path, "-k", chosen).stdout
    check_saved(tmp_path)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", CONFIGS)
def test_two_ranks_at_length(backend, tmp_path):
    """What takes too long for each time."""
    assert " passed" in launched(backend, tmp_path, "-m", "exhaustive").stdout
