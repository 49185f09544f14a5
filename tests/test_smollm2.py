"""A real pretrained model, SmolLM2-135M-Instruct, on a real vLLM server."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOTrainer

from dash_trl import DASHTrainer, serve
from tests.launching import ROOT
from tests.tiny import assert_same_update, load, noting, run, user

QUESTIONS = ["What is 2 + 3?", "Name a colour.", "Is 7 a prime number?", "Say hello."]
SETTINGS = {
    "max_completion_length": 64,
    "max_steps": 2,
    "learning_rate": 0.03,  # smaller updates would be lost in the rounding of the weights
    "shuffle_dataset": False,
}


@pytest.fixture
def path(python) -> str:
    return python(ROOT / "benchmarks" / "smollm2.py").stdout.splitlines()[-1]


@pytest.fixture
def vllm_servers(path) -> Iterator[list[str]]:
    with serve.vllm_servers(path, port=8900, options=["--max-model-len", "512"]) as urls:
        yield urls


def as_sampled(rollouts) -> dict[str, Any]:
    """What a `rollout_func` would return."""
    tables = {"prompt_ids": rollouts.prompt_mask, "completion_ids": rollouts.completion_mask}
    return {"logprobs": None} | {
        name: [row[own.bool()].tolist() for row, own in zip(getattr(rollouts, name), mask, strict=True)]
        for name, mask in tables.items()
    }


def odd(completion_ids: list[list[int]], **columns) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def test_a_pretrained_model_on_a_server_learns_as_trls(vllm_servers, path, tmp_path):
    """In float32, passes of other shapes round otherwise: up to 2e-5 of the update in 30 layers."""
    sampled = noting("on_rollouts_sampled", as_sampled)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [user(one) for one in QUESTIONS]

    def trained(kind, **settings):
        model = load(path, dtype=torch.float32)
        dataset = Dataset.from_dict({"prompt": prompts})
        return run(kind, path, tmp_path, loaded=model, reward=odd, dataset=dataset, **SETTINGS, **settings)

    server = {"vllm_server_urls": vllm_servers, "vllm_importance_sampling_correction": False}
    ours = trained(DASHTrainer, callbacks=[sampled], **server)
    first, _ = sampled.noted
    assert tokenizer.batch_decode(first["prompt_ids"][::4]) == [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in prompts
    ]
    ended = [ids[-1] == tokenizer.eos_token_id for ids in first["completion_ids"]]
    assert any(ended) and ended == [len(ids) < 64 or ids[-1] == 2 for ids in first["completion_ids"]]
    logs = ours.state.log_history[:2]
    assert all(abs(log["off_policy/ratio_mean"] - 1) < 1e-3 and log["off_policy/kl"] < 1e-6 for log in logs)
    assert logs[1]["servers/healthy"] == 1 and 0 < logs[0]["filter/kept_rows"]
    trl = trained(GRPOTrainer, rollouts=lambda prompts, trainer: sampled.noted.pop(0))
    assert_same_update(load(path, dtype=torch.float32), trl, ours, tolerance=2e-5)
