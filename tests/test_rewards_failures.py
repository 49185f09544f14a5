"""A failed reward unscores its row; None stays "not applicable"; a broken function stops the run."""

import math

import pytest
import torch
from datasets import Dataset

from dash_trl.rewards import FailureWatch, failure_of, raise_reward_error, watch
from tests.tiny import refused

NAN = float("nan")


def call(func, rows=4):
    return func(prompts=[""] * rows, completions=[""] * rows, completion_ids=[[]] * rows)


def test_what_a_watched_function_tells_apart():
    watched = watch(lambda completions, **kwargs: [1, None, NAN, math.inf], "mixed")
    assert call(watched) == [1.0, None, None, None]
    assert str([one.value for one in watched.outcomes]) == "[1.0, None, nan, inf]"
    assert failure_of(watched.outcomes)[0] == "failed on 2 of 4 completions; on the first of them it returned nan"


def test_a_function_that_breaks_its_contract_stops_the_run():
    """After TRL's collective, in which the other ranks are."""
    for returned, said in (([1.0, 2.0], "2 rewards for 4"), (None, "None"), (["a"] * 4, "'a'")):
        watched = watch(lambda completions, returned=returned, **kwargs: returned, "wrong")
        assert call(watched) == [None] * 4, returned
        refused(said, raise_reward_error, [watched])


def test_a_failure_outweighs_another_functions_number(caplog):
    """Rows: both scored; one not applicable; one failed; a reward model's NaN. Failures are said once."""
    first = watch(lambda completions, **kwargs: [1.0, None, NAN, 1.0], "first")
    call(first)
    model = torch.nn.Linear(1, 1)
    rewards = torch.tensor([[1.0, 0.5], [NAN, 0.5], [NAN, 0.5], [1.0, NAN]])
    failures = FailureWatch([first, model], ["first", "model"])
    failures.unscore(rewards, lambda rows: rows, counts=False)
    assert not failures.failed  # an evaluation's failures are no figure of training
    ours = failures.unscore(rewards, lambda rows: rows)
    assert failures.failed.keys() == {"first", "model"}
    assert ours.isnan().all(dim=1).tolist() == [False, False, True, True]
    assert ours[1].isnan().tolist() == [True, False]
    of_first, of_model = (record.message for record in caplog.records)
    assert "'first'" in of_first
    assert "on the first of them it returned nan. These completions (25.0% of the batch) are unscored" in of_model


def test_unscored_rows_leave_a_run_and_the_baseline(train):
    """Row 0 of each group fails; the other three keep the baseline of three. Coroutine functions are watched, too."""

    async def half_failed(completion_ids, **kwargs):
        return [NAN if i % 4 == 0 else float(i % 4 == 1) for i in range(len(completion_ids))]

    def always(completion_ids, **kwargs):
        return [0.25] * len(completion_ids)

    trainer = train(reward=[half_failed, always], scale_rewards="none")
    log = trainer.state.log_history[0]
    assert log["filter/dropped_unscored"] == 0.25 and log["filter/kept_rows"] == 0.75
    assert log["reward"] == pytest.approx(0.25 + 1 / 3, abs=1e-5)
    assert list(trainer._logs["advantages"]) == pytest.approx([0.0, 2 / 3, -1 / 3, -1 / 3] * 4)


DEAD = [NAN, NAN]
NOT_APPLICABLE = [None, None]


def batches(outcomes, elsewhere=None):
    """Batches of two rows by one function: per batch its two rewards, or the exception that it raises.

    Args:
        elsewhere: the reward of another rank's only row.
    Returns:
        How many batches passed, and the error that ended the run.
    """
    others = [] if elsewhere is None else [elsewhere]
    kinds = torch.tensor([int(math.isnan(value)) for value in others], dtype=torch.long)

    script = iter(outcomes)

    def scripted(completions, **kwargs):
        outcome = next(script)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    function = watch(scripted, "scripted")
    failures = FailureWatch([function], ["scripted"])
    for number in range(len(outcomes)):
        rewards = [NAN if value is None else value for value in call(function, rows=2)]
        try:
            failures.unscore(torch.tensor([*rewards, *others]).unsqueeze(1), lambda local: torch.cat([local, kinds]))
        except RuntimeError as error:
            return number, error
    return len(outcomes), None


def test_a_function_without_a_score_in_ten_batches_stops_the_run():
    for outcomes, passed, said in (
        ([KeyError("answer")], 0, "of the first batch. Its last failure: it failed on 2 of 2"),
        ([[0.0, 1.0], KeyError("answer"), [0.0, 1.0]], 3, None),
        ([DEAD] * 9, 9, None),
        ([DEAD] * 10, 9, "in 10 batches in a row. Its last failure: it failed on 2 of 2"),
        ([[0.0, 1.0], *[KeyError("answer")] * 10], 10, "it raised KeyError: 'answer'"),
        ([[None, -math.inf]] * 10, 9, "it failed on 1 of 2 completions; on the first of them it returned -inf"),
        ([*[DEAD] * 9, [NAN, 1.0], *[DEAD] * 9], 19, None),
        ([*[DEAD] * 9, NOT_APPLICABLE, DEAD], 10, "it returned nan"),
        ([NOT_APPLICABLE] * 20, 20, None),
        ([DEAD, *[KeyError("answer")] * 8, DEAD], 9, "it returned nan"),
    ):
        number, error = batches(outcomes)
        assert number == passed and (said or "None") in str(error), outcomes
        if error is not None:
            last = outcomes[passed]
            assert error.__cause__ is (last if isinstance(last, Exception) else None), outcomes


def test_all_ranks_decide_alike():
    """A score on another rank keeps the run alive; a failure there ends it here, too."""
    assert batches([DEAD] * 20, elsewhere=0.5) == (20, None)
    assert batches([KeyError()] * 20, elsewhere=0.5) == (20, None)  # from the first batch on
    number, error = batches([DEAD, *[NOT_APPLICABLE] * 20], elsewhere=NAN)
    assert number == 9 and "Its last failure: it failed on another rank" in str(error)


def test_every_training_begins_anew(train, caplog):
    """Twice six batches of failures are not ten. The scores of evaluations do not excuse ten in a row."""

    def dead(answer, **kwargs):
        return [1.0 if value < 0 else NAN for value in answer]

    evaluation = Dataset.from_dict({"prompt": ["1 + 2 = "] * 4, "answer": [-1] * 4})
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "gradient_accumulation_steps": 1,
        "eval_dataset": evaluation,
    }
    trainer = train(reward=dead, **settings)
    trainer.train()
    assert "No row was kept in 10" not in caplog.text
    trainer.args.max_steps = 11
    refused("'dead' failed on every completion that it applied to in 10 batches", trainer.train, error=RuntimeError)
    assert trainer.state.log_history[-1]["step"] >= 8 and "eval_reward" in str(trainer.state.log_history)


def test_windows_without_a_row_are_said_with_the_remedy(train, caplog):
    trainer = train(constant=1.0, gradient_accumulation_steps=1, max_steps=11)
    assert trainer.state.global_step == 11
    assert caplog.text.count("No row was kept in 10 generation windows in a row") == 1
    assert caplog.text.count("No row was kept in a generation window, so that nothing was learned") == 1
    assert "Of the last window's rows 100% have no signal" in caplog.text
