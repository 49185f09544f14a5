"""`RewardAgent` in a run and alone: forms, groups, logs, limits, and what becomes of failures."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time

import pytest
from datasets import Dataset

from dash_trl import DASHTrainer, RewardAgent
from dash_trl.rewards import Score, form_of, read_score
from tests.tiny import run

NAN = math.nan
COLUMNS = {"prompt": ["1 + 2 = ", "3 + 4 = "] * 16, "answer": [3, 7] * 16, "level": ["easy", "hard"] * 16}


def completion_length(completion_ids):
    return float(len(completion_ids))


# What each form gets is written down row by row and compared with what TRL hands to a function of its own form.


def trls(completions, answer, **kwargs):
    return [float(len(text) + gold) for text, gold in zip(completions, answer, strict=True)]


async def trls_async(prompts, completions, answer, **kwargs):
    await asyncio.sleep(0)
    return trls(completions, answer)


def per_sample(completion, answer):
    return len(completion) + answer


def all_columns(completion, **columns):
    assert set(columns) == {"prompt", "completion_ids", "answer", "level"}
    return len(completion) + columns["answer"], {"hard": columns["level"] == "hard"}


async def per_sample_async(answer, completion):
    await asyncio.sleep(random.random() / 100)
    return {"score": len(completion) + answer, "ids": 1}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source is None and extra_info["level"] in ("easy", "hard") and "completion" not in extra_info
    return len(solution_str) + ground_truth, extra_info["prompt"], "because"


class Stateful:
    def __init__(self):
        self.seen = []

    def compute_score(self, completion, answer):
        return len(completion) + answer

    def post_process_scores(self, scores):
        self.seen.append(scores)
        return scores


FORMS = [trls, trls_async, per_sample, all_columns, per_sample_async, compute_score, Stateful, Stateful()]


def test_every_form_gets_its_own_rows(tiny_model, tmp_path):
    """The same rewards by every form, for other completions and answers in each row."""
    rewards = []

    class Watched(DASHTrainer):
        def _calculate_rewards(self, *args):
            rewards.append(super()._calculate_rewards(*args))
            return rewards[-1]

    settings = {"max_steps": 2, "log_completions": True}
    reference = [trls]
    trainer = run(
        Watched, tiny_model, tmp_path, reward=[*reference, RewardAgent(FORMS)], dataset=Dataset.from_dict(COLUMNS), **settings
    )
    assert len(rewards) == 2 and rewards[0][:, 0].unique().numel() > 2
    for batch in rewards:
        assert (batch == batch[:, :1]).all()
    seen = FORMS[-1].seen
    assert [len(scores) for scores in seen] == [trainer.num_generations] * len(seen)
    logged = trainer.state.log_history[0]
    assert logged["rewards/per_sample_async/ids"] == 1 and 0 <= logged["rewards/all_columns/hard"] <= 1
    extra = trainer._logs["extra"]
    assert set(extra["compute_score/prompt"]) == set(COLUMNS["prompt"])
    assert set(extra["compute_score/explanation"]) == {"because"}
