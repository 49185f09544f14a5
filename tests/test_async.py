"""Asynchronous rollouts on fake servers that write the optimizer step of their weights into their tokens.

So the tests compare the policy versions with the tokens themselves. `test_vllm.py` has the real servers.
"""

import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.sampling import ServerGeneration, ServerPool, WeightMismatch
from tests.fake_server import Clock, Fake, factory, is_idle, keep_weights, settle
from tests.tiny import ON_GPU, prompts, refusal, run, tiny_tokenizer
from tests.vllm_run import wait_until

FIRST = 10  # the token of weights that no optimizer step has changed
SECONDS = 300.0  # that something is waited for which has to happen, on a machine however busy


class Dated(Fake):
    """A server whose completions have two tokens: its weights when the request came, and when it was answered.

    Attributes:
        requests: the requests for rollouts that came, in order.
        answered: the prompts of the requests that were answered, in order.
        version: the optimizer step that made its weights; `step` tells the current one.
        log_prob: the log-prob of every token.
    """

    def __init__(self, **options: Any):
        self.requests: list[dict[str, Any]] = []
        self.answered: list[tuple[int, ...]] = []
        self.version, self.log_prob = 0, -0.5
        self.step: Any = lambda: 0
        self.changed = threading.Condition()
        super().__init__(**options)

    @property
    def arrived(self) -> list[tuple[int, ...]]:
        return [tuple(request["prompt"]) for request in self.requests]

    def load(self, path: str) -> None:
        super().load(path)
        self.version = self.step()

    def answer(self, send: Any, request: dict[str, Any], fault: str | None) -> None:
        came = self.version
        if rollout := request["max_tokens"] > 1:  # else a trial
            self.note(self.requests, request)
            self.hold.wait(SECONDS)
        self.send_rows(send, request, [[FIRST + came, FIRST + self.version]] * request["n"], rollout)

    def send_rows(self, send: Any, request: dict[str, Any], rows: list[list[int]], rollout: bool) -> None:
        most, choices = request["max_tokens"], []
        for index, ids in enumerate(rows):
            log_probs = {"token_logprobs": [self.log_prob] * len(ids[:most])}
            choices.append({"index": index, "token_ids": ids[:most], "logprobs": log_probs, "finish_reason": "stop"})
        send(200, json.dumps({"choices": choices}).encode())
        if rollout:
            self.note(self.answered, tuple(request["prompt"]))

    def note(self, happened: list[Any], one: Any) -> int:
        with self.changed:
            happened.append(one)
            self.changed.notify_all()
            return len(happened)

    def wait_for(self, happened: Any) -> None:
        """`happened()`: a condition on `requests` and `answered`."""
        with self.changed:
            assert self.changed.wait_for(happened, SECONDS), (self.arrived, self.answered)


class Watch(DASHCallback):
    """Callback that records the tokens and policy versions of each window, and the window of each step."""

    def __init__(self) -> None:
        self.windows: list[SimpleNamespace] = []
        self.trained: list[tuple[int, int]] = []  # (optimizer steps before, window)
        self.wait: Any = lambda window: None

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        self.windows.append(
            SimpleNamespace(
                step=state.global_step,
                tokens=rollouts.completion_ids[:, :2] - FIRST,
                believed=rollouts.policy_version,
                prompts=[row["prompt"] for row in rollouts.examples],
            )
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.trained.append((state.global_step - 1, len(self.windows) - 1))
        self.wait(len(self.windows) - 1)


def asynchronous(tiny_model: str, output: Any, fakes: list[Dated], level: int, **settings: Any) -> tuple[Any, Any]:
    """Trains with fake servers, which are sent the weights; returns the trainer and the watch."""
    watch = settings.pop("watch", None) or Watch()
    prepare_more = settings.pop("prepare", lambda trainer: None)

    def prepare(trainer: Any) -> None:
        for fake in fakes:
            fake.serve(tiny_model)
            fake.step = lambda: trainer.state.global_step
        prepare_more(trainer)

    trainer = run(
        settings.pop("trainer_class", DASHTrainer),
        tiny_model,
        output,
        vllm_server_urls=[fake.url for fake in fakes],
        async_level=level,
        callbacks=[watch],
        prepare=prepare,
        vllm_importance_sampling_correction=False,
        **settings,
    )
    return trainer, watch


fakes = factory(Dated)


# (settings, optimizer steps at which the windows begin)
SEMANTICS = {
    "a window per step": ({"gradient_accumulation_steps": 4, "steps_per_generation": 4}, [0, 1, 2, 3]),
    "two steps per window": ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, [0, 2, 4, 6]),
    "two windows per step": ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, [0, 0, 1, 1]),
    "three iterations": (
        {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 3},
        [0, 3, 6, 9],
    ),
}
PAIRS = [("a window per step", 0), ("two steps per window", 1), ("two windows per step", 2), ("three iterations", 1)]


@pytest.mark.parametrize(("name", "level"), PAIRS)
def test_window_n_is_sampled_by_the_weights_with_which_window_n_minus_k_began(name, level, tiny_model, tmp_path, fakes):
    """Servers that answer at once: a step does not end before they have answered what may be under way.

    No step has a signal, since all completions of a group are equal: it counts, and its weights are sent.
    """
    settings, begins = SEMANTICS[name]
    fake, watch = fakes(), Watch()
    groups, last = settings["steps_per_generation"], len(begins) - 1  # groups of 4 rows
    watch.wait = lambda window: fake.wait_for(lambda: len(fake.answered) >= groups * (min(window + level, last) + 1))
    steps = begins[-1] + max(1, begins[-1] - begins[-2])
    asynchronous(tiny_model, tmp_path, [fake], level, max_steps=steps, watch=watch, **settings)
    assert [window.step for window in watch.windows] == begins
    for n, window in enumerate(watch.windows):
        assert (window.tokens == begins[max(0, n - level)]).all()
        came, answered = window.tokens.T
        assert (window.believed[:, 0] == came).all() and (window.believed[:, 1] >= answered).all()
    assert len(fake.arrived) == groups * len(begins)  # nothing beyond the run's end
    behind = max(before - begins[max(0, window - level)] for before, window in watch.trained)
    per_window = begins[-1] - begins[-3]  # two windows' optimizer steps
    assert behind == (level + 1) * per_window // 2 - 1 if name in ("two steps per window", "three iterations") else True


STEP = SEMANTICS["a window per step"][0]
GROUPS = 4  # of a window of these settings


def test_further_rounds_of_a_window_are_of_the_newest_weights(tiny_model, tmp_path, fakes):
    """No group has signal, so that each window takes as many rounds as it may; no prompt comes twice."""
    settings = {"max_steps": 4, "max_num_gen_batches": 2, "shuffle_dataset": False, **STEP}
    _, watch = asynchronous(tiny_model, tmp_path, [fakes()], 2, **settings)
    first, further = watch.windows[::2], watch.windows[1::2]
    assert [one.step for one in first] == [one.step for one in further] == [0, 1, 2, 3]
    assert all(one.tokens.min() >= one.step - 2 for one in first)
    assert all((one.tokens == one.step).all() for one in further)
    sampled = [prompt for one in watch.windows for prompt in dict.fromkeys(one.prompts)]
    assert len(set(sampled)) == len(sampled) == 4 * 2 * GROUPS


def test_a_row_in_flight_while_weights_are_sent_has_an_oldest_and_a_newest(tiny_model, tmp_path, fakes):
    """It is answered when the new ones have come."""
    fake, watch = fakes(), Watch()
    load = fake.load

    def load_and_go_on(path: str) -> None:
        load(path)
        if fake.version == 2:
            fake.hold.set()

    def wait(window: int) -> None:
        if window == 0:
            fake.wait_for(lambda: len(fake.answered) == 2 * GROUPS)
            fake.hold.clear()
        if window == 1:  # window 2 is submitted at its beginning
            fake.wait_for(lambda: len(fake.requests) == 3 * GROUPS)

    fake.load, watch.wait = load_and_go_on, wait
    trainer, watch = asynchronous(tiny_model, tmp_path, [fake], 1, watch=watch, max_steps=3, **STEP)
    assert watch.windows[2].tokens.tolist() == watch.windows[2].believed.tolist() == [[1, 2]] * 16
    assert trainer.vllm_generation.pool.retried == 0 and len(fake.requests) == 3 * GROUPS


def test_what_is_waited_for_goes_first_then_the_windows_in_their_order(tiny_model, tmp_path, fakes):
    """A server with room for one group at a time; a callback that samples and scores for itself."""
    fake, own = fakes(), []

    def prepare(trainer: Any) -> None:
        trainer.vllm_generation.pool.fleet.most_sequences = 4

    class Samples(Watch):
        def on_rewards(self, args, state, control, rollouts, trainer, **kwargs):
            own.append(trainer.vllm_generation.generate([[7, 8, 9]] * 4, None, 4)[1])

    _, watch = asynchronous(
        tiny_model,
        tmp_path,
        [fake],
        2,
        max_steps=3,
        watch=Samples(),
        prepare=prepare,
        **STEP,
    )
    assert len(own) == 3 and all(len(rows) == 4 for rows in own)
    asked = [tiny_tokenizer()(text=window.prompts)["input_ids"] for window in watch.windows]
    trained = [ids for window in asked for ids in dict.fromkeys(map(tuple, window))]
    assert [ids for ids in fake.arrived if ids != (7, 8, 9)] == trained


def test_a_failure_in_flight_is_raised_where_its_window_is_collected(tiny_model, tmp_path, fakes):
    """And nothing is left on the servers."""
    fake, watch = fakes(), Watch()
    trainers, answer = [], fake.answer

    def refusing(send: Any, request: dict[str, Any], fault: str | None) -> None:
        if watch.trained and request["max_tokens"] > 1:
            return send(400, b'{"error": "told to"}')
        return answer(send, request, fault)

    fake.answer = refusing
    assert "answered 400" in refusal(
        asynchronous, tiny_model, tmp_path, [fake], 1, max_steps=6, watch=watch, prepare=trainers.append, **STEP
    )
    assert [window.step for window in watch.windows] == [0, 1]  # which was sampled when window 0 was
    assert nothing_in_work(trainers[0])


def nothing_in_work(trainer: Any) -> bool:
    return is_idle(trainer.vllm_generation.pool)


# ------------------------------------------------------------------------------------------------------- the requests


@pytest.fixture(scope="module")
def sampler(tiny_model, tmp_path_factory) -> Any:
    """A sampler whose server, `fake`, has been given the weights."""
    fake = Dated()
    fake.config["model_config"]["max_model_len"] = 20
    vllm = sampler_of(fake, AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path_factory.mktemp("weights"))
    vllm.sync_weights()
    vllm.fake = fake
    yield vllm
    fake.stop()


def sampler_of(fake: Dated, model: Any, folder: Any, length: int = 8) -> Any:
    fake.serve(model.name_or_path)
    return ServerGeneration(
        [fake.url],
        model=model,
        accelerator=Accelerator(cpu=not ON_GPU),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model.name_or_path),
        weight_dir=str(folder),
        max_completion_length=length,
        end_ids=[1, 7],
    )


def test_names_that_vllm_does_not_know_are_refused_before_weights_are_sent(tiny_model, tmp_path, fakes):
    """A server that gets one has lost its old weights, and does not answer any more."""
    adapter = LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5])
    fake, model = fakes(), get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), adapter)
    said = refusal(sampler_of(fake, model, tmp_path).sync_weights)
    assert "['model.embed_tokens.token_adapter." in said and not fake.loads


def test_a_trainer_in_bf16_beside_a_server_in_float32(tiny_model, tmp_path, fakes, caplog):
    """Rounding is no mismatch, but other weights are."""
    for fault, refused in ((None, nullcontext()), ("old copies", pytest.raises(WeightMismatch, match="bfloat16"))):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        with torch.no_grad():
            model.lm_head.weight.mul_(8)  # so that rounding shows
        with refused, caplog.at_level("INFO", "dash_trl"):
            sampler_of(fakes(fault=fault), model.bfloat16(), tmp_path, length=4096).sync_weights()
    assert all(caplog.text.count(one) == 2 for one in ("servers' context is 4096 tokens", "for the first time, twice"))


def requests_of(sampler: Any, rows: list[list[int]], group: int, **kwargs: Any) -> list[dict[str, Any]]:
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

    def limits(*lengths: int, **kwargs: Any) -> dict[int, int]:
        rows = [[0] * length for length in lengths]
        return {len(one["prompt"]): one["max_tokens"] for one in requests_of(sampler, rows, 1, **kwargs)}

    assert limits(12, 15, 20) == {12: 8, 15: 5, 20: 8}
    assert limits(15, 18, max_tokens=3) == {15: 3, 18: 2}


# ------------------------------------------------------------------------------------- the pool, while weights are sent


def pool_of(fakes: list[Dated], **options: Any) -> ServerPool:
    pool = keep_weights(ServerPool([fake.url for fake in fakes], **{"server_timeout": SECONDS, **options}))
    pool.wait_until_ready()
    return pool


SAMPLING = {"max_tokens": 8}


def submit(pool: ServerPool, count: int) -> Any:
    return pool.submit(pool.complete([i, 5], 1, SAMPLING) for i in range(count))


def test_a_server_s_queue_and_a_weight_sync_do_not_count_as_silence(fakes, monkeypatch):
    """A server that answers one request after the other, each in two thirds of the limit."""
    fake, clock = fakes(), Clock(monkeypatch)
    pool = pool_of([fake], server_timeout=9000.0, request_timeout=300.0)
    answer, go_on = fake.answer, threading.Semaphore(0)

    def one_at_a_time(*arguments: Any) -> None:
        fake.note(fake.requests, arguments[1])
        assert go_on.acquire(timeout=SECONDS)
        answer(*arguments)

    fake.answer = one_at_a_time
    batch = submit(pool, 6)
    fake.wait_for(lambda: len(fake.requests) == 6)
    pool.new_version(1)
    clock.now += 1000.0
    settle(pool)
    pool.weights_sent(1, {fake.url: None})
    settle(pool)
    for left in range(5, -1, -1):
        clock.now += 200.0
        settle(pool)
        go_on.release()
        wait_until(lambda left=left: pool.fleet.running() == left)
    assert len(pool.collect(batch)) == 6 and pool.retried == 0


def test_what_a_server_writes_with_half_loaded_weights_is_not_taken(fakes):
    """Its load fails, and it goes on with what it has; that is known when all have loaded."""
    bad, good = fakes(), fakes()
    pool = pool_of([bad, good])
    bad.hold.clear()
    good.hold.clear()
    batch = submit(pool, 4)
    for fake in (bad, good):
        fake.wait_for(lambda fake=fake: len(fake.requests) == 2)
    pool.new_version(1)
    bad.version = 77
    bad.hold.set()
    bad.wait_for(lambda: len(bad.answered) == 2)
    good.version = bad.version = 1  # what comes after
    pool.weights_sent(1, {bad.url: "500 while loading", good.url: None})
    good.hold.set()
    assert {token - FIRST for (row,), _ in pool.collect(batch) for token in row.token_ids} <= {
        0,
        1,
    } and pool.retried == 2


def test_weights_do_not_wait_for_a_look_at_who_does_not_answer(fakes):
    alive, away = fakes(), fakes()
    pool = pool_of([alive, away])
    alive.hold.clear()
    away.well.clear()
    batch = submit(pool, 2)
    alive.wait_for(lambda: len(alive.requests) == 2)
    assert pool.new_version(1) == [alive.url, away.url]  # else it would be dead, since the look ends without an answer
    pool.weights_sent(1, {alive.url: None, away.url: "away"})
    alive.hold.set()
    assert len(pool.collect(batch)) == 2


def test_stop_tokens_of_the_user_end_rows_and_unknown_log_probs_are_not_corrected(tiny_model, tmp_path, fakes):
    """All end tokens are sent to servers, whose model may know others; vLLM says −9999 for a log-prob it does not know.

    In training the second token is that of no optimizer step, in the evaluation that of one.
    """
    settings = {**STEP, "generation_kwargs": {"stop_token_ids": [FIRST, FIRST + 1]}, "mask_truncated_completions": True}
    trainer, _ = asynchronous(tiny_model, tmp_path, [fake := fakes()], 0, max_steps=1, **settings)
    logged = trainer.state.log_history[0]
    assert logged["completions/clipped_ratio"] == 0.0 and logged["completions/mean_terminated_length"] == 2.0
    assert trainer.evaluate(prompts(4))["eval_completions/clipped_ratio"] == 0.0
    ends = {FIRST, FIRST + 1, trainer.processing_class.eos_token_id}
    assert fake.requests and all({*one["stop_token_ids"]} == ends for one in fake.requests)
    trainer.vllm_importance_sampling_correction, trainer.vllm_importance_sampling_mode = True, "token_truncate"
    fake.log_prob = -9999.0
    assert trainer.evaluate(prompts(4))["eval_sampling/importance_sampling_ratio/max"] == 1.0
