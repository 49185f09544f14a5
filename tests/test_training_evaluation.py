"""`eval_k`: accuracy and pass@k of a trainer's own evaluations, and the best checkpoint by them."""

import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from typing import Any

import pytest
from datasets import Dataset

from dash_trl import DASHTrainer
from dash_trl.monitoring import MetricsFileCallback
from tests.tiny import ScriptedReward, parameters, run

EVALUATION: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


def held_out(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i} - {i} = " for i in range(count)], "answer": [-1] * count})


class Marks(ScriptedReward):
    """Scores in training; in evaluations marks, which it keeps by the prompt."""

    def __init__(self, *marks: float):
        super().__init__(constant=0.3)
        self.marks, self.given = marks, defaultdict(list)

    def __call__(self, prompts, completion_ids, answer, **kwargs):
        scores = super().__call__(prompts, completion_ids, **kwargs)
        if answer[0] >= 0:
            return scores
        marks = [random.Random(str(ids)).choice(self.marks) for ids in completion_ids]
        for prompt, mark in zip(prompts, marks, strict=True):
            self.given[prompt].append(mark)
        return marks


def test_the_figures_are_those_of_the_completions(tiny_model, tmp_path):
    """7 problems with 4 completions each, 8 at a time: the last batch is shorter."""
    reward, file = Marks(0.6, 1.0, 0.5, -2.0, math.nan), tmp_path / "metrics.jsonl"
    settings = {**EVALUATION, "per_device_eval_batch_size": 8, "eval_k": [1, 3]}
    callbacks = [MetricsFileCallback(file)]
    run(DASHTrainer, tiny_model, tmp_path, reward=reward, eval_dataset=held_out(7), callbacks=callbacks, **settings)
    (found,) = [log for log in map(json.loads, file.read_text().splitlines()) if "eval_loss" in log]
    assert len(reward.given) == 7 and {len(marks) for marks in reward.given.values()} == {4}
    scored = [[mark > 0.5 for mark in marks if not math.isnan(mark)] for marks in reward.given.values()]
    assert found["eval_accuracy"] == pytest.approx(sum(map(sum, scored)) / sum(map(len, scored)))
    assert found["eval_failed"] == pytest.approx(1 - sum(map(len, scored)) / 28) and found["eval_failed"] > 0
    for k in (1, 3):
        lucky = [statistics.fmean(map(any, itertools.combinations(one, k))) for one in scored if len(one) >= k]
        assert found[f"eval_pass_at_{k}"] == pytest.approx(statistics.fmean(lucky))
    for name in ("eval_accuracy", "eval_pass_at_1", "eval_pass_at_3"):
        assert 0 <= found[f"{name}_low"] < found[name] < found[f"{name}_high"] <= 1


def test_every_function_and_data_set_has_figures_of_its_own(tiny_model, tmp_path):
    def right(completions, **columns):
        return [1.0] * len(completions)

    def unscored(completions, **columns):
        return [None] * len(completions)

    evaluated = {"easy": held_out(1), "hard": held_out(2)}
    rewards = [ScriptedReward(), right, unscored]
    trainer = run(DASHTrainer, tiny_model, tmp_path, reward=rewards, eval_dataset=evaluated, eval_k=[4], **EVALUATION)
    metrics = trainer.evaluate()
    for name in evaluated:
        assert metrics[f"eval_{name}_rewards/right/accuracy"] == metrics[f"eval_{name}_rewards/right/pass_at_4"] == 1.0
        assert math.isnan(metrics[f"eval_{name}_rewards/unscored/accuracy"])
        assert metrics[f"eval_{name}_rewards/unscored/failed"] == 1.0
        assert f"eval_{name}_accuracy" not in metrics


@pytest.mark.parametrize("settings", [{}, {"steps_per_generation": 8}])
def test_training_is_the_same_with_and_without_evaluations(tiny_model, tmp_path, settings):
    """Transformers samples. The second window of two steps is shuffled and sampled after two evaluations."""
    shared = {"in_process": True, "max_completion_length": 6, "max_steps": 3, **settings}
    evaluated = {"eval_dataset": held_out(2), "eval_k": [1], **EVALUATION}
    runs = [run(DASHTrainer, tiny_model, tmp_path, **shared, **more) for more in ({}, evaluated)]
    one, other = (parameters(trainer.model) for trainer in runs)
    assert all(value.equal(other[name]) for name, value in one.items())
    assert [log["eval_pass_at_1"] for log in runs[1].state.log_history if "eval_loss" in log]
