"""`RewardRunner` alone and in a run: groups, logs, limits, and what becomes of failures. Its forms: `test_forms.py`."""

import asyncio
import gc
import math
import os
import signal
import threading
import time
import traceback
import weakref
from collections import Counter

import pytest
from datasets import Dataset

from dash_trl import DASHConfig, DASHTrainer, RewardRunner
from dash_trl.checks import check_rewards
from dash_trl.rewards import Score, failure_of, raise_reward_error, unpack, watch
from dash_trl.workers import ThreadCalls
from tests.tiny import prompts, refusal, refused

NAN = math.nan
both_kinds = pytest.mark.parametrize("asynchronous", [False, True])


def rows(count, **columns):
    known = [{"prompt": "p", "completion": str(i), "completion_ids": [i], "number": i} for i in range(count)]
    return [{**row, **columns} for row in known]


def scores(runner, count, **settings):
    request = runner.submit(rows(count), **settings)
    request.wait()
    return request.outcomes


def test_groups_are_handed_out_in_the_order_in_which_they_are_complete():
    """Here the last one first. Scores stay at their rows, and an evaluation meanwhile has its own."""
    gates = [threading.Event() for _ in range(6)]

    def score(completion, number, training):
        if training:
            gates[number // 4].wait()
        return number + 100 * training

    with RewardRunner(score) as runner:
        request = runner.submit(rows(24, training=True), group_size=4)
        evaluation = runner.submit(rows(3, training=False))
        evaluation.wait()
        for group in reversed(range(6)):
            gates[group].set()
            assert request.next_groups() == [group]
    assert [one.value for one in request.outcomes[0]] == list(range(100, 124))
    assert [one.value for one in evaluation.outcomes[0]] == [0, 1, 2]


@both_kinds
def test_never_more_calls_than_allowed_over_all_ranks(asynchronous):
    """Nor more than a function allows. Calls wait until as many run as may."""
    running = []
    most = []

    def begins(number):
        running.append(number)
        most.append(len(running))

    def waits(completion, number):
        begins(number)
        barrier.wait(60)
        running.remove(number)

    async def awaits(completion, number):
        begins(number)
        await barrier.wait()
        running.remove(number)

    reward = awaits if asynchronous else waits
    for limit, expected in ((None, 4), (2, 2), (12, 4)):
        reward.max_concurrency = limit
        barrier = asyncio.Barrier(expected) if asynchronous else threading.Barrier(expected)
        most.clear()
        with RewardRunner(reward, max_concurrency=12) as runner:
            runner.ranks = 3
            (outcomes,) = scores(runner, 64)
        assert max(most) == expected and outcomes == [Score(None)] * 64, limit


@both_kinds
def test_starts_keep_their_distance(asynchronous):
    """10 starts at 100 per second over 2 ranks, 50 for this one."""
    started = []

    async def score_async(completion):
        started.append(time.monotonic())

    def score(completion):
        started.append(time.monotonic())

    with RewardRunner(score_async if asynchronous else score, rate_limit=100) as runner:
        runner.ranks = 2
        before = time.monotonic()
        scores(runner, 10)
    assert all(began - before >= number / 50 - 0.001 for number, began in enumerate(sorted(started)))


def test_calls_are_made_again_after_errors_that_pass(monkeypatch):
    """It fails twice with each row; with row 3 by an error of another kind. The pauses grow."""
    slept = []
    count = Counter()
    sleep = asyncio.sleep

    def note(seconds):
        slept.append(seconds)
        return sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)

    def flaky(completion, number):
        count[number] += 1
        if number == 3:
            raise KeyError("no lost connection")
        if count[number] <= 2:
            raise ConnectionError(f"attempt {count[number]}")
        return number

    for settings, attempts, last in (
        ({"retry_on": ConnectionError, "retries": 2}, 3, "Score"),
        ({"retry_on": (ConnectionError,), "retries": 1}, 2, "attempt 2"),
        ({"retries": 5}, 1, "attempt 1"),  # no error is named
    ):
        count.clear()
        slept.clear()
        with RewardRunner(flaky, **settings) as runner:
            (outcomes,) = scores(runner, 4)
        assert count == {0: attempts, 1: attempts, 2: attempts, 3: 1} and isinstance(outcomes[3], KeyError)
        for number in range(3):
            assert outcomes[number] == Score(number) if last == "Score" else str(outcomes[number]) == last
        assert len(slept) == 3 * (attempts - 1) and all(0 <= seconds <= attempts - 1 for seconds in slept)


class Centred:
    """Seed's use of `post_process_scores`: unscored ones get the mean of the others."""

    closed = 0

    def compute_score(self, solution_str, number, extra_info):
        if number == 1:
            raise KeyError("away")
        return {6: None, 9: NAN}.get(number, float(number)), {
            "of": f"{extra_info['group_uid']} {extra_info['group_size']}"
        }

    def post_process_scores(self, scores):
        known = [score for score in scores if not math.isnan(score)]
        if 8.0 in known:
            return known  # too few
        if 12.0 in known:
            raise ZeroDivisionError
        return [sum(known) / len(known) if math.isnan(score) and 2.0 in known else score for score in scores]

    def close(self):
        self.closed += 1


def test_groups_are_looked_at_once_more():
    """A group of four: one with a failure that is filled in, one where None stays, two where the method fails."""
    with RewardRunner(Centred()) as runner:
        (outcomes,) = scores(runner, 16, group_size=4)
    assert [one.value for one in outcomes[:4]] == [0.0, pytest.approx(5 / 3), 2.0, 3.0]
    assert [one.value for one in outcomes[4:8]] == [4.0, 5.0, None, 7.0]
    first, second = ({one.notes["of"] for one in outcomes[start : start + 4] if one.notes} for start in (0, 4))
    assert len(first) == len(second) == 1 and first != second and all(one.endswith(" 4") for one in first | second)
    assert all("post_process_scores returned 3 scores for 4" in str(one) for one in outcomes[8:12])
    assert all(isinstance(one, ZeroDivisionError) for one in outcomes[12:])


def test_a_rank_without_whole_groups_names_no_group():
    """Its sixth row may be of the same prompt as the first row of the next rank."""
    with RewardRunner(lambda solution_str, extra_info: len(extra_info)) as runner:
        of_group, alone = (scores(runner, 6, group_size=size)[0] for size in (3, 4))
    assert of_group[0].value == alone[5].value + 2


@pytest.mark.parametrize("settings", [{}, {"retry_on": ConnectionError}])
def test_an_interrupt_starts_nothing_more(monkeypatch, settings):
    """As Ctrl+C does, which the main thread gets while it waits."""
    started = []
    both = threading.Barrier(3)
    gate = threading.Event()

    def score(completion, number):
        started.append(number)
        both.wait()
        gate.wait()
        return 1.0

    def interrupted():
        raise KeyboardInterrupt

    with RewardRunner(score, max_concurrency=2, **settings) as runner:
        request = runner.submit(rows(50))
        monkeypatch.setattr(request, "next_groups", interrupted)
        both.wait()  # two calls have begun
        with pytest.raises(KeyboardInterrupt):
            request.wait()
        both.abort()
        gate.set()
        again = runner.submit(rows(1))
        again.wait()  # behind all that were waiting, on the same threads
    assert len(started) == 3


@both_kinds
def test_a_runner_may_be_used_in_a_process_forked_from_its_own(asynchronous):
    """As by `notebook_launcher`: the threads of the parent are not there."""

    async def score_async(completion, number):
        return number

    with RewardRunner(score_async if asynchronous else (lambda completion, number: number)) as runner:
        scores(runner, 4)
        child = os.fork()
        if not child:
            signal.alarm(120)  # ends what hangs
            scores(runner, 4)
            runner.close()
            (outcomes,) = scores(runner, 4)
            os._exit(7 if [one.value for one in outcomes] == [0, 1, 2, 3] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_runners_that_are_gone_leave_no_threads():
    async def score_async(completion):
        return 1.0

    before = set(threading.enumerate())
    for _ in range(5):
        runner = RewardRunner([score_async, lambda completion: 1.0], max_concurrency=4)
        scores(runner, 8)
    del runner
    for _ in range(600):  # a thread that is about to end may still keep the runner when garbage is collected
        gc.collect()
        if not (left := set(threading.enumerate()) - before):
            return
        left.pop().join(0.1)
    pytest.fail(f"{left} are left")


def test_a_call_outside_of_a_trainer_starts_only_its_function():
    """In a notebook, again and again, with the whole batch as one group."""
    called = []

    def first(solution_str, extra_info):
        called.append(extra_info["group_size"])
        return extra_info["answer"]

    texts = {"prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[1], [2]]}
    with RewardRunner([first, lambda completion, answer: -answer]) as runner:
        one, other = runner.rewards
        assert one(**texts, answer=[1, 2]) == [1, 2] and one(**texts, answer=[3, 4]) == [3, 4]
        assert other(**texts, answer=[3, 4]) == [-3, -4]
    assert called == [2] * 4


BATCH = {"prompts": ["p"] * 8, "completions": ["c"] * 8}


def test_what_runs_the_calls_may_fail(monkeypatch, train):
    """As a cluster that does not answer: an error of the run, on all ranks."""

    def fail(self, function, arguments, *, timeout):
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ThreadCalls, "submit", fail)
    refused("no cluster", train, error=ConnectionError, reward=RewardRunner(lambda completion: 1.0))


class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")


def test_an_error_without_a_text_stays_within_the_call():
    """It would leave TRL's call on one rank, and the others in their next collective."""

    def mute(completion):
        raise Mute

    class Odd:
        def __float__(self):
            raise Mute

    def odd(completions, **columns):
        return [Odd()] * len(completions)

    for reward in (*RewardRunner(mute).rewards, watch(odd, "odd")):
        assert reward(**BATCH, completion_ids=[[1]] * 8) == [None] * 8
        assert "raised Mute: <exception str() failed>" in failure_of(reward.outcomes)[0]
        raise_reward_error([reward])


def test_close_ends_what_functions_hold_once():
    reward = Centred()
    with RewardRunner([reward, reward]) as runner:
        pass
    assert reward.closed == 1
    (outcomes, _) = scores(runner, 1)  # and it can be used again
    assert outcomes[0].value == 0.0
    runner.close()


# ------------------------------------------------------------------------------------------------------ in a run


def flaky(completion_ids, completion):
    """Fails on a quarter of the completions."""
    if sum(completion_ids) % 4 == 0:
        raise ConnectionError("judge is away")
    return float(len(completion_ids))


def test_failures_leave_the_batch_and_are_counted(train, caplog):
    """They are unscored, though the other function scores them. And nothing holds the trainer afterwards."""
    runner = RewardRunner(flaky)
    rewards = [runner, lambda completions, **kw: [1.0] * len(completions)]
    trainer = train(reward=rewards)
    log = trainer.state.log_history[0]
    assert 0 == log["rewards/<lambda>/failed"] < log["rewards/flaky/failed"] == log["filter/dropped_unscored"] < 1
    (said,) = [record for record in caplog.records if "flaky" in record.message]
    assert "raised ConnectionError: judge is away. These completions (" in said.message
    assert [one.name for one in traceback.extract_tb(said.exc_info[2])] == ["scored", "flaky"]
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_mistakes_are_said_before_the_model_is_loaded(unloadable, tiny_model, tmp_path):
    refused(
        "asks for 'anwser', but it can get only",
        DASHTrainer,
        model=tiny_model,
        reward_funcs=lambda completion, anwser: 1.0,
        args=DASHConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=4),
        train_dataset=prompts(16),
    )


def test_post_process_scores_needs_whole_groups():
    """As where two processes share a group."""
    args = DASHConfig("out", use_cpu=True, bf16=False, per_device_train_batch_size=6, num_generations=2)
    args.num_generations = 4
    refused(
        r"whole groups, but a process has 6 completions .* is not a multiple of num",
        check_rewards,
        unpack(Centred()),
        args,
        {},
        False,
    )
    args.num_generations = 2
    args.num_generations_eval = 4
    args.per_device_eval_batch_size = 2
    assert "2 completions (per_device_eval_batch_size), which is not a multiple of" in refusal(
        check_rewards, unpack(Centred()), args, {"eval_dataset": Dataset.from_dict({"number": [1]})}, False
    )
