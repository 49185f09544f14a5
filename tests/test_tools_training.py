"""Training with tools and environments: what `DASHTrainer` logs, asks rewards for, and trains on is TRL's.

Rows have different numbers of turns, and calls that fail or do not fit.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer
from tests.scripted_turns import (
    RANDOM_CALLS,
    Judge,
    RandomTurns,
    Rows,
    add,
    fails,
    fill,
    later,
    plays,
    save_tool_model,
    user,
)
from tests.test_contract import ByTokens, check_logs, first, second
from tests.test_equivalence import TOLERANCE, compare, padded
from tests.test_tools import Counter, Echo, Mute
from tests.tiny import EOS, parameters, relative_difference, run

TOOLS = [add, later, fails, fill]
OF_ENVIRONMENTS = {"add": {"a": 1, "b": 2}, "count": {"step": 2}, "count_later": {"step": 1}, "shout": {"text": "hey"}}
LONGEST = 150  # tokens of a completion: some answers do not fit


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tool_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(model) -> dict[str, torch.Tensor]:
    return parameters(model)


def problems(count: int) -> Dataset:
    names = ["counter", "echo", "twin", "mute"]
    return Dataset.from_dict(
        {
            "prompt": [user(f"{number} + {3 * number} = ") for number in range(count)],
            "environment": [names[number % 4] for number in range(count)],
            "observed": [("text", "")[number // 4 % 2] for number in range(count)],
        }
    )


def corrects(trainer: Any) -> None:
    """As with vLLM in this process, whose log-probs are those of the script."""
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    trainer.use_vllm, trainer.vllm_mode = True, "colocate"
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, llm=SimpleNamespace(llm_engine=config))


ONE = {"environment_factory": Counter, "tools": [add]}
SEVERAL = {"environment_factory": {"counter": Counter, "twin": Counter, "echo": Echo, "mute": Mute}, "tools": [add]}
# name → (arguments of the trainer, of the script, settings)
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tools": ({"tools": TOOLS}, {}, {}),
    "tools by the model's generate": ({"tools": TOOLS}, {"generated": True}, {}),
    "one call, truncated rows are masked": (
        {"tools": TOOLS},
        {},
        {"max_tool_calling_iterations": 1, "mask_truncated_completions": True, "chat_template_kwargs": {"mark": "!"}},
    ),
    "an environment, two steps of a window": (
        ONE,
        {"calls": OF_ENVIRONMENTS},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    ),
    "environments": (SEVERAL, {"calls": OF_ENVIRONMENTS}, {}),
    "tools and a sampler's log-probs": (
        {"tools": TOOLS},
        {"noise": 0.1, "also": [corrects]},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.05},
    ),
}


def check_tools_contract(model: str, folder: Path, name: str) -> None:
    """The log, the tables, the rows, and what reward functions got, of two steps and their evaluations."""
    arguments, of_script, settings = SCENARIOS[name]
    trainers, judges, windows = [], [], []
    for kind in (ByTokens, DASHTrainer):
        judge, rows, script = Judge(), Rows(), dict(of_script)
        turns = RandomTurns(calls=script.pop("calls", RANDOM_CALLS), ends=1.0 if script.get("generated") else 0.7)
        prepare = plays(turns, rows.prepare, *script.pop("also", ()), **script)
        own = {"gradient_filter_threshold": None} if kind is DASHTrainer else {}
        defaults: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 1e-3}
        defaults |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
        defaults |= {
            "log_completions": True,
            "num_completions_to_print": 1,
            "loss_type": "dapo",
            "reward_weights": [1.0, 0.5, 1.0],
        }
        torch.manual_seed(0)
        trainers.append(
            run(
                kind,
                model,
                folder / kind.__name__,
                reward=[first, second, judge],
                in_process=True,
                dataset=problems(12),
                eval_dataset=problems(2),
                prepare=prepare,
                more=arguments,
                max_completion_length=LONGEST,
                **{**defaults, **settings, **own},
            )
        )
        judges.append(judge)
        windows.append(rows.windows)
    check_logs(trainers)
    assert any(log.get("tools/call_frequency", 0) > 0 for log in trainers[0].state.log_history)
    for one, other in zip(*(judge.asked for judge in judges), strict=True):
        assert other == one
    for one, other in ((row, ours) for pair in zip(*windows, strict=True) for row, ours in zip(*pair, strict=True)):
        assert other[:2] == one[:2]
        assert other[2] == (one[2] if one[2] is None else pytest.approx(one[2], abs=1e-5))


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_that_trl_logs_and_asks(model, tmp_path, name):
    check_tools_contract(model, tmp_path, name)


UPDATES: dict[str, dict[str, Any]] = {
    "dapo, shared prompts": {"loss_type": "dapo"},
    "dapo, nothing is dropped": {"loss_type": "dapo", "gradient_filter_threshold": None, "share_prompts": False},
    "grpo, packed": {"loss_type": "grpo", "max_tokens_per_microbatch": 300, "share_prompts": False},
    "grpo, padded": {"loss_type": "grpo", "also": padded},
    "cispo, packed and shared": {"loss_type": "cispo", "max_tokens_per_microbatch": 600, "learning_rate": 10.0},
    "dr_grpo, two passes over a window": {
        "loss_type": "dr_grpo",
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 3.0,
    },
    "a sampler's log-probs": {
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
    "beta, nothing is dropped": {"beta": 0.04, "max_steps": 2, "gradient_filter_threshold": None},
}


@pytest.mark.parametrize("name", UPDATES)
def test_the_update_is_trls(start, model, tmp_path, name):
    settings = {"learning_rate": 0.3, "more": {"tools": TOOLS}, **UPDATES[name]}
    turns = RandomTurns(calls=settings.pop("calls", RANDOM_CALLS))
    also = [settings.pop("also")] if "also" in settings else []
    script = plays(turns, *also, noise=settings.pop("noise", None))
    others = {"in_process": True, "dataset": problems(64), "prepare": script, "max_completion_length": LONGEST}
    steps, trl, dash = compare(start, model, tmp_path, **settings, **others)
    assert steps[-1][1] > 1e-4 and steps[-1][0] <= TOLERANCE
    for one, other in zip(trl.state.log_history[:-1], dash.state.log_history[:-1], strict=True):
        for figure in ("loss", "reward", "completions/mean_length", "tools/call_frequency", "tools/failure_frequency"):
            assert other.get(figure) == pytest.approx(one.get(figure), abs=1e-5), figure
    kept = dash.state.log_history[0]["filter/kept_rows"]
    assert "shared" not in name or dash.state.log_history[0]["packing/shared_tokens"] > 0
    assert (kept == 1) == ("gradient_filter_threshold" in settings) and trl.state.log_history[0]["tools/call_frequency"]


class Unmasked(GRPOTrainer):
    """Trains on the tokens of tools, too."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        found["tool_mask"] = torch.ones_like(found["tool_mask"])
        return found


def test_tokens_of_tools_would_change_the_update(start, model, tmp_path):
    """The control of the tests above."""
    settings = {"more": {"tools": TOOLS}, "in_process": True, "dataset": problems(64), "prepare": plays(RandomTurns())}
    trainers = [
        run(kind, model, tmp_path, max_completion_length=LONGEST, **settings) for kind in (Unmasked, DASHTrainer)
    ]
    assert relative_difference(start, *(parameters(trainer.model) for trainer in trainers))[0] > 1e-2


class Numbered:
    """An environment whose reward is the number of its prompt."""

    def reset(self, number: int, **columns: Any) -> None:
        self.number = number

    def get_reward(self) -> float:
        return float(self.number)


class Pairs(DASHCallback):
    """Each row's number, and the reward of its environment."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_rewards(self, args: Any, state: Any, control: Any, rollouts: Any, **kwargs: Any) -> None:
        numbers = [row["number"] for row in rollouts.examples]
        self.seen += zip(numbers, rollouts.rewards[:, -1].tolist(), strict=True)


def test_an_environment_is_asked_of_its_own_window_while_the_next_is_there(model, tmp_path):
    pairs = Pairs()
    dataset = problems(12).add_column("number", list(range(12)))
    run(
        DASHTrainer,
        model,
        tmp_path,
        in_process=True,
        dataset=dataset,
        callbacks=[pairs],
        reward=lambda completion, number: 0.0,
        more={"environment_factory": Numbered},
        prepare=plays(lambda text, asked: [[EOS]]),
        async_level=1,
        max_steps=3,
        vllm_importance_sampling_correction=False,
    )
    assert len(pairs.seen) == 48 and all(number == reward for number, reward in pairs.seen)
