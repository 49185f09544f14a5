"""Training with tools and environments: what `DASHTrainer` logs, asks rewards for, and trains on is TRL's.

Rows have different numbers of turns, and calls that fail or do not fit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from dash_trl import DASHTrainer
from dash_trl.distributed import Ranks
from tests.scripted_turns import (
    RANDOM_CALLS,
    SMALL,
    Counter,
    Echo,
    Mute,
    RandomTurns,
    add,
    check_as_trl,
    fails,
    fill,
    later,
    plays,
    user,
    written,
)
from tests.test_equivalence import TOLERANCE, compare
from tests.tiny import corrects, pad, parameters, run

TOOLS = [add, later, fails, fill]
OF_ENVIRONMENTS = {"add": {"a": 1, "b": 2}, "count": {"step": 2}, "count_later": {"step": 1}, "shout": {"text": "hey"}}
LONGEST = 150  # tokens of a completion: some answers do not fit


@pytest.fixture(scope="module")
def start(tool_model) -> dict[str, torch.Tensor]:
    return parameters(tool_model)


def problems(count: int) -> Dataset:
    names = ["counter", "echo", "twin", "mute"]
    return Dataset.from_dict(
        {
            "prompt": [user(f"{number} + {3 * number} = ") for number in range(count)],
            "environment": [names[number % 4] for number in range(count)],
            "observed": [("text", "")[number // 4 % 2] for number in range(count)],
        }
    )


SEVERAL = {"environment_factory": {"counter": Counter, "twin": Counter, "echo": Echo, "mute": Mute}, "tools": [add]}
# name → (arguments of the trainer, of the script, settings)
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one call, truncated rows are masked": (
        {"tools": TOOLS},
        {},
        {"max_tool_calling_iterations": 1, "mask_truncated_completions": True, "chat_template_kwargs": {"mark": "!"}},
    ),
    "environments": (SEVERAL, {"calls": OF_ENVIRONMENTS}, {}),
    "tools and a sampler's log-probs": (
        {"tools": TOOLS},
        {"noise": 0.1, "also": [corrects]},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.05},
    ),
}


def check_tools_contract(model: str, folder: Path, name: str) -> None:
    """Two steps, and their evaluations."""
    arguments, of_script, settings = SCENARIOS[name]
    options = dict(of_script)
    turns, also = RandomTurns(calls=options.pop("calls", RANDOM_CALLS)), options.pop("also", ())
    defaults: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 2, "max_completion_length": LONGEST}
    defaults |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    defaults |= {"dataset": problems(12), "eval_dataset": problems(2)}
    defaults |= {"log_completions": True, "num_completions_to_print": 1}
    dash = check_as_trl(model, folder, turns, *also, more=arguments, options=options, **{**defaults, **settings})
    for prefix in ("", "eval_"):
        assert any(log.get(f"{prefix}tools/call_frequency", 0) > 0 for log in dash.log)


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_that_trl_logs_and_asks(tool_model, tmp_path, name):
    check_tools_contract(tool_model, tmp_path, name)


UPDATES: dict[str, dict[str, Any]] = {
    "dapo, shared prompts": {"loss_type": "dapo"},
    "grpo, packed, beta, nothing is dropped": {
        "loss_type": "grpo",
        "max_tokens_per_microbatch": 300,
        "share_prompts": False,
        "beta": 0.04,
        "max_steps": 2,
        "gradient_filter_threshold": None,
    },
    "grpo, padded": {"loss_type": "grpo", "also": pad},
    "cispo, packed and shared, a sampler's log-probs": {
        "loss_type": "cispo",
        "max_tokens_per_microbatch": 600,
        "learning_rate": 10.0,
        "noise": 0.1,
        "also": corrects,
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.05,
    },
    "environments, truncated rows are masked": {
        "more": SEVERAL,
        "calls": OF_ENVIRONMENTS,
        "mask_truncated_completions": True,
        "reward_weights": [5.0],
    },
}


@pytest.mark.parametrize("name", UPDATES)
def test_the_update_is_trls(start, tool_model, tmp_path, name):
    settings = {"learning_rate": 0.3, "more": {"tools": TOOLS}, **UPDATES[name]}
    turns = RandomTurns(calls=settings.pop("calls", RANDOM_CALLS))
    also = [settings.pop("also")] if "also" in settings else []
    script = plays(turns, *also, noise=settings.pop("noise", None))
    others = {"in_process": True, "dataset": problems(64), "prepare": script, "max_completion_length": LONGEST}
    steps, trl, dash = compare(start, tool_model, tmp_path, **settings, **others)
    assert steps[-1][1] > 1e-4 and steps[-1][0] <= TOLERANCE
    for one, other in zip(trl.state.log_history[:-1], dash.state.log_history[:-1], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    kept = dash.state.log_history[0]["filter/kept_rows"]
    assert "shared" not in name or dash.state.log_history[0]["packing/shared_tokens"] > 0
    assert (kept == 1) == ("gradient_filter_threshold" in settings) and trl.state.log_history[0]["tools/call_frequency"]


class BesideThree(Ranks):
    """Another rank has three rows."""

    def largest(self, number: int) -> int:
        return max(super().largest(number), 3)


def test_ranks_that_share_an_engine_ask_for_equally_many_rows(tool_model, tmp_path):
    """TRL cuts a rank's completions out of those of all its ranks by the number of this rank's own prompts."""
    call, last, counts, sharing = written("", ("add", {"a": 1, "b": 2})), written("done"), list[int](), iter((1, 2))

    def counted(trainer: Any) -> None:
        trainer.ranks, trainer.args.vllm_tensor_parallel_size = BesideThree(trainer.accelerator), next(sharing)
        sample = trainer._generate_single_turn

        def sampled(prompt_ids: list[list[int]], *others: Any) -> Any:
            counts.append(len(prompt_ids))
            return sample(prompt_ids, *others)

        trainer._generate_single_turn = sampled

    script = plays(lambda text, asked: [last] if asked else [call, call, last], corrects, counted)
    for _ in range(2):
        settings = {"dataset": problems(1), "more": {"tools": [add]}, **SMALL}
        run(DASHTrainer, tool_model, tmp_path, in_process=True, prepare=script, **settings)
    assert counts == [2, 1, 1, 3, 3, 3]
