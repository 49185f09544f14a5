"""Real vLLM servers: sampled log-probs, weight syncs, crashes, and whole training runs."""

import asyncio
import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl.embedded.problems import arithmetic_dataset
from dash_trl.embedded.warm_up import embedded_model
from dash_trl.evaluation import LocalSampler, check_shapes, open_sampler
from dash_trl.evaluation.checkpoint import Checkpoint
from dash_trl.evaluation.command import main
from dash_trl.rewards import JudgeError, JudgeReward
from dash_trl.sampling.trl import VLLMPool
from dash_trl.sampling.weights.snapshot import WeightMismatch
from dash_trl.serve import DIRECT, Servers, free_ports
from examples.value_quality.command import main as value_quality

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"CI": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
DTYPE = ("--dtype", "float32")  # on a GPU, too, to compare log-probs to 1e-4


@pytest.fixture(scope="session")
def model_path() -> str:
    return embedded_model(progress=False)


@pytest.fixture(scope="session")
def slow_file(tmp_path_factory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        file = tmp_path_factory.mktemp("servers") / "slow"
        patch.setenv("DASH_TRL_SLOW_TOKENS", str(file))
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield file


@pytest.fixture
def slow_tokens(slow_file) -> Iterator[Path]:
    """While this file exists, `servers` take their time for a token."""
    yield slow_file
    slow_file.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def started(model_path, slow_file) -> Iterator[Servers]:
    """Two servers, some of which a test may have killed."""
    options = (*DTYPE, "--logits-processors", "tests.slow_tokens:SlowTokens")
    with Servers(model_path, 2, port=8100, options=options) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def servers(started) -> Servers:
    """Two servers that run. Tests that kill one come last: to start it again takes a while."""
    for number, command in enumerate(started.commands):
        if not command.running:
            started.commands[number] = started.start(number)
    started.wait_until_ready()
    return started


@pytest.fixture(scope="module")
def trained(model_path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path)


@pytest.fixture(scope="module")
def proven(started, trained, tmp_path_factory) -> VLLMPool:
    """It has sent its first weights."""
    pool = make_pool(started.urls, trained, tmp_path_factory.mktemp("weights"))
    pool.sync_weights()
    return pool


@pytest.fixture
def model(trained, model_path):
    """The embedded model, as it was; a test may change it, and give it to `pool`."""
    trained.load_state_dict(AutoModelForCausalLM.from_pretrained(model_path).state_dict())
    return trained


@pytest.fixture
def pool(servers, model, proven) -> VLLMPool:
    """For `model`; the servers hold weights of other tests."""
    proven.generation_kwargs, proven.max_completion_length, proven.step = {}, 48, lambda: 0
    return proven


def make_pool(urls: list[str], model: Any, weight_dir: Path) -> VLLMPool:
    return VLLMPool(
        urls,
        weight_dir=str(weight_dir),
        weight_sync="file",
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(model.name_or_path),
        max_completion_length=48,
        server_timeout=60.0,
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
    """Over the rows, one at a time."""
    by_row = zip(rows, completions, log_probs, strict=True)
    return max(differences(model, *row).max().item() for row in by_row)


def change(model: Any, seed: int) -> None:
    """Far enough that stale weights cannot pass for these."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def generated_tokens(url: str) -> float:
    text = DIRECT.open(f"{url}/metrics", timeout=10).read().decode()
    return float(re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.M)[1])


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- log-probs and weights


def test_sampled_log_probs_are_the_trainers_through_three_syncs(pool, model):
    long = 12 * prompts(pool, 1, 1)[0]  # several blocks of the prefix cache, which must not outlive its weights
    rows = [*prompts(pool, 15, 4), *[long] * 4]
    for sync in range(3):
        change(model, sync)
        pool.sync_weights()
        assert len(list(Path(pool.weight_dir).glob("*/version-*"))) == 1  # old versions are removed
        returned, completions, log_probs, token_ids = pool.generate(rows, None, 4)
        assert returned == rows and len(completions) == 64
        assert token_ids == [[[token] for token in row] for row in completions]
        assert largest_difference(model, rows, completions, log_probs) <= 1e-4
    assert len({tuple(row) for row in completions[:4]}) > 1  # four samples, not one four times


def test_a_row_across_a_sync_is_of_the_old_weights_up_to_a_token_and_then_of_the_new_ones(
    servers, slow_tokens, model, pool
):
    """And a new request for its prompt, a prefix that the servers knew, is of the new ones."""
    pool.generation_kwargs, pool.max_completion_length = {"ignore_eos": True}, 120
    pool.sync_weights()
    (short,), old = prompts(pool, 1, 1), copy.deepcopy(model)
    rows = [*[short] * 2, *[12 * short] * 2]
    before = {url: generated_tokens(url) for url in servers.urls}
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


def test_both_servers_work_and_every_group_comes_once_and_in_order(servers, model, pool):
    pool.sync_weights()
    before = [generated_tokens(url) for url in servers.urls]
    rows = prompts(pool, 24, 8)
    _, completions, log_probs, _ = pool.generate(rows, None, 8)
    after = [generated_tokens(url) for url in servers.urls]
    tokens = sum(map(len, completions))
    assert sum(after) - sum(before) == tokens
    assert all(0.3 < (b - a) / tokens < 0.7 for a, b in zip(before, after, strict=True))
    assert largest_difference(model, rows, completions, log_probs) <= 1e-4  # so each row is its prompt's
    pool.generation_kwargs = {"ignore_eos": True}
    _, completions, _, _ = pool.generate(rows[:16], None, 8, max_tokens=[5] * 8 + [3] * 8)
    assert [len(row) for row in completions] == [5] * 8 + [3] * 8


def test_values_of_a_server_are_the_policys(model, pool):
    """`ServerValue` against `AnswerLogProbValue`."""
    from types import SimpleNamespace

    from dash_trl.process_rewards import AnswerLogProbValue, ServerValue, ValueRequest

    change(model, 7)
    pool.sync_weights()
    prompt = tuple(prompts(pool, 1, 1)[0])
    completion = tuple(pool.processing_class("7+5=12\n12-3=9\nThe answer is 9")["input_ids"])
    requests = [
        ValueRequest(prompt, completion, (0, 7, 13), ("9", "12")),
        ValueRequest(prompt, completion, (), ("9",)),
        ValueRequest(prompt, completion, (0, len(completion)), ()),
    ]
    trainer = SimpleNamespace(vllm_generation=pool, _tokenizer=pool.processing_class, ranks=pool.ranks)
    options = {"force_prompt": "The answer is ", "closing": "<|im_end|>"}
    expected = AnswerLogProbValue(**options).score(requests, model, pool.processing_class)
    values = ServerValue(**options)(requests, trainer)
    assert values[0] == pytest.approx(expected[0], abs=1e-4) and values[1] == []
    assert all(value != value for value in values[2])  # no answer: missing


@pytest.mark.exhaustive
def test_without_the_plugin_the_proof_fails(model_path, model, tmp_path, monkeypatch):
    """CPU builds compute with packed copies of the weights."""
    if torch.cuda.is_available():
        pytest.skip("the plugin does nothing on a GPU")
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    with Servers(model_path, 1, port=8200) as unfixed:
        unfixed.wait_until_ready()
        with pytest.raises(WeightMismatch, match="its plugin"):
            make_pool(unfixed.urls, model, tmp_path).sync_weights()


def test_a_server_of_another_model_is_found_at_the_first_sync(servers, tiny_model, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(ValueError, match=r"another shape than .*'hidden_size': \(96, 32\)"):
        make_pool(servers.urls, other, tmp_path).sync_weights()


# ------------------------------------------------------------------------------------------------------------- a judge


@pytest.mark.parametrize("scores", [(0, 1), (3, 5)])
def test_a_judge_is_held_to_the_schema(servers, model_path, scores):
    """The embedded model cannot judge, but all that it may write is a judgement. It is led to end texts and spaces."""
    ids = AutoTokenizer.from_pretrained(model_path)
    bias = {'"': 100, " ": -100, "\n": -100, "\r": -100, "\t": -100}
    options = {"logit_bias": {str(ids(text)["input_ids"][0]): value for text, value in bias.items()}}
    url = f"{servers.urls[0]}/v1"
    judge = JudgeReward(model_path, base_url=url, scores=scores, temperature=1.0, options=options, cache=False)
    asked = [judge(prompt=f"{i}+1", completion=[{"role": "assistant", "content": str(i + 1)}]) for i in range(16)]

    async def together():
        return await asyncio.gather(*asked)

    answers = asyncio.run(together())
    lowest, highest = scores
    given = {score for score, *_ in answers}
    assert len(given) > 1 and given <= {i / (highest - lowest) for i in range(highest - lowest + 1)}


def test_a_judge_that_is_cut_off_gives_no_score(servers, model_path):
    judge = JudgeReward(model_path, base_url=f"{servers.urls[0]}/v1", options={"max_completion_tokens": 4}, cache=False)
    with pytest.raises(JudgeError, match="cut off"):
        asyncio.run(judge(prompt="1+1", completion="2"))


# ----------------------------------------------------------------------------------------------------------- whole runs


def launch(arguments: list[str], timeout: int = 400, killed: bool = False, **environment: str) -> str:
    """What it printed. `killed`: it ends in SIGKILL."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    by_signal = done.returncode == -signal.SIGKILL or "Signal 9 (SIGKILL)" in done.stderr  # as torchrun says it
    assert by_signal if killed else done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def results(stdout: str) -> list[dict[str, Any]]:
    """Of each rank."""
    (line,) = [line for line in stdout.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


def test_sampling_one_window_ahead_learns(servers, tmp_path, monkeypatch):
    """By the flags of the README."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_math

    monkeypatch.setattr(train_math, "measure", lambda *_: {})
    flags = {"--max_steps": 10, "--learning_rate": 3e-4, "--lr_scheduler_type": "constant", "--async_level": 1}
    flags |= {"--output_dir": tmp_path, "--loss_type": "aipo", "--disable_tqdm": True}
    arguments = [str(part) for flag in flags.items() for part in flag]
    train_math.main([*arguments, "--vllm_server_urls", *servers.urls])
    logs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logs = [log for log in logs if "reward" in log]
    assert [log["async/staleness_mean"] for log in logs] == [0.0] + [1.0] * 9
    assert all(math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"]) for log in logs)
    rewards = [log["reward"] for log in logs]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1


def within_bound(windows: list[dict[str, Any]], level: int) -> bool:
    """Window n is of the weights with which window n − k began, or of newer ones."""
    begun = [window["step"] for window in windows]
    return all(
        begun[max(0, n - level)] <= one["oldest"] <= one["newest"] <= one["step"] for n, one in enumerate(windows)
    )


# ----------------------------------------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def checkpoints(model_path, tmp_path_factory) -> dict[str, str]:
    """Of one shape: the embedded model's directory, one with other weights, a LoRA adapter on it."""
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


CONVERSATIONS = arithmetic_dataset("test", 12)["prompt"]


def greedy(sampler: Any) -> list[list[int]]:
    drawn = dict(sampler.sample(CONVERSATIONS, temperature=0, max_new_tokens=20))
    return [drawn[index][0].token_ids for index in range(len(CONVERSATIONS))]


@pytest.fixture(scope="module")
def by_transformers(checkpoints) -> dict[str, list[list[int]]]:
    own = greedy(open_sampler(checkpoints["own"]))
    other = greedy(open_sampler(checkpoints["other"]))
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoints["own"]), checkpoints["adapter"]
    )
    adapter = greedy(LocalSampler(adapted, AutoTokenizer.from_pretrained(checkpoints["own"])))
    assert own != other and own != adapter
    return {"own": own, "other": other, "adapter": adapter}


def test_servers_take_one_checkpoint_after_another(servers, checkpoints, by_transformers, tmp_path):
    """In place, LoRA merged; and the one that they hold is not written again."""
    for number, (name, written) in enumerate([("other", True), ("adapter", True), ("own", True), ("own", False)]):
        folder = tmp_path / str(number)
        with open_sampler(checkpoints[name], server_urls=servers.urls, weight_dir=folder) as sampler:
            assert greedy(sampler) == by_transformers[name], name
            assert folder.exists() == written, name


def test_servers_that_were_given_other_weights_get_theirs_again_or_are_refused(
    servers, checkpoints, by_transformers, tmp_path
):
    with open_sampler(checkpoints["other"], server_urls=servers.urls, weight_dir=tmp_path) as first:
        with open_sampler(checkpoints["own"], server_urls=servers.urls, weight_dir=tmp_path) as second:
            assert greedy(second) == by_transformers["own"]
            held = open_sampler(checkpoints["own"], server_urls=servers.urls)
        assert greedy(first) == by_transformers["other"]
        with held, pytest.raises(WeightMismatch, match="holds others"):
            greedy(held)


def test_evaluation_by_servers(servers, checkpoints, tiny_model, tmp_path, capsys):
    def evaluate(*models: str) -> None:
        main([*models, *"--dataset_name embedded --dataset_test_split test[:40] --num_samples 16 --k 1 4".split(), *to])

    to = ["--vllm_server_urls", *servers.urls, "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=rf"another shape than .* python -m dash_trl.serve {tiny_model} --servers 2"):
        check_shapes([Checkpoint(checkpoints["own"]), Checkpoint(tiny_model)], servers.urls)
    evaluate(checkpoints["other"], "embedded")
    accuracy = {name: json.loads((tmp_path / f"{name}.json").read_text())["accuracy"] for name in ("other", "embedded")}
    assert 0.25 < accuracy["embedded"] < 0.65 and accuracy["other"] < accuracy["embedded"]
    file = tmp_path / "embedded.jsonl"
    whole = file.read_text().splitlines()
    assert [json.loads(line)["index"] for line in whole[1:]] == list(range(40))
    file.write_text("\n".join([*whole[:11], whole[12], whole[30][:20]]))
    evaluate("embedded")
    again = file.read_text().splitlines()
    assert again[:11] == whole[:11] and again[12] == whole[12] and len(again) == 41
    assert [json.loads(line)["index"] for line in again[1:]] == list(range(40))


def test_value_quality_by_servers(servers, tmp_path):
    """Prefixes are completed by them; values get log-probs alone, as where a run samples from servers."""
    to = ["--vllm_server_urls", *servers.urls, "--output_dir", str(tmp_path)]
    small = "--num_problems 6 --num_samples 4 --num_rollouts 4 --fit_rollouts 256 --values outcome".split()
    value_quality(["embedded", *small, *to])
    found = json.loads((tmp_path / "value_quality.json").read_text())
    assert found["responses"] == 24 and found["without_truth"] == 0 and found["settings"]["sampler"] == "servers"
    assert found["estimators"]["outcome, 256 rollouts"]["spearman"] > 0.3
    rows = [json.loads(line) for line in (tmp_path / "truth.jsonl").read_text().splitlines()[1:]]
    assert all(len(row["samples"]) == 4 for row in rows) and 0.1 < found["mean_truth"] < 0.8


# -------------------------------------------------------------------------------------------------------------- crashes


def test_a_killed_server_loses_nothing_and_comes_back_with_the_weights(servers, slow_tokens, model, pool):
    pool.generation_kwargs, pool.max_completion_length = {"ignore_eos": True}, 150
    pool.sync_weights()
    fleet = pool.pool.fleet
    rows = prompts(pool, 16, 2)
    slow_tokens.touch()  # so that it is killed in the middle
    sampling = ThreadPoolExecutor(1).submit(pool.generate, rows, None, 2)
    victim = servers.urls[1]
    wait_until(lambda: len(fleet.servers[victim].outstanding) == 8)
    servers.commands[1].stop(at_once=True)
    slow_tokens.unlink()
    _, completions, log_probs, _ = sampling.result(300)
    assert [len(row) for row in completions] == [150] * 32
    assert fleet.servers[victim].state == "dead" and fleet.servers[servers.urls[0]].state == "healthy"
    assert largest_difference(model, rows, completions, log_probs) <= 1e-4

    change(model, 3)
    pool.sync_weights()  # the dead one does not hold up the others
    pool.generation_kwargs, pool.max_completion_length = {}, 48
    servers.commands[1] = servers.start(1)  # with the weights of its disk
    servers.wait_until_ready()
    rows = rows[:16]
    answered = generated_tokens(servers.urls[0])
    while fleet.servers[victim].state != "healthy":
        _, completions, log_probs, _ = pool.generate(rows, None, 2)
        assert largest_difference(model, rows, completions, log_probs) <= 1e-4  # never a prompt for the old weights
        assert generated_tokens(servers.urls[0]) - answered < 1e6
    assert fleet.servers[victim].version == fleet.version
    _, completions, log_probs, _ = pool.generate(rows, None, 2)
    assert generated_tokens(victim) > 10  # it works again
    assert largest_difference(model, rows, completions, log_probs) <= 1e-4


@pytest.mark.distributed
def test_a_run_two_windows_ahead_is_killed_and_resumed(servers, model_path, tmp_path):
    """On two ranks, with a window finished and a window in flight. In another run a server dies, and stays dead."""
    address = ["--master_addr=127.0.0.1", f"--master_port={free_ports(1, 29500)[0]}"]
    torchrun = ["torch.distributed.run", "--nproc_per_node=2", *address]
    script = [*torchrun, ROOT / "tests" / "async_run.py", model_path, tmp_path, ",".join(servers.urls)]
    environment = {"ACCELERATE_USE_CPU": "true"}
    launch([*script, "killed"], killed=True, **environment)
    killed = [json.loads((tmp_path / f"killed-{rank}.json").read_text()) for rank in range(2)]
    went_on = results(launch([*script, "resumed", servers.commands[1].process.pid], **environment))
    assert not servers.commands[1].running
    for before, after in zip(killed, went_on, strict=True):
        resumed, died = after["resumed"], after["a server died"]
        assert (before["step"], before["finished"], before["running"]) == (3, {"2": True, "3": False}, 4)
        prompts = [window["prompts"] for window in died["windows"]]
        assert len(prompts) == 6 and resumed["steps"] == died["steps"] == 12
        assert [window["prompts"] for window in before["windows"] + resumed["windows"]] == prompts
        assert all(within_bound(one["windows"], 2) for one in (before, resumed, died))
        assert not within_bound(resumed["windows"], 1) and not within_bound(died["windows"], 1)
        assert resumed["ranks_agree"] and died["ranks_agree"] and all(map(math.isfinite, died["losses"]))
        assert min(died["had"]) > 0  # requests of each rank, when it died
        assert died["retried"] == sum(died["had"]) and died["healthy"] == 1
    for epoch in (slice(0, 3), slice(3, 6)):  # each prompt once
        windows = [window for rank in went_on for window in rank["a server died"]["windows"][epoch]]
        asked = [prompt for window in windows for prompt in window["prompts"]]
        assert len(set(asked)) == len(asked) == 24


@pytest.mark.distributed
def test_zero3_two_ranks_and_all_servers_lost(started, model_path, tmp_path):
    """Two steps under ZeRO-3 with servers; then they are killed, and both ranks get the error in time."""
    alive = [number for number, command in enumerate(started.commands) if command.running]
    urls = ",".join(started.urls[number] for number in alive)
    groups = ",".join(str(started.commands[number].process.pid) for number in alive)
    config = ROOT / "tests" / "accelerate" / "zero3.yaml"
    script = ["accelerate.commands.launch", "--config_file", config, "--main_process_port", free_ports(1, 29500)[0]]
    ranks = results(launch([*script, ROOT / "tests" / "vllm_run.py", model_path, tmp_path, urls, groups]))
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["steps"] == 2 and rank["moved"] > 1e-4
        assert max(rank["differences"]) < 1e-4 and len(rank["differences"]) == 2
        assert all(row == [1, 1] for row in rank["versions"])  # the second window's
        assert rank["synced"] == -1  # the end of training may load its best model
        assert rank["error"] == "PoolError"
        assert rank["seconds"] < 20.0
        assert all(url in rank["message"] for url in rank["urls"])


# ------------------------------------------------------------------------------------ vLLM without servers


def test_colocated(model_path, tmp_path):
    """TRL's own mode, through the same buffer."""
    stdout = launch([f"{__package__}.vllm_run", model_path, tmp_path, "colocate", ""], VLLM_CPU_KVCACHE_SPACE="1")
    (rank,) = results(stdout)
    assert rank["steps"] == 2 and rank["moved"] > 1e-4
    assert max(rank["differences"]) < 0.01 and len(rank["differences"]) == 2  # TRL loads the model in bfloat16


IN_PROCESS = """
import sys
from dash_trl.evaluation import open_sampler
from tests.test_vllm import CONVERSATIONS, greedy

with open_sampler(sys.argv[1], backend="vllm") as sampler:
    print("greedy", greedy(sampler))
    prompts = [30 * f"{number}+1-1" for number in range(24)]  # 32 of each: more tokens than vLLM takes in a step
    arguments = {"num_samples": 32, "max_new_tokens": 20, "seed": 1}
    whole = dict(sampler.sample(prompts, **arguments))
    rest = dict(sampler.sample(prompts, **arguments, done={0, 5}))
    print("same", rest == {index: samples for index, samples in whole.items() if index not in (0, 5)})
    print("texts", len({sample.text for samples in whole.values() for sample in samples}))
"""


def test_vllm_in_process_draws_each_request_by_its_seed(checkpoints, by_transformers):
    """Prompts that are computed in parts, with seeds, would end an engine on a CPU."""
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, checkpoints["adapter"]],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in ("greedy", "same", "texts")
    )
    assert json.loads(said["greedy"]) == by_transformers["adapter"]
    assert said["same"] == "True" and int(said["texts"]) > 50
