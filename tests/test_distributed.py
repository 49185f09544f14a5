"""DDP, ZeRO-2 and ZeRO-3 with two real processes on gloo: equal counts of passes, equal updates, equal ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from dash_trl import DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import OutcomeValue
from tests.tiny import run, save_tiny_model

ROOT = Path(__file__).parents[1]
BACKENDS = ["ddp", "zero2", "zero3"]


def launch(backend: str, output: Path, *models: str) -> dict[str, Any]:
    """Run every scenario of `distributed_run.py` in one launch: importing torch and trl takes longer than training."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1", "HF_HUB_OFFLINE": "1"}
    if backend == "ddp":  # `accelerate launch --cpu` starts one process; torchrun starts two
        environment["ACCELERATE_USE_CPU"] = "true"
        command = ["torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    else:
        config = str(ROOT / "tests" / "accelerate" / f"{backend}.yaml")
        command = ["accelerate.commands.launch", "--config_file", config, "--main_process_port", port]
    script = str(ROOT / "tests" / "distributed_run.py")
    done = subprocess.run(
        [sys.executable, "-m", *command, script, str(output), *models],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert done.returncode == 0 and lines, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0].removeprefix("RESULTS "))


def larger_models(directory: Path) -> list[str]:
    """With an LM head, tied and not, that ZeRO-3 shards: what has fewer than 1e5 elements stays whole on every rank."""
    paths = []
    for name, tied in (("tied head", True), ("untied head", False)):
        paths.append(save_tiny_model(directory / name, vocab_size=4000, tie_word_embeddings=tied))
        head = AutoModelForCausalLM.from_pretrained(paths[-1]).lm_head.weight
        assert head.numel() > 1e5
    return paths


def learned_alone(model: str, output: Path) -> list[int]:
    """The rollouts per window in the buffer of one process, which goes on with what two have learned."""
    value = OutcomeValue(min_rollouts=4, min_problems=2)
    settings = {"resume": str(output / "outcome" / "checkpoint-3"), "gradient_accumulation_steps": 8, "max_steps": 4}
    run(DASHTrainer, model, output / "alone", callbacks=[ProcessRewardCallback(value)], **settings)
    return [len(window["outcome"]) for window in value.state_dict()["windows"]]


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend, tiny_model, tmp_path):
    if backend != "ddp" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (`pip install dash_trl[deepspeed]`)")
    windowed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    sliding_model = save_tiny_model(tmp_path / "sliding", **windowed)  # the same weights
    larger = larger_models(tmp_path) if backend == "zero3" else []
    results = launch(backend, tmp_path, tiny_model, sliding_model, *larger)
    assert results.pop("ranks") == 2
    steps = results.pop("silent and spoiled steps")
    bonus = results.pop("entropy bonus")
    assert bonus["added"] == pytest.approx(bonus["entropy"], rel=1e-3) and bonus["entropy"] > 1.0
    silent, *moved = steps["moved"]
    assert silent == moved[1] == 0.0 < min(moved[0], moved[2]) and moved[2] < 1.0
    assert steps["skipped"] == [[0, 0, 1, 1]] * 2  # a step without signal logs none
    for name in ("process rewards", "process rewards, sliding window"):
        episodes = results[name].pop("episodes")
        assert episodes[0] > 16 and episodes[1] == 0
    outcome = results["outcome value"]
    assert outcome.pop("learned") == [[32, 16, 32]] * 2
    first, second = outcome.pop("buffers")
    assert first == second
    weights, others = outcome.pop("weights")
    assert weights == others and 0 < weights[2] < weights[0] == pytest.approx(1.0)
    worth, of_other = outcome.pop("worth")
    assert worth == of_other
    # A window without values; one that only the first rank's rollouts say something of; one of all.
    mixed = [[number for number, pairs in enumerate(window["pairs"]) if pairs] for window in worth]
    assert len(mixed[0]) == 16 and not mixed[1] and 0 < len(mixed[2]) and max(mixed[2]) < 4 <= max(mixed[3])
    assert len(worth[3]["pairs"]) == 8
    valued = outcome.pop("valued")
    assert valued[0] == 0.0 < min(valued[1:])
    for name, rows in (("own rows", 16), ("rows of all", 32)):  # the second: one group, which lies on both ranks
        for rank in (credit := results.pop(name)):
            assert rank["rows"] == rows and rank["ranks_agree"] and rank["difference"] <= 1e-12, name
            assert rank["logged"] == credit[0]["logged"] and rank["logged"]["advantage/std"] > 0, name
            assert rank["worth"] == credit[0]["worth"] and sum(rank["worth"][0]["pairs"]) > 4, name
            assert len(rank["worth"][0]["pairs"]) == 32 // (4 if rows == 16 else 32), "each group once"
        assert sum(rank["valued"] for rank in credit) > 0
    assert results.pop("Monte Carlo values") == [{"rows": [16, 16], "right": True}] * 2
    filled, nan, *others = results["unknown log-probs"].pop("off_policy")
    assert others == [filled, nan], "the figures are those of all ranks"
    assert nan["off_policy/rescored_rows"] > 0.0 == filled["off_policy/rescored_rows"]
    if backend == "ddp":
        refused = results["resumed"].pop("refused")
        assert refused[0] == refused[1] and "generation_window_1.pt is missing" in refused[0]
        assert results.pop("time limit") == [2, 2]
        assert results.pop("read ahead") == [[[], [True, True]]] * 2
        assert learned_alone(tiny_model, tmp_path) == [32, 16, 32, 32]
    assert results["one step ahead"].pop("behind") == [0, 1, 1]
    assert len(results) == 16 + len(larger) + (backend == "ddp")
    for name, result in results.items():
        assert result["update"] > 1e-3, name
        assert result["ranks_agree"], name
        assert result.get("difference", 0.0) <= 1e-5, f"{name}: {result}"
