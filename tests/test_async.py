"""Asynchronous rollouts on fake servers that write the optimizer step of their weights into their tokens.

So the tests compare the policy versions with the tokens themselves. `test_vllm.py` has the real servers.
"""

import re
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dash_trl.rollout import RunAhead, StaleRollouts
from dash_trl.sampling import ServerPool, WeightMismatch
from tests.fake_server import (
    FIRST,
    GROUPS,
    SECONDS,
    Clock,
    Dated,
    Watch,
    asynchronous,
    factory,
    pool_of,
    sampler_of,
    settle,
)
from tests.tiny import load, prompts, tiny_tokenizer
from tests.vllm_run import wait_until

fakes = factory(Dated)


# name → (`async_level`, settings, optimizer steps at which the windows begin)
SEMANTICS = {
    "a window per step": (0, {}, [0, 1, 2, 3]),
    "two steps per window": (1, {"gradient_accumulation_steps": 2, "steps_per_generation": 4}, [0, 2, 4, 6]),
    "two windows per step": (2, {"steps_per_generation": 2}, [0, 0, 1, 1]),
    "three iterations": (1, {"num_iterations": 3}, [0, 3, 6, 9]),
    "a window begins within a step": (1, {"steps_per_generation": 6}, [0, 1, 3, 4]),
}


@pytest.mark.parametrize("name", SEMANTICS)
def test_window_n_is_sampled_by_the_weights_with_which_window_n_minus_k_began(name, tiny_model, tmp_path, fakes):
    """Servers that answer at once: a step does not end before they have answered what may be under way.

    No step has a signal, since all completions of a group are equal: it counts, and its weights are sent.
    """
    level, settings, begins = SEMANTICS[name]
    fake = fakes()
    watch = Watch()
    groups = settings.get("steps_per_generation", GROUPS)  # of 4 rows
    last = len(begins) - 1
    watch.wait = lambda window: wait_until(lambda: len(fake.answered) >= groups * (min(window + level, last) + 1))
    steps = begins[-1] + max(1, begins[-1] - begins[-2])
    asynchronous(tiny_model, tmp_path, [fake], level, max_steps=steps, watch=watch, **settings)
    assert [window.step for window in watch.windows] == begins
    for n, window in enumerate(watch.windows):
        assert (window.tokens == begins[max(0, n - level)]).all()
        came, answered = window.tokens.T
        assert (window.believed[:, 0] == came).all() and (window.believed[:, 1] >= answered).all()
    assert len(fake.arrived) == groups * len(begins)  # nothing beyond the run's end


def test_further_rounds_of_a_window_are_of_the_newest_weights(tiny_model, tmp_path, fakes):
    """No group has signal, so that each window takes as many rounds as it may; no prompt comes twice."""
    settings = {"max_steps": 4, "max_num_gen_batches": 2, "shuffle_dataset": False}
    _, watch = asynchronous(tiny_model, tmp_path, [fakes()], 2, **settings)
    first = watch.windows[::2]
    further = watch.windows[1::2]
    assert [one.step for one in first] == [one.step for one in further] == [0, 1, 2, 3]
    assert all(one.tokens.min() >= one.step - 2 for one in first)
    assert all((one.tokens == one.step).all() for one in further)
    sampled = [prompt for one in watch.windows for prompt in dict.fromkeys(one.prompts)]
    assert len(set(sampled)) == len(sampled) == 4 * 2 * GROUPS


def test_a_row_in_flight_while_weights_are_sent_has_an_oldest_and_a_newest(tiny_model, tmp_path, fakes):
    """It is answered when the new ones have come."""
    fake = fakes()
    watch = Watch()
    load = fake.load

    def load_and_go_on(path: str) -> None:
        load(path)
        if fake.version == 2:
            fake.hold.set()

    def wait(window: int) -> None:
        if window == 0:
            wait_until(lambda: len(fake.answered) == 2 * GROUPS)
            fake.hold.clear()
        if window == 1:  # window 2 is submitted at its beginning
            wait_until(lambda: len(fake.requests) == 3 * GROUPS)

    fake.load = load_and_go_on
    watch.wait = wait
    trainer, watch = asynchronous(tiny_model, tmp_path, [fake], 1, watch=watch, max_steps=3)
    assert watch.windows[2].tokens.tolist() == watch.windows[2].believed.tolist() == [[1, 2]] * 16
    assert trainer.vllm_generation.pool.retried == 0 and len(fake.requests) == 3 * GROUPS


def test_what_is_waited_for_goes_first_then_the_windows_in_their_order(tiny_model, tmp_path, fakes):
    """A server with room for one group at a time; a callback that samples and scores for itself."""
    fake = fakes()
    own = []

    def prepare(trainer) -> None:
        trainer.vllm_generation.pool.fleet.most_sequences = 4

    class Samples(Watch):
        def on_rewards(self, args, state, control, rollouts, trainer, **kwargs):
            own.append(trainer.vllm_generation.generate([[7, 8, 9]] * 4, None, 4)[1])

    _, watch = asynchronous(tiny_model, tmp_path, [fake], 2, max_steps=3, watch=Samples(), prepare=prepare)
    assert len(own) == 3 and all(len(rows) == 4 for rows in own)
    asked = [tiny_tokenizer()(text=window.prompts)["input_ids"] for window in watch.windows]
    trained = [ids for window in asked for ids in dict.fromkeys(map(tuple, window))]
    assert [ids for ids in fake.arrived if ids != (7, 8, 9)] == trained


def test_rollouts_that_are_too_old_are_an_error_with_every_number():
    ahead = RunAhead(2)
    for step in (100, 104, 108, 112):
        ahead.begin(step, known=9)
    ahead.check(104)
    with pytest.raises(StaleRollouts) as error:
        ahead.check(103)
    window, now, oldest, level, permitted, *begun = map(int, re.findall(r"\d+", str(error.value)))
    assert (window, now, oldest, level, permitted, begun) == (3, 112, 103, 2, 104, [104, 108, 112])


# ------------------------------------------------------------------------------------------------------- the requests


@pytest.fixture
def sampler(tiny_model, tmp_path, fakes):
    """A sampler whose server, `fake`, has been given the weights."""
    fake = fakes()
    fake.config["model_config"]["max_model_len"] = 20
    fake.serve(tiny_model)
    vllm = sampler_of([fake], load(tiny_model), tmp_path, max_completion_length=8)
    vllm.sync_weights()
    vllm.fake = fake
    return vllm


def test_a_trainer_in_bf16_beside_a_server_in_float32(tiny_model, tmp_path, fakes, caplog):
    """Rounding is no mismatch, but other weights are."""
    for fault, refused in ((None, nullcontext()), ("old copies", pytest.raises(WeightMismatch, match="bfloat16"))):
        model = load(tiny_model)
        with torch.no_grad():
            model.lm_head.weight.mul_(8)  # so that rounding shows
        fake = fakes(fault=fault)
        fake.serve(tiny_model)
        with refused, caplog.at_level("INFO", "dash_trl"):
            sampler_of([fake], model.bfloat16(), tmp_path, max_completion_length=4096).sync_weights()
    assert all(caplog.text.count(one) == 2 for one in ("servers' context is 4096 tokens", "for the first time, twice"))


def requests_of(sampler, rows: list[list[int]], group: int, **kwargs) -> list[dict[str, Any]]:
    sampler.fake.requests.clear()
    sampler.generation_kwargs = kwargs
    assert [len(answers) for answers in sampler.generate(rows, None, group)] == [len(rows)] * 4
    return sampler.fake.requests


def test_equal_neighbours_are_groups_of_their_own(sampler):
    rows = [[1, 2]] * 2 + [[3]] * 8 + [[4]] * 3  # of a group on two ranks, two prompts alike, a part of a group
    groups = sorted((one["prompt"], one["n"]) for one in requests_of(sampler, rows, 4))
    assert groups == [([1, 2], 2), ([3], 4), ([3], 4), ([4], 3)]


def test_a_completion_fits_into_the_context(sampler):
    """Else the server refuses the request; a prompt that is too long alone is left for it to report."""

    def limits(*lengths: int, **kwargs) -> dict[int, int]:
        rows = [[0] * length for length in lengths]
        return {len(one["prompt"]): one["max_tokens"] for one in requests_of(sampler, rows, 1, **kwargs)}

    assert limits(12, 15, 20) == {12: 8, 15: 5, 20: 8}
    assert limits(15, 18, max_tokens=3) == {15: 3, 18: 2}


# ------------------------------------------------------------------------------------- the pool, while weights are sent


def with_weights(*fakes: Dated, **options) -> ServerPool:
    """A pool whose servers have the current weights."""
    pool = pool_of(*fakes, **{"server_timeout": SECONDS, **options})

    async def refit(server) -> int:
        return pool.fleet.version

    pool.refit = refit
    pool.wait_until_ready()
    return pool


SAMPLING = {"max_tokens": 8}


def submit(pool: ServerPool, count: int):
    return pool.submit(pool.complete([i, 5], 1, SAMPLING) for i in range(count))


def test_a_server_s_queue_and_a_weight_sync_do_not_count_as_silence(fakes, monkeypatch):
    """A server that answers one request after the other, each in two thirds of the limit."""
    fake = fakes()
    clock = Clock(monkeypatch)
    pool = with_weights(fake, server_timeout=9000.0, request_timeout=300.0)
    answer = fake.answer
    go_on = threading.Semaphore(0)

    def one_at_a_time(*arguments) -> None:
        fake.requests.append(arguments[1])
        assert go_on.acquire(timeout=SECONDS)
        answer(*arguments)

    fake.answer = one_at_a_time
    batch = submit(pool, 6)
    wait_until(lambda: len(fake.requests) == 6)
    pool.new_version(1)
    clock.now += 1000.0
    settle(pool)
    pool.weights_sent({fake.url: None})
    settle(pool)
    for left in range(5, -1, -1):
        clock.now += 200.0
        settle(pool)
        go_on.release()
        wait_until(lambda left=left: len(pool.fleet.jobs()) == left)
    assert len(pool.collect(batch)) == 6 and pool.retried == 0


def test_what_a_server_writes_with_half_loaded_weights_is_not_taken(fakes):
    """Its load fails, and it goes on with what it has; that is known when all have loaded."""
    bad = fakes()
    good = fakes()
    pool = with_weights(bad, good)
    bad.hold.clear()
    good.hold.clear()
    batch = submit(pool, 4)
    for fake in (bad, good):
        wait_until(lambda fake=fake: len(fake.requests) == 2)
    pool.new_version(1)
    bad.version = 77
    bad.hold.set()
    wait_until(lambda: len(bad.answered) == 2)
    good.version = bad.version = 1  # what comes after
    pool.weights_sent({bad.url: "500 while loading", good.url: None})
    good.hold.set()
    assert {token - FIRST for (row,), _ in pool.collect(batch) for token in row.token_ids} <= {0, 1}
    assert pool.retried == 2


def test_weights_do_not_wait_for_a_look_at_who_does_not_answer(fakes):
    alive = fakes()
    away = fakes()
    pool = with_weights(alive, away)
    alive.hold.clear()
    away.well.clear()
    batch = submit(pool, 2)
    wait_until(lambda: len(alive.requests) == 2)
    assert pool.new_version(1) == [alive.url, away.url]  # else it would be dead, since the look ends without an answer
    pool.weights_sent({alive.url: None, away.url: "away"})
    alive.hold.set()
    assert len(pool.collect(batch)) == 2


def test_stop_tokens_of_the_user_end_rows_and_unknown_log_probs_are_not_corrected(tiny_model, tmp_path, fakes):
    """All end tokens are sent to servers, whose model may know others; vLLM says −9999 for a log-prob it does not know.

    In training the second token is that of no optimizer step, in the evaluation that of one.
    """
    settings = {"generation_kwargs": {"stop_token_ids": [FIRST, FIRST + 1]}, "mask_truncated_completions": True}
    trainer, _ = asynchronous(tiny_model, tmp_path, [fake := fakes()], 0, **settings)
    logged = trainer.state.log_history[0]
    assert logged["completions/clipped_ratio"] == 0.0 and logged["completions/mean_terminated_length"] == 2.0
    assert trainer.evaluate(prompts(4))["eval_completions/clipped_ratio"] == 0.0
    ends = {FIRST, FIRST + 1, trainer.processing_class.eos_token_id}
    assert fake.requests and all({*one["stop_token_ids"]} == ends for one in fake.requests)
    trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = "token_truncate"
    fake.log_prob = -9999.0
    assert trainer.evaluate(prompts(4))["eval_sampling/importance_sampling_ratio/max"] == 1.0
