"""What a pool makes of servers that misbehave: every prompt once, in order, in time, or an error that names them.

The servers here are fakes, for faults only; `test_vllm.py` has the real ones.
"""

import asyncio
import errno
import threading
import time

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dash_trl.config import DASHConfig
from dash_trl.distributed import Ranks
from dash_trl.sampling import Completion, PoolError, ServerPool, VLLMPool, check_urls, key_header, own_key
from dash_trl.sampling.weights import FileWeights, WeightMismatch, WeightSync
from tests.fake_server import Clock, Fake, factory, hurry, is_idle, settle
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


def test_results_are_taken_as_they_come(fakes):
    """From a server that fails the first request, too; whoever stops taking takes the rest back."""
    pool = ServerPool([fakes("500", 1).url, fakes().url], server_timeout=60.0)
    jobs = pool.completions(prompts(20, 2), SAMPLING)
    assert sorted(pool.as_completed(jobs)) == list(enumerate(expected(20, 2)))
    rest = pool.as_completed(pool.completions(prompts(20, 2), SAMPLING))
    next(rest)
    rest.close()
    assert is_idle(pool)
    # vLLM ends a completion that repeats itself, if `generation_kwargs` have `repetition_detection`: it is whole.
    pool = ready(fakes("repetition"))
    assert pool.complete(prompts(2, 2), SAMPLING) == expected(2, 2) and not pool.retried
    # A prompt may have a limit of its own: a server answers with an error where both exceed its context.
    assert pool.complete([([0, 2], 1), ([1, 2], 2, 1)], SAMPLING) == [*expected(1, 1), [Completion([1], [-0.5])] * 2]


def test_what_a_server_answers_wrongly_is_its_failure(fakes):
    for fault, message in (FAULTS | FAULTS_OF_SAMPLES).items():
        pool = ServerPool([fakes(fault).url], request_timeout=0.2 if fault == "hangs" else 60.0)
        asked = [lambda server: server.complete([1, 2, 3], 4, SAMPLING)]
        if fault in FAULTS:
            asked.append(lambda server: server.log_probs([1, 2, 3]))
        for ask in asked:
            with pytest.raises(PoolError, match=message) as raised:
                pool.ask_all(ask)
            assert raised.value.__cause__.gone == (fault == "breaks off"), fault


def test_a_good_server_answers_what_a_bad_one_fails(fakes, monkeypatch):
    clock = Clock(monkeypatch)
    for fault in ("500", "hangs", "breaks off", "NaN"):
        bad, good = fakes(fault, spared=1), fakes()  # a server is tried before it is trusted
        pool = ready(bad, good, server_timeout=600.0, request_timeout=60.0)
        jobs, results = pool.completions(prompts(12, 4), SAMPLING), expected(12, 4)
        batch = pool.submit(jobs, order=0)
        if fault == "hangs":
            wait_until(lambda bad=bad, good=good: (bad.asked["/v1/completions"], len(good.served)) == (7, 7))
            settle(pool)
            clock.now += 61.0
        assert pool.collect(batch) == results, fault
        assert sorted(good.served) == [0, *range(12)], fault  # 0 is the trial's, too
        assert bad.asked["/v1/completions"] > 3 and bad.served == [0], fault


def test_servers_that_cannot_be_used_are_named(fakes):
    bad, good, gone = fakes("500", spared=1), fakes(), fakes()
    gone.stop()
    pool = ready(bad, server_timeout=0.5)
    with pytest.raises(PoolError, match=f"{bad.url} is (dead|suspect|refitting); last error: "):
        pool.complete(prompts(3, 2), SAMPLING)
    pool = ServerPool([good.url, gone.url], server_timeout=0.5)
    with pytest.raises(PoolError, match=f"1 of 2 vLLM servers did not answer(.|\n)*{gone.url}"):
        pool.wait_until_ready()
    with pytest.raises(PoolError, match=f"No vLLM server could be used for 0.3 s(.|\n)*{gone.url} is dead"):
        ServerPool([gone.url], server_timeout=0.3).complete(prompts(3, 2), SAMPLING)


def test_a_prompt_that_no_server_can_answer_ends_the_run(fakes):
    """Each of them is well after it failed, and would be given that prompt for ever."""
    pool = ServerPool([fakes("500", poison=3).url, fakes("500", poison=3).url], server_timeout=60.0)
    with pytest.raises(PoolError, match="A request failed 6 times, most recently on http.*answered 500"):
        pool.complete(prompts(6, 2), SAMPLING)


def test_a_server_that_fails_to_load_weights_goes_on_sampling(fakes):
    reset = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    for fault in ("/collective_rpc", reset, "/update_weight_version"):
        fake = fakes(fault)
        with pytest.raises(PoolError, match="answered 500"):
            ServerPool([fake.url]).ask_all(lambda server: server.load_weights("directory", "tag"))
        assert fake.asked["/pause?mode=keep"] == fake.asked["/resume"] == 1, fault


def test_newer_weights_wait_for_those_that_a_server_is_being_given(fakes):
    """Else the older ones, coming last, would be what it computes with."""
    order, newer_asked = [], threading.Event()
    pool = ServerPool([fakes().url, fakes().url], server_timeout=60.0)
    slow = pool.urls[1]

    async def refit(server):
        if server.url == slow:
            while not newer_asked.is_set():
                await asyncio.sleep(0.01)
            for _ in range(1000):
                await asyncio.sleep(0)
            order.append("older")
        return pool.fleet.version

    pool.refit = refit
    pool.complete(prompts(4, 1), SAMPLING)  # by the other one
    assert order == [] and pool.fleet.waiting() == [slow]
    newer_asked.set()
    pool.new_version(1)
    assert order == ["older"]


def test_a_look_at_who_had_no_work_waits_until_weights_are_sent(fakes):
    """Before, it would give a server the older weights. After, it comes first: nobody held a connection to the server.

    A chain may make a request while weights are sent.
    """
    idle, away = fakes(), fakes()
    pool, looks = ready(idle, away), []

    async def refit(server):
        looks.append((server.url, pool.fleet.version, len(idle.served)))
        return pool.fleet.version

    pool.refit = refit
    pool.new_version(1)
    pool.fleet.failed(away.url, None, "it was away", now=0.0)  # a look is due
    batch = pool.submit(pool.completions(prompts(2, 1), SAMPLING), order=0)
    settle(pool)
    pool.on_each(lambda server: server.weight_tag())  # a look that had begun would come before
    assert looks == [] and [fake.asked["/health"] for fake in (idle, away)] == [1, 1]
    pool.weights_sent(1, dict.fromkeys(pool.urls))
    assert pool.collect(batch) == expected(2, 1)
    assert (idle.url, 1, 1) in looks  # it has answered its trial


def test_a_server_that_has_to_wait_for_the_next_weights_is_none_that_could_be_used(fakes):
    """It was restarted before the first weight sync ended, so there are no weights to give it yet."""
    pool = ready(fakes(), server_timeout=0.5)

    async def refit(server):
        return None

    pool.refit = refit
    end = threading.Timer(60.0, pool.cancel)  # instead of a hang
    end.start()
    with pytest.raises(PoolError, match="No vLLM server could be used for 0.5 s(.|\n)*is refitting"):
        pool.complete(prompts(1, 1), SAMPLING)
    end.cancel()


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def weight_sync(fakes: list[Fake], model, folder) -> WeightSync:
    for fake in fakes:
        fake.serve(model.name_or_path)
    pool = ServerPool([fake.url for fake in fakes], server_timeout=60.0)
    weights = FileWeights(folder, torch.float32)
    return WeightSync(pool, Ranks(Accelerator(cpu=True)), weights, model, 300, model.named_parameters)


def test_a_server_that_was_restarted_unseen_gets_the_weights_first(model, tmp_path, fakes, caplog):
    """Nobody saw it: its connections are closed, it answers, and says nothing of its weights unasked."""
    fake, other = fakes(), fakes()
    sync = weight_sync([fake, other], model, tmp_path)
    pool = sync.pool
    pool.wait_until_ready()
    assert pool.fleet.waiting() == pool.urls  # there are no weights yet
    sync.send()
    assert fake.loads == other.loads == [0, 0]  # with the proof
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    assert len(fake.served) == 4 and len(fake.loads) == 2  # and no trial, since nothing was amiss
    sent, fake.tag = fake.tag, "default"
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    assert fake.loads[2:] == [4] and fake.tag == sent and len(other.loads) == 2
    pool.fleet.refit_failed(other.url, "gone", time.monotonic() - 9.0)
    sync.send()
    assert len(fake.loads) == 4 and len(other.loads) == 2  # the dead hold nobody up
    sent, other.tag = fake.tag, "default"
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    wait_until(lambda: other.tag == sent)
    assert len(fake.loads) == 4 and len(other.loads) == 3
    fake.tag = "another-1"
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1) and fake.tag == sent
    said_so = f"{fake.url} was given weights by another run (version 'another-1') after this run's ('{sent}')"
    assert said_so in caplog.text


def test_a_failed_proof_is_made_again(model, tmp_path, fakes):
    """The servers hold weights that are wrong on purpose, or did not take them: at the start that ends the run."""
    fake = fakes("/collective_rpc")
    sync = weight_sync([fake], model, tmp_path)
    with pytest.raises(PoolError, match=r"In the first weight sync 1 servers failed(.|\n)*answered 500"):
        sync.send()
    fake.fault = "old copies"
    with pytest.raises(WeightMismatch, match="does not compute with them"):
        sync.send()
    fake.fault = None
    fake.loads.clear()
    sync.send()
    assert len(fake.loads) == 2  # the changed weights, and those of the model
    sync.send()
    assert len(fake.loads) == 3
    fake.fault = "/collective_rpc"
    sync.send()  # later, it does without that server
    assert sync.pool.fleet.servers[fake.url].state == "dead"


def test_after_a_failure_of_the_trainer_no_server_is_used_with_its_old_weights(model, tmp_path, fakes):
    sync = weight_sync([fakes(), fakes()], model, tmp_path)
    sync.send()

    def gather():
        yield from list(model.named_parameters())[:1]
        raise ValueError("out of memory")

    sync.gather = gather
    with pytest.raises(ValueError, match="out of memory"):
        sync.send()
    assert {server.state for server in sync.pool.fleet.servers.values()} == {"dead"}


# error → what is different: a server's fault, its report, its configuration, or an option of the trainer
REFUSED = {
    "python -m dash_trl.serve": {"fault": "no extension"},
    "cannot be read .IndexError": {"fault": "no worker"},
    "cannot be read .KeyError: 'comparable'": {"fault": "no report"},
    r"another shape than '.*' .there, here.: {'vocab_size': .65, 300.}.* --servers 2": {"shape": {"vocab_size": 65}},
    "vllm_weight_difference=True, but the servers' weights are quantised": {
        "report": {"comparable": False},
        "weight_difference": True,
    },
}
RAW = {"model_config": {"logprobs_mode": "raw_logprobs", "max_model_len": 4096}}
WITH_LESS = [
    (None, {}),
    ("a lost update would go unnoticed", {"report": {"comparable": False}}),
    ("every ratio that uses them (importance sampling correction, loss_type='aipo') is biased", {"config": RAW}),
]


def sampler(fakes: list[Fake], model, folder, **options) -> VLLMPool:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model.name_or_path)
    settings = {"model": model, "processing_class": tokenizer, "accelerator": Accelerator(cpu=True)}
    return VLLMPool([fake.url for fake in fakes], weight_dir=folder, server_timeout=60.0, **settings, **options)


def test_which_servers_can_be_this_trainer_s(model, tmp_path, fakes, caplog):
    def pair(fault=None, report=(), config=(), shape=(), **options):
        first, second = fakes(fault), fakes()
        for fake in (first, second):
            fake.serve(model.name_or_path)
        second.config["model_config"]["max_model_len"] = 9999
        first.report.update(report)
        first.report["shape"].update(shape)
        first.config.update(config)
        return sampler([first, second], model, tmp_path, **options)

    for message, different in REFUSED.items():
        with pytest.raises(PoolError if "cannot be read" in message else ValueError, match=message):
            pair(**different).sync_weights()
    for message, different in WITH_LESS:
        caplog.clear()
        vllm = pair(**different)
        vllm.sync_weights()
        assert vllm.context == 4096, message
        assert message in said(caplog) if message else not said(caplog), message


def test_a_server_that_came_back_at_the_end_of_a_batch_works_in_the_next(fakes):
    other, late = fakes(), fakes()
    pool = ready(other, late)
    pool.fleet.refit_failed(late.url, "it was away", now=0.0)
    late.hold.clear()  # until the batch has ended
    pool.complete(prompts(1, 1), SAMPLING)
    late.hold.set()
    wait_until(lambda: pool.fleet.servers[late.url].state == "healthy")
    before = len(late.served)
    pool.complete(prompts(2, 1), SAMPLING)
    assert len(late.served) == before + 1


class Dying(Fake):
    """Breaks off one prompt in each of its lives, another one every time, while it is at the others."""

    life = 0

    def next_fault(self, first):
        self.life += first == 0  # the trial of a new life
        return None if first == 0 else "breaks off" if first == 1 + self.life % 8 else "hangs"


def test_what_kills_servers_ends_the_run(monkeypatch):
    """They are restarted, time and again, and it is not known which of the prompts that they had is the cause."""
    dying, clock = Dying(), Clock(monkeypatch)
    pool = ServerPool([dying.url], server_timeout=6000.0)
    batch = pool.submit(pool.completions([([i, 1, 2], 1) for i in range(1, 9)], SAMPLING), order=0)
    hurry(pool, clock)
    with pytest.raises(PoolError, match="A request failed 6 times, most recently on http.*ClientPayloadError"):
        pool.collect(batch)
    assert dying.life <= 6
    dying.stop()


def test_the_first_server_to_answer_is_not_given_all_the_work(fakes):
    both = fakes(), fakes()
    pool = ServerPool([fake.url for fake in both], server_timeout=60.0)

    async def refit(server):
        for _ in range(1000 * (server.url == both[0].url)):
            await asyncio.sleep(0)
        return pool.fleet.version

    pool.refit = refit
    pool.wait_until_ready()
    assert pool.complete(prompts(8, 1), SAMPLING) == expected(8, 1)
    assert [len(fake.served) for fake in both] == [1 + 4, 1 + 4]


def test_ranks_begin_with_different_servers(model, tmp_path, fakes, monkeypatch):
    three = [fakes() for _ in range(3)]
    urls = [fake.url for fake in three]
    for rank in range(4):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        assert sampler(three, model, tmp_path).pool.urls == [urls[(rank + i) % 3] for i in range(3)], rank
    assert not any(fake.asked["/v1/completions"] for fake in three)  # a killed run may have left them paused


def test_batches_in_work_at_once_do_not_hide_each_other_s_jobs(fakes):
    """They count from 0 each; the second finds the server at work, so that it need not be looked at."""
    fake = fakes()
    pool = ready(fake)
    fake.hold.clear()
    looks, outstanding = fake.asked["/health"], pool.fleet.servers[fake.url].outstanding
    batches = []
    for first in (1, 2):
        batches.append(pool.submit(pool.completions([([first, 1, 2], 1)], SAMPLING), order=0))
        wait_until(lambda first=first: fake.asked["/v1/completions"] > first)
        assert fake.asked["/health"] == looks + 1
    assert len(outstanding) == 2
    fake.hold.set()
    assert [pool.collect(batch)[0][0].token_ids for batch in batches] == [[1, 100], [2, 100]] and not outstanding


def test_too_many_open_files_are_not_the_server_s_death(fakes, monkeypatch):
    async def connect(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", connect)
    with pytest.raises(PoolError, match="Too many open files") as raised:
        ServerPool([fakes().url]).ask_all(lambda server: server.probe())
    assert not raised.value.__cause__.gone


def test_what_every_server_would_refuse_is_the_users_error_at_once(fakes):
    for fault, message in (("400", "answered 400"), ("401", "VLLM_API_KEY")):
        pool = ServerPool([fakes(fault).url, fakes(fault).url], server_timeout=60.0)
        with pytest.raises(ValueError, match=message):
            pool.complete(prompts(3, 2), SAMPLING)
        with pytest.raises(ValueError, match=message):
            list(pool.as_completed(pool.completions(prompts(2, 1), SAMPLING)))


def test_a_server_that_comes_back_is_refitted_before_it_is_given_a_prompt(fakes, monkeypatch):
    """It says that it is well; its weights come first, and while they fail it gets nothing."""
    fake, clock = fakes(), Clock(monkeypatch)
    pool = ServerPool([fake.url], server_timeout=6000.0)
    order = []

    async def refit(server):
        order.append(("refit", len(fake.served)))
        return pool.fleet.version - (len(order) < 3)  # twice it ends up with old weights

    pool.refit = refit
    batch = pool.submit(pool.completions(prompts(4, 1), SAMPLING), order=0)
    hurry(pool, clock)
    assert pool.collect(batch) == expected(4, 1)
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
    fake.key = "secret-key"
    caplog.set_level("DEBUG")
    assert ServerPool([fake.url], server_timeout=60.0).complete(prompts(6, 2), SAMPLING) == expected(6, 2)
    assert "secret-key" not in caplog.text


def test_the_key_that_the_user_s_servers_made_is_found(fakes, monkeypatch, tmp_path, caplog):
    """If they are started after the trainer, too. No other machine gets it."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level("DEBUG")
    fake = fakes()
    pool = ServerPool([fake.url], server_timeout=60.0)
    fake.key = own_key()
    assert pool.complete(prompts(6, 2), SAMPLING) == expected(6, 2)
    assert fake.key not in caplog.text
    assert key_header(fake.url) == {"Authorization": f"Bearer {fake.key}"} and key_header("http://10.0.0.3:80") == {}
    fake.key = "another"
    with pytest.raises(ValueError, match=r"answered 401 .*variable VLLM_API_KEY to the key .* is in .*vllm_key of the"):
        ServerPool([fake.url], server_timeout=1.0).complete(prompts(1, 1), SAMPLING)


def test_a_redirect_is_not_followed(fakes):
    fake, other = fakes("307"), fakes()
    fake.location = f"{other.url}/v1/completions"
    with pytest.raises(ValueError, match="answered 307 to POST .* Redirects are not followed"):
        ServerPool([fake.url], server_timeout=1.0).complete(prompts(1, 1), SAMPLING)
    assert not other.asked


NO_ADDRESSES = [
    ([], "empty"),
    (["127.0.0.1:8000"], "not the address of a server"),
    (["http://127.0.0.1:8000/v1"], "without a path"),
    (["http://127.0.0.1:8000?x=1"], "without a path"),
    (["http://127.0.0.1:port"], "'http://127.0.0.1:port', which is not the address"),
    (["http://[::1:8000"], "not the address"),
    (["http://me:secret@127.0.0.1:8000"], r"'http://\*\*\*@127.0.0.1:8000', which is not .* a password"),
    ("127.0.0.1:8000", "'127.0.0.1:8000', which is not the address of a server"),
    (" , ", "empty"),
    (["http://127.0.0.1:8000", "http://10.0.0.3:8000"], "'http://10.0.0.3:8000', which is not on .* VLLM_API_KEY"),
    (["https://example.com"], "no key for it"),
]


def test_addresses(caplog, monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for urls, message in NO_ADDRESSES:
        with pytest.raises(ValueError, match=message):
            check_urls(urls)
    assert check_urls(["http://localhost:8000/", "http://[::1]:8001"]) == ["http://localhost:8000", "http://[::1]:8001"]
    assert check_urls(["http://0.0.0.0:8000"])  # TRL's default: this machine
    both = "http://localhost:8000, http://localhost:8001/"  # one string may name them all
    for urls in (both, both.replace(" ", ""), [both], ("http://localhost:8000", "http://localhost:8001")):
        read = DASHConfig(str(tmp_path), use_cpu=True, bf16=False, vllm_server_urls=urls).vllm_server_urls
        assert read == ["http://localhost:8000", "http://localhost:8001"], urls
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    check_urls(["https://10.0.0.3:8000"])
    assert not said(caplog)
    check_urls(["http://10.0.0.3:8000"])
    assert "are sent to http://10.0.0.3:8000 without encryption" in caplog.text and "secret" not in caplog.text
