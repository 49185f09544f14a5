"""The launch of `test_vllm.py`: runs on real servers on two ranks, some of which die, and vLLM within a process.

python -m tests.vllm_run MODEL ADAPTER OUTPUT URL,URL PROCESS_GROUP,PROCESS_GROUP HOLD

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from torch.func import functional_call
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, RewardRunner
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


@dataclass(frozen=True)
class Place:
    """What the scenarios are given.

    Attributes:
        groups: the process group of each server.
        hold: while this file exists, the servers sample no token.
    """

    model: str
    adapter: str
    output: Path
    urls: list[str]
    groups: list[int]
    hold: Path


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


def tools(place: Place) -> None:
    tokenizer, watch = Caller.from_pretrained(place.model), Rows(place.model)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, {}
    problems = arithmetic_dataset("train", 2 * FIRST_WINDOW)
    trainer = run(
        DASHTrainer,
        place.model,
        place.output,
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
        vllm_server_urls=place.urls,
    )
    logs = [log for log in trainer.state.log_history if "tools/call_frequency" in log]
    seen = {name: getattr(watch, name) for name in ("windows", "difference", "turns", "wrong")}
    seen |= {"calls": [log["tools/call_frequency"] for log in logs], "streamed": Noted.streamed}
    seen |= {"failed": [log["tools/failed_rows"] for log in logs], "ranks_agree": equal_on_all_ranks(whole(trainer))}
    say("tools", seen)


# ---------------------------------------------------------------------------------------------- two windows ahead


class InFlight(Watch):
    """While its second window is trained on, that one and the third have been sampled, and the fourth is in flight.

    From then on, the servers hold all tokens back, so that this depends on no clock.
    """

    def __init__(self, hold: Path) -> None:
        super().__init__()
        self.hold = hold

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        super().on_rollouts_sampled(args, state, control, rollouts, trainer)
        if len(self.windows) == 1:
            wait_until(lambda: not self.running() and not self.backlog.waiting)
            trainer.accelerator.wait_for_everyone()
            self.hold.touch()
        elif len(self.windows) == 2:
            wait_until(lambda: len(self.running()) == GROUPS)
            self.in_flight()

    def in_flight(self) -> None:
        """Now they are."""

    @property
    def backlog(self) -> Any:
        return self.trainer.vllm_generation.pool.backlog

    def running(self) -> list[str]:
        """The server of each request in flight."""
        return list(self.backlog.running.values())


class KilledAtItsCheckpoint(InFlight):
    """Both ranks; none before both have said what they saw."""

    def on_save(self, args, state, control, **kwargs):
        seen = {"windows": self.windows, "running": len(self.running()), "step": state.global_step}
        files = [Path(args.output_dir, f"killed-{rank}.json") for rank in range(2)]
        own = files[self.trainer.accelerator.process_index]
        partial = own.with_suffix(".partial")
        partial.write_text(json.dumps(seen))
        partial.rename(own)
        wait_until(lambda: all(file.exists() for file in files))
        os.kill(os.getpid(), signal.SIGKILL)


class ServerDies(InFlight):
    """While requests of both ranks are in flight on it."""

    def __init__(self, place: Place):
        super().__init__(place.hold)
        self.url, self.group = place.urls[-1], place.groups[-1]
        self.had: list[int] = []  # each rank

    def in_flight(self) -> None:
        self.had = gather_object([self.running().count(self.url)])
        if self.trainer.accelerator.is_main_process:
            os.killpg(self.group, signal.SIGKILL)
            self.hold.unlink()


def ahead(place: Place, watch: Watch, **settings: Any) -> Any:
    problems = [f"{a}+{b}=" for a in range(1, 7) for b in range(1, 5)]
    return run(
        DASHTrainer,
        place.model,
        place.output,
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
        vllm_server_urls=place.urls,
        **settings,
    )


def killed(place: Place) -> None:
    ahead(place, KilledAtItsCheckpoint(place.hold), save_strategy="steps", save_steps=CHECKPOINT)


def resumed(place: Place) -> None:
    place.hold.unlink(missing_ok=True)  # of the killed run
    watch = ServerDies(place)
    trainer = ahead(place, watch, resume=str(place.output / f"checkpoint-{CHECKPOINT}"))
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


def two_steps(
    model: str, output: Path, trainer_class: Any = DASHTrainer, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """The trainer, and what this rank saw."""
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()  # before ZeRO-3 shards whatever is loaded
    watch = Watch()
    trainer = run(
        trainer_class,
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


def zero3_adapter(place: Place) -> None:
    without_compiled_ops()
    peft_config = LoraConfig(r=4, target_modules="all-linear")
    say(
        "zero3_adapter",
        two_steps(place.model, place.output, vllm_server_urls=place.urls, more={"peft_config": peft_config})[1],
    )


def fsdp2(place: Place) -> None:
    fsdp_on_cpu()
    trainer, seen = two_steps(place.model, place.output, vllm_server_urls=place.urls)
    assert trainer.accelerator.is_fsdp2
    say("fsdp2", seen)


def zero3(place: Place) -> None:
    without_compiled_ops()
    trainer, seen = two_steps(place.model, place.output, vllm_server_urls=place.urls[:1], vllm_weight_difference=True)
    if trainer.accelerator.is_main_process:
        os.killpg(place.groups[0], signal.SIGKILL)
    trainer.accelerator.wait_for_everyone()
    trainer.vllm_generation.pool.server_timeout = 3.0
    error = None
    try:
        # one rank has nothing to ask for, and must fail all the same
        trainer.vllm_generation.generate([[5, 6, 7]] * 8 if trainer.accelerator.is_main_process else [], None, 8)
    except Exception as failure:
        error = [type(failure).__name__, str(failure)]
    say("zero3", {**seen, "error": error})


def greedy(sampler: Any) -> list[list[int]]:
    drawn = dict(sampler.sample(CONVERSATIONS, temperature=0, max_completion_length=20))
    return [drawn[index][0].token_ids for index in range(len(CONVERSATIONS))]


class UsesVLLM(GRPOTrainer):
    """After the check that refuses colocated vLLM on a CPU, where it takes more than a user would set."""

    def __init__(self, model: Any, reward_funcs: Any, args: Any, *others: Any, **settings: Any):
        args.use_vllm = True
        super().__init__(model, reward_funcs, args, *others, **settings)


class Colocated(DASHTrainer, UsesVLLM):
    """`use_vllm=True` with TRL's mode "colocate", on a CPU."""


def in_process(place: Place) -> None:
    """vLLM that an evaluation starts, and vLLM within the process of a training."""
    with open_sampler(place.adapter, use_vllm=True) as sampler:
        say("evaluation", {"greedy": greedy(sampler)})
    vllm = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "in_process": True}
    say("colocate", two_steps(place.model, place.output, Colocated, **vllm)[1])


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


def begin(rank: int, ranks: int, port: int, environment: dict[str, str], scenario: Any, place: Place) -> None:
    """A rank, as torchrun would begin it."""
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= environment
    scenario(place)
    leave()


def main(model: str, adapter: str, output: str, urls: str, groups: str, hold: str) -> None:
    process_groups = [int(group) for group in groups.split(",")]
    place = Place(model, adapter, Path(output), urls.split(","), process_groups, Path(hold))
    for scenario, (ranks, environment) in SCENARIOS.items():
        arguments = ranks, free_ports(1, 29500)[0], environment, scenario, place
        try:
            start_processes(begin, arguments, nprocs=ranks, start_method="fork")
        except (ProcessRaisedException, ProcessExitedException) as error:
            print(f"\n{scenario.__name__} ended: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
