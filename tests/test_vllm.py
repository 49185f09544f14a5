"""Real vLLM servers: sampled log-probs, weight syncs, crashes, and whole training runs."""

import asyncio
import copy
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl import DASHTrainer, RewardRunner
from dash_trl.evaluation import LocalSampler, main, open_sampler
from dash_trl.process_rewards import AnswerLogProbValue, ProcessRewardCallback
from dash_trl.rewards import JudgeError, JudgeReward
from dash_trl.sampling import VLLMPool, find_changes, key_header, own_key, pack
from dash_trl.sampling.weights import WeightMismatch
from dash_trl.serve import DIRECT, READY_SECONDS, cores, free_ports, read, visible_gpus
from dash_trl.toy import arithmetic_dataset, toy_model
from dash_trl.workers import Command
from tests.tiny import run
from tests.vllm_run import Watch, greedy, two_steps, wait_until

ROOT = Path(__file__).parents[1]
WHOLE, FEW, ADAPTER = "reload_weights", "dash_load_differences", "dash_load_adapter"  # calls that give weights


class Pair:
    """Two servers, each by a `python -m dash_trl.serve` of its own, so that one can die alone.

    Attributes:
        commands: of those that were needed so far.
        slow: while this file exists, they take their time for a token.
        hold: while this file exists, they sample no token.
    """

    def __init__(self, model: str, folder: Path):
        self.model, self.folder, self.slow, self.hold = model, folder, folder / "slow", folder / "hold"
        self.ports = free_ports(2, 10000 + os.getpid() % 10000)  # not those of another suite that begins now, too
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.commands: list[Command] = []

    def start(self, number: int) -> Command:
        places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"DASH_TRL_SERVER_FOLDER": str(self.folder), "PYTHONPATH": places}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cores(number, 2)
        if visible_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[number::2])
        log = self.folder / f"{number}.log"
        log.unlink(missing_ok=True)  # of an earlier life
        command = [sys.executable, "-m", "dash_trl.serve", self.model, "--port", str(self.ports[number])]
        # float32 on a GPU, too, to compare log-probs to 1e-4
        options = ["--dtype", "float32", "--logits-processors", "tests.slow_tokens:SlowTokens"]
        options += ["--middleware", "tests.slow_tokens.CallRecorder", "--enable-lora", "--max-lora-rank", "8"]
        return Command([*command, *options], environment=environment, log=log)

    def need(self, count: int) -> None:
        """Starts those of the first servers that do not run yet."""
        self.commands += [self.start(number) for number in range(len(self.commands), count)]
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Waits until the servers have printed that they are ready, with the flag for training."""
        for url, command in zip(self.urls, self.commands, strict=False):
            ready = f"    --vllm_server_urls {url}\n\nCtrl+C stops the servers.\n"
            wait_until(
                lambda command=command, ready=ready: ready in said(command) or not command.running, READY_SECONDS
            )
            assert command.running, said(command)

    def group(self, number: int) -> int:
        """Of the server, not of the process that started it."""
        (server,) = psutil.Process(self.commands[number].process.pid).children()
        return server.pid

    def calls(self) -> dict[str, list[str]]:
        """Server → the calls that gave it weights since `forget_calls`."""
        files = [self.folder / f"calls-{port}" for port in self.ports]
        called = [file.read_text().split() if file.exists() else [] for file in files]
        return {
            url: [name for name in names if name in (WHOLE, FEW, ADAPTER)]
            for url, names in zip(self.urls, called, strict=True)
        }

    def forget_calls(self) -> None:
        for file in self.folder.glob("calls-*"):
            file.unlink()

    def stop(self) -> None:
        for command in self.commands:
            command.terminate()
        for command in self.commands:
            command.process.wait(60)


def said(command: Command) -> str:
    return command.log.read_text()


@pytest.fixture(scope="module")
def model_path() -> str:
    return toy_model(progress=False)


@pytest.fixture(scope="module")
def pair(model_path, tmp_path_factory) -> Iterator[Pair]:
    """Starts none: `vllm_server` and `vllm_servers` do."""
    made = Pair(model_path, tmp_path_factory.mktemp("servers"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def vllm_server(pair) -> str:
    """The URL of a real server. A test with this fixture alone starts one."""
    pair.need(1)
    return pair.urls[0]


@pytest.fixture(scope="module")
def vllm_servers(pair) -> Pair:
    """Two real servers. The tests that kill some come last."""
    pair.need(2)
    return pair


@pytest.fixture
def slow_tokens(vllm_servers) -> Iterator[Path]:
    """While this file exists, the servers take their time for a token."""
    yield vllm_servers.slow
    vllm_servers.slow.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def trained(model_path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path)


@pytest.fixture(scope="module")
def proven(vllm_servers, trained, tmp_path_factory) -> VLLMPool:
    """It has sent its first weights."""
    pool = make_pool(vllm_servers.urls, trained, tmp_path_factory.mktemp("weights"))
    pool.sync_weights()
    return pool


@pytest.fixture
def model(trained, model_path):
    """The toy model, as it was; a test may change it, and give it to `pool`."""
    trained.load_state_dict(AutoModelForCausalLM.from_pretrained(model_path).state_dict())
    return trained


@pytest.fixture
def pool(model, proven) -> VLLMPool:
    """For `model`; the servers hold weights of other tests."""
    proven.generation_kwargs, proven.max_completion_length, proven.step = {}, 48, lambda: 0
    return proven


def make_pool(urls: list[str], model: Any, weight_dir: Path, **options: Any) -> VLLMPool:
    return VLLMPool(
        urls,
        weight_dir=str(weight_dir),
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(model.name_or_path),
        max_completion_length=48,
        server_timeout=60.0,
        **options,
    )


def prompts(pool: VLLMPool, count: int, n: int) -> list[list[int]]:
    rows = arithmetic_dataset("test", count)["prompt"]
    apply = pool.processing_class.apply_chat_template
    texts = [apply(row, add_generation_prompt=True, tokenize=False) for row in rows]
    return [ids for ids in pool.processing_class(texts)["input_ids"] for _ in range(n)]


@torch.no_grad()
def differences(model: Any, prompt: list[int], completion: list[int], sampled: list[list[float]]) -> Tensor:
    """[tokens], of the sampled tokens' log-probs from those that the model gives them."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return (expected - torch.tensor([value for (value,) in sampled])).abs()


def largest_difference(model: Any, rows: list[list[int]], completions: list[list[int]], log_probs: list) -> float:
    """Returns the largest difference over all rows, computed row by row."""
    by_row = zip(rows, completions, log_probs, strict=True)
    return max(differences(model, *row).max().item() for row in by_row)


def sampled_difference(pool: VLLMPool, model: Any) -> float:
    """Samples, and returns the largest difference from the log-probs that a model gives these tokens."""
    rows = prompts(pool, 4, 4)
    _, completions, log_probs, _ = pool.generate(rows, None, 4)
    return largest_difference(model, rows, completions, log_probs)


def change(model: Any, seed: int, part: str = "") -> None:
    """Changes all parameters, or those with a part in their names, so much that stale weights would be noticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def change_few(model: Any, seed: int) -> None:
    """One element in 50 of every parameter, its first and last ones, too; some become −0.0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            some = torch.rand(flat.shape, generator=generator) < 0.02
            some[[0, -1]] = True
            flat[some] += 0.02 * torch.randn(int(some.sum()), generator=generator)
            flat[len(flat) // 2] = -0.0


def post(url: str, **body: Any) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), key_header(url))
    request.add_header("Content-Type", "application/json")
    with DIRECT.open(request, timeout=60) as answer:
        assert answer.status == 200


def stored(url: str, folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a server with one worker, as vLLM itself saves them."""
    folder.mkdir()
    post(f"{url}/collective_rpc", method="save_sharded_state", kwargs={"path": str(folder)})
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    plain = {name.replace(".base_layer", ""): value for file in files for name, value in file.items()}
    return {name.replace("lm_head.", "model.embed_tokens."): value for name, value in plain.items()}  # they are tied


def as_stored(model: Any) -> dict[str, Tensor]:
    """The model's parameters, fused as vLLM fuses them."""
    fused: dict[str, list[Tensor]] = {}
    for name, value in model.named_parameters():
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            name = next((name.replace(part, whole) for part in parts if part in name), name)
        fused.setdefault(name, []).append(value.detach())
    return {name: torch.cat(values) for name, values in fused.items()}


def adapted_and_pool(base: VLLMPool, folder: Path, **config: Any) -> tuple[Any, VLLMPool]:
    """A copy of the model of `base` with an adapter, and a pool for it; the servers have the weights of the model."""
    base.sync_weights()
    adapted = get_peft_model(copy.deepcopy(base.model), LoraConfig(**{"target_modules": "all-linear", **config}))
    return adapted, make_pool(base.urls, adapted, folder)


def generated_tokens(url: str) -> float:
    text = read(f"{url}/metrics")
    return float(re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.M)[1])


def test_nobody_without_the_key_reaches_the_servers(vllm_servers):
    for path in ("/health", "/metrics", "/v1/models", "/weight_info"):
        with pytest.raises(HTTPError, match="401"):
            urllib.request.urlopen(vllm_servers.urls[0] + path, timeout=10)
        assert read(vllm_servers.urls[0] + path) is not None
    for command in vllm_servers.commands:
        process = psutil.Process(command.process.pid)
        lines = [" ".join(one.cmdline()) for one in (process, *process.children(recursive=True))]
        log = Path(re.search(r"logs: (.+)", said(command))[1], "server_0.log").read_text()
        assert "vllm serve" in "".join(lines) and "startup complete" in log
        assert not any(own_key() in text for text in (*lines, log, said(command)))


def check_two_steps(ranks: Sequence[dict[str, Any]], largest: float = 1e-4) -> None:
    """Of a run: the second window was sampled by the weights of the first step, as the trainer has them."""
    for rank in ranks:
        assert rank["steps"] == 2 and rank["moved"] > 1e-4
        assert max(rank["differences"]) < largest and len(rank["differences"]) == 2
        assert [(window["oldest"], window["newest"]) for window in rank["windows"]] == [(0, 0), (1, 1)]


def test_training_with_a_real_server(vllm_server, model_path, tmp_path):
    """Two steps. It runs alone in a minute: the second window is sampled by weights that the server has reloaded."""
    trainer, seen = two_steps(model_path, tmp_path, vllm_server_urls=[vllm_server])
    check_two_steps([seen])
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) <= 1e-4


# ---------------------------------------------------------------------------------------------- log-probs and weights


def test_sampled_log_probs_are_the_trainers_through_three_syncs(vllm_servers, model, pool, caplog):
    """Both servers work, and every group comes once and in order: so each row is its prompt's."""
    long = 12 * prompts(pool, 1, 1)[0]  # several blocks of the prefix cache, which must not outlive its weights
    rows = [*prompts(pool, 23, 4), *[long] * 4]
    for sync in range(3):
        change(model, sync)
        pool.sync_weights()
        assert len(list(Path(pool.weight_dir).glob("*/version-*"))) == 1  # old versions are removed
        before = [generated_tokens(url) for url in vllm_servers.urls]
        returned, completions, log_probs, token_ids = pool.generate(rows, None, 4)
        served = [generated_tokens(url) - tokens for url, tokens in zip(vllm_servers.urls, before, strict=True)]
        if "goes to another" not in caplog.text:  # a machine that is too busy lets connections break
            assert sum(served) == sum(map(len, completions)) and min(served) > 0.25 * sum(served)
        assert returned == rows and len(completions) == 96
        assert token_ids == [[[token] for token in row] for row in completions]
        assert largest_difference(model, rows, completions, log_probs) <= 1e-4
    assert len({tuple(row) for row in completions[:4]}) > 1  # four samples, not one four times
    pool.generation_kwargs = {"ignore_eos": True}
    _, completions, _, _ = pool.generate(rows[:8], None, 4, max_tokens=[5] * 4 + [3] * 4)
    assert [len(row) for row in completions] == [5] * 4 + [3] * 4


def test_a_row_across_a_sync_is_of_the_old_weights_up_to_a_token_and_then_of_the_new_ones(
    vllm_servers, slow_tokens, model, pool
):
    """And a new request for its prompt, a prefix that the servers knew, is of the new ones."""
    pool.generation_kwargs, pool.max_completion_length = {"ignore_eos": True}, 120
    pool.sync_weights()
    (short,), old = prompts(pool, 1, 1), copy.deepcopy(model)
    rows = [*[short] * 2, *[12 * short] * 2]
    before = {url: generated_tokens(url) for url in vllm_servers.urls}
    slow_tokens.touch()
    pool.expect(0, {0: [], 1: rows})
    assert pool.generate([], None, 2) == ([], [], [], [])  # of a window without rows: nothing to wait for

    def both_groups_have_begun() -> bool:
        in_work = list(pool.pool.backlog.running.values())
        return len(in_work) == 2 and all(generated_tokens(url) >= before[url] + 8 for url in in_work)

    wait_until(both_groups_have_begun)
    change(model, 1)
    pool.step = lambda: 7
    pool.sync_weights()
    slow_tokens.unlink()
    pool.expect(1, {})
    _, completions, log_probs, _ = pool.generate(rows, None, 2)
    assert pool.policy_version.tolist() == [[0, 7]] * 4
    for row in zip(rows, completions, log_probs, strict=True):
        of_old, of_new = (differences(weights, *row) <= 1e-4 for weights in (old, model))
        begins, ends = of_old.cumprod(0).sum(), of_new.flip(0).cumprod(0).sum()  # tokens of either without a gap
        assert len(of_old) == 120 <= begins + ends and max(begins, ends) < 120

    pool.generation_kwargs, pool.max_completion_length = {}, 48
    _, completions, log_probs, _ = pool.generate(rows, None, 2)
    assert pool.policy_version.tolist() == [[7, 7]] * 4
    assert largest_difference(model, rows, completions, log_probs) <= 1e-4


def test_only_what_changed_goes_to_the_servers(vllm_servers, model, tmp_path, caplog):
    """All of it where a server holds other weights than it says, or another version, or sees no file of ours."""
    pool = make_pool(vllm_servers.urls, model, tmp_path / "weights", weight_difference=True)

    def sync(*, finite: bool = True) -> dict[str, list[str]]:
        """Server → the calls that it got; then each has the trainer's weights, bit for bit, and computes with them."""
        vllm_servers.forget_calls()
        pool.sync_weights()
        expected = as_stored(model)
        for url in vllm_servers.urls:
            found = stored(url, tmp_path / f"stored-{len(list(tmp_path.iterdir()))}")
            assert expected.keys() <= found.keys()
            for name, value in expected.items():  # vLLM pads the vocabulary
                assert torch.equal(found[name][: len(value)].view(torch.int32), value.view(torch.int32)), name
        assert not finite or sampled_difference(pool, model) <= 1e-4
        return vllm_servers.calls()

    few, whole, first = [FEW], [WHOLE], vllm_servers.urls[0]
    assert sync() == dict.fromkeys(vllm_servers.urls, few + whole)  # with the proof of both ways
    for seed in range(2):
        change_few(model, seed)
        assert sync() == dict.fromkeys(vllm_servers.urls, few)
    assert sync() == dict.fromkeys(vllm_servers.urls, [])  # nothing has changed
    assert not list((tmp_path / "weights").glob("*/version-*"))  # nobody needs files
    assert "gets all" not in caplog.text

    (other,) = pack(find_changes("model.norm.weight", None, torch.zeros_like(model.model.norm.weight)))
    post(f"{first}/collective_rpc", method=FEW, kwargs={"dtype": "float32", **other})
    change_few(model, 2)
    assert sync() == {first: few + whole, vllm_servers.urls[1]: few}
    assert "did not hold the weights of" in caplog.text

    post(f"{first}/update_weight_version", new_version="another-1")
    change_few(model, 3)
    assert sync() == {first: whole, vllm_servers.urls[1]: few}
    assert f"{first} was given weights by another run (version 'another-1')" in caplog.text

    with torch.no_grad():
        kept, model.model.norm.weight[0] = model.model.norm.weight[0].item(), math.nan
        caplog.clear()
        assert sync(finite=False) == dict.fromkeys(vllm_servers.urls, few + whole)  # vLLM changes nothing into a NaN
        assert "NaN values" in caplog.text
        model.model.norm.weight[0] = kept
        assert sync() == dict.fromkeys(vllm_servers.urls, few)

    change(model, 4)  # all of them
    assert sync() == dict.fromkeys(vllm_servers.urls, whole)

    (folder,) = (tmp_path / "weights").iterdir()
    shutil.rmtree(folder)
    change(model, 5)
    assert sync() == dict.fromkeys(vllm_servers.urls, few)


def drawn_from(logits: Tensor, seen: list[int], sampling: dict[str, Any]) -> Tensor:
    """[V], log-probs of what a token is drawn from; `seen`: the tokens before it. Penalty, temperature, min_p, k, p."""
    known = torch.tensor(sorted(set(seen)))
    penalty = sampling.get("repetition_penalty", 1.0)
    logits = logits.index_copy(0, known, torch.where(logits > 0, logits / penalty, logits * penalty)[known])
    probs = (logits / sampling.get("temperature", 1.0)).softmax(0)
    probs = probs * (probs >= sampling.get("min_p", 0.0) * probs.max())
    order = probs.argsort(descending=True)[: sampling.get("top_k", len(probs))]
    share = probs[order] / probs[order].sum()
    order = order[share.cumsum(0) - share < sampling.get("top_p", 1.0)]
    kept = torch.zeros_like(probs).index_copy(0, order, probs[order])
    return (kept / kept.sum()).log()


SAMPLING: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 5, "temperature": 0.7},
    {"repetition_penalty": 1.2, "temperature": 1.3, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
]


def test_sampled_log_probs_are_those_of_the_truncated_distribution(model, pool, monkeypatch):
    """Of what the server drew from, not of what the model would have chosen from."""
    pool.max_completion_length = 16
    pool.sync_weights()
    rows = prompts(pool, 4, 4)
    for sampling in SAMPLING:
        with monkeypatch.context() as patch:
            for name, value in sampling.items():
                patch.setattr(pool, name, value)
            _, completions, log_probs, _ = pool.generate(rows, None, 4)
        for prompt, completion, reported in zip(rows, completions, log_probs, strict=True):
            ids = prompt + completion
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0]
            expected = torch.stack(
                [drawn_from(logits[t - 1], ids[:t], sampling)[ids[t]] for t in range(len(prompt), len(ids))]
            )
            assert (expected - torch.tensor(reported).squeeze(1)).abs().max() <= 1e-4, sampling
        assert largest_difference(model, rows, completions, log_probs) > 0.05, sampling


def test_an_adapter_goes_to_the_servers_without_its_model(vllm_servers, model, pool, tmp_path):
    config = {"r": 8, "use_rslora": True, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 3]}
    adapted, own = adapted_and_pool(pool, tmp_path, lora_alpha=12, **config)
    own.sync_weights()  # with its proof, of B matrices that are zero
    for seed in (4, 5):
        change(adapted, seed, "lora_")
        own.sync_weights()
        assert sampled_difference(own, adapted) <= 1e-4
        with adapted.disable_adapter():
            assert sampled_difference(own, adapted) > 0.1
    sent = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in sent} == {"adapter_config.json", "adapter_model.safetensors", ".dash_trl.lock"}

    change(model, 6)
    pool.sync_weights()  # the servers have another model now, for which nobody trained this adapter
    with pytest.raises(WeightMismatch, match="holds another base model"):
        own.sync_weights()
    merged = make_pool(vllm_servers.urls, adapted, tmp_path / "merged")
    merged.sync_weights()
    assert sampled_difference(merged, adapted) <= 1e-4


def test_modules_that_an_adapter_trains_whole_reach_the_servers(vllm_servers, model, tmp_path):
    """Tied embeddings and linear layers, under the names of the base model, without the copies of TRL's reference."""
    config = LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "down_proj"], ensure_weight_tying=True
    )
    adapted = get_peft_model(copy.deepcopy(model), config)
    adapted.add_adapter("ref", config)
    pool = make_pool(vllm_servers.urls, adapted, tmp_path)
    pool.sync_weights()  # with its proof
    change(adapted, 4)
    pool.sync_weights()
    assert sampled_difference(pool, adapted) <= 1e-4


# ------------------------------------------------------------------------------------------------------------- a judge


def test_a_judge_is_held_to_the_schema(vllm_servers, model_path):
    """The toy model cannot judge, but all that it may write is a judgement. It is led to end texts and spaces."""
    ids = AutoTokenizer.from_pretrained(model_path)
    bias = {'"': 100, " ": -100, "\n": -100, "\r": -100, "\t": -100}
    options = {"logit_bias": {str(ids(text)["input_ids"][0]): value for text, value in bias.items()}}
    settings = {"base_url": f"{vllm_servers.urls[0]}/v1", "api_key": own_key()}
    judge = JudgeReward(model_path, scores=(3, 5), temperature=1.0, options=options, **settings)
    asked = [judge(prompt=f"{i}+1", completion=[{"role": "assistant", "content": str(i + 1)}]) for i in range(16)]

    async def together():
        return await asyncio.gather(*asked)

    given = {score for score, *_ in asyncio.run(together())}
    assert len(given) > 1 and given <= {0.0, 0.5, 1.0}
    cut_off = JudgeReward(model_path, options={"max_completion_tokens": 4}, on_refusal=None, **settings)
    with pytest.raises(JudgeError, match="cut off"):
        asyncio.run(cut_off(prompt="1+1", completion="2"))


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_sampling_one_window_ahead_learns(vllm_servers, tmp_path, monkeypatch):
    """By the flags of the README."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_math

    monkeypatch.setattr(train_math, "measure", lambda *_: {})
    flags = {"--max_steps": 10, "--learning_rate": 3e-4, "--lr_scheduler_type": "constant", "--async_level": 1}
    flags |= {"--output_dir": tmp_path, "--loss_type": "aipo", "--disable_tqdm": True}
    arguments = [str(part) for flag in flags.items() for part in flag]
    train_math.main([*arguments, "--vllm_server_urls", *vllm_servers.urls])
    logs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logs = [log for log in logs if "reward" in log]
    assert [log["async/staleness_mean"] for log in logs] == [0.0] + [1.0] * 9
    assert all(math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"]) for log in logs)
    rewards = [log["reward"] for log in logs]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1


def test_values_begin_while_others_are_sampled(vllm_servers, model_path, tmp_path):
    """They are those that are asked for after the window was sampled; not used for solved and unscored rows."""
    early, differences = list[bool](), list[float]()

    class Twice(AnswerLogProbValue):
        def __call__(self, requests, trainer):
            found = super().__call__(requests, trainer)
            again = super().__call__([replace(one, begun=None) for one in requests], trainer)
            early.extend(one.begun is not None for one in requests if one.boundaries)
            pairs = [pair for rows in zip(found, again, strict=True) for pair in zip(*rows, strict=True)]
            differences.extend(abs(one - other) for one, other in pairs)
            return found

    def reward(prompts, **columns):  # the first group is solved, and a row of the second is unscored
        return [1.0] * 4 + [None] + [float(row % 2) for row in range(len(prompts) - 5)]

    settings = {
        "max_steps": 2,
        "max_completion_length": 48,
        "learning_rate": 1e-3,
        "vllm_server_urls": vllm_servers.urls,
    }
    callback, data = ProcessRewardCallback(Twice()), arithmetic_dataset("train", 64)
    run(DASHTrainer, model_path, tmp_path, dataset=data, callbacks=[callback], reward=reward, **settings)
    assert len(early) == 22 and all(early[11:]) and not any(early[:11])  # in the first window the model is tried
    assert len(differences) >= 44 and max(differences) <= 1e-6


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_rounds_of_a_window_while_later_ones_are_sampled(vllm_servers, model_path, tmp_path, level):
    """Every prompt once, by weights that `async_level` permits; those of further rounds by the newest."""
    watch, scored, steps = Watch(), [], 4

    def score(completion: str, completion_ids: list[int], number: int) -> float:
        scored.append(number)
        chance = random.Random(f"{number} {completion_ids}")
        return float(chance.random() < 0.5) if number % 2 else 0.0  # half of the prompts have no signal

    problems = [f"{number}+{number % 7}=" for number in range(64)]
    trainer = run(
        DASHTrainer,
        model_path,
        tmp_path,
        reward=RewardRunner(score),
        dataset=Dataset.from_dict({"prompt": problems, "number": list(range(64))}),
        callbacks=[watch],
        max_completion_length=12,
        max_steps=steps,
        max_num_gen_batches=3,
        shuffle_dataset=False,
        learning_rate=0.01,
        async_level=level,
        loss_type="aipo",
        vllm_server_urls=vllm_servers.urls,
    )
    logs = [log for log in trainer.state.log_history if "dynamic_sampling/rounds" in log]
    rounds = [[one for one in watch.windows if one["step"] == step] for step in range(steps)]
    assert [log["dynamic_sampling/rounds"] for log in logs] == list(map(len, rounds)) and len(watch.windows) > steps
    assert level or len(rounds[-1][0]["prompts"]) == 4
    for step, (first, *more) in enumerate(rounds):
        assert first["oldest"] >= max(step - level, 0) and all(one["oldest"] == step for one in more)
    sampled = [prompt for one in watch.windows for prompt in one["prompts"]]
    assert sorted(sampled, key=problems.index) == problems[: len(sampled)]
    assert Counter(scored) == dict.fromkeys(range(len(sampled)), 4)


# ----------------------------------------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def checkpoints(model_path, tmp_path_factory) -> dict[str, str]:
    """Of one shape: the toy model's directory, one with other weights, a LoRA adapter on it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    other = AutoModelForCausalLM.from_pretrained(model_path)
    change(other, 5)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), config)
    for name, one in (("other", other), ("adapter", adapted)):
        one.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {"own": model_path, "other": str(folder / "other"), "adapter": str(folder / "adapter")}


@pytest.fixture(scope="module")
def by_transformers(checkpoints) -> dict[str, list[list[int]]]:
    with open_sampler(checkpoints["own"]) as one, open_sampler(checkpoints["other"]) as another:
        own, other = greedy(one), greedy(another)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoints["own"]), checkpoints["adapter"]
    )
    adapter = greedy(LocalSampler(adapted, AutoTokenizer.from_pretrained(checkpoints["own"])))
    assert own != other and own != adapter
    return {"own": own, "other": other, "adapter": adapter}


def test_servers_take_one_checkpoint_after_another(vllm_servers, checkpoints, by_transformers, tmp_path):
    """In place, LoRA merged. Those that were given other weights meanwhile get theirs again, or are refused."""

    def opened(name: str, folder: str) -> Any:
        return open_sampler(checkpoints[name], server_urls=vllm_servers.urls, weight_dir=tmp_path / folder)

    with opened("other", "0") as other:
        assert greedy(other) == by_transformers["other"]
        for folder, name in (("1", "adapter"), ("2", "own")):
            with opened(name, folder) as sampler:
                assert greedy(sampler) == by_transformers[name]
        with opened("own", "3") as held:
            assert greedy(held) == by_transformers["own"]
            assert greedy(other) == by_transformers["other"]
            with pytest.raises(WeightMismatch, match="holds others"):
                greedy(held)
    assert [(tmp_path / folder).exists() for folder in "0123"] == [True] * 3 + [False]  # it was not written again


def test_evaluation_by_servers(vllm_servers, checkpoints, tiny_model, tmp_path, capsys):
    def evaluate(*models: str) -> None:
        main([*models, *"--dataset_name toy --dataset_test_split test[:32] --num_samples 8 --k 1 4".split(), *to])

    to = ["--vllm_server_urls", *vllm_servers.urls, "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=rf"another shape than .* python -m dash_trl.serve {tiny_model} --servers 2"):
        evaluate(tiny_model)
    evaluate(checkpoints["other"], "toy")
    accuracy = {name: json.loads((tmp_path / f"{name}.json").read_text())["accuracy"] for name in ("other", "toy")}
    assert 0.25 < accuracy["toy"] < 0.65 and accuracy["other"] < accuracy["toy"]
    lines = (tmp_path / "toy.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in lines[1:]) == list(range(32))


# -------------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("adapter", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_a_killed_server_loses_nothing_and_comes_back_with_the_weights(
    vllm_servers, slow_tokens, model, pool, tmp_path, adapter
):
    if adapter:
        model, pool = adapted_and_pool(pool, tmp_path)
    else:  # the server gets them whole, by file
        pool = make_pool(vllm_servers.urls, model, tmp_path, weight_difference=True)
    pool.generation_kwargs, pool.max_completion_length = {"ignore_eos": True}, 150
    pool.sync_weights()
    fleet = pool.pool.fleet
    rows = prompts(pool, 16, 2)
    slow_tokens.touch()  # so that it is killed in the middle
    sampling = ThreadPoolExecutor(1).submit(pool.generate, rows, None, 2)
    victim = vllm_servers.urls[1]
    wait_until(lambda: len(fleet.servers[victim].outstanding) == 8)
    os.killpg(vllm_servers.group(1), signal.SIGKILL)
    slow_tokens.unlink()
    _, completions, log_probs, _ = sampling.result(300)
    assert [len(row) for row in completions] == [150] * 32
    assert (
        fleet.servers[victim].state == "dead" != fleet.servers[vllm_servers.urls[0]].state
    )  # idle now, it may be suspect
    assert largest_difference(model, rows, completions, log_probs) <= 1e-4

    if adapter:
        change(model, 3, "lora_")
    else:
        change_few(model, 3)
    vllm_servers.forget_calls()
    pool.sync_weights()  # the dead one does not hold up the others
    pool.generation_kwargs, pool.max_completion_length = {}, 48
    wait_until(lambda: not vllm_servers.commands[1].running)
    assert f"Ended: {victim}. The logs are in" in said(vllm_servers.commands[1])
    vllm_servers.commands[1] = vllm_servers.start(1)  # with the weights of its disk
    vllm_servers.wait_until_ready()

    def it_is_back() -> bool:
        _, completions, log_probs, _ = pool.generate(rows[:16], None, 2)
        assert (
            largest_difference(model, rows[:16], completions, log_probs) <= 1e-4
        )  # never a prompt for the old weights
        return fleet.servers[victim].state == "healthy"

    wait_until(it_is_back)
    assert fleet.servers[victim].version == fleet.version
    assert it_is_back() and generated_tokens(victim) > 10  # it works again
    few, whole = (ADAPTER, ADAPTER) if adapter else (FEW, WHOLE)
    assert vllm_servers.calls() == {vllm_servers.urls[0]: [few], victim: [whole]}


def within_bound(windows: list[dict[str, Any]], level: int) -> bool:
    """Window n is of the weights with which window n − k began, or of newer ones."""
    begun = [window["step"] for window in windows]
    return all(
        begun[max(0, n - level)] <= one["oldest"] <= one["newest"] <= one["step"] for n, one in enumerate(windows)
    )


@dataclass
class Launched:
    """All scenarios of `vllm_run.py`.

    Attributes:
        saw: scenario → what each rank saw.
        calls: that gave weights to the first server, which lives until the end.
    """

    saw: dict[str, list[dict[str, Any]]]
    printed: str
    output: Path
    calls: list[str]

    def ranks(self, scenario: str, count: int = 2) -> list[dict[str, Any]]:
        assert len(self.saw.get(scenario, ())) == count, self.printed
        return self.saw[scenario]


@pytest.fixture(scope="module")
def launched(vllm_servers, checkpoints, trained, proven, tmp_path_factory) -> Launched:
    """No server is left afterwards."""
    trained.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoints["own"]).state_dict())
    proven.sync_weights()  # the first scenario trains an adapter of this model
    vllm_servers.forget_calls()
    output, groups = tmp_path_factory.mktemp("launched"), [vllm_servers.group(number) for number in range(2)]
    where = [checkpoints["own"], checkpoints["adapter"], output, ",".join(vllm_servers.urls)]
    where += [",".join(map(str, groups)), vllm_servers.hold]
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_run", *map(str, where)],
        env={**os.environ, "CI": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    lines = [line.removeprefix("RESULTS ") for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    calls = vllm_servers.calls()[vllm_servers.urls[0]]
    return Launched(dict(map(json.loads, lines)), done.stdout, output, calls)


def test_a_run_with_tools_and_an_environment_one_window_ahead(launched):
    """On two ranks; each row goes on by itself, and its reward begins when it ends."""
    for rank in launched.ranks("tools"):
        assert len(rank["turns"]) == 32 and len(set(rank["turns"])) > 1 and not rank["wrong"]
        assert rank["difference"] <= 1e-4 and rank["streamed"] and rank["ranks_agree"]
        assert within_bound(rank["windows"], 1) and not within_bound(rank["windows"], 0)
        assert min(rank["calls"]) > 0.5 and rank["failed"] == [0.0] * 2


def test_a_run_two_windows_ahead_is_killed_and_resumed_and_a_server_dies(launched):
    """On two ranks, with a window finished and a window in flight."""
    resumed, printed = launched.ranks("resumed"), launched.printed
    assert "killed ended: process" in printed and "terminated with signal SIGKILL" in printed, printed
    for rank, after in enumerate(resumed):
        before = json.loads((launched.output / f"killed-{rank}.json").read_text())
        assert (before["step"], before["running"]) == (3, 4)
        assert len(before["windows"]) == 2 and len(after["windows"]) == 4 and after["steps"] == 12
        assert within_bound(before["windows"], 2) and within_bound(after["windows"], 2)
        assert not within_bound(after["windows"], 1)
        assert after["ranks_agree"] and all(map(math.isfinite, after["losses"]))
        assert min(after["had"]) > 0  # requests of each rank, when it died
        assert after["retried"] == sum(after["had"]) and after["healthy"] == 1
        after["windows"] = before["windows"] + after["windows"]
    for epoch in (slice(0, 3), slice(3, 6)):  # each prompt once
        windows = [window for rank in resumed for window in rank["windows"][epoch]]
        asked = [prompt for window in windows for prompt in window["prompts"]]
        assert len(set(asked)) == len(asked) == 24


def test_fsdp2_and_zero3_on_two_ranks(launched):
    """The servers sample by the weights, or by the adapter, that two ranks have sharded."""
    check_two_steps(launched.ranks("zero3_adapter"))
    check_two_steps(launched.ranks("fsdp2"))
    check_two_steps(launched.ranks("zero3"))
    # the adapter alone, then all weights, and under ZeRO-3 what has changed
    assert launched.calls[0] == ADAPTER and launched.calls.index(WHOLE) < launched.calls.index(FEW)


def test_all_servers_are_lost(launched, vllm_servers):
    """Both ranks get the error."""
    for rank in launched.ranks("zero3"):
        error, message = rank["error"]
        assert error == "PoolError" and vllm_servers.urls[0] in message


# ------------------------------------------------------------------------------------ vLLM without servers


def test_vllm_that_an_evaluation_starts(launched, by_transformers):
    (rank,) = launched.ranks("evaluation", 1)
    assert rank["greedy"] == by_transformers["adapter"]


def test_colocated(launched):
    """TRL's own mode, through the same buffer. TRL loads the model in bfloat16."""
    check_two_steps(launched.ranks("colocate", 1), 0.01)
