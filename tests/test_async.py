"""Asynchronous rollouts on fake servers that write the version of their weights into their tokens.

So the tests compare the policy versions with the tokens themselves. `test_vllm.py` has the real servers.
"""

import asyncio
import json
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.sampling import ServerPool, VLLMPool
from dash_trl.sampling.server import ServerError
from dash_trl.sampling.weights import Snapshot, WeightSync
from tests.fake_server import Fake, factory
from tests.tiny import ON_GPU, prompts, run, tiny_tokenizer
from tests.vllm_run import wait_until

FIRST = 10  # the token of version 0
SECONDS = 60.0  # that something is waited for which has to happen


class Dated(Fake):
    """A server whose completions have two tokens: the weight version when the request came, and when it was answered.

    Attributes:
        arrived: the prompts of the requests that came, in order.
        answered: the prompts of the requests that were answered, in order.
        log_prob: the log-prob of every token.
        hold: an event; no request is answered while it is cleared.
    """

    def __init__(self, **options: Any):
        self.arrived: list[tuple[int, ...]] = []
        self.answered: list[tuple[int, ...]] = []
        self.version, self.log_prob = 0, -0.5
        self.changed = threading.Condition()
        self.hold = threading.Event()
        self.hold.set()
        super().__init__(**options)

    def next_fault(self, first: int) -> None:
        return None

    def answer(self, send: Any, request: dict[str, Any], fault: str | None) -> None:
        came, prompt = self.version, tuple(request["prompt"])
        rollout = "prompt_logprobs" not in request and request["max_tokens"] > 1  # else a trial or a score
        if rollout:
            self._note(self.arrived, prompt)
            self.hold.wait(SECONDS)
        self.send_rows(send, request, [[FIRST + came, FIRST + self.version]] * request["n"], rollout)

    def send_rows(self, send: Any, request: dict[str, Any], rows: list[list[int]], rollout: bool) -> None:
        most, choices = request["max_tokens"], []
        for index, ids in enumerate(rows):
            log_probs = {"token_logprobs": [self.log_prob] * len(ids[:most])}
            choices.append({"index": index, "token_ids": ids[:most], "logprobs": log_probs, "finish_reason": "stop"})
        send(200, json.dumps({"choices": choices}).encode())
        if rollout:
            self._note(self.answered, tuple(request["prompt"]))

    def _note(self, prompts: list[tuple[int, ...]], prompt: tuple[int, ...]) -> None:
        with self.changed:
            prompts.append(prompt)
            self.changed.notify_all()

    def stop(self) -> None:
        self.hold.set()
        super().stop()

    def wait_for(self, happened: Any) -> None:
        """`happened()`: a condition on `arrived` and `answered`."""
        with self.changed:
            assert self.changed.wait_for(happened, SECONDS), (self.arrived, self.answered)


class DatedWeights:
    """Replaces the transfer of weights: only sends the version. `steps` is version → optimizer steps at this time."""

    dtype = torch.float32

    def __init__(self, trainer: Any, fakes: list[Dated]):
        self.trainer, self.fakes = trainer, {fake.url: fake for fake in fakes}
        self.steps: dict[int, int] = {}

    def send(self, parameters: Any, version: int, on_each: Any) -> tuple[Snapshot, dict[str, None]]:
        self.steps[version] = self.trainer.state.global_step
        snapshot = Snapshot(version, f"run-{version}", 0, "nowhere")

        async def load(server: Any) -> None:
            await server.load_weights("nowhere", snapshot.tag)
            self.fakes[server.url].version = version

        return snapshot, dict.fromkeys(on_each(load))

    async def refit(self, server: Any, snapshot: Snapshot) -> int:
        self.fakes[server.url].version = snapshot.version
        return snapshot.version


class Watch(DASHCallback):
    """Callback that records the tokens and policy versions of each window, and the window of each step."""

    def __init__(self) -> None:
        self.windows: list[SimpleNamespace] = []
        self.trained: list[tuple[int, int]] = []  # (optimizer steps before, window)
        self.wait: Any = lambda window: None

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        tokens = rollouts.completion_ids[:, :2] - FIRST
        self.windows.append(
            SimpleNamespace(
                step=state.global_step,
                tokens=tokens,
                believed=rollouts.policy_version,
                prompts=[row["prompt"] for row in rollouts.examples],
            )
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.trained.append((state.global_step - 1, len(self.windows) - 1))
        self.wait(len(self.windows) - 1)


def asynchronous(tiny_model: str, output: Any, fakes: list[Dated], level: int, **settings: Any) -> tuple[Any, Any, Any]:
    """Trains with fake servers; returns the trainer, the watch, and version → optimizer steps."""
    watch = settings.pop("watch", None) or Watch()
    weights: list[DatedWeights] = []
    prepare_more = settings.pop("prepare", lambda trainer: None)

    def prepare(trainer: Any) -> None:
        vllm = trainer.vllm_generation
        weights.append(DatedWeights(trainer, fakes))
        vllm._sync = WeightSync(vllm.pool, vllm.ranks, weights[0], vllm.model, 300, vllm._gather)
        vllm._sync._proven = True
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
    return trainer, watch, weights[0].steps


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
PAIRS = [
    *(("a window per step", 0), ("two steps per window", 1), ("two windows per step", 2), ("three iterations", 1)),
]
REST = [
    pytest.param(name, level, marks=pytest.mark.exhaustive)
    for name in SEMANTICS
    for level in (0, 1, 2)
    if (name, level) not in PAIRS
]


@pytest.mark.parametrize(("name", "level"), PAIRS + REST)
def test_window_n_is_sampled_by_the_weights_with_which_window_n_minus_k_began(
    name, level, tiny_model, tmp_path, fakes, monkeypatch
):
    """Servers that answer at once: a step does not end before they have answered what may be under way.

    No step has a signal, since all completions of a group are equal: it counts, and its weights are sent. A window is
    tokenized once, since a chat template may tell the time: what was sampled for has to be what is trained on.
    """
    tokenize, calls = GRPOTrainer._tokenize_prompts, []

    def telling_the_time(self: Any, prompts: list[str]) -> tuple:
        calls.append(prompts)
        return tokenize(self, [f"{len(calls)} {prompt}" for prompt in prompts])

    monkeypatch.setattr(GRPOTrainer, "_tokenize_prompts", telling_the_time)
    settings, begins = SEMANTICS[name]
    fake, watch = fakes(), Watch()
    groups = settings["steps_per_generation"]  # of 4 rows
    under_way = [groups * (min(window + level, len(begins) - 1) + 1) for window in range(len(begins))]
    watch.wait = lambda window: fake.wait_for(lambda: len(fake.answered) >= under_way[window])
    steps = begins[-1] + max(1, begins[-1] - begins[-2])
    _, watch, versions = asynchronous(tiny_model, tmp_path, [fake], level, max_steps=steps, watch=watch, **settings)
    assert [window.step for window in watch.windows] == begins and len(calls) == len(begins)
    for n, window in enumerate(watch.windows):
        sampled = torch.tensor([[versions[version] for version in row] for row in window.tokens.tolist()])
        assert (sampled == begins[max(0, n - level)]).all()
        assert (window.believed[:, 0] == sampled[:, 0]).all() and (window.believed[:, 1] >= sampled[:, 1]).all()
    assert len(fake.arrived) == groups * len(begins)  # nothing beyond the run's end
    behind = max(before - begins[max(0, window - level)] for before, window in watch.trained)
    per_window = begins[-1] - begins[-3]  # two windows' optimizer steps
    assert behind == (level + 1) * per_window // 2 - 1 if name in ("two steps per window", "three iterations") else True


@pytest.fixture
def clock(monkeypatch):
    """The pool's: `clock.now` is added to it. The pool looks at it all the time."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("dash_trl.sampling.pool.TICK", 0.01)
    own_time = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.now)
    monkeypatch.setattr("dash_trl.sampling.pool.time", own_time)
    return clock


STEP = SEMANTICS["a window per step"][0]
GROUPS = 4  # of a window of these settings


def test_a_row_in_flight_while_weights_are_sent_has_an_oldest_and_a_newest(tiny_model, tmp_path, fakes, clock):
    """It is answered when the new ones have come; its limit does not run meanwhile."""
    fake, watch = fakes(), Watch()

    def prepare(trainer: Any) -> None:
        vllm = trainer.vllm_generation
        weights, send = vllm._sync.weights, vllm._sync.weights.send

        def send_and_go_on(parameters: Any, version: int, on_each: Any) -> Any:
            if version == 3:
                fake.wait_for(lambda: len(fake.arrived) == 3 * GROUPS)
                clock.now += 1000.0
                wait_until(lambda: vllm.pool._heard[fake.url] >= 1000.0)
            sent = send(parameters, version, on_each)
            if version == 3:
                fake.hold.set()
            return sent

        weights.send = send_and_go_on

    def hold(window: int) -> None:  # from when window 2 is submitted, at the beginning of window 1
        if window == 1:
            fake.wait_for(lambda: len(fake.arrived) == 3 * GROUPS)

    def when_sampled(window: int) -> None:
        fake.wait_for(lambda: len(fake.answered) == 2 * GROUPS)
        fake.hold.clear()

    watch.wait = lambda window: when_sampled(window) if window == 0 else hold(window)
    settings = {"vllm_request_timeout": 100.0, "max_steps": 3, **STEP}
    trainer, watch, versions = asynchronous(tiny_model, tmp_path, [fake], 1, watch=watch, prepare=prepare, **settings)
    last = watch.windows[2]
    assert [[versions[one] for one in row] for row in last.tokens.tolist()] == [[1, 2]] * 16
    assert last.believed.tolist() == [[1, 2]] * 16
    assert trainer.vllm_generation.pool.retried == 0 and len(fake.arrived) == 3 * GROUPS


def test_what_is_waited_for_goes_first_then_the_windows_in_their_order(tiny_model, tmp_path, fakes):
    """A server with room for one group at a time; a callback that samples and scores for itself; an evaluation."""
    fake, own, held_out = fakes(), [], prompts(80).select(range(76, 80))

    def prepare(trainer: Any) -> None:
        trainer.vllm_generation.pool.fleet.most_sequences = 4

    class Samples(Watch):
        def on_rewards(self, args, state, control, rollouts, trainer, **kwargs):
            own.append(trainer.vllm_generation.generate([[7, 8, 9]] * 4, None, 4)[1])

    _, watch, _ = asynchronous(
        tiny_model,
        tmp_path,
        [fake],
        2,
        max_steps=3,
        watch=Samples(),
        prepare=prepare,
        **STEP,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=held_out,
        num_generations_eval=2,
        per_device_eval_batch_size=8,
    )
    assert len(own) == 3 and all(len(rows) == 4 for rows in own)
    evaluated = {tuple(ids) for ids in tiny_ids(held_out)}
    windows = [ids for ids in fake.arrived if ids != (7, 8, 9)]
    trained = [ids for window in watch.windows for ids in dict.fromkeys(map(tuple, tiny_ids(window.prompts)))]
    assert [ids for ids in windows if ids in set(trained)] == trained
    assert len([ids for ids in windows if ids in evaluated]) >= 4


def test_a_failure_in_flight_is_raised_where_its_window_is_collected(tiny_model, tmp_path, fakes):
    """And nothing is left on the servers."""
    fake, watch = fakes(), Watch()
    refuse = []
    answer = fake.answer

    def refusing(send: Any, request: dict[str, Any], fault: str | None) -> None:
        if refuse and request["max_tokens"] > 1:
            return send(400, b'{"error": "told to"}')
        return answer(send, request, fault)

    fake.answer = refusing
    watch.wait = lambda window: refuse.append(window) if window == 0 else None
    trainers = []
    with pytest.raises(ValueError, match="answered 400"):
        asynchronous(tiny_model, tmp_path, [fake], 1, max_steps=6, watch=watch, prepare=trainers.append, **STEP)
    assert [window.step for window in watch.windows] == [0, 1]  # which was sampled when window 0 was
    assert nothing_in_work(trainers[0])


def tiny_ids(prompts: Any) -> list[list[int]]:
    texts = prompts["prompt"] if hasattr(prompts, "column_names") else prompts
    return tiny_tokenizer()(text=list(texts))["input_ids"]


def nothing_in_work(trainer: Any) -> bool:
    pool = trainer.vllm_generation.pool
    return not (pool.backlog.waiting or pool.backlog.running or pool._requests or pool._batches)


def test_a_server_s_queue_does_not_count_as_silence(fakes, clock):
    """A server that answers one request after the other, each in two thirds of the limit."""
    fake = fakes()
    pool = ServerPool([fake.url], server_timeout=2000.0, request_timeout=300.0)
    pool.wait_until_ready()
    lock, answer, answered = threading.Lock(), fake.answer, []

    def one_at_a_time(*arguments: Any) -> None:
        with lock:
            wait_until(lambda: len(pool.backlog.running) == 6 - len(answered))
            clock.now += 200.0
            answered.append(clock.now)
            answer(*arguments)

    fake.answer = one_at_a_time
    assert len(pool.run(pool.completions([([i, 1, 2], 1) for i in range(6)], {"max_tokens": 8}))) == 6
    assert pool.retried == 0


def test_equal_neighbours_are_groups_of_their_own(fakes):
    vllm = SimpleNamespace(
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        max_completion_length=8,
        structured_outputs_regex=None,
        generation_kwargs={},
        end_ids=[],
        pool=ServerPool([fakes().url]),
        ranks=SimpleNamespace(rank=0),
    )
    vllm._sampling = lambda window: VLLMPool._sampling(vllm, window)
    rows = [[1, 2]] * 2 + [[3]] * 8 + [[4]] * 3  # of a group on two ranks, two prompts alike, a part of a group
    jobs = VLLMPool._jobs(vllm, 0, rows, 4)
    assert [(job.sequences, job.number) for job in jobs] == [(2, 0), (4, 1), (4, 2), (3, 3)]


def test_no_two_rows_have_the_same_seed(fakes):
    """Else rows of the same prompt would be equal. vLLM gives row i of a request the request's seed + i."""
    fake, seeds = fakes(), []
    answer = fake.answer

    def note(send: Any, request: dict[str, Any], fault: str | None) -> None:
        if request["max_tokens"] > 1:  # else a trial
            seeds.extend(None if request.get("seed") is None else request["seed"] + i for i in range(request["n"]))
        answer(send, request, fault)

    fake.answer = note
    vllm = object.__new__(VLLMPool)
    names = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "structured_outputs_regex", "context")
    vars(vllm).update(dict.fromkeys(names), urls=[fake.url], server_timeout=20.0, request_timeout=20.0, end_ids=[])
    vllm.max_completion_length, vllm.rank_timeout, vllm.timed = 8, 20.0, lambda what: nullcontext()
    vllm.accelerator, vllm.generation_kwargs = Accelerator(cpu=not ON_GPU), {"seed": 5}
    vllm._init_vllm()
    vllm.pool.refit = None
    vllm.pool.weights_sent(0, {fake.url: None})

    async def turns(ask: Any) -> None:
        await ask([1], 8)
        await ask([1], 8)

    rows = [[1]] * 8
    for rank in range(2):
        vllm.ranks.rank = rank
        for window in range(2):
            vllm.expect(2 * window, {2 * window: rows})
            vllm.generate(rows, None, 4)
            vllm.expect(2 * window + 1, {}, chains={2 * window + 1: [turns] * 8})
            vllm.generate([], None, 4)
            vllm.generate(rows, None, 4)
            vllm.generate(rows, None, 1)  # later turns of an evaluation
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 5 * 8
    vllm.generation_kwargs, seeds[:] = {}, []
    vllm.generate(rows, None, 4)
    assert seeds == [None] * 8


def test_a_later_turn_of_an_evaluation_fits_into_the_context():
    """Else the server refuses the request; a prompt that is too long alone is left for it to report."""
    vllm = SimpleNamespace(max_completion_length=8, context=20, generation_kwargs={})
    assert VLLMPool._room(vllm, [[0] * 12, [0] * 15, [0] * 20]) == [None, 5, None]
    vllm.generation_kwargs = {"max_tokens": 3}
    assert VLLMPool._room(vllm, [[0] * 15, [0] * 18]) == [None, 2]
    vllm.context = None
    assert VLLMPool._room(vllm, [[0] * 15]) == [None]


# ------------------------------------------------------------------------------------- the pool, while weights are sent


def pool_of(fakes: list[Dated], **options: Any) -> ServerPool:
    pool = ServerPool([fake.url for fake in fakes], server_timeout=20.0, **options)

    async def refit(server: Any) -> int:
        return pool.fleet.version

    pool.refit = refit
    pool.wait_until_ready()
    return pool


SAMPLING = {"max_tokens": 8}


def test_what_a_server_writes_with_half_loaded_weights_is_not_taken(fakes):
    """Its load fails, and it goes on with what it has; that is known when all have loaded."""
    bad, good = fakes(), fakes()
    pool = pool_of([bad, good])
    bad.hold.clear()
    good.hold.clear()
    jobs = pool.completions([([i, 5], 1) for i in range(4)], SAMPLING)
    batch = pool.submit(jobs, order=0)
    for fake in (bad, good):
        fake.wait_for(lambda fake=fake: len(fake.arrived) == 2)
    pool.new_version(1)
    bad.version = 77
    bad.hold.set()
    bad.wait_for(lambda: len(bad.answered) == 2)
    good.version = bad.version = 1  # what comes after
    pool.weights_sent(1, {bad.url: "500 while loading", good.url: None})
    good.hold.set()
    tokens = {token - FIRST for (row,) in pool.collect(batch) for token in row.token_ids}
    assert tokens <= {0, 1} and pool.retried == 2


def test_a_server_with_work_is_not_tried_out_behind_it(fakes):
    """A failed request says little of it, and a trial would wait for all that it has."""
    fake = fakes()
    pool, answer = pool_of([fake]), fake.answer
    trials = fake.asked["/v1/completions"]
    failing = [True]

    def failing_once(send: Any, request: dict[str, Any], fault: str | None) -> None:
        if request["prompt"][0] == 3 and failing:
            failing.pop()
            return send(500, b"{}")
        return answer(send, request, fault)

    fake.answer = failing_once
    fake.hold.clear()
    batch = pool.submit(pool.completions([([i, 5], 1) for i in range(4)], SAMPLING), order=0)
    fake.wait_for(lambda: len(fake.arrived) == 4)  # the failed one, too, again
    assert fake.asked["/v1/completions"] == trials + 5
    fake.hold.set()
    assert len(pool.collect(batch)) == 4 and pool.retried == 1


def test_weights_do_not_wait_for_a_look_at_who_does_not_answer(fakes):
    alive, away = fakes(), fakes()
    pool, looked, end = pool_of([alive, away]), threading.Event(), threading.Event()

    async def probe() -> None:
        looked.set()
        while not end.is_set():
            await asyncio.sleep(0.01)
        raise ServerError("away")

    pool._servers[away.url].probe = probe
    alive.hold.clear()
    batch = pool.submit(pool.completions([([i, 5], 1) for i in range(2)], SAMPLING), order=0)
    assert looked.wait(SECONDS)
    timer = threading.Timer(SECONDS, end.set)
    timer.start()
    assert alive.url in pool.new_version(1) and not end.is_set()
    pool.weights_sent(1, {alive.url: None, away.url: "away"})
    end.set()
    timer.cancel()
    alive.hold.set()
    assert len(pool.collect(batch)) == 2


def test_an_evaluation_after_a_failed_run_is_none_of_its_windows(tiny_model, tmp_path, fakes, monkeypatch):
    tokenize, calls, trainers = GRPOTrainer._tokenize_prompts, [], []

    def failing_once(self: Any, prompts: list[str]) -> tuple:
        calls.append(prompts)
        if len(calls) == 4:
            raise ValueError("a bad row")
        return tokenize(self, prompts)

    monkeypatch.setattr(GRPOTrainer, "_tokenize_prompts", failing_once)
    held_out = prompts(80).select(range(76, 80))
    settings = {"eval_dataset": held_out, "num_generations_eval": 2, "per_device_eval_batch_size": 8, **STEP}
    with pytest.raises(ValueError, match="a bad row"):
        asynchronous(tiny_model, tmp_path, [fakes()], 1, max_steps=6, prepare=trainers.append, **settings)
    assert "eval_loss" in trainers[0].evaluate() and nothing_in_work(trainers[0])


def test_an_unknown_log_prob_is_not_corrected_in_an_evaluation(tiny_model, tmp_path, fakes):
    """vLLM answers -9999 for a log-prob that it does not know."""
    trainer, *_ = asynchronous(tiny_model, tmp_path, [fake := fakes()], 0, **STEP, max_steps=1)
    trainer.vllm_importance_sampling_correction, trainer.vllm_importance_sampling_mode = True, "token_truncate"
    fake.log_prob = -9999.0
    logged = trainer.evaluate(prompts(4))
    assert logged["eval_sampling/importance_sampling_ratio/max"] == 1.0


@pytest.mark.parametrize(
    "settings, sent",
    [({}, {FIRST + 1, "eos"}), ({"ignore_eos": True}, {FIRST + 1}), ({"stop_token_ids": None}, {"eos"})],
)
def test_end_tokens_are_sent_to_servers(tiny_model, tmp_path, fakes, settings, sent):
    """A server's model may know others than the trainer's model and tokenizer."""
    fake, asked = fakes(), []
    answer = fake.answer

    def note(send: Any, request: dict[str, Any], fault: str | None) -> None:
        if request["max_tokens"] > 1:  # else a trial
            asked.append({*request["stop_token_ids"]})
        answer(send, request, fault)

    fake.answer = note
    kwargs = {"stop_token_ids": [FIRST + 1], **settings}
    trainer, *_ = asynchronous(tiny_model, tmp_path, [fake], 0, **STEP, max_steps=1, generation_kwargs=kwargs)
    ends = {trainer._tokenizer.eos_token_id if token == "eos" else token for token in sent}
    assert asked and all(one == ends for one in asked)


def test_a_row_that_a_stop_token_of_the_user_ends_is_not_truncated(tiny_model, tmp_path, fakes):
    versions = [FIRST + 1, FIRST + 2]  # in training and in the evaluation
    settings = {"generation_kwargs": {"stop_token_ids": versions}, "mask_truncated_completions": True}
    trainer, *_ = asynchronous(tiny_model, tmp_path, [fakes()], 0, **STEP, max_steps=1, **settings)
    logged = trainer.state.log_history[0]
    assert logged["completions/clipped_ratio"] == 0.0 and logged["completions/mean_terminated_length"] == 2.0
    assert trainer.evaluate(prompts(4))["eval_completions/clipped_ratio"] == 0.0
