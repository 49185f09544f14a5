"""The launch of `test_vllm.py`: runs on real servers on two ranks, some of which die, and vLLM within a process.

python -m tests.vllm_run MODEL ADAPTER OUTPUT URL,URL PROCESS_GROUP,PROCESS_GROUP

tools: a run with a tool and an environment, one window ahead.
killed: a run with `async_level` that ends in SIGKILL of both ranks, at a checkpoint.
resumed: that run from its checkpoint; the last server dies meanwhile, and stays dead.
fsdp2: two steps under FSDP2.
zero3: two steps under ZeRO-3; then the first server dies, too, and sampling has to fail on both ranks.
in process: vLLM without servers, in an evaluation and in TRL's colocate mode.

One process imports what all need, and forks the ranks. A window of the runs with `async_level` is 4 groups of a rank
and two optimizer steps, an epoch three windows.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from torch.func import functional_call
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dash_trl import DASHCallback, DASHTrainer, RewardRunner
from dash_trl.checks import arguments as early_checks
from dash_trl.evaluation import open_sampler
from dash_trl.serve import free_ports
from dash_trl.toy import arithmetic_dataset, arithmetic_reward
from tests.distributed_run import equal_on_all_ranks, whole
from tests.tiny import ScriptedReward, fsdp_on_cpu, leave, run, without_compiled_ops

LEVEL, WINDOWS, STEPS_PER_WINDOW = 2, 6, 2
GROUPS = 4  # of a rank's window
CHECKPOINT = 3  # the optimizer step: half of window 1 is used, window 2 ends the epoch, window 3 begins the next
SECONDS = 120.0  # that something is waited for which has to happen
CONVERSATIONS = arithmetic_dataset("test", 12)["prompt"]


def wait_until(condition: Any, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def say(name: str, seen: Any) -> None:
    """What each rank saw, by rank 0."""
    ranks = gather_object([seen])
    if int(os.environ.get("RANK", 0)) == 0:
        print("\nRESULTS " + json.dumps([name, ranks]), flush=True)


class Watch(DASHCallback):
    """The prompts of each window, the optimizer steps before it, and those of its oldest and its newest weights."""

    trainer: Any = None

    def __init__(self) -> None:
        self.windows: list[dict[str, Any]] = []

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        self.trainer = trainer
        prompts = [row["prompt"] for row in rollouts.examples[:: args.num_generations]]
        oldest, newest = rollouts.policy_version.min().item(), rollouts.policy_version.max().item()
        self.windows.append({"prompts": prompts, "step": state.global_step, "oldest": oldest, "newest": newest})


# ---------------------------------------------------------------------------------------------- tools

CHAT_TEMPLATE = (
    "{% for one in messages %}{{ '<|im_start|>' + one.role + '\n' + one.content }}"
    "{% for call in one.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LONGEST, ANSWER = 240, 40  # tokens of a completion, and more than a tool's answer has
FIRST_WINDOW = 8  # prompts of both ranks


class Caller(PreTrainedTokenizerFast):
    """Reads turns as calls of the environment or of the tool, by their lengths; some are the end."""

    def parse_response(self, response: list[int], **_: Any) -> dict[str, Any]:
        text = self.decode(response, skip_special_tokens=True)
        name = ("note", "twice", "note", None)[len(response) % 4] if response[-1] == self.eos_token_id else None
        calls = [{"type": "function", "function": {"name": name, "arguments": {"text": text}}}] if name else []
        return {"role": "assistant", "content": text, "tool_calls": calls}


def twice(text: str) -> str:
    """Asks the next problem.

    Args:
        text: Is not read.
    """
    return f"{len(text) % 10}+2-1"


class Noted:
    """An environment that is rewarded for its notes. The first of them waits for a reward of another row."""

    rewarded, waits = threading.Event(), iter([True])
    streamed = False

    def reset(self, number: int, **_: Any) -> None:
        self.number, self.notes = number, 0

    def note(self, text: str) -> str:
        """Notes a text.

        Args:
            text: What to note.
        """
        self.notes += 1
        if self.number < FIRST_WINDOW and next(Noted.waits, False):
            Noted.streamed = Noted.rewarded.wait(SECONDS)
        return twice(text)

    def get_reward(self) -> float:
        return float(self.notes)


def length(completion: Any, completion_ids: list[int], number: int) -> float:
    if number < FIRST_WINDOW:
        Noted.rewarded.set()
    return len(completion_ids) / LONGEST


class Rows(Watch):
    """Compares the rows with the environments, and their log-probs with those of the weights that sampled them."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.weights: list[dict[str, torch.Tensor]] = []  # of each optimizer step
        self.difference = 0.0
        self.turns: list[int] = []
        self.wrong: list[Any] = []

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        super().on_rollouts_sampled(args, state, control, rollouts, trainer)
        self.weights.append(whole(trainer))
        for row, (messages, environment) in enumerate(zip(rollouts.completions, trainer.environments, strict=True)):
            length = int(rollouts.completion_mask[row].sum())
            self.turns.append(sum(one["role"] == "assistant" for one in messages))
            known = sum(one.get("name") == "note" for one in messages)
            if length < LONGEST - ANSWER and known != environment.notes:  # else an answer may not have had room
                self.wrong.append((known, environment.notes))
            self.difference = max(self.difference, self.differences(rollouts, row, length))

    @torch.no_grad()
    def differences(self, rollouts: Any, row: int, length: int) -> float:
        """The largest of the row's own tokens, each by the nearest of the weights that may have sampled it."""
        completion = rollouts.completion_ids[row, :length]
        ids = torch.cat([rollouts.prompt_ids[row][rollouts.prompt_mask[row].bool()], completion])
        oldest, newest = rollouts.policy_version[row].tolist()
        found = []
        for weights in self.weights[oldest : newest + 1]:
            logits = functional_call(self.model, weights, kwargs={"input_ids": ids[None]}).logits
            log_probs = logits[0, -length - 1 : -1].log_softmax(-1)
            found.append(log_probs.gather(1, completion[:, None]).squeeze(1))
        sampled = rollouts.sampling_per_token_logps[row, :length]
        nearest = (torch.stack(found) - sampled).abs().amin(dim=0)
        return nearest[rollouts.tool_mask[row, :length].bool()].max().item()


def tools(model: str, adapter: str, output: Path, urls: list[str], groups: list[int]) -> None:
    tokenizer, watch = Caller.from_pretrained(model), Rows(model)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, {}
    problems = arithmetic_dataset("train", 2 * FIRST_WINDOW)
    trainer = run(
        DASHTrainer,
        model,
        output,
        reward=RewardRunner(length),
        dataset=problems.add_column("number", list(range(len(problems)))),
        callbacks=[watch],
        more={"processing_class": tokenizer, "tools": [twice], "environment_factory": Noted},
        max_completion_length=LONGEST,
        max_tool_calling_iterations=3,
        max_steps=2,
        learning_rate=0.01,
        shuffle_dataset=False,
        async_level=1,
        vllm_server_urls=urls,
    )
    logs = [log for log in trainer.state.log_history if "tools/call_frequency" in log]
    seen = {name: getattr(watch, name) for name in ("windows", "difference", "turns", "wrong")}
    seen |= {"calls": [log["tools/call_frequency"] for log in logs], "streamed": Noted.streamed}
    seen |= {"failed": [log["tools/failed_rows"] for log in logs], "ranks_agree": equal_on_all_ranks(whole(trainer))}
    say("tools", seen)


# ---------------------------------------------------------------------------------------------- two windows ahead


class InFlight(Watch):
    """While its second window is trained on, that one and the third have been sampled, and the fourth is in flight.

    It lies with servers that go on waiting when they have the weights with which the second begins, so that this
    depends on no clock.
    """

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        super().on_rollouts_sampled(args, state, control, rollouts, trainer)
        servers = trainer.vllm_generation.pool._servers.values()

        async def stay_paused() -> None:
            pass

        if len(self.windows) == 1:
            wait_until(lambda: all(self.finished().values()))
            for server in servers:
                server.resume = stay_paused
        elif len(self.windows) == 2:
            for server in servers:
                del server.resume
            wait_until(lambda: len(self.running()) == GROUPS)
            self.in_flight()

    def in_flight(self) -> None:
        """Now they are."""

    def finished(self) -> dict[int, bool]:
        """Window → whether all its rows have come; of those that were submitted and not trained on."""
        batches = self.trainer.vllm_generation._in_flight
        return {window: batch.finished.qsize() == len(batch.jobs) for window, batch in batches.items()}

    def running(self) -> list[str]:
        """The server of each request in flight."""
        return list(self.trainer.vllm_generation.pool.backlog.running.values())


class KilledAtItsCheckpoint(InFlight):
    """Both ranks; none before both have said what they saw."""

    def on_save(self, args, state, control, **kwargs):
        seen = {"windows": self.windows, "finished": self.finished(), "running": len(self.running())}
        files = [Path(args.output_dir, f"killed-{rank}.json") for rank in range(2)]
        own = files[self.trainer.accelerator.process_index]
        partial = own.with_suffix(".partial")
        partial.write_text(json.dumps({**seen, "step": state.global_step}))
        partial.rename(own)
        wait_until(lambda: all(file.exists() for file in files))
        os.kill(os.getpid(), signal.SIGKILL)


class ServerDies(InFlight):
    """While requests of both ranks are in flight on it."""

    def __init__(self, url: str, group: int):
        super().__init__()
        self.url, self.group = url, group
        self.had: list[int] = []  # each rank

    def in_flight(self) -> None:
        self.had = gather_object([self.running().count(self.url)])
        if self.trainer.accelerator.is_main_process:
            os.killpg(self.group, signal.SIGKILL)


def ahead(model: str, output: Path, urls: list[str], watch: Watch, **settings: Any) -> Any:
    problems = [f"{a}+{b}=" for a in range(1, 7) for b in range(1, 5)]
    return run(
        DASHTrainer,
        model,
        output,
        reward=ScriptedReward(constant=0.0),
        dataset=Dataset.from_dict({"prompt": problems}),
        callbacks=[watch],
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_completion_length=12,
        max_steps=WINDOWS * STEPS_PER_WINDOW,
        learning_rate=0.1,
        ddp_timeout=2 * int(SECONDS),  # a rank that fails leaves no other behind
        async_level=LEVEL,
        vllm_server_urls=urls,
        **settings,
    )


def killed(model: str, adapter: str, output: Path, urls: list[str], groups: list[int]) -> None:
    ahead(model, output, urls, KilledAtItsCheckpoint(), save_strategy="steps", save_steps=CHECKPOINT)


def resumed(model: str, adapter: str, output: Path, urls: list[str], groups: list[int]) -> None:
    watch = ServerDies(urls[-1], groups[-1])
    trainer = ahead(model, output, urls, watch, resume=str(output / f"checkpoint-{CHECKPOINT}"))
    logs = trainer.state.log_history
    seen = {
        "windows": watch.windows,
        "had": watch.had,
        "steps": trainer.state.global_step,
        "ranks_agree": equal_on_all_ranks(whole(trainer)),
        "losses": [log["loss"] for log in logs if "loss" in log],
        "retried": max(log.get("servers/retried_requests", 0) for log in logs),  # so far
        "healthy": [log["servers/healthy"] for log in logs if "servers/healthy" in log][-1],
    }
    say("resumed", seen)


# ------------------------------------------------------------------------------------------------- two steps


def two_steps(model: str, output: Path, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """The trainer, and what this rank saw."""
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()  # before ZeRO-3 shards whatever is loaded
    watch = Watch()
    trainer = run(
        DASHTrainer,
        model,
        output,
        reward=arithmetic_reward,
        dataset=arithmetic_dataset("train", 64),
        callbacks=[watch],
        optimizer="adamw_torch",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=48,
        max_steps=2,
        use_cpu=not torch.cuda.is_available(),
        **settings,
    )
    key = "sampling/sampling_logp_difference/mean"
    return trainer, {
        "steps": trainer.state.global_step,
        "moved": max((value.cpu() - before.get(name, 0)).abs().max().item() for name, value in trained(trainer)),
        "differences": [log[key] for log in trainer.state.log_history if key in log],
        "windows": watch.windows,
    }


def trained(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    """All weights; of an adapter its B matrices, which begin with 0."""
    return [(name, value) for name, value in whole(trainer).items() if "lora_B" in name or "base_model" not in name]


def zero3_adapter(model: str, adapter: str, output: Path, urls: list[str], groups: list[int]) -> None:
    without_compiled_ops()
    peft_config = LoraConfig(r=4, target_modules="all-linear")
    trainer, seen = two_steps(model, output, vllm_server_urls=urls, more={"peft_config": peft_config})
    say("zero3_adapter", {**seen, "way": type(trainer.vllm_generation._sync.weights).__name__})


def fsdp2(model: str, adapter: str, output: Path, urls: list[str], groups: list[int]) -> None:
    fsdp_on_cpu()
    trainer, seen = two_steps(model, output, vllm_server_urls=urls)
    assert trainer.accelerator.is_fsdp2
    say("fsdp2", seen)


def zero3(model: str, adapter: str, output: Path, urls: list[str], groups: list[int]) -> None:
    without_compiled_ops()
    trainer, seen = two_steps(model, output, vllm_server_urls=urls[:1], vllm_weight_difference=True)
    seen["way"] = type(trainer.vllm_generation._sync.weights).__name__
    if trainer.accelerator.is_main_process:
        os.killpg(groups[0], signal.SIGKILL)
    trainer.accelerator.wait_for_everyone()
    trainer.vllm_generation.pool.server_timeout = 3.0
    started = time.monotonic()
    error = None
    try:
        # one rank has nothing to ask for, and must fail all the same
        trainer.vllm_generation.generate([[5, 6, 7]] * 8 if trainer.accelerator.is_main_process else [], None, 8)
    except Exception as failure:
        error = [type(failure).__name__, str(failure)]
    say("zero3", {**seen, "error": error, "seconds": time.monotonic() - started})


def greedy(sampler: Any) -> list[list[int]]:
    drawn = dict(sampler.sample(CONVERSATIONS, temperature=0, max_completion_length=20))
    return [drawn[index][0].token_ids for index in range(len(CONVERSATIONS))]


def in_process(model: str, adapter: str, output: Path, urls: list[str], groups: list[int]) -> None:
    """Prompts that are computed in parts, with seeds, would end an engine on a CPU."""
    with open_sampler(adapter, backend="vllm") as sampler:
        prompts = [30 * f"{number}+1-1" for number in range(24)]  # 32 of each: more tokens than vLLM takes in a step
        arguments = {"num_samples": 32, "max_completion_length": 20, "seed": 1}
        of_all = dict(sampler.sample(prompts, **arguments))
        rest = dict(sampler.sample(prompts, **arguments, done={0, 5}))
        seen = {
            "greedy": greedy(sampler),
            "same": rest == {index: samples for index, samples in of_all.items() if index not in (0, 5)},
            "texts": len({sample.text for samples in of_all.values() for sample in samples}),
        }
    say("evaluation", seen)
    early_checks.check_vllm = lambda args: None  # on a CPU it takes more than a user would set
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    say("colocate", two_steps(model, output, in_process=True, **vllm)[1])


# -------------------------------------------------------------------------------------------------- the launch

ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP2 |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
SCENARIOS: dict[Any, tuple[int, dict[str, str]]] = {  # → ranks, environment
    zero3_adapter: (2, ZERO3),  # first: the servers have the model of the adapter
    fsdp2: (2, FSDP2),
    tools: (2, {"ACCELERATE_USE_CPU": "true"}),
    killed: (2, {"ACCELERATE_USE_CPU": "true"}),
    resumed: (2, {"ACCELERATE_USE_CPU": "true"}),
    zero3: (2, ZERO3),
    in_process: (1, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}),  # in TRL's mode without compiled kernels
}


def begin(rank: int, ranks: int, port: int, environment: dict[str, str], scenario: Any, arguments: tuple) -> None:
    """A rank, as torchrun would begin it."""
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= environment
    scenario(*arguments)
    leave()


def main(model: str, adapter: str, output: str, urls: str, groups: str) -> None:
    arguments = model, adapter, Path(output), urls.split(","), [int(group) for group in groups.split(",")]
    for scenario, (ranks, environment) in SCENARIOS.items():
        place = ranks, free_ports(1, 29500)[0], environment
        try:
            start_processes(begin, (*place, scenario, arguments), nprocs=ranks, start_method="fork")
        except (ProcessRaisedException, ProcessExitedException) as error:
            print(f"\n{scenario.__name__} ended: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
