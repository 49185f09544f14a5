"""`RewardRunner` alone and in a run: groups, logs, limits, and what becomes of failures. Its forms: `test_forms.py`."""

import asyncio
import gc
import os
import signal
import threading
import time
import traceback
import weakref
from collections import Counter

import pytest

from dash_trl import DASHConfig, DASHTrainer, RewardRunner
from dash_trl.rewards import Request, Score, failure_of, raise_reward_error, watch
from dash_trl.workers import ThreadCalls
from tests.tiny import prompts, refused

both_kinds = pytest.mark.parametrize("asynchronous", [False, True])


def rows(count, **columns):
    known = [{"prompt": "p", "completion": str(i), "completion_ids": [i], "number": i} for i in range(count)]
    return [{**row, **columns} for row in known]


def scores(runner, count):
    request = runner.submit(rows(count))
    request.wait()
    return request.outcomes


def test_groups_are_handed_out_in_the_order_in_which_they_are_complete():
    """Here the last one first. Scores stay at their rows, and an evaluation meanwhile has its own.

    The other function is done with all of them before.
    """
    gates = [threading.Event() for _ in range(6)]

    def score(completion, number, training):
        if training:
            gates[number // 4].wait()
        return number + 100 * training

    with RewardRunner([score, lambda completion: 0.0]) as runner:
        request = Request(runner.rewards, 24, 4)
        request.start(0, rows(24, training=True))
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
    """In a notebook, again and again."""
    called = []

    def first(solution_str, extra_info):
        called.append(solution_str)
        return extra_info["answer"]

    texts = {"prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[1], [2]]}
    with RewardRunner([first, lambda completion, answer: -answer]) as runner:
        one, other = runner.rewards
        assert one(**texts, answer=[1, 2]) == [1, 2] and one(**texts, answer=[3, 4]) == [3, 4]
        assert other(**texts, answer=[3, 4]) == [-3, -4]
    assert sorted(called) == ["a", "a", "b", "b"]


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


class Closes:
    closed = 0

    def compute_score(self, completion):
        return 0.0

    def close(self):
        self.closed += 1


def test_close_ends_what_functions_hold_once():
    reward = Closes()
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
