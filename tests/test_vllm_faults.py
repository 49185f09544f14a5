"""What a pool makes of servers that misbehave: every prompt once, in order, in time, or an error that names them.

The servers here are fakes, for faults only; `test_vllm.py` has the real ones.
"""

import asyncio
import errno
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import Qwen2Config

from dash_trl.config import DASHConfig
from dash_trl.distributed import Ranks
from dash_trl.sampling import PoolError, ServerPool, VLLMPool, check_urls, own_key
from dash_trl.sampling.server import Completion, ServerError
from dash_trl.sampling.vllm_plugin import model_shape
from dash_trl.sampling.weights import FileWeights, Snapshot, WeightSync
from dash_trl.sampling.weights.snapshot import WeightMismatch
from tests.fake_server import Fake, factory
from tests.tiny import said
from tests.vllm_run import wait_until

SAMPLING = {"max_tokens": 8}
NO_NUMBER = "a log-prob that is not a finite number"
UNREADABLE = "gave an answer that cannot be read"
# fault → what is said of a server that has it
FAULTS = {
    "500": "answered 500",
    "429": "answered 429",
    "hangs": "took longer than 0.2 s",
    "truncated JSON": UNREADABLE,
    "breaks off": "ClientPayloadError",
    "too large": "answered more than 50000 bytes",
    "not JSON": UNREADABLE,
    "too few choices": r"answered \d choices instead of",
    "null choice": UNREADABLE,
    "NaN": "A log-prob is not a finite number",
    "written NaN": NO_NUMBER,
    "null": UNREADABLE,
    "wrong token counts": r"answered \d (tokens with|prompt log-probs for)",
}
FAULTS_OF_SAMPLES = {
    "too many choices": "answered 5 choices instead of 4",
    "null index": UNREADABLE,
    "too many tokens": "answered 10 tokens, more than max_tokens=8",
    "aborted": "ended a completion with finish_reason='abort'",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody rests for long."""
    for name in ("health.FIRST_BACK_OFF", "health.PROBE_EVERY", "pool.TICK", "pool.LOOK_AGAIN"):
        monkeypatch.setattr(f"dash_trl.sampling.{name}", 0.01)


fakes = factory(Fake)


def ready(*fakes: Fake, **options) -> ServerPool:
    """A pool that has seen them."""
    pool = ServerPool([fake.url for fake in fakes], **{"server_timeout": 60.0, **options})
    pool.wait_until_ready()
    return pool


def expected(count: int, n: int) -> list[list[Completion]]:
    return [[Completion([i, 100 + k], [-0.5, -1.5]) for k in range(n)] for i in range(count)]


def prompts(count: int, n: int) -> list[tuple[list[int], int]]:
    return [([i, 1, 2], n) for i in range(count)]


def test_a_completion_that_repeats_itself_is_whole(fakes):
    """vLLM ends it there, if `generation_kwargs` have `repetition_detection`."""
    pool = ready(fakes("repetition"))
    assert pool.complete(prompts(2, 2), SAMPLING) == expected(2, 2) and not pool.retried


def test_results_are_taken_as_they_come(fakes):
    """From a server that fails the first request, too; whoever stops taking takes the rest back."""
    pool = ServerPool([fakes("500", 1).url, fakes().url], server_timeout=20.0)
    jobs = pool.completions(prompts(20, 2), SAMPLING)
    assert sorted(pool.as_completed(jobs)) == list(enumerate(expected(20, 2)))
    rest = pool.as_completed(pool.completions(prompts(20, 2), SAMPLING))
    next(rest)
    rest.close()
    assert not pool.backlog.waiting and not pool.backlog.running
    # A prompt may have a limit of its own: a server answers with an error where both exceed its context.
    assert pool.complete([([0, 2], 1), ([1, 2], 2, 1)], SAMPLING) == [*expected(1, 1), [Completion([1], [-0.5])] * 2]


@pytest.mark.parametrize("fault", FAULTS | FAULTS_OF_SAMPLES)
def test_what_a_server_answers_wrongly_is_its_failure(fault, fakes, monkeypatch):
    monkeypatch.setattr("dash_trl.sampling.server.MOST_BYTES", 50_000)
    message = (FAULTS | FAULTS_OF_SAMPLES)[fault]
    pool = ServerPool([fakes(fault).url], request_timeout=0.2 if fault == "hangs" else 60.0)
    asked = [lambda server: server.complete([1, 2, 3], 4, SAMPLING)]
    if fault in FAULTS:
        asked.append(lambda server: server.log_probs([1, 2, 3]))
    for ask in asked:
        (error,) = pool.on_each(ask).values()
        assert isinstance(error, ServerError) and re.search(message, str(error))
        assert error.gone == (fault == "breaks off")


@pytest.mark.parametrize("fault", ["500", "hangs", "breaks off"])
def test_a_good_server_answers_what_a_bad_one_fails(fault, fakes):
    bad, good = fakes(fault, spared=1), fakes()  # a server is tried before it is trusted
    pool = ready(bad, good, request_timeout=1.0 if fault == "hangs" else 60.0)
    assert pool.complete(prompts(12, 4), SAMPLING) == expected(12, 4)
    assert sorted(good.served) == [0, *range(12)]  # 0 is the trial's, too
    assert bad.asked["/v1/completions"] > 3 and bad.served == [0]


def test_sequences_are_scored(fakes):
    bad, good = fakes("NaN", spared=1), fakes()
    pool = ready(bad, good)
    assert pool.run(pool.log_probs([[i, 1, 2] for i in range(12)])) == [[-0.25, -0.5]] * 12
    assert sorted(good.served) == [0, *range(12)] and bad.served == [0]


@pytest.mark.parametrize("fault", ["500", "hangs"])
def test_a_bad_server_alone_is_an_error_that_names_it(fault, fakes):
    bad = fakes(fault, spared=1)
    pool = ready(bad, server_timeout=0.5, request_timeout=0.1)
    with pytest.raises(PoolError, match=f"{bad.url} is (dead|suspect|refitting); last error: "):
        pool.complete(prompts(3, 2), SAMPLING)


def test_a_prompt_that_no_server_can_answer_ends_the_run(fakes):
    """Each of them is well after it failed, and would be given that prompt for ever."""
    pool = ServerPool([fakes("500", poison=3).url, fakes("500", poison=3).url], server_timeout=60.0)
    with pytest.raises(PoolError, match="A request failed 6 times, most recently on http.*answered 500"):
        pool.complete(prompts(6, 2), SAMPLING)


@pytest.mark.parametrize(
    "fault",
    [
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "/update_weight_version",
    ],
)
def test_a_server_that_fails_to_load_weights_goes_on_sampling(fault, fakes):
    fake = fakes(fault)
    pool = ServerPool([fake.url])
    (error,) = pool.on_each(lambda server: server.load_weights("directory", "tag")).values()
    assert isinstance(error, ServerError)
    assert fake.asked["/pause?mode=keep"] == fake.asked["/resume"] == 1


def weight_sync(urls: list[str], send) -> WeightSync:
    """`send(parameters, version, on_each)` in place of files. It has been proven."""
    pool, model = ServerPool(urls, server_timeout=20.0), torch.nn.Linear(2, 2)
    model.config = Qwen2Config(vocab_size=64)
    weights = SimpleNamespace(send=send, dtype=torch.float32)
    sync = WeightSync(pool, Ranks(Accelerator(cpu=True)), weights, model, 64, model.named_parameters)
    sync._proven = True
    return sync


def test_newer_weights_wait_for_those_that_a_server_is_being_given(fakes):
    """Else the older ones, coming last, would be what it computes with."""
    order, newer_asked = [], threading.Event()
    sync = weight_sync([fakes().url, fakes().url], lambda *_: (order.append("newer"), (None, {}))[1])
    pool = sync.pool
    slow = pool.urls[1]

    async def refit(server):
        if server.url == slow:
            while not newer_asked.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            order.append("older")
        return pool.fleet.version

    pool.refit = refit
    for url in pool.urls:
        pool.fleet.refit_failed(url, "it was away", now=0.0)
    pool.complete(prompts(4, 1), SAMPLING)  # by the other one
    assert order == [] and pool.fleet.waiting() == [slow]
    newer_asked.set()
    sync.send()
    assert order == ["older", "newer"]
    assert {server.state for server in pool.fleet.servers.values()} == {"dead"}  # the main process sent to nobody


def test_a_request_begins_no_look_while_newer_weights_wait(fakes):
    """A chain may make it then. The look would give the server the older weights, while it is being sent the newer."""
    idle, slow = fakes(), fakes()
    pool, looks, go_on = ready(idle, slow), [], threading.Event()

    async def refit(server):
        looks.append((server.url, pool._sending))
        while server.url == slow.url and not go_on.is_set():
            await asyncio.sleep(0.01)
        return pool.fleet.version

    pool.refit = refit
    pool.fleet.refit_failed(slow.url, "it was away", now=0.0)
    pool.complete(prompts(1, 1), SAMPLING)
    sending = threading.Thread(target=pool.new_version, args=(1,))
    sending.start()
    wait_until(lambda: pool._sending)
    batch = pool.submit(pool.completions(prompts(1, 1), SAMPLING), order=0)
    go_on.set()
    sending.join()
    pool.weights_sent(1, dict.fromkeys(pool.urls))
    assert pool.collect(batch) == expected(1, 1)
    assert (idle.url, True) not in looks and looks[-1][1] is False


def test_who_had_no_work_while_weights_were_sent_is_looked_at_before_it_is_given_what_waits(fakes):
    """It may have been restarted since it took them; nobody held a connection to it."""
    fake, looks = fakes(), []
    pool = ready(fake)

    async def refit(server):
        looks.append(len(fake.served))
        return 1

    pool.refit = refit
    pool.new_version(1)
    batch = pool.submit(pool.completions(prompts(1, 1), SAMPLING), order=0)
    pool.weights_sent(1, {fake.url: None})
    assert pool.collect(batch) == expected(1, 1)
    assert looks == [len(fake.served) - 1]


def test_a_server_that_has_to_wait_for_the_next_weights_is_none_that_could_be_used(fakes):
    """Over NCCL: it was restarted unseen, and what has the current weights as far as is known has not."""
    pool = ready(fakes(), server_timeout=0.5)

    async def refit(server):
        return None

    pool.refit = refit
    end = threading.Timer(20.0, pool.cancel)
    end.start()
    with pytest.raises(PoolError, match="No vLLM server could be used for 0.5 s(.|\n)*is refitting"):
        pool.complete(prompts(1, 1), SAMPLING)
    end.cancel()


def test_a_server_that_was_restarted_unseen_gets_the_weights_first(fakes, caplog):
    """Nobody saw it: its connections are closed, it answers, and says nothing of its weights unasked."""
    fake, other = fakes(), fakes()
    loads = []

    class Files(FileWeights):
        async def _load(self, server, snapshot):
            loads.append((server.url, len(fake.served)))
            assert (await server.load_weights("directory", snapshot.tag)).checksum == 0

    weights = Files("nowhere", torch.float32)

    def send(parameters, version, on_each):
        snapshot = Snapshot(version, f"run-{version}", 0, "nowhere")
        return snapshot, on_each(lambda server: weights._load(server, snapshot))

    sync = weight_sync([fake.url, other.url], send)
    pool, sync.weights.refit = sync.pool, weights.refit
    pool.wait_until_ready()
    assert pool.fleet.waiting() == pool.urls  # there are no weights yet
    sync.send()
    assert loads == [(fake.url, 0), (other.url, 0)]
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    assert len(loads) == 2 and len(fake.served) == 4  # and no trial, since nothing was amiss
    fake.tag = "default"
    fake.delay = 0.05
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    assert loads[2:] == [(fake.url, 4)] and fake.tag == "run-1"
    pool.fleet.refit_failed(other.url, "gone", time.monotonic() - 9.0)
    sync.send()
    assert [url for url, _ in loads[3:]] == [fake.url]  # the dead hold nobody up
    other.tag = "default"
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    assert [url for url, _ in loads[4:]] == [other.url]
    fake.tag = "another-1"
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1) and fake.tag == "run-2"
    assert (
        f"{fake.url} was given weights by another run (version 'another-1') after this run's ('run-2')" in caplog.text
    )


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("no extension", ValueError, "python -m dash_trl.serve"),
        ("no worker", PoolError, "cannot be read .IndexError"),
        ("no report", PoolError, "cannot be read .KeyError: 'comparable'"),
        ("dtype", ValueError, "in different dtypes"),
        ("connector", ValueError, "the KV connector LMCacheMPConnector, whose cache may keep prefixes of old weights"),
        ("tiers", ValueError, "the KV connector OffloadingConnector, whose cache may keep prefixes of old weights"),
        ("shape", ValueError, r"another shape than 'model' .there, here.: {'vocab_size': .65, 64.}.* --servers 2"),
        ("nccl", ValueError, "vllm_weight_sync='nccl' needs the trainer on CUDA"),
        ("difference", ValueError, "vllm_weight_difference=True, but the servers' weights are quantised"),
    ],
)
def test_servers_that_cannot_be_this_trainer_s(fault, error, message, fakes):
    fake, other = fakes(fault), fakes()
    vllm = checked_pool([fake, other], fault)
    with pytest.raises(error, match=message):
        vllm._check_servers()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (None, None),
        ("offloading", None),
        ("quantised", "a lost update would go unnoticed"),
        ("logprobs_mode", "every ratio that uses them (importance sampling correction, loss_type='aipo') is biased"),
    ],
)
def test_servers_that_can_but_with_less(fault, message, fakes, caplog):
    vllm = checked_pool([fakes(), fakes()], fault)
    assert vllm._check_servers() == (torch.float32, 4096, None)
    assert message in said(caplog) if message else not said(caplog)


def checked_pool(fakes: list[Fake], fault: str | None) -> VLLMPool:
    vllm = object.__new__(VLLMPool)
    vllm.accelerator, vllm.model = Accelerator(cpu=True), torch.nn.Module()
    vllm.model.name_or_path = "model"
    vllm.pool, vllm.model.config = ServerPool([fake.url for fake in fakes]), Qwen2Config(vocab_size=64)
    for fake in fakes:
        fake.report["shape"] = model_shape(vllm.model.config)
    first = fakes[0]
    first.report |= {"dtype": {"dtype": "bfloat16"}}.get(fault, {})
    first.report |= {"comparable": False} if fault in ("quantised", "difference") else {}
    vllm.weight_difference = fault == "difference"
    first.report["shape"] |= {"vocab_size": 65} if fault == "shape" else {}
    first.config["model_config"] |= {"logprobs_mode": "raw_logprobs"} if fault == "logprobs_mode" else {}
    connector = "LMCacheMPConnector" if fault == "connector" else "OffloadingConnector"
    if fault in ("connector", "tiers", "offloading"):
        options = {"cpu_bytes_to_use": 1} | ({"spec_name": "TieringOffloadingSpec"} if fault == "tiers" else {})
        transfer = {"kv_connector": connector, "kv_connector_extra_config": options}
        first.config["kv_transfer_config"] = transfer
    vllm.weight_sync = "nccl" if fault == "nccl" else "file"
    return vllm


def test_a_server_that_came_back_at_the_end_of_a_batch_works_in_the_next(fakes):
    both = fakes(delay=0.1), fakes(delay=0.3)
    pool = ready(*both)
    late = pool.urls[1]
    pool.fleet.refit_failed(late, "it was away", now=0.0)
    pool.complete(prompts(1, 1), SAMPLING)
    wait_until(lambda: pool.fleet.servers[late].state == "healthy")
    before = len(both[1].served)
    pool.complete(prompts(2, 1), SAMPLING)
    assert len(both[1].served) == before + 1


def test_a_failed_proof_is_made_again(fakes, monkeypatch):
    """The servers hold weights that are wrong on purpose, or did not take them: at the start that ends the run."""
    sent, errors, fake = [], {}, fakes()
    sync = weight_sync([fake.url], lambda parameters, version, on_each: (sent.append(version), (None, errors))[1])
    monkeypatch.setattr("dash_trl.sampling.weights.sync.model_log_probs", lambda *_: torch.zeros(31))
    outcomes = iter([None, WeightMismatch("old ones"), None, None])

    def check(*_):
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(sync, "check", check)
    sync._proven = False
    errors[fake.url] = "no room"
    with pytest.raises(PoolError, match="In the first weight sync 1 servers failed(.|\n)*no room"):
        sync.send()
    errors.clear()
    with pytest.raises(WeightMismatch):
        sync.send()
    sync.send()
    assert next(outcomes, "all") == "all" and sent == [1, 2, 3, 4, 5]
    errors[fake.url] = "no room"
    sync.send()  # later, it does without that server
    assert sent == [1, 2, 3, 4, 5, 6]


class Dying(Fake):
    """Breaks off one prompt in each of its lives, another one every time, while it is at the others."""

    life = 0

    def next_fault(self, first):
        if first == 0:  # the trial of a new life
            self.life += 1
        elif first == 1 + self.life % 8:
            return "breaks off"
        else:
            time.sleep(0.1)
        return None


def test_what_kills_servers_ends_the_run():
    """They are restarted, time and again, and it is not known which of the prompts that they had is the cause."""
    dying = Dying()
    with pytest.raises(PoolError, match="A request failed 6 times, most recently on http.*ClientPayloadError"):
        ServerPool([dying.url], server_timeout=60.0).complete([([i, 1, 2], 1) for i in range(1, 9)], SAMPLING)
    assert dying.life <= 6
    dying.stop()


def test_the_first_server_to_answer_is_not_given_all_the_work(fakes):
    both = fakes(), fakes()
    pool = ServerPool([fake.url for fake in both], server_timeout=20.0)

    async def refit(server):
        await asyncio.sleep(0.2 * (server.url == both[0].url))
        return pool.fleet.version

    pool.refit = refit
    pool.wait_until_ready()
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    assert [len(fake.served) for fake in both] == [1 + 4, 1 + 4]


def test_ranks_begin_with_different_servers(fakes):
    three = [fakes() for _ in range(3)]
    urls = [fake.url for fake in three]
    for rank in range(4):
        pool = object.__new__(VLLMPool)
        pool.accelerator = SimpleNamespace(process_index=rank, num_processes=1, device=torch.device("cpu"))
        pool.urls, pool.server_timeout, pool.request_timeout = urls, 5.0, 5.0
        pool.rank_timeout = 5.0
        pool._init_vllm()
        assert pool.pool.urls == [urls[(rank + i) % 3] for i in range(3)]
    assert not any(fake.asked["/v1/completions"] for fake in three)  # a killed run may have left them paused


def test_batches_in_work_at_once_do_not_hide_each_other_s_jobs():
    """They count from 0 each; the second finds the server at work, so that it need not be looked at."""
    go_on = threading.Event()

    class Waiting(Fake):
        def next_fault(self, first):
            assert first == 0 or go_on.wait(20.0)

    fake = Waiting()
    pool = ready(fake, server_timeout=5.0)
    looks, outstanding = [fake.asked["/health"]], pool.fleet.servers[fake.url].outstanding
    with ThreadPoolExecutor(2) as threads:
        batches = []
        for first in (1, 2):
            batches.append(threads.submit(pool.complete, [([first, 1, 2], 1)], SAMPLING))
            wait_until(lambda first=first: fake.asked["/v1/completions"] > first)
            looks.append(fake.asked["/health"])
        jobs = len(outstanding)
        go_on.set()
        assert [batch.result()[0][0].token_ids for batch in batches] == [[1, 100], [2, 100]]
    assert jobs == 2 and not outstanding
    assert looks[1] == looks[2] == looks[0] + 1
    fake.stop()


def test_too_many_open_files_are_not_the_server_s_death(fakes, monkeypatch):
    async def connect(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", connect)
    (error,) = ServerPool([fakes().url]).on_each(lambda server: server.probe()).values()
    assert isinstance(error, ServerError) and "Too many open files" in str(error) and not error.gone


@pytest.mark.parametrize(("fault", "message"), [("400", "answered 400"), ("401", "VLLM_API_KEY")])
def test_what_every_server_would_refuse_is_the_users_error_at_once(fault, message, fakes):
    pool = ServerPool([fakes(fault).url, fakes(fault).url], server_timeout=60.0)
    with pytest.raises(ValueError, match=message):
        pool.complete(prompts(3, 2), SAMPLING)
    with pytest.raises(ValueError, match=message):
        list(pool.as_completed(pool.completions(prompts(2, 1), SAMPLING)))


def test_a_server_that_is_missing_at_the_start_is_named(fakes):
    good, missing = fakes(), fakes()
    missing.stop()
    pool = ServerPool([good.url, missing.url], server_timeout=0.5)
    with pytest.raises(PoolError, match=f"1 of 2 vLLM servers did not answer(.|\n)*{missing.url}"):
        pool.wait_until_ready()


def test_nobody_there_is_an_error_within_the_timeout(fakes):
    gone = fakes()
    gone.stop()
    with pytest.raises(PoolError, match=f"No vLLM server could be used for 0.3 s(.|\n)*{gone.url} is dead"):
        ServerPool([gone.url], server_timeout=0.3).complete(prompts(3, 2), SAMPLING)


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


def test_a_server_that_recovers_is_asked_with_the_key_and_directly(fakes, monkeypatch, caplog):
    """The API key comes from the environment and is not logged, and no proxy of the environment is asked."""
    monkeypatch.setenv("VLLM_API_KEY", "secret-key")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("no_proxy", "")
    fake = fakes("500", times=2)
    caplog.set_level("DEBUG")
    assert ServerPool([fake.url], server_timeout=20.0).complete(prompts(6, 2), SAMPLING) == expected(6, 2)
    assert fake.authorisation == "Bearer secret-key"
    assert "secret-key" not in caplog.text


def test_the_key_that_the_user_s_servers_made_is_found(fakes, monkeypatch, tmp_path, caplog):
    """If they are started after the trainer, too. No other machine gets it."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level("DEBUG")
    fake = fakes()
    pool = ServerPool([fake.url], server_timeout=20.0)
    fake.key = own_key()
    assert pool.complete(prompts(6, 2), SAMPLING) == expected(6, 2)
    assert fake.key not in caplog.text
    monkeypatch.setattr("dash_trl.sampling.key.is_here", lambda url: False)
    with pytest.raises(ValueError, match=r"answered 401 .*variable VLLM_API_KEY to the key .* is in .*vllm_key of the"):
        ServerPool([fake.url], server_timeout=1.0).complete(prompts(1, 1), SAMPLING)


def test_a_redirect_is_not_followed(fakes):
    fake, other = fakes("307"), fakes()
    fake.location = f"{other.url}/v1/completions"
    with pytest.raises(ValueError, match="answered 307 to POST .* Redirects are not followed"):
        ServerPool([fake.url], server_timeout=1.0).complete(prompts(1, 1), SAMPLING)
    assert not other.asked


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "empty"),
        (["127.0.0.1:8000"], "not the address of a server"),
        (["http://127.0.0.1:8000/v1"], "without a path"),
        (["http://127.0.0.1:8000?x=1"], "without a path"),
        (["http://127.0.0.1:port"], "'http://127.0.0.1:port', which is not the address"),
        (["http://[::1:8000"], "not the address"),
        (["http://me:secret@127.0.0.1:8000"], r"'http://\*\*\*@127.0.0.1:8000', which is not .* a password"),
        (["http://127.0.0.1:8000", "http://127.0.0.1:8000/"], "twice"),
        ("http://127.0.0.1:8000,http://127.0.0.1:8000", "twice"),
        ("127.0.0.1:8000", "'127.0.0.1:8000', which is not the address of a server"),
        (" , ", "empty"),
        (["http://127.0.0.1:8000", "http://10.0.0.3:8000"], "'http://10.0.0.3:8000', which is not on .* VLLM_API_KEY"),
        (["https://example.com"], "no key for it"),
    ],
)
def test_addresses(urls, message, caplog, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match=message):
        check_urls(urls)
    assert check_urls(["http://localhost:8000/", "http://[::1]:8001"]) == ["http://localhost:8000", "http://[::1]:8001"]
    assert not said(caplog)
    assert check_urls(["http://0.0.0.0:8000"]) and not said(caplog)  # TRL's default: this machine
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    check_urls(["https://10.0.0.3:8000"])
    assert not said(caplog)
    check_urls(["http://10.0.0.3:8000"])
    assert "are sent to http://10.0.0.3:8000 without encryption" in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize(
    ("urls", "servers"),
    [
        ("http://localhost:8000", ["http://localhost:8000"]),
        ("http://localhost:8000,http://localhost:8001/", ["http://localhost:8000", "http://localhost:8001"]),
        ("http://localhost:8000, http://localhost:8001", ["http://localhost:8000", "http://localhost:8001"]),
        (["http://localhost:8000,http://localhost:8001"], ["http://localhost:8000", "http://localhost:8001"]),
        (("http://localhost:8000",), ["http://localhost:8000"]),
    ],
)
def test_one_string_may_name_them_all(urls, servers, tmp_path):
    assert DASHConfig(str(tmp_path), use_cpu=True, bf16=False, vllm_server_urls=urls).vllm_server_urls == servers
