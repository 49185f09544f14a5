"""`RewardAgent` in a run and alone: forms, groups, logs, limits, and what becomes of failures."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import sys
import threading
import time
import weakref

import pytest
from datasets import Dataset

from dash_trl import DASHConfig, DASHTrainer, RewardAgent
from dash_trl.checks import check_rewards
from dash_trl.rewards import Score, raise_mistakes, unpack
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
        Watched,
        tiny_model,
        tmp_path,
        reward=[*reference, RewardAgent(FORMS)],
        dataset=Dataset.from_dict(COLUMNS),
        **settings,
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


# ------------------------------------------------------------------------------------------------------ alone


def rows(count, **columns):
    known = [{"prompt": "p", "completion": str(i), "completion_ids": [i], "number": i} for i in range(count)]
    return [{**row, **columns} for row in known]


def scores(agent, count, **settings):
    request = agent.submit(rows(count), **settings)
    request.wait()
    return request.outcomes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_scores_that_come_in_any_order_stay_at_their_rows(asynchronous):
    """The first row comes last: each waits for the one after it. A group is handed out when its own rows are there."""
    count, order = 24, [24]

    def blocking(completion, number):
        while order[-1] != number + 1:
            time.sleep(0.001)
        order.append(number)
        return number

    async def waiting(completion, number):
        while order[-1] != number + 1:
            await asyncio.sleep(0)
        return blocking(completion, number)

    with RewardAgent([waiting if asynchronous else blocking]) as agent:
        request = agent.submit(rows(count), group_size=4)
        groups = []
        while len(groups) < 6:
            groups += request.next_groups()
    assert groups == [5, 4, 3, 2, 1, 0]
    assert [one.value for one in request.outcomes[0]] == list(range(count))


def test_two_batches_at_once_do_not_meet():
    """An evaluation may score while rewards of training are out."""
    gate = threading.Event()

    def score(completion, number, late):
        if late:
            gate.wait()
        return number + 100 * late

    with RewardAgent(score) as agent:
        training = agent.submit(rows(8, late=True), group_size=4)
        evaluation = agent.submit(rows(3, late=False))
        evaluation.wait()
        gate.set()
        training.wait()
    assert [one.value for one in evaluation.outcomes[0]] == [0, 1, 2]
    assert [one.value for one in training.outcomes[0]] == [100, 101, 102, 103, 104, 105, 106, 107]


def test_what_fails_takes_nothing_along():
    """Each row has its own score, or its own reason."""

    def flaky(completion, number):
        if number == 1:
            raise KeyError("answer")
        if number == 2:
            threading.Event().wait()  # for ever
        if number == 5:
            raise SystemExit
        return {3: "wrong", 4: NAN}.get(number, number)

    with RewardAgent(flaky, timeout=0.2) as agent:
        (outcomes,) = scores(agent, 8, group_size=4)
    kinds = [type(one) for one in outcomes]
    assert kinds == [Score, KeyError, TimeoutError, ValueError, Score, SystemExit, Score, Score]
    assert [outcomes[i].value for i in (0, 6, 7)] == [0, 6, 7] and math.isnan(outcomes[4].value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_never_more_calls_than_allowed_over_all_ranks(asynchronous):
    """Nor more than an object allows."""
    running, most = [], []

    class Waits:
        max_concurrency = None

        def compute_score(self, completion, number):
            running.append(number)
            time.sleep(0.002)
            most.append(len(running))
            running.remove(number)
            return 1.0

    class Awaits(Waits):
        async def compute_score(self, completion, number):
            running.append(number)
            await asyncio.sleep(0.002)
            most.append(len(running))
            running.remove(number)
            return 1.0

    for limit, expected in ((None, 4), (2, 2), (12, 4)):
        reward = Awaits() if asynchronous else Waits()
        reward.max_concurrency = limit
        most.clear()
        with RewardAgent(reward, max_concurrency=12) as agent:
            agent.ranks = 3
            (outcomes,) = scores(agent, 64)
        assert max(most) == expected and all(one.value == 1 for one in outcomes)


def test_starts_keep_their_distance():
    """20 starts at 100 per second over 2 ranks, 50 for this one: 0.38 s at the least; the clock may only add to it."""
    starts = []
    with RewardAgent(lambda completion: starts.append(time.monotonic()), rate_limit=100) as agent:
        agent.ranks = 2
        scores(agent, 20)
    assert sorted(starts)[-1] - min(starts) >= 0.36


class Attempts:
    """Fails twice with each row, once with an error of another kind in row 3."""

    def __init__(self):
        self.count = {}

    def compute_score(self, completion, number):
        self.count[number] = self.count.get(number, 0) + 1
        if number == 3:
            raise KeyError("not transient")
        if self.count[number] <= 2:
            raise ConnectionError(f"attempt {self.count[number]}")
        return number


def test_calls_are_made_again_after_errors_that_pass(monkeypatch):
    monkeypatch.setattr("dash_trl.workers.retries.LONGEST_PAUSE", 0.01)
    attempts = Attempts()
    with RewardAgent(attempts, transient=ConnectionError, retries=2) as agent:
        (outcomes,) = scores(agent, 5)
    assert attempts.count == {0: 3, 1: 3, 2: 3, 3: 1, 4: 3}
    assert isinstance(outcomes[3], KeyError) and [outcomes[i].value for i in (0, 1, 2, 4)] == [0, 1, 2, 4]
    attempts = Attempts()
    with RewardAgent(attempts, transient=ConnectionError, retries=1) as agent:
        (outcomes,) = scores(agent, 1)
    assert str(outcomes[0]) == "attempt 2" and attempts.count == {0: 2}
    attempts = Attempts()
    with RewardAgent(attempts, retries=5) as agent:  # no error is named
        scores(agent, 3)
    assert attempts.count == {0: 1, 1: 1, 2: 1}


class Centred:
    """Seed's use of `post_process_scores`: unscored ones get the mean of the others."""

    closed = 0

    def compute_score(self, completion, number):
        if number == 1:
            raise KeyError("away")
        return None if number == 6 else float(number)

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

    class Short(Centred):
        def compute_score(self, completion, number):
            return math.nan if number == 9 else super().compute_score(completion, number)

    with RewardAgent(Short()) as agent:
        (outcomes,) = scores(agent, 16, group_size=4)
    assert [one.value for one in outcomes[:4]] == [0.0, pytest.approx(5 / 3), 2.0, 3.0]
    assert [one.value for one in outcomes[4:8]] == [4.0, 5.0, None, 7.0]
    assert all("post_process_scores returned 3 scores for 4" in str(one) for one in outcomes[8:12])
    assert all(isinstance(one, ZeroDivisionError) for one in outcomes[12:])


class Unreadable:
    def __repr__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("returned", [(0.5, {"found": 10**400}), Unreadable(), (1.0, {"a": Unreadable()}), [10**400]])
def test_what_cannot_be_read_is_unscored(returned):
    with RewardAgent(lambda completion: returned) as agent:
        (outcomes,) = scores(agent, 3)
    assert all(isinstance(one, Exception) for one in outcomes)


def test_a_function_that_exits_takes_nothing_along():
    """Nor where calls may be made again."""

    def exits(completion, number):
        return sys.exit() if number == 1 else 1.0

    with RewardAgent(exits, transient=(ConnectionError,)) as agent:
        (outcomes,) = scores(agent, 8)
    assert [type(one) for one in outcomes] == [SystemExit if i == 1 else Score for i in range(8)]


def test_cancelled_calls_with_retries_are_not_started():
    started, gate = [], threading.Event()

    def score(completion, number):
        started.append(number)
        gate.wait()
        return 1.0

    with RewardAgent(score, max_concurrency=2, transient=ConnectionError) as agent:
        request = agent.submit(rows(50))
        while len(started) < 2:
            time.sleep(0.01)
        request.cancel()
        gate.set()
        agent.submit(rows(1)).wait()
    assert len(started) <= 3


def test_agents_that_are_gone_leave_no_threads():
    def count():
        return sum("dash_trl" in one.name for one in threading.enumerate())

    async def score_async(completion):
        return 1.0

    before = count()
    for _ in range(5):
        agent = RewardAgent([score_async, lambda completion: 1.0], max_concurrency=4)
        scores(agent, 8)
    del agent
    gc.collect()
    for _ in range(300):
        if count() <= before:
            break
        time.sleep(0.02)
    assert count() <= before


def test_a_trainer_is_let_go_of(tiny_model, tmp_path):
    agent = RewardAgent(lambda completion: 1.0)
    trainer = weakref.ref(run(DASHTrainer, tiny_model, tmp_path, reward=agent))
    gc.collect()
    assert trainer() is None
    assert agent.rewards[0].group_size() == 0


def test_the_same_completions_once_more():
    """In a notebook; TRL makes new lists."""
    first, second = (lambda completion, answer: answer), (lambda completion, answer: -answer)
    agent = RewardAgent([first, second])
    texts = {"prompts": ["p", "p"], "completions": ["a", "b"], "completion_ids": [[1], [2]]}
    one, other = agent.rewards
    assert one(**texts, answer=[1, 2]) == [1, 2] and one(**texts, answer=[3, 4]) == [3, 4]
    assert other(**texts, answer=[3, 4]) == [-3, -4]
    agent.close()


BATCH = {"prompts": ["p"] * 8, "completions": ["c"] * 8, "completion_ids": [[1]] * 8}


def test_what_runs_the_calls_may_fail(monkeypatch):
    """As a cluster that does not answer: an error of the run, on all ranks."""

    def fail(self, calls):
        raise ConnectionError("no cluster")

    monkeypatch.setattr("dash_trl.workers.ThreadCalls.submit", fail)
    (reward,) = RewardAgent(lambda completion: 1.0).rewards
    assert reward(**BATCH) == [None] * 8 and reward.failed == [True] * 8
    with pytest.raises(ConnectionError, match="no cluster"):
        raise_mistakes([reward])


def test_close_ends_what_functions_hold_once():
    reward = Centred()
    with RewardAgent([reward, reward]) as agent:
        pass
    assert reward.closed == 1
    (outcomes, _) = scores(agent, 1)  # and it can be used again
    assert outcomes[0].value == 0.0
    agent.close()


def test_hanging_calls_are_replaced_until_there_are_too_many(monkeypatch):
    monkeypatch.setattr("dash_trl.workers.threads.MOST_ABANDONED", 6)

    def hangs(completion, number):
        if number % 3 == 0:
            threading.Event().wait()
        return number

    agent = RewardAgent(hangs, timeout=0.1, max_concurrency=2)
    (outcomes,) = scores(agent, 12)
    assert [isinstance(one, TimeoutError) for one in outcomes] == [i % 3 == 0 for i in range(12)]
    (outcomes,) = scores(agent, 12)
    assert "6 calls hang, so that no more are made" in str(outcomes[-1])


def test_an_interrupt_starts_nothing_more(monkeypatch):
    """As Ctrl+C does, which the main thread gets while it waits."""
    started, gate = [], threading.Event()

    def score(completion, number):
        started.append(number)
        gate.wait()
        return 1.0

    agent = RewardAgent(score, max_concurrency=2)
    request = agent.submit(rows(50))

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(request, "next_groups", interrupted)
    with pytest.raises(KeyboardInterrupt):
        request.wait()
    gate.set()
    again = agent.submit(rows(1))
    again.wait()  # behind all that were waiting, on the same threads
    assert len(started) <= 3
    agent.close()


# ------------------------------------------------------------------------------------------------------ in a run


def test_failures_leave_the_batch_and_are_counted(tiny_model, tmp_path, caplog):
    """A quarter of the completions fails: unscored, though the other function scores them."""

    def flaky(completion_ids, completion):
        if sum(completion_ids) % 4 == 0:
            raise ConnectionError("judge is away")
        return float(len(completion_ids))

    failing = []

    class Watcher(DASHTrainer):
        def _new_window(self, examples):
            window = super()._new_window(examples)
            failing.append([sum(ids[mask.bool()].tolist()) % 4 == 0 for ids, mask in zip(*self.sampled, strict=True)])
            return window

        def _reward(self, rollouts):
            self.sampled = rollouts.completion_ids, rollouts.completion_mask
            scored = super()._reward(rollouts)
            self.unscored = (~scored.scored).tolist()
            return scored

    trainer = run(
        Watcher, tiny_model, tmp_path, reward=[RewardAgent(flaky), lambda completions, **kw: [1.0] * len(completions)]
    )
    assert trainer.unscored == failing[0] and 0 < sum(failing[0]) < len(failing[0])
    log = trainer.state.log_history[0]
    assert log["rewards/flaky/failed"] == log["filter/dropped_unscored"] == sum(failing[0]) / len(failing[0])
    (said,) = [record for record in caplog.records if "flaky" in record.message]
    assert "raised ConnectionError: judge is away" in said.message and said.exc_info


def test_the_first_failure_may_end_the_run(tiny_model, tmp_path):
    def flaky(completion, completion_ids):
        if sum(completion_ids) % 4 == 0:
            raise ConnectionError("judge is away")
        return 1.0

    with pytest.raises(
        RuntimeError, match=r"'flaky' failed on \d+ of 16.*judge is away \(on_error='raise'\)"
    ) as caught:
        run(DASHTrainer, tiny_model, tmp_path, reward=RewardAgent(flaky, on_error="raise"))
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_function_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr("dash_trl.workers.threads.MOST_ABANDONED", 4)

    def hangs(completion):
        threading.Event().wait()

    (reward,) = RewardAgent(hangs, timeout=0.05, max_concurrency=4).rewards
    assert reward(**BATCH) == [None] * 8
    with pytest.raises(RuntimeError, match=r"'hangs' hangs: 4 calls hang.*backend='process'"):
        raise_mistakes([reward])


def test_a_batch_function_that_returns_no_list_is_the_users_mistake():
    def one(completions, **kwargs):
        return 1.0

    (reward,) = RewardAgent(one).rewards
    assert reward(**BATCH) == [None] * 8
    with pytest.raises(ValueError, match="'one' returned 1.0, not a list of numbers"):
        raise_mistakes([reward])


def test_trls_logs_are_written_on_the_main_thread(tiny_model, tmp_path):
    """By a function that is run on another one."""
    threads = []

    def logs(completions, log_extra, log_metric, **kwargs):
        threads.append(threading.current_thread())
        log_metric("length", 3.0)
        log_extra("text", ["so"] * len(completions))
        return [1.0] * len(completions)

    class Watcher(DASHTrainer):
        def _log_metric(self, name, value):
            threads.append(threading.current_thread())
            super()._log_metric(name, value)

    trainer = run(Watcher, tiny_model, tmp_path, reward=RewardAgent(logs))
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()
    assert trainer.state.log_history[0]["length"] == 3.0 and trainer._logs["extra"]["text"][0] == "so"


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completion, anwser: 1.0, "asks for 'anwser', but the data set has the columns"),
        (lambda text: 1.0, "none of the forms"),
    ],
)
def test_mistakes_are_said_before_the_model_is_loaded(unloadable, tiny_model, tmp_path, reward, message):
    with pytest.raises(ValueError, match=message):
        DASHTrainer(
            model=tiny_model,
            reward_funcs=reward,
            args=DASHConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=4),
            train_dataset=Dataset.from_dict({**COLUMNS, "number": [1] * 32}),
        )


def test_post_process_scores_needs_whole_groups():
    """As where two processes share a group."""
    args = DASHConfig("out", use_cpu=True, bf16=False, per_device_train_batch_size=6, num_generations=2)
    args.num_generations = 4
    with pytest.raises(ValueError, match=r"whole groups, but a process has 6 completions .* no multiple of num_gen"):
        check_rewards(unpack(Centred()), args, None, None)
    args.num_generations, args.num_generations_eval, args.per_device_eval_batch_size = 2, 4, 2
    with pytest.raises(ValueError, match=r"2 completions \(per_device_eval_batch_size\), no multiple of num_gen"):
        check_rewards(unpack(Centred()), args, None, Dataset.from_dict({"number": [1]}))
