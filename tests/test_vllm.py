"""Real vLLM servers: sampled log-probs, weight syncs, crashes, and whole training runs."""

import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dash_trl.evaluation import main, open_sampler
from dash_trl.sampling import FileWeights, ServerGeneration, WeightMismatch
from dash_trl.serve import free_ports, visible_gpus
from dash_trl.server_key import key_header
from dash_trl.toy import arithmetic_dataset
from dash_trl.workers import Command
from tests.launching import ROOT
from tests.tiny import load, log_probs, refused
from tests.vllm_run import greedy, wait_until


class Pair:
    """Two servers, each by a `dash_trl serve` of its own, so that one can die alone.

    Attributes:
        commands: of the two servers.
        slow: while this file exists, they take their time for a token.
        hold: while this file exists, they sample no token.
    """

    def __init__(self, model: str, folder: Path):
        self.model = model
        self.folder = folder
        self.slow = folder / "slow"
        self.hold = folder / "hold"
        self.ports = free_ports(2, 10000 + os.getpid() % 10000)  # not those of another suite that begins now, too
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.commands = [self.start(number) for number in range(2)]

    def start(self, number: int) -> Command:
        places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"DASH_TRL_SERVER_FOLDER": str(self.folder), "PYTHONPATH": places}
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // 2))
        if visible_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[number::2])
        log = self.folder / f"{number}.log"
        log.unlink(missing_ok=True)  # of an earlier life
        command = [sys.executable, "-m", "dash_trl", "serve", self.model, "--port", str(self.ports[number])]
        # float32 on a GPU, too, to compare log-probs to 1e-4
        options = ["--dtype", "float32", "--logits-processors", "tests.slow_tokens:SlowTokens"]
        options += ["--enable-lora", "--max-lora-rank", "8"]
        return Command([*command, *options], environment=environment, log=log)

    def wait_until_ready(self) -> None:
        """Waits until the servers have printed that they are ready, with the flag for training."""
        for url, command in zip(self.urls, self.commands, strict=True):
            ready = f"    --vllm_server_urls {url}\n\nCtrl+C stops the servers.\n"
            wait_until(
                lambda command=command, ready=ready: ready in command.log.read_text() or not command.running, 600
            )
            assert command.running, command.log.read_text()

    def group(self, number: int) -> int:
        """Of the server, not of the process that started it."""
        (server,) = psutil.Process(self.commands[number].process.pid).children()
        return server.pid

    def stop(self) -> None:
        for command in self.commands:
            command.terminate()
        for command in self.commands:
            command.process.wait(60)


@pytest.fixture(scope="module")
def vllm_servers(toy, tmp_path_factory) -> Iterator[Pair]:
    """Two real servers. The tests that kill some come last."""
    pair = Pair(toy, tmp_path_factory.mktemp("servers"))
    try:
        pair.wait_until_ready()
        yield pair
    finally:
        pair.stop()


@pytest.fixture
def slow_tokens(vllm_servers) -> Iterator[Path]:
    """While this file exists, the servers take their time for a token."""
    yield vllm_servers.slow
    vllm_servers.slow.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def trained(toy):
    return load(toy)


@pytest.fixture(scope="module")
def proven(vllm_servers, trained, tmp_path_factory) -> ServerGeneration:
    """It has sent its first weights."""
    pool = make_pool(vllm_servers.urls, trained, tmp_path_factory.mktemp("weights"))
    pool.sync_weights()
    return pool


@pytest.fixture
def model(trained, toy):
    """The toy model, as it was; a test may change it, and give it to `pool`."""
    trained.load_state_dict(load(toy).state_dict())
    return trained


@pytest.fixture
def pool(model, proven) -> ServerGeneration:
    """For `model`; the servers hold weights of other tests."""
    proven.generation_kwargs = {}
    proven.max_completion_length = 48
    proven.step = lambda: 0
    return proven


def make_pool(urls: list[str], model, weight_dir: Path, **options) -> ServerGeneration:
    return ServerGeneration(
        urls,
        weight_dir=str(weight_dir),
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(model.name_or_path),
        max_completion_length=48,
        server_timeout=60.0,
        **options,
    )


def prompts(pool: ServerGeneration, count: int, n: int) -> list[list[int]]:
    rows = arithmetic_dataset("test", count)["prompt"]
    apply = pool.processing_class.apply_chat_template
    texts = [apply(row, add_generation_prompt=True, tokenize=False) for row in rows]
    return [ids for ids in pool.processing_class(texts)["input_ids"] for _ in range(n)]


def differences(model, prompt: list[int], completion: list[int], sampled: list[list[float]]) -> Tensor:
    """[tokens], of the sampled tokens' log-probs from those that the model gives them."""
    return (torch.tensor(log_probs(model, prompt, completion)) - torch.tensor(sampled).squeeze(1)).abs()


def largest_difference(model, rows: list[list[int]], completions: list[list[int]], log_probs: list) -> float:
    """Return the largest difference over all rows, computed row by row."""
    return max(differences(model, *row).max().item() for row in zip(rows, completions, log_probs, strict=True))


def sampled_difference(pool: ServerGeneration, model) -> float:
    """Samples, and returns the largest difference from the log-probs that a model gives these tokens."""
    rows = prompts(pool, 4, 4)
    _, completions, log_probs, _ = pool.generate(rows, None, 4)
    return largest_difference(model, rows, completions, log_probs)


def begin_with_its_model(pool: ServerGeneration) -> None:
    """Gives the servers the pool's model, as if they had been started with it, so that an adapter may follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileWeights, "kind", "adapter")
        pool.sync_weights()


def change(model, seed: int, part: str = "") -> None:
    """Changes all parameters, or those with a part in their names, so much that it would be noticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def read(url: str) -> str:
    return urllib.request.urlopen(urllib.request.Request(url, headers=key_header(url)), timeout=10).read().decode()


def generated_tokens(url: str) -> float:
    return float(re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", read(f"{url}/metrics"), re.M)[1])


def test_nobody_without_the_key_reaches_the_servers(vllm_servers):
    for path in ("/health", "/v1/models", "/weight_info"):
        refused("401", urllib.request.urlopen, vllm_servers.urls[0] + path, error=HTTPError, timeout=10)
        assert read(vllm_servers.urls[0] + path) is not None


def check_two_steps(ranks: Sequence[dict[str, Any]], count: int, largest: float = 1e-4) -> None:
    """Of a run: the second window was sampled by the weights of the first step, as the trainer has them."""
    assert len(ranks) == count
    for rank in ranks:
        assert rank["steps"] == 2 and rank["moved"] > 1e-4
        assert max(rank["differences"]) < largest and len(rank["differences"]) == 2
        assert [(window["oldest"], window["newest"]) for window in rank["windows"]] == [(0, 0), (1, 1)]


# ---------------------------------------------------------------------------------------------- log-probs and weights


def test_sampled_log_probs_are_the_trainers_through_three_syncs(model, pool):
    """Every group comes once and in order: so each row is its prompt's."""
    long = 12 * prompts(pool, 1, 1)[0]  # several blocks of the prefix cache, which must not outlive its weights
    rows = [*prompts(pool, 23, 4), *[long] * 4]
    for sync in range(3):
        change(model, sync)
        pool.sync_weights()
        assert len(list(Path(pool.weight_dir).glob("*/version-*"))) == 1  # old versions are removed
        returned, completions, log_probs, token_ids = pool.generate(rows, None, 4)
        assert returned == rows and token_ids == [[[token] for token in row] for row in completions]
        assert largest_difference(model, rows, completions, log_probs) <= 1e-4
    assert len({tuple(row) for row in completions[:4]}) > 1  # four samples, not one four times
    assert all(generated_tokens(url) > 1000 for url in pool.pool.urls)  # both servers work

    async def turns() -> None:  # a row of several turns
        ids = rows[0]
        for _ in range(2):
            (reply,), _ = await pool.pool.complete(*next(pool.requests([ids], 1)))
            replies.append((ids, reply.token_ids, [[value] for value in reply.log_probs]))
            ids = [*ids, *reply.token_ids]

    replies: list[tuple] = []
    pool.pool.collect(pool.pool.submit(turns() for _ in range(4)))
    assert len(replies) == 8 and largest_difference(model, *zip(*replies, strict=True)) <= 1e-4


def test_a_row_across_a_sync_is_of_the_old_weights_up_to_a_token_and_then_of_the_new_ones(
    vllm_servers, slow_tokens, model, pool
):
    pool.generation_kwargs = {"ignore_eos": True}
    pool.max_completion_length = 120
    pool.sync_weights()
    (short,) = prompts(pool, 1, 1)
    old = copy.deepcopy(model)
    rows = [*[short] * 2, *[12 * short] * 2]
    before = {url: generated_tokens(url) for url in vllm_servers.urls}
    slow_tokens.touch()
    batch = pool.pool.submit(pool.pool.complete(*request) for request in pool.requests(rows, 2))

    def both_groups_have_begun() -> bool:
        in_work = [one.url for one in pool.pool.fleet.servers.values() for _ in one.outstanding]
        return len(in_work) == 2 and all(generated_tokens(url) >= before[url] + 8 for url in in_work)

    wait_until(both_groups_have_begun)
    change(model, 1)
    pool.step = lambda: 7
    pool.sync_weights()
    slow_tokens.unlink()
    groups, versions = zip(*pool.pool.collect(batch), strict=True)
    sampled = [row for group in groups for row in group]
    completions = [row.token_ids for row in sampled]
    log_probs = [[[one] for one in row.log_probs] for row in sampled]
    assert list(map(pool.steps, versions)) == [[0, 7]] * 2
    for row in zip(rows, completions, log_probs, strict=True):
        of_old, of_new = (differences(weights, *row) <= 1e-4 for weights in (old, model))
        # Tokens of either without a gap.
        begins = of_old.cumprod(0).sum()
        ends = of_new.flip(0).cumprod(0).sum()
        assert len(of_old) == 120 <= begins + ends and max(begins, ends) < 120


WARPERS = {
    "repetition_penalty": (RepetitionPenaltyLogitsProcessor, 1.2),
    "temperature": (TemperatureLogitsWarper, 1.3),
    "min_p": (MinPLogitsWarper, 0.02),
    "top_k": (TopKLogitsWarper, 20),
    "top_p": (TopPLogitsWarper, 0.9),
}


def test_sampled_log_probs_are_those_of_the_truncated_distribution(model, pool, monkeypatch):
    """Of what the server drew from, which is what Transformers draws from; not of what the model would choose from."""
    pool.max_completion_length = 16
    pool.sync_weights()
    rows = prompts(pool, 4, 4)
    with monkeypatch.context() as patch:
        for name, (_, value) in WARPERS.items():
            patch.setattr(pool, name, value)
        _, completions, log_probs, _ = pool.generate(rows, None, 4)
    warp = LogitsProcessorList([kind(value) for kind, value in WARPERS.values()])
    for prompt, completion, reported in zip(rows, completions, log_probs, strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        places = range(len(prompt), ids.shape[1])
        expected = [warp(ids[:, :t], logits[:, t - 1].clone()).log_softmax(-1)[0, ids[0, t]] for t in places]
        assert (torch.stack(expected) - torch.tensor(reported).squeeze(1)).abs().max() <= 1e-4
    assert largest_difference(model, rows, completions, log_probs) > 0.05


def test_an_adapter_goes_to_the_servers_without_its_model(vllm_servers, model, pool, tmp_path):
    config = {"r": 8, "use_rslora": True, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 3]}
    begin_with_its_model(pool)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(lora_alpha=12, **config))
    own = make_pool(vllm_servers.urls, adapted, tmp_path)
    own.sync_weights()  # with its proof, of B matrices that are zero
    for seed in (4, 5):
        change(adapted, seed, "lora_")
        own.sync_weights()
        assert sampled_difference(own, adapted) <= 1e-4
        with adapted.disable_adapter():
            assert sampled_difference(own, adapted) > 0.1
    sent = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in sent} == {"adapter_config.json", "adapter_model.safetensors"}
    base = next(one for one in adapted.parameters() if not one.requires_grad).data
    base.neg_()
    refused("The weights of the adapter's base model have changed", own.sync_weights)
    base.neg_()

    change(model, 6)
    begin_with_its_model(pool)  # a model for which nobody trained this adapter
    other = make_pool(vllm_servers.urls, adapted, tmp_path / "other")
    refused("does not compute with the weights that it was given", other.sync_weights, error=WeightMismatch)
    pool.sync_weights()
    for run in (own, make_pool(vllm_servers.urls, adapted, tmp_path / "later")):
        refused("was given a whole model by another run", run.sync_weights, error=WeightMismatch)

    # What PEFT trains whole goes merged: under the names of the base model, without the copies of TRL's reference.
    config = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "down_proj"]}
    whole = get_peft_model(copy.deepcopy(model), LoraConfig(**config, ensure_weight_tying=True))
    whole.add_adapter("ref", LoraConfig(**config, ensure_weight_tying=True))
    merged = make_pool(vllm_servers.urls, whole, tmp_path / "merged")
    merged.sync_weights()  # with its proof
    change(whole, 4)
    merged.sync_weights()
    assert sampled_difference(merged, whole) <= 1e-4


# ----------------------------------------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def checkpoints(toy, tmp_path_factory) -> dict[str, str]:
    """Of one shape: the toy model's directory, one with other weights, a LoRA adapter on it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: load(toy) for name in ("other", "adapter")}
    change(made["other"], 5)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    made["adapter"] = get_peft_model(made["adapter"], config)
    for name, one in made.items():
        one.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(toy).save_pretrained(folder / name)
    return {"own": toy, **{name: str(folder / name) for name in made}}


@pytest.fixture(scope="module")
def by_transformers(checkpoints) -> dict[str, list[list[int]]]:
    found = {}
    for name, checkpoint in checkpoints.items():
        with open_sampler(checkpoint) as sampler:
            found[name] = greedy(sampler)
    return found


def test_evaluation_by_servers(vllm_servers, checkpoints, by_transformers, tmp_path):
    """They take one checkpoint after another in place, LoRA merged. Other weights meanwhile are replaced."""

    def opened(name: str, folder: str):
        return open_sampler(checkpoints[name], server_urls=vllm_servers.urls, weight_dir=tmp_path / folder)

    with opened("other", "0") as other:
        for folder, name in (("1", "adapter"), ("2", "own")):
            with opened(name, folder) as sampler:
                assert greedy(sampler) == by_transformers[name]
        assert greedy(other) == by_transformers["other"] != by_transformers["own"]
    flags = "--dataset_name toy --dataset_test_split test[:32] --num_samples 8 --k 1 4".split()
    main([checkpoints["other"], "toy", *flags, "--vllm_server_urls", *vllm_servers.urls, "--output_dir", str(tmp_path)])
    accuracy = {name: json.loads((tmp_path / f"{name}.json").read_text())["accuracy"] for name in ("other", "toy")}
    assert 0.25 < accuracy["toy"] < 0.65 and accuracy["other"] < accuracy["toy"]


# -------------------------------------------------------------------------------------------------------------- crashes


def test_a_killed_server_loses_nothing_and_comes_back_with_the_weights(vllm_servers, slow_tokens, model, pool):
    pool.generation_kwargs = {"ignore_eos": True}
    pool.max_completion_length = 150
    pool.sync_weights()
    fleet = pool.pool.fleet
    rows = prompts(pool, 16, 2)
    victim = vllm_servers.urls[1]
    slow_tokens.touch()  # so that it is killed in the middle
    sampling = ThreadPoolExecutor(1).submit(pool.generate, rows, None, 2)
    wait_until(lambda: len(fleet.servers[victim].outstanding) == 8)
    os.killpg(vllm_servers.group(1), signal.SIGKILL)
    slow_tokens.unlink()
    _, completions, log_probs, _ = sampling.result(300)
    assert [len(row) for row in completions] == [150] * 32 and fleet.servers[victim].state == "dead"
    assert largest_difference(model, rows, completions, log_probs) <= 1e-4

    change(model, 3)
    pool.sync_weights()  # the dead one does not hold up the others
    pool.generation_kwargs = {}
    pool.max_completion_length = 48
    wait_until(lambda: not vllm_servers.commands[1].running)
    assert "A server has ended, so all are stopped." in vllm_servers.commands[1].log.read_text()
    vllm_servers.commands[1] = vllm_servers.start(1)  # with the weights of its disk
    vllm_servers.wait_until_ready()

    def it_is_back() -> bool:
        assert sampled_difference(pool, model) <= 1e-4  # never a prompt for the old weights
        return fleet.servers[victim].state == "healthy"

    wait_until(it_is_back)
    assert it_is_back() and generated_tokens(victim) > 10  # it works again


def within_bound(windows: list[dict[str, Any]], level: int) -> bool:
    """Window n is of the weights with which window n − k began, or of newer ones."""
    begun = [window["step"] for window in windows]
    return all(
        begun[max(0, n - level)] <= one["oldest"] <= one["newest"] <= one["step"] for n, one in enumerate(windows)
    )


@pytest.fixture(scope="module")
def launched(vllm_servers, checkpoints, trained, proven, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Scenario of `vllm_run.py` → what each rank saw. The first server is dead afterwards."""
    trained.load_state_dict(load(checkpoints["own"]).state_dict())
    begin_with_its_model(proven)
    where = [checkpoints["own"], checkpoints["adapter"], tmp_path_factory.mktemp("launched")]
    where += [",".join(vllm_servers.urls), vllm_servers.group(0), vllm_servers.hold]
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_run", *map(str, where)],
        env={**os.environ, "CI": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    print(done.stdout)
    lines = [line.removeprefix("RESULTS ") for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    return dict(map(json.loads, lines))


def test_a_run_two_windows_ahead_is_killed_and_resumed(launched):
    """On two ranks, with a window finished and a window in flight. Each prompt comes once in an epoch."""
    windows: list[list[str]] = [[] for _ in range(6)]
    for before, after in zip(launched["killed"], launched["resumed"], strict=True):
        assert (before["step"], before["in_flight"]) == (3, 4)
        assert len(before["windows"]) == 2 and len(after["windows"]) == 4
        assert within_bound(before["windows"], 2) and within_bound(after["windows"], 2)
        assert not within_bound(after["windows"], 1)
        assert after["ranks_agree"] and all(map(math.isfinite, after["losses"]))
        for prompts_so_far, window in zip(windows, before["windows"] + after["windows"], strict=True):
            prompts_so_far += window["prompts"]
    for epoch in (windows[:3], windows[3:]):
        asked = [prompt for window in epoch for prompt in window]
        assert len(set(asked)) == len(asked) == 24


def test_fsdp2_and_zero3_on_two_ranks(launched, vllm_servers):
    """The servers sample by what two ranks have sharded. If all servers are lost, both ranks get the error."""
    for scenario in ("zero3_adapter", "fsdp2", "zero3"):
        check_two_steps(launched[scenario], 2)
    for rank in launched["zero3"]:
        assert "PoolError" in f"{rank['error']}" and vllm_servers.urls[0] in rank["error"][1]


def test_vllm_without_servers(launched, by_transformers):
    """vLLM that an evaluation starts; training in TRL's own mode, whose model is in bfloat16."""
    (rank,) = launched["evaluation"]
    assert rank["adapter"] == by_transformers["adapter"] and rank["whole"] == by_transformers["own"]
    check_two_steps(launched["colocate"], 1, 0.01)
