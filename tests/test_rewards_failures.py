"""A failed reward unscores its row; None stays "not applicable"; a broken function stops the run."""

import math

import pytest
import torch

from dash_trl import DASHTrainer
from dash_trl.rewards.failures import unscore_failed, watch
from tests.tiny import run

NAN = float("nan")


def call(func, rows=4):
    return func(prompts=[""] * rows, completions=[""] * rows, completion_ids=[[]] * rows)


def test_what_a_watched_function_tells_apart():
    watched = watch(lambda completions, **kwargs: [1, None, NAN, math.inf], "mixed")
    assert call(watched) == [1.0, None, None, None]
    assert watched.failed == [False, False, True, True]


def test_an_exception_fails_the_rows_of_the_call():
    def raising(completions, **kwargs):
        raise TimeoutError("judge is away")

    watched = watch(raising, "judge")
    assert call(watched) == [None] * 4
    assert watched.failed == [True] * 4 and isinstance(watched.error, TimeoutError)


def test_failures_are_said_once(caplog):
    watched = watch(lambda completions, **kwargs: [NAN] * 4, "broken")
    with caplog.at_level("WARNING"):
        call(watched)
        call(watched)
    assert caplog.text.count("'broken' returned nan for 4 of 4 completions") == 1


@pytest.mark.parametrize("returned, said", [([1.0, 2.0], "2 rewards for 4"), (None, "None"), (["a"] * 4, "'a'")])
def test_a_function_that_breaks_its_contract_stops_the_run(returned, said):
    with pytest.raises(ValueError, match=said):
        call(watch(lambda completions, **kwargs: returned, "wrong"))


def test_a_failure_outweighs_another_functions_number():
    """Rows: both scored; one not applicable; one failed; a reward model's NaN."""
    first = watch(lambda completions, **kwargs: [1.0, None, NAN, 1.0], "first")
    call(first)
    model = torch.nn.Linear(1, 1)
    rewards = torch.tensor([[1.0, 0.5], [NAN, 0.5], [NAN, 0.5], [1.0, NAN]])
    ours = unscore_failed(rewards, [first, model], set(), lambda rows: rows)
    assert ours.isnan().all(dim=1).tolist() == [False, False, True, True]
    assert ours[1].isnan().tolist() == [True, False]


def test_unscored_rows_leave_a_run_and_the_baseline(tiny_model, tmp_path):
    """Row 0 of each group fails; the other three keep the baseline of three."""
    seen = []

    def half_failed(completion_ids, **kwargs):
        return [NAN if i % 4 == 0 else float(i % 4 == 1) for i in range(len(completion_ids))]

    def always(completion_ids, **kwargs):
        return [0.25] * len(completion_ids)

    class Watcher(DASHTrainer):
        def _sample_window(self, examples):
            window = super()._sample_window(examples)
            seen.append(window.rollouts)
            return window

    trainer = run(Watcher, tiny_model, tmp_path, reward=[half_failed, always], scale_rewards="none")
    log = trainer.state.log_history[0]
    assert log["filter/dropped_unscored"] == 0.25 and log["filter/kept_rows"] == 0.75
    assert sorted({round(a, 4) for a in seen[0].advantages.tolist()}) == [-0.3333, 0.6667]
    assert log["reward"] == pytest.approx(0.25 + 1 / 3, abs=1e-5)
    assert trainer._logs["advantages"][0] == 0.0


def test_async_functions_are_watched_too(tiny_model, tmp_path):
    async def slow(completion_ids, **kwargs):
        return [math.inf] + [float(i % 2) for i in range(1, len(completion_ids))]

    trainer = run(DASHTrainer, tiny_model, tmp_path, reward=slow)
    assert trainer.state.log_history[0]["filter/dropped_unscored"] == 1 / 16


def test_a_function_that_raises_from_the_start_stops_the_run(tiny_model, tmp_path):
    def broken(completion_ids, **kwargs):
        raise KeyError("answer")

    with pytest.raises(RuntimeError, match="'broken' raised on every completion of the first batch") as caught:
        run(DASHTrainer, tiny_model, tmp_path, reward=broken)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_raises_later_does_not(tiny_model, tmp_path):
    calls = []

    def flaky(completion_ids, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("away")
        return [float(len(ids) % 2) for ids in completion_ids]

    trainer = run(DASHTrainer, tiny_model, tmp_path, reward=flaky, max_steps=3)
    dropped = [log["filter/dropped_unscored"] for log in trainer.state.log_history[:3]]
    assert dropped == [0.0, 1.0, 0.0]
