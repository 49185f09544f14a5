"""A fake vLLM server, for faults and for tests of the order of requests and of weights."""

import asyncio
import copy
import functools
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.sampling import ServerGeneration, ServerPool
from tests.tiny import EOS, ON_GPU, log_probs, run

NAN = float("nan")
# fault → what takes the place of the fields of a choice, of a prompt [1, 2, 3] and two tokens
SPOILED = {
    "written NaN": {
        "logprobs": {"token_logprobs": [NAN, -1.5]},
        "prompt_logprobs": [None, {"2": {"logprob": NAN}}, {"3": {"logprob": -0.75}}],
    },
    "null": {
        "logprobs": {"token_logprobs": [None, -1.5]},
        "prompt_logprobs": [None, {"2": {"logprob": None}}, {"3": {"logprob": -0.75}}],
    },
    "wrong token counts": {"token_ids": [1, 103, 7], "prompt_logprobs": [None] * 4},
    "aborted": {"finish_reason": "abort"},
    "repetition": {"finish_reason": "repetition"},  # no fault
}
# vLLM's own answers
WORKER_ERRORS = {
    "no extension": "Worker failed with error ''CPUWorker' object has no attribute 'dash_model''",
    "half loaded": "Worker failed with error 'Tensor.item() cannot be called on meta tensors'",
}
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


loaded = functools.cache(AutoModelForCausalLM.from_pretrained)


class Fake:
    """The server, on a free port.

    Args:
        fault: name of a fault that spoils answers; None = all answers are right.
        times: number of answers that are spoiled.
        spared: number of right answers before these.
        poison: a token; only answers to prompts that begin with it are spoiled.

    Attributes:
        held: the weights that it was given: name → tensor.
        loads: for each time that it was given weights, the number of prompts that were answered well before.
        well, hold: events; while they are cleared, no look and no prompt is answered.
    """

    def __init__(self, fault: str | None = None, times: int = 10**9, *, spared: int = 0, poison: int | None = None):
        self.fault = fault
        self.times = times
        self.spared = spared
        self.poison = poison
        self.served: list[int] = []  # first tokens of the prompts that were answered well
        self.asked = Counter()
        self.tag = "default"  # tag of the weights; "default" is that of a server that was just started
        self.report = {"dtype": "float32", "shape": {}}
        self.config = {"model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 4096}}
        self.held = {}
        self.loads = []
        self.model = None
        self.lock = threading.Lock()
        self.key: str | None = None  # if set, requests need this key
        self.ended = threading.Event()
        self.well = threading.Event()
        self.hold = threading.Event()
        self.well.set()
        self.hold.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                fake.asked[self.path] += 1
                if self.refused():
                    return
                if self.path == "/health":
                    fake.well.wait()
                answer = {"weight_version": fake.tag, "vllm_config": fake.config}
                self._send(200, b"" if self.path == "/health" else json.dumps(answer).encode())

            def do_POST(self):
                fake.asked[self.path] += 1
                request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                if self.refused():
                    return
                if self.path == "/v1/completions":
                    if fake.model is not None and "prompt_logprobs" in request:
                        self._send(200, fake.score(request["prompt"]))
                    else:
                        fake.answer(self._send, request, fake.next_fault(request["prompt"][0]))
                elif self.path == fake.fault:
                    self._send(500, b"{}")
                else:
                    fake.tag = request.get("new_version", fake.tag)
                    self._send(*fake.rpc_answer(request))

            def refused(self):
                refused = fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}"
                if refused:
                    self._send(401, b"")
                return refused

            def _send(self, status, body, length=None):
                try:
                    self.send_response(status)
                    self.send_header("Location", f"{fake.url}/elsewhere")  # for the status of a redirect
                    self.send_header("Content-Length", str(len(body) if length is None else length))
                    self.end_headers()
                    self.wfile.write(body)
                    if length is not None:
                        self.close_connection = True
                except OSError:
                    pass  # the client gave up waiting

        class Listener(ThreadingHTTPServer):
            request_queue_size = 128  # else connections that come together wait a second

            def handle_error(self, request, client_address):
                pass  # a client that went away

        self.server = Listener(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def serve(self, model):
        """Has the model in a folder from now on: reports its shape and its weights, and scores with it."""
        self.model = copy.deepcopy(loaded(model))
        self.held = dict(self.model.named_parameters())
        self.report["shape"] = {"multimodal": False, **{name: getattr(self.model.config, name) for name in SHAPE}}

    def score(self, ids):
        with self.lock:
            values = log_probs(self.model, ids[:1], ids[1:])
        entries = [{str(token): {"logprob": value}} for token, value in zip(ids[1:], values, strict=True)]
        return json.dumps({"choices": [{"prompt_logprobs": [None, *entries]}]}).encode()

    def load(self, path):
        self.loads.append(len(self.served))
        shards = sorted(Path(path).glob("*.safetensors"))
        self.held = {name: value for shard in shards for name, value in load_file(shard).items()}
        if self.model is not None and self.fault != "old copies":  # else it computes with others than it holds
            with self.lock:
                self.model.load_state_dict(self.held)

    def rpc_answer(self, request):
        if self.fault in WORKER_ERRORS:
            return 500, json.dumps({"error": {"message": WORKER_ERRORS[self.fault]}}).encode()
        if request.get("method") == "reload_weights":
            self.load(request["kwargs"]["weights_path"])
        results = [{} if self.fault == "no report" else self.report]
        return 200, json.dumps({"results": results, "success": True}).encode()

    def next_fault(self, first):
        if self.spared > 0 or self.times <= 0 or self.poison not in (None, first):
            self.spared -= 1
            return None
        self.times -= 1
        return self.fault

    def answer(self, send, request, fault):
        self.hold.wait()
        first = request["prompt"][0]
        n = request.get("n", 1)
        most = request["max_tokens"]
        entries = [{str(token): {"logprob": -0.25 * token}} for token in request["prompt"]]
        choices = [
            {
                "index": i,
                "token_ids": [first, 100 + i][:most],
                "logprobs": {"token_logprobs": [-0.5, -1.5][:most]},
                "prompt_logprobs": [None, *entries[1:]],
                "finish_reason": "stop",
            }
            for i in reversed(range(n))  # their order is not promised
        ]
        if fault in ("500", "400", "401", "307"):
            return send(int(fault), b'{"error": "told to"}')
        if fault == "hangs":
            self.ended.wait()
        if fault == "too few choices":
            choices = choices[:-1]
        if fault in SPOILED:
            choices[0] |= SPOILED[fault]
        whole = json.dumps({"choices": choices}).encode()
        if fault == "truncated JSON":
            return send(200, whole[:-20])
        if fault == "breaks off":
            return send(200, whole[:-20], length=100_000)
        if fault is None:
            self.served.append(first)
        send(200, whole)

    def stop(self):
        for event in (self.ended, self.well, self.hold):
            event.set()
        self.server.shutdown()
        self.server.server_close()


def factory(kind):
    """A fixture: makes servers of a kind, and stops them."""

    @pytest.fixture
    def make_servers():
        made = []

        def make(*arguments, **options):
            made.append(kind(*arguments, **options))
            return made[-1]

        yield make
        for one in made:
            one.stop()

    return make_servers


class Clock:
    """The clock of this process, which tests put forward: `now` is added to it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + self.now)


def settle(pool):
    """Lets a pool do what it can do at once: its event loop goes round many times."""

    async def go_round(server):
        for _ in range(100):
            await asyncio.sleep(0)

    pool.ask_all(go_round)


def is_idle(pool):
    return not pool.fleet.jobs()


def pool_of(*fakes, **options):
    """Return a pool of fake servers, none of which it has seen."""
    return ServerPool([fake.url for fake in fakes], **{"server_timeout": 60.0, **options})


def sampler_of(fakes, model, folder, **options):
    """Return a sampler on fake servers, to which no weights have been sent."""
    return ServerGeneration(
        [fake.url for fake in fakes],
        model=model,
        accelerator=Accelerator(cpu=not ON_GPU),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model.name_or_path),
        weight_dir=str(folder),
        server_timeout=60.0,
        **options,
    )


# ---------------------------------------------------------------------------------------------------- training


FIRST = 10  # the token of weights that no optimizer step has changed
SECONDS = 300.0  # that something is waited for which has to happen, on a machine however busy
GROUPS = 4  # of a window of the settings of `tests.tiny.run`, which is an optimizer step


class Dated(Fake):
    """A server whose completions have two tokens: its weights when the request came, and when it was answered.

    Attributes:
        requests: the requests for rollouts that came, in order.
        answered: the prompts of the requests that were answered, in order.
        version: the optimizer step that made its weights; `step` tells the current one.
        log_prob: the log-prob of every token.
    """

    def __init__(self, **options):
        self.requests: list[dict[str, Any]] = []
        self.answered: list[tuple[int, ...]] = []
        self.version = 0
        self.log_prob = -0.5
        self.step = lambda: 0
        super().__init__(**options)

    @property
    def arrived(self) -> list[tuple[int, ...]]:
        return [tuple(request["prompt"]) for request in self.requests]

    def load(self, path: str) -> None:
        super().load(path)
        self.version = self.step()

    def answer(self, send, request: dict[str, Any], fault: str | None) -> None:
        came = self.version
        if rollout := request["max_tokens"] > 1:  # else a trial
            self.requests.append(request)
            self.hold.wait(SECONDS)
        self.send_rows(send, request, [[FIRST + came, FIRST + self.version]] * request["n"], rollout)

    def send_rows(self, send, request: dict[str, Any], rows: list[list[int]], rollout: bool) -> None:
        most = request["max_tokens"]
        choices = []
        for index, ids in enumerate(rows):
            log_probs = {"token_logprobs": [self.log_prob] * len(ids[:most])}
            choices.append({"index": index, "token_ids": ids[:most], "logprobs": log_probs, "finish_reason": "stop"})
        send(200, json.dumps({"choices": choices}).encode())
        if rollout:
            self.answered.append(tuple(request["prompt"]))


class Varied(Dated):
    """A server whose completions differ in a group. It calls `before` before it answers the n-th rollout."""

    before: Any = staticmethod(lambda number: None)

    def answer(self, send: Any, request: dict[str, Any], fault: str | None) -> None:
        prompt = tuple(request["prompt"])
        rollout = request["max_tokens"] > 1
        if rollout:
            with self.lock:
                self.requests.append(request)
                number = len(self.requests)
            self.before(number)
            if fault := super(Dated, self).next_fault(prompt[0]):
                return send(int(fault), b'{"error": "told to"}')
        of_prompt = 31 * sum(prompt)
        rows = [
            [20 + (of_prompt + 7 * row + i * row) % 230 for i in range(2 + (of_prompt + row) % 5)]
            + [EOS] * (row % 3 > 0)
            for row in range(request["n"])
        ]
        self.send_rows(send, request, rows, rollout)


class Watch(DASHCallback):
    """Callback that records the tokens and policy versions of each window. `wait`: called after each step."""

    per_group = True

    def __init__(self) -> None:
        self.windows: list[SimpleNamespace] = []
        self.wait = lambda window: None

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
        self.wait(len(self.windows) - 1)


def asynchronous(tiny_model: str, output, fakes: list[Dated], level: int, **settings) -> tuple[Any, Any]:
    """Trains with fake servers, which are sent the weights; returns the trainer and the watch."""
    watch = settings.pop("watch", None) or Watch()
    prepare_more = settings.pop("prepare", lambda trainer: None)

    def prepare(trainer) -> None:
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
