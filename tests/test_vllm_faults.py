"""What a pool makes of servers that misbehave: every prompt once, in order, in time, or an error that names them.

The servers here are fakes, for faults only; `test_vllm.py` has the real ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from dash_trl.sampling.server import Completion, ServerError
from dash_trl.sampling.urls import check_urls
from dash_trl.sampling.vllm_pool import PoolError, ServerPool, VLLMPool

SAMPLING = {"max_tokens": 8}


class Fake:
    """A server on a free port that spoils answers by a `fault`: `times` of them, after the first `spared`.

    poison: only prompts that begin with this token.
    """

    def __init__(
        self,
        fault: str | None = None,
        times: int = 10**9,
        *,
        spared: int = 0,
        poison: int | None = None,
        delay: float = 0.0,
    ):
        self.fault, self.times, self.spared, self.poison, self.delay = fault, times, spared, poison, delay
        self.served: list[int] = []  # first tokens of the prompts that were answered well
        self.asked = Counter()
        self.authorisation: str | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                fake.asked[self.path] += 1
                if self.path == "/health":
                    self._send(200, b"")
                else:
                    self._send(200, json.dumps({"data": [{"id": "model"}]}).encode())

            def do_POST(self):
                fake.asked[self.path] += 1
                fake.authorisation = self.headers.get("Authorization")
                request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                if self.path == "/v1/completions":
                    time.sleep(fake.delay)
                    fake.answer(self._send, request, fake.next_fault(request["prompt"][0]))
                else:
                    self._send(500 if self.path == fake.fault else 200, b"{}")

            def _send(self, status, body, length=None):
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body) if length is None else length))
                    self.end_headers()
                    self.wfile.write(body)
                    if length is not None:
                        self.close_connection = True
                except OSError:
                    pass  # the client gave up waiting

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def next_fault(self, first):
        if self.spared > 0 or self.times <= 0 or self.poison not in (None, first):
            self.spared -= 1
            return None
        self.times -= 1
        return self.fault

    def answer(self, send, request, fault):
        first = request["prompt"][0]
        choices = [
            {
                "index": i,
                "token_ids": [first, 100 + i],
                "logprobs": {"token_logprobs": [-0.5, -1.5]},
                "finish_reason": "stop",
            }
            for i in reversed(range(request["n"]))  # their order is not promised
        ]
        for choice in choices:
            del choice["token_ids"][request["max_tokens"] :]
            del choice["logprobs"]["token_logprobs"][request["max_tokens"] :]
        if fault in ("500", "429", "400", "401"):
            return send(int(fault), b'{"error": "told to"}')
        if fault == "hangs":
            time.sleep(30)
        if fault == "truncated JSON":
            return send(200, json.dumps({"choices": choices}).encode()[:-20])
        if fault == "breaks off":
            return send(200, json.dumps({"choices": choices}).encode()[:-20], length=100_000)
        if fault == "not JSON":
            return send(200, b"<html>proxy</html>")
        if fault == "too few choices":
            choices = choices[:-1]
        if fault == "NaN":
            choices[0]["logprobs"]["token_logprobs"][0] = float("nan")
        if fault == "null":
            choices[0]["logprobs"]["token_logprobs"][0] = None
        if fault == "wrong token counts":
            choices[0]["token_ids"].append(7)
        if fault == "too many tokens":
            choices[0]["token_ids"] *= 5
            choices[0]["logprobs"]["token_logprobs"] *= 5
        if fault == "aborted":
            choices[0]["finish_reason"] = "abort"
        if fault is None:
            self.served.append(first)
        send(200, json.dumps({"choices": choices}).encode())

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


FAULTS = [
    "500",
    "429",
    "hangs",
    "truncated JSON",
    "breaks off",
    "not JSON",
    "too few choices",
    "NaN",
    "null",
    "wrong token counts",
    "too many tokens",
    "aborted",
]


@pytest.fixture
def fakes():
    made: list[Fake] = []

    def make(*arguments, **options) -> Fake:
        made.append(Fake(*arguments, **options))
        return made[-1]

    yield make
    for fake in made:
        fake.stop()


def expected(count: int, n: int) -> list[list[Completion]]:
    return [[Completion([i, 100 + k], [-0.5, -1.5]) for k in range(n)] for i in range(count)]


def prompts(count: int, n: int) -> list[tuple[list[int], int]]:
    return [([i, 1, 2], n) for i in range(count)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_good_server_answers_what_a_bad_one_fails(fault, fakes):
    bad, good = fakes(fault, spared=1), fakes()  # a server is tried before it is trusted
    pool = ServerPool([bad.url, good.url], server_timeout=20.0, request_timeout=1.0)
    pool.wait_until_ready()
    assert pool.complete(prompts(12, 4), SAMPLING) == expected(12, 4)
    assert sorted(good.served) == [0, *range(12)]  # 0 is the trial's, too
    assert bad.asked["/v1/completions"] > 3 and bad.served == [0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_server_alone_is_an_error_that_names_it(fault, fakes):
    bad = fakes(fault, spared=1)
    pool = ServerPool([bad.url], server_timeout=1.0, request_timeout=0.5)
    pool.wait_until_ready()
    started = time.monotonic()
    with pytest.raises(PoolError, match=f"{bad.url} is (dead|suspect|refitting); last error: "):
        pool.complete(prompts(3, 2), SAMPLING)
    assert time.monotonic() - started < 15.0


def test_a_prompt_that_no_server_can_answer_ends_the_run(fakes, monkeypatch):
    """Each of them is well after it failed, and would be given that prompt for ever."""
    monkeypatch.setattr("dash_trl.sampling.health.FIRST_BACK_OFF", 0.01)
    monkeypatch.setattr("dash_trl.sampling.health.PROBE_EVERY", 0.01)
    pool = ServerPool([fakes("500", poison=3).url, fakes("500", poison=3).url], server_timeout=60.0)
    with pytest.raises(PoolError, match="A request failed 6 times, at last with http.*answered 500"):
        pool.complete(prompts(6, 2), SAMPLING)


@pytest.mark.parametrize("fault", ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"])
def test_a_server_that_fails_to_load_weights_goes_on_sampling(fault, fakes):
    fake = fakes(fault)
    pool = ServerPool([fake.url])
    (error,) = pool.on_each(lambda server: server.load_weights("directory", "tag")).values()
    assert isinstance(error, ServerError)
    assert fake.asked["/pause?mode=keep"] == fake.asked["/resume"] == 1


def test_newer_weights_wait_for_those_that_a_server_is_being_given(fakes):
    """Else the older ones, coming last, would be what it computes with."""
    pool = ServerPool([fakes().url, fakes().url], server_timeout=20.0)
    pool.wait_until_ready()
    order, slow = [], pool.urls[1]

    async def refit(server):
        await asyncio.sleep(1.0)
        order.append("older")
        return pool.fleet.version

    pool.refit = refit
    pool.fleet.failed(slow, 0, "", time.monotonic() - 5.0, gone=True)
    pool.complete(prompts(4, 1), SAMPLING)
    assert order == []
    vllm = object.__new__(VLLMPool)  # its weights alone
    vllm.pool, vllm.accelerator, vllm.model = pool, Accelerator(cpu=True), torch.nn.Linear(2, 2)
    vllm._iter_named_params = lambda: iter(())
    vllm._weights = SimpleNamespace(send=lambda *_: (order.append("newer"), (None, {}))[1])
    vllm._send_weights()
    assert order == ["older", "newer"]


@pytest.mark.parametrize("fault", ["500", "too few choices", "hangs"])
def test_a_server_that_recovers_goes_on(fault, fakes):
    shaky = fakes(fault, times=2)
    pool = ServerPool([shaky.url], server_timeout=20.0, request_timeout=0.5)
    assert pool.complete(prompts(6, 2), SAMPLING) == expected(6, 2)


def test_both_servers_work_and_no_prompt_is_asked_twice(fakes):
    both = fakes(delay=0.01), fakes(delay=0.01)
    pool = ServerPool([fake.url for fake in both], server_timeout=5.0)
    pool.wait_until_ready()
    assert pool.complete(prompts(40, 2), SAMPLING) == expected(40, 2)
    served = Counter(both[0].served + both[1].served)
    assert all(served[i] == 1 for i in range(1, 40))
    assert all(len(fake.served) >= 15 for fake in both)


def test_more_work_than_the_servers_take_at_once_waits_here(fakes, monkeypatch):
    monkeypatch.setattr("dash_trl.sampling.health.SEQUENCES_PER_SERVER", 4)
    slow, fast = fakes(delay=0.3), fakes()
    pool = ServerPool([slow.url, fast.url], server_timeout=5.0)
    assert pool.complete(prompts(40, 2), SAMPLING) == expected(40, 2)
    assert len(fast.served) > 3 * len(slow.served)  # what waits goes to who is free


@pytest.mark.parametrize(("fault", "message"), [("400", "answered 400"), ("401", "VLLM_API_KEY")])
def test_what_every_server_would_refuse_is_the_users_error_at_once(fault, message, fakes):
    pool = ServerPool([fakes(fault).url, fakes(fault).url], server_timeout=60.0)
    with pytest.raises(ValueError, match=message):
        pool.complete(prompts(3, 2), SAMPLING)


def test_a_server_that_is_missing_at_the_start_is_named(fakes):
    good, missing = fakes(), fakes()
    missing.stop()
    pool = ServerPool([good.url, missing.url], server_timeout=0.5)
    with pytest.raises(PoolError, match=f"1 of 2 vLLM servers did not answer(.|\n)*{missing.url}"):
        pool.wait_until_ready()


def test_nobody_there_is_an_error_within_the_timeout(fakes):
    gone = fakes()
    gone.stop()
    started = time.monotonic()
    with pytest.raises(PoolError, match=f"No vLLM server could be used for 1 s(.|\n)*{gone.url} is dead"):
        ServerPool([gone.url], server_timeout=1.0).complete(prompts(3, 2), SAMPLING)
    assert time.monotonic() - started < 5.0


def test_a_server_that_comes_back_is_refitted_before_it_is_given_a_prompt(fakes):
    """It says that it is well; its weights come first, and while they fail it gets nothing."""
    fake = fakes()
    pool = ServerPool([fake.url], server_timeout=10.0)
    order = []

    async def refit(server):
        order.append(("refit", len(fake.served)))
        return pool.fleet.version - (len(order) < 3)  # twice it ends up with old weights

    pool.refit = refit
    assert pool.complete(prompts(4, 1), SAMPLING) == expected(4, 1)
    assert len(order) == 3
    trials = 3  # one token each, before a server is trusted
    assert len(fake.served) == 4 + trials


def test_the_api_key_comes_from_the_environment_and_is_not_logged(fakes, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "secret-key")
    fake = fakes("500", times=2)
    caplog.set_level("DEBUG")
    ServerPool([fake.url], server_timeout=10.0).complete(prompts(2, 1), SAMPLING)
    assert fake.authorisation == "Bearer secret-key"
    assert "secret-key" not in caplog.text


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "empty"),
        (["127.0.0.1:8000"], "not the address of a server"),
        (["http://127.0.0.1:8000/v1"], "without a path"),
        (["http://127.0.0.1:8000", "http://127.0.0.1:8000/"], "twice"),
    ],
)
def test_addresses(urls, message, caplog):
    with pytest.raises(ValueError, match=message):
        check_urls(urls)
    assert check_urls(["http://localhost:8000/", "http://[::1]:8001"]) == ["http://localhost:8000", "http://[::1]:8001"]
    assert not caplog.records
    check_urls(["http://10.0.0.3:8000"])
    assert "no authentication" in caplog.text
