"""What a pool makes of servers that misbehave: every prompt once, in order, in time, or an error that names them.

The servers here are fakes, for faults only; `test_vllm.py` has the real ones.
"""

import asyncio
import gc
import threading
import time
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from trl.generation.vllm_generation import VLLMGeneration

from dash_trl.config import DASHConfig
from dash_trl.sampling import (
    Completion,
    PoolError,
    ServerGeneration,
    ServerGone,
    ServerPool,
    WeightMismatch,
    install,
)
from dash_trl.server_key import check_urls, own_key
from tests.fake_server import Clock, Fake, factory, is_idle, pool_of, sampler_of, settle
from tests.tiny import load, refused, said
from tests.vllm_run import wait_until

SAMPLING = {"max_tokens": 8}
UNREADABLE = "gave an answer that cannot be read"
# fault → what is said of a server that has it
FAULTS = {
    "500": "answered 500",
    "hangs": "took longer than 0.2 s",
    "truncated JSON": UNREADABLE,
    "breaks off": "ClientPayloadError",
    "too few choices": r"answered \d choices instead of",
    "written NaN": "a log-prob that is not a finite number",
    "null": UNREADABLE,
    "wrong token counts": rf"answered \d tokens with|{UNREADABLE}",
    "aborted": "ended a completion with finish_reason='abort'",
}


fakes = factory(Fake)


def ready(*fakes: Fake, **options) -> ServerPool:
    """A pool that has seen them."""
    pool = pool_of(*fakes, **options)
    pool.wait_until_ready()
    return pool


def expected(count: int, n: int) -> list[tuple[int, list[Completion]]]:
    return [(i, [Completion([i, 100 + k], [-0.5, -1.5]) for k in range(n)]) for i in range(count)]


async def ask(pool: ServerPool, number: int, n: int) -> tuple[int, list[Completion]]:
    return number, (await pool.complete([number, 1, 2], n, SAMPLING))[0]


def asked(pool: ServerPool, count: int, n: int):
    return (ask(pool, number, n) for number in range(count))


def complete(pool: ServerPool, count: int, n: int = 1) -> list[tuple[int, list[Completion]]]:
    return pool.run(asked(pool, count, n))


def test_results_are_taken_as_they_come(fakes):
    """From a server that fails the first request, too; whoever stops taking takes the rest back."""
    pool = pool_of(fakes("500", 1), fakes())
    assert sorted(pool.as_completed(asked(pool, 20, 2))) == expected(20, 2)
    rest = pool.as_completed(asked(pool, 20, 2))
    next(rest)
    rest.close()
    assert is_idle(pool)
    # vLLM ends a completion that repeats itself, if `generation_kwargs` have `repetition_detection`: it is whole.
    pool = ready(fakes("repetition"))
    assert complete(pool, 2, 2) == expected(2, 2) and not pool.retried


def test_what_a_server_answers_wrongly_is_its_failure(fakes):
    for fault, message in FAULTS.items():
        pool = pool_of(fakes(fault), request_timeout=0.2 if fault == "hangs" else 60.0)
        asks = [lambda server: server.complete([1, 2, 3], 4, SAMPLING), lambda server: server.log_probs([1, 2, 3])]
        for ask in asks[: 1 + (fault != "aborted")]:
            with pytest.raises(PoolError, match=message) as raised:
                pool.ask_all(ask)
            assert isinstance(raised.value.__cause__, ServerGone) == (fault == "breaks off"), fault


def test_a_good_server_answers_what_a_bad_one_fails(fakes, monkeypatch):
    clock = Clock(monkeypatch)
    for fault in ("500", "hangs", "breaks off"):
        bad = fakes(fault, spared=1)  # a server is tried before it is trusted
        good = fakes()
        pool = ready(bad, good, server_timeout=600.0, request_timeout=60.0)
        batch = pool.submit(asked(pool, 12, 4))
        if fault == "hangs":
            wait_until(lambda bad=bad, pool=pool: (bad.asked["/v1/completions"], len(pool.fleet.jobs())) == (7, 6))
            clock.now += 61.0
        assert pool.collect(batch) == expected(12, 4), fault
        assert sorted(good.served) == [0, *range(12)], fault  # 0 is the trial's, too
        assert bad.asked["/v1/completions"] > 3 and bad.served == [0], fault


def test_servers_that_cannot_be_used_are_named(fakes):
    bad = fakes("500", spared=1)
    good = fakes()
    gone = fakes()
    gone.stop()
    pool = ready(bad, server_timeout=0.5)
    refused(f"{bad.url} is (dead|unchecked|refitting); last error: ", complete, pool, 3, error=PoolError)
    pool = pool_of(good, gone, server_timeout=0.5)
    refused(f"1 of 2 vLLM servers did not answer(.|\n)*{gone.url}", pool.wait_until_ready, error=PoolError)
    refused(
        f"No vLLM server could be used for 0.3 s(.|\n)*{gone.url} is dead",
        complete,
        pool_of(gone, server_timeout=0.3),
        3,
        error=PoolError,
    )


def test_a_prompt_that_no_server_can_answer_ends_the_run(fakes):
    """Each of them is well after it failed, and would be given that prompt for ever."""
    pool = pool_of(fakes("500", poison=3), fakes("500", poison=3))
    refused("A request failed 6 times, most recently on http.*answered 500", complete, pool, 6, error=PoolError)


def test_a_server_that_fails_to_load_weights_goes_on_sampling(fakes):
    reset = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    for fault in ("/collective_rpc", reset, "/update_weight_version"):
        fake = fakes(fault)
        refused(
            "answered 500",
            pool_of(fake).ask_all,
            lambda server: server.load_weights("directory", "tag"),
            error=PoolError,
        )
        assert fake.asked["/pause?mode=keep"] == fake.asked["/resume"] == 1, fault
        # Weights that are loaded in part have neither the old tag nor the new one.
        assert fake.tag == ("default" if fault == "/update_weight_version" else "tag.unfinished"), fault


def test_newer_weights_wait_for_those_that_a_server_is_being_given(fakes):
    """Else the older ones, coming last, would be what it computes with."""
    order = []
    newer_asked = threading.Event()
    pool = pool_of(fakes(), fakes())
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
    complete(pool, 4)  # by the other one
    assert order == [] and pool.fleet.urls_of("refitting") == [slow]
    newer_asked.set()
    pool.new_version(1)
    assert order == ["older"]


def test_a_look_at_who_had_no_work_waits_until_weights_are_sent(fakes):
    """Before, it would give a server the older weights. After, it comes first: nobody held a connection to the server.

    A chain may make a request while weights are sent.
    """
    idle = fakes()
    away = fakes()
    pool = ready(idle, away)
    looks = []

    async def refit(server):
        looks.append((server.url, pool.fleet.version, len(idle.served)))
        return pool.fleet.version

    pool.refit = refit
    pool.new_version(1)
    pool.fleet.failed(away.url, "it was away", now=0.0)  # a look is due
    batch = pool.submit(asked(pool, 2, 1))
    settle(pool)
    pool.ask_all(lambda server: server.weight_tag())  # a look that had begun would come before
    assert looks == [] and [fake.asked["/health"] for fake in (idle, away)] == [1, 1]
    pool.weights_sent(dict.fromkeys(pool.urls))
    assert pool.collect(batch) == expected(2, 1)
    assert (idle.url, 1, 1) in looks  # it has answered its trial


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model)


def serving(fakes: list[Fake], model, folder) -> ServerGeneration:
    """A sampler on servers of this model, to which no weights have been sent."""
    for fake in fakes:
        fake.serve(model.name_or_path)
    return sampler_of(fakes, model, folder)


def test_a_server_that_was_restarted_unseen_gets_the_weights_first(model, tmp_path, fakes, caplog):
    """Nobody saw it: its connections are closed, it answers, and says nothing of its weights unasked."""
    fake = fakes()
    other = fakes()
    vllm = serving([fake, other], model, tmp_path)
    pool = vllm.pool
    assert pool.fleet.urls_of("refitting") == pool.urls  # there are no weights yet
    vllm.sync_weights()
    assert fake.loads == other.loads == [0, 0]  # with the proof
    assert complete(pool, 8) == expected(8, 1)
    assert len(fake.served) == 4 and len(fake.loads) == 2 < fake.asked["/resume"]  # and no trial: nothing was amiss
    sent = fake.tag
    fake.tag = "default"
    assert complete(pool, 8) == expected(8, 1)
    assert fake.loads[2:] == [4] and fake.tag == sent and len(other.loads) == 2
    pool.fleet.died(other.url, "gone", time.monotonic() - 9.0)
    vllm.sync_weights()
    assert len(fake.loads) == 4 and len(other.loads) == 2  # the dead hold nobody up
    sent = fake.tag
    other.tag = "default"
    assert complete(pool, 8) == expected(8, 1)
    wait_until(lambda: other.tag == sent)
    assert len(fake.loads) == 4 and len(other.loads) == 3
    fake.tag = "another-1"
    assert complete(pool, 8) == expected(8, 1) and fake.tag == sent
    said_so = f"{fake.url} was given weights by another run (version 'another-1') after this run's."
    assert said_so in caplog.text


def test_a_failed_proof_is_made_again(model, tmp_path, fakes):
    """The servers hold weights that are wrong on purpose, or did not take them: at the start that ends the run."""
    fake = fakes("/update_weight_version")
    vllm = serving([fake], model, tmp_path)
    refused(r"In the first weight sync 1 servers failed(.|\n)*answered 500", vllm.sync_weights, error=PoolError)
    fake.fault = "old copies"
    refused("does not compute with the weights", vllm.sync_weights, error=WeightMismatch)
    fake.fault = None
    fake.loads.clear()
    vllm.sync_weights()
    assert len(fake.loads) == 2  # the changed weights, and those of the model
    vllm.sync_weights()
    assert len(fake.loads) == 3
    fake.fault = "/collective_rpc"
    vllm.sync_weights()  # later, it does without that server
    assert vllm.pool.fleet.servers[fake.url].state == "dead"


def test_after_a_failure_of_the_trainer_no_server_is_used_with_its_old_weights(model, tmp_path, fakes, monkeypatch):
    vllm = serving([fakes(), fakes()], model, tmp_path)
    vllm.sync_weights()
    monkeypatch.setattr(model, "named_parameters", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vllm.sync_weights()
    assert {server.state for server in vllm.pool.fleet.servers.values()} == {"dead"}


# error → what is different: a server's fault, its report, its configuration, or an option of the trainer
REFUSED = {
    "dash_trl serve": {"fault": "no extension"},
    "holds only part of its weights, because a load failed. Restart it": {"fault": "half loaded"},
    "cannot be read .KeyError: 'dtype'": {"fault": "no report"},
    "the KV connector LMCacheMPConnector, whose cache may keep prefixes of old weights": {
        "config": {"kv_transfer_config": {"kv_connector": "LMCacheMPConnector"}}
    },
    r"another shape than '.*' .there, here.: {'vocab_size': .65, 300.}.* --servers 2": {"shape": {"vocab_size": 65}},
}
RAW = {"model_config": {"logprobs_mode": "raw_logprobs", "max_model_len": 4096}}
WITH_LESS = [
    (None, {}),
    (None, {"config": {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}}),
    ("every ratio that uses them (importance sampling correction, loss_type='aipo') is biased", {"config": RAW}),
]


def test_which_servers_can_be_this_trainer_s(model, tmp_path, fakes, caplog):
    def pair(fault=None, report=(), config=(), shape=(), **options):
        first = fakes(fault)
        second = fakes()
        for fake in (first, second):
            fake.serve(model.name_or_path)
        second.config["model_config"]["max_model_len"] = 9999
        first.report.update(report)
        first.report["shape"].update(shape)
        first.config.update(config)
        return sampler_of([first, second], model, tmp_path, **options)

    for message, different in REFUSED.items():
        refused(message, pair(**different).sync_weights, error=PoolError if "cannot be read" in message else ValueError)
    refused("seed=5.*Leave it out", pair, generation_kwargs={"seed": 5})
    for message, different in WITH_LESS:
        caplog.clear()
        vllm = pair(**different)
        vllm.sync_weights()
        assert vllm.context == 4096, message
        assert message in said(caplog) if message else not said(caplog), message


def alive() -> int:
    """Bytes of all tensors, but for torch's fake ones, which have no memory."""
    tensors = (one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
    return sum({one.data_ptr(): one.nbytes() for one in tensors}.values())


def test_weight_syncs_leave_the_base_weights_of_an_adapter_as_they_are(model, tmp_path, fakes, monkeypatch):
    """To the bit, though in bf16 an adapter that is added to a weight and subtracted again leaves another weight.

    While parameters are sent, there is one copy of those that the adapter changes; then there is none.
    """
    config = LoraConfig(
        r=8, lora_alpha=64, target_modules="all-linear", init_lora_weights=False, modules_to_save=["norm"]
    )
    base = load(model.name_or_path, dtype=torch.bfloat16)
    fake = fakes()
    adapted = get_peft_model(base, config)
    adapted.add_adapter("ref", config)  # as TRL does with beta > 0
    fake.serve(model.name_or_path)
    fake.model.bfloat16()
    fake.report["dtype"] = "bfloat16"
    servers = sampler_of([fake], adapted, tmp_path)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    colocated = VLLMGeneration(model=adapted, accelerator=servers.accelerator, mode="colocate", processing_class=None)
    colocated.llm = MagicMock()
    install(MagicMock(**{"vllm_generation": colocated, "args.vllm_mode": "colocate"}))
    before = {name: value.detach().clone() for name, value in adapted.named_parameters()}
    for vllm in (servers, colocated):
        for _ in range(20):
            vllm.sync_weights()
        gc.collect()
        start = alive()
        sent, held = zip(*((name, alive()) for name, _ in vllm._iter_named_params()), strict=True)
        assert not any("modules_to_save" in name for name in sent), "vLLM knows no such name"
        next(vllm._iter_named_params())  # a sync that is interrupted
        assert {*held} == {start + sum(one.nbytes for name, one in before.items() if ".base_layer." in name)}
        assert alive() == start
        assert all(value.equal(before[name]) for name, value in adapted.named_parameters())
    assert all(value.equal(fake.held[name]) for name, value in adapted.merge_and_unload().named_parameters())


def test_ranks_begin_with_different_servers(model, tmp_path, fakes, monkeypatch):
    three = [fakes() for _ in range(3)]
    urls = [fake.url for fake in three]
    for rank in range(4):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        assert sampler_of(three, model, tmp_path).pool.urls == [urls[(rank + i) % 3] for i in range(3)], rank
    assert not any(fake.asked["/v1/completions"] for fake in three)  # a killed run may have left them paused


def test_what_every_server_would_refuse_is_the_users_error_at_once(fakes):
    for fault, message in (("400", "answered 400"), ("401", "VLLM_API_KEY"), ("307", "answered 307")):
        pool = pool_of(fakes(fault), fakes(fault))
        for _ in range(3):  # more often than there are servers
            refused(message, complete, pool, 3)
        refused(message, list, pool.as_completed(asked(pool, 2, 1)))


def test_a_server_that_recovers_is_asked_with_the_key_and_directly(fakes, monkeypatch, tmp_path, caplog):
    """Servers that are started after the trainer make the key. No proxy is asked."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("no_proxy", "")
    fake = fakes("500", times=2)
    caplog.set_level("DEBUG")
    pool = pool_of(fake)
    fake.key = own_key()
    assert complete(pool, 6, 2) == expected(6, 2)
    assert fake.key not in caplog.text


NO_ADDRESSES = [
    ([], "empty"),
    (["127.0.0.1:8000"], "not the address of a server"),
    (["http://127.0.0.1:8000/v1"], "without a path"),
    (["http://127.0.0.1:port"], "'http://127.0.0.1:port', which is not the address"),
    (["http://me:secret@127.0.0.1:8000"], r"'http://\*\*\*@127.0.0.1:8000', which is not .* a password"),
    (["http://127.0.0.1:8000", "http://10.0.0.3:8000"], "'http://10.0.0.3:8000', which is not on .* VLLM_API_KEY"),
    (["https://example.com"], "no key for it"),
]


def test_addresses(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for urls, message in NO_ADDRESSES:
        refused(message, check_urls, urls)
    both = ["http://0.0.0.0:8000", "http://[::1]:8001"]  # the first one is TRL's default: this machine
    for urls in (both, ["http://0.0.0.0:8000,http://[::1]:8001/"], "http://0.0.0.0:8000, http://[::1]:8001", 2 * both):
        read = DASHConfig(str(tmp_path), use_cpu=True, bf16=False, vllm_server_urls=urls).vllm_server_urls
        assert read == both, urls
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    check_urls(["https://10.0.0.3:8000"])
    check_urls(["http://10.0.0.3:8000"])
