"""Training with tools and environments: what `DASHTrainer` logs, asks rewards for, and trains on is TRL's.

Rows have different numbers of turns, and calls that fail or do not fit.
"""

from typing import Any

import pytest

from dash_trl.distributed import Ranks
from tests.scripted_turns import (
    LONGEST,
    SCENARIOS,
    SMALL,
    TOOLS,
    RandomTurns,
    add,
    check_tools_contract,
    plays,
    problems,
    written,
)
from tests.tiny import compare, corrects, pad


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_that_trl_logs_and_asks(tool_model, tmp_path, name):
    check_tools_contract(tool_model, tmp_path, name)


UPDATES: dict[str, dict[str, Any]] = {
    "dapo, shared prompts": {},
    "grpo, packed, beta, nothing is dropped": {
        "loss_type": "grpo",
        "max_tokens_per_microbatch": 300,
        "share_prompts": False,
        "beta": 0.04,
        "max_steps": 2,
        "gradient_filter_threshold": None,
    },
    "grpo, padded": {"loss_type": "grpo", "also": [pad]},
    "cispo, packed and shared, a sampler's log-probs": {
        "loss_type": "cispo",
        "max_tokens_per_microbatch": 600,
        "learning_rate": 10.0,
        "noise": 0.1,
        "also": [corrects],
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.05,
    },
}


@pytest.mark.parametrize("name", UPDATES)
def test_the_update_is_trls(train, tool_model, name):
    settings = {"learning_rate": 0.3, "more": {"tools": TOOLS}, **UPDATES[name]}
    script = plays(RandomTurns(), *settings.pop("also", ()), noise=settings.pop("noise", None))
    others = {"in_process": True, "dataset": problems(64), "prepare": script, "max_completion_length": LONGEST}
    steps, trl, dash = compare(train, model=tool_model, **settings, **others)
    assert steps[-1][1] > 1e-4 and steps[-1][0] <= 1e-5
    for one, other in zip(trl.state.log_history[:-1], dash.state.log_history[:-1], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
    kept = dash.state.log_history[0]["filter/kept_rows"]
    assert "shared" not in name or dash.state.log_history[0]["packing/shared_tokens"] > 0
    assert (kept == 1) == ("gradient_filter_threshold" in settings) and trl.state.log_history[0]["tools/call_frequency"]


class BesideThree(Ranks):
    """Another rank has three rows."""

    def largest(self, number: int) -> int:
        return max(super().largest(number), 3)


def test_ranks_that_share_an_engine_ask_for_equally_many_rows(train, tool_model):
    """TRL cuts a rank's completions out of those of all its ranks by the number of this rank's own prompts."""
    call = written("", ("add", {"a": 1, "b": 2}))
    last = written("done")
    counts = list[int]()
    sharing = iter((1, 2))

    def counted(trainer) -> None:
        trainer.ranks = BesideThree(trainer.accelerator)
        trainer.args.vllm_tensor_parallel_size = next(sharing)
        sample = trainer._generate_single_turn

        def sampled(prompt_ids: list[list[int]], *others):
            counts.append(len(prompt_ids))
            return sample(prompt_ids, *others)

        trainer._generate_single_turn = sampled

    script = plays(lambda text, asked: [last] if asked else [call, call, last], corrects, counted)
    for _ in range(2):
        settings = {"dataset": problems(1), "more": {"tools": [add]}, **SMALL}
        train(model=tool_model, in_process=True, prepare=script, **settings)
    assert counts == [2, 1, 1, 3, 3, 3]
