"""The launch of `test_vllm.py`: runs on real servers on two ranks, and vLLM within a process.

python -m tests.vllm_run MODEL ADAPTER OUTPUT URL,URL PROCESS_GROUP HOLD

zero3_adapter, fsdp2: two steps.
killed: a run with `async_level` that ends in SIGKILL of both ranks, at a checkpoint.
resumed: that run from its checkpoint.
zero3: two steps on the first server; then it dies, and sampling has to fail on both ranks.
in process: vLLM without servers, in an evaluation and in TRL's colocate mode.

One process imports what all need, and forks the ranks. A window of the runs with `async_level` is 4 groups of a rank
and two optimizer steps, an epoch three windows.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.evaluation import open_sampler
from dash_trl.serve import free_ports
from dash_trl.toy import arithmetic_dataset, arithmetic_reward
from tests.distributed_run import equal_on_all_ranks, whole
from tests.tiny import ScriptedReward, fsdp_on_cpu, leave, load, run, without_compiled_ops

LEVEL = 2
WINDOWS = 6
STEPS_PER_WINDOW = 2
GROUPS = 4  # of a rank's window
CHECKPOINT = 3  # the optimizer step: half of window 1 is used, window 2 ends the epoch, window 3 begins the next
SECONDS = 300.0  # that something is waited for which has to happen
CONVERSATIONS = arithmetic_dataset("test", 12)["prompt"]


@dataclass(frozen=True)
class Place:
    """What the scenarios are given.

    Attributes:
        group: the process group of the first server.
        hold: while this file exists, the servers sample no token.
    """

    model: str
    adapter: str
    output: Path
    urls: list[str]
    group: int
    hold: Path


def wait_until(condition, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def say(name: str, seen) -> None:
    """What each rank saw, by rank 0."""
    ranks = gather_object([seen])
    if int(os.environ.get("RANK", 0)) == 0:
        print("\nRESULTS " + json.dumps([name, ranks]), flush=True)


class Watch(DASHCallback):
    """The prompts of each window, the optimizer steps before it, and those of its oldest and its newest weights."""

    def __init__(self) -> None:
        self.windows: list[dict[str, Any]] = []

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        prompts = [row["prompt"] for row in rollouts.examples[:: args.num_generations]]
        oldest = rollouts.policy_version.min().item()
        newest = rollouts.policy_version.max().item()
        self.windows.append({"prompts": prompts, "step": state.global_step, "oldest": oldest, "newest": newest})


# ---------------------------------------------------------------------------------------------- two windows ahead


class KilledAtItsCheckpoint(Watch):
    """While its second window is trained on, that one and the third have been sampled, and the fourth is in flight.

    From then on, the servers hold all tokens back, so that this depends on no clock.
    """

    def __init__(self, hold: Path) -> None:
        super().__init__()
        self.hold = hold

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        super().on_rollouts_sampled(args, state, control, rollouts, trainer)
        self.trainer = trainer
        self.fleet = trainer.vllm_generation.pool.fleet
        if len(self.windows) == 1:
            wait_until(lambda: not self.in_flight())
            trainer.accelerator.wait_for_everyone()
            self.hold.touch()
        elif len(self.windows) == 2:
            wait_until(lambda: self.in_flight() == GROUPS)

    def in_flight(self) -> int:
        """Groups that servers sample or are going to: a server that is tested with a token does not answer now."""
        return len(self.fleet.jobs())

    def on_save(self, args, state, control, **kwargs):
        say("killed", {"windows": self.windows, "in_flight": self.in_flight(), "step": state.global_step})
        self.trainer.accelerator.wait_for_everyone()
        os.kill(os.getpid(), signal.SIGKILL)


def ahead(place: Place, watch: Watch, **settings):
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
    watch = Watch()
    trainer = ahead(place, watch, resume=place.output / f"checkpoint-{CHECKPOINT}")
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    agree = equal_on_all_ranks(whole(trainer))
    say("resumed", {"windows": watch.windows, "ranks_agree": agree, "losses": losses})


# ------------------------------------------------------------------------------------------------- two steps


def two_steps(model: str, output: Path, trainer_class=DASHTrainer, **settings) -> tuple[Any, dict[str, Any]]:
    """The trainer, and what this rank saw."""
    before = load(model).state_dict()  # before ZeRO-3 shards whatever is loaded
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


def trained(trainer) -> list[tuple[str, torch.Tensor]]:
    """All weights; of an adapter its B matrices, which begin with 0."""
    return [(name, value) for name, value in whole(trainer).items() if "lora_B" in name or "base_model" not in name]


def zero3_adapter(place: Place) -> None:
    without_compiled_ops()
    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    say("zero3_adapter", two_steps(place.model, place.output, vllm_server_urls=place.urls, more=more)[1])


def fsdp2(place: Place) -> None:
    fsdp_on_cpu()
    trainer, seen = two_steps(place.model, place.output, vllm_server_urls=place.urls)
    assert trainer.accelerator.is_fsdp2
    say("fsdp2", seen)


def zero3(place: Place) -> None:
    without_compiled_ops()
    trainer, seen = two_steps(place.model, place.output, vllm_server_urls=place.urls[:1])
    if trainer.accelerator.is_main_process:
        os.killpg(place.group, signal.SIGKILL)
    trainer.accelerator.wait_for_everyone()
    trainer.vllm_generation.pool.server_timeout = 3.0
    error = None
    try:
        # one rank has nothing to ask for, and must fail all the same
        trainer.vllm_generation.generate([[5, 6, 7]] * 8 if trainer.accelerator.is_main_process else [], None, 8)
    except Exception as failure:
        error = [type(failure).__name__, str(failure)]
    say("zero3", {**seen, "error": error})


def greedy(sampler) -> list[list[int]]:
    drawn = dict(sampler.sample(CONVERSATIONS, temperature=0, max_completion_length=20))
    return [drawn[index][0].token_ids for index in range(len(CONVERSATIONS))]


class UsesVLLM(GRPOTrainer):
    """After the check that refuses colocated vLLM on a CPU, where it takes more than a user would set."""

    def __init__(self, model, reward_funcs, args, *others, **settings):
        args.use_vllm = True
        super().__init__(model, reward_funcs, args, *others, **settings)


class Colocated(DASHTrainer, UsesVLLM):
    """`use_vllm=True` with TRL's mode "colocate", on a CPU."""


def in_process(place: Place) -> None:
    """vLLM that an evaluation starts, and vLLM within the process of a training."""
    drawn = {}
    for name, path in {"whole": place.model, "adapter": place.adapter}.items():
        with open_sampler(path, use_vllm=True) as sampler:
            drawn[name] = greedy(sampler)
    say("evaluation", drawn)
    vllm = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "in_process": True}
    say("colocate", two_steps(place.model, place.output, Colocated, **vllm)[1])


# -------------------------------------------------------------------------------------------------- the launch

ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
SCENARIOS = {  # → ranks, environment
    zero3_adapter: (2, ZERO3),  # first: the servers were given no other model
    fsdp2: (2, FSDP2),
    killed: (2, {"ACCELERATE_USE_CPU": "true"}),
    resumed: (2, {"ACCELERATE_USE_CPU": "true"}),
    zero3: (2, ZERO3),
    in_process: (1, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}),  # in TRL's mode without compiled kernels
}


def begin(rank: int, ranks: int, port: int, environment: dict[str, str], scenario, place: Place) -> None:
    """A rank, as torchrun would begin it."""
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= environment
    scenario(place)
    leave()


def main(model: str, adapter: str, output: str, urls: str, group: str, hold: str) -> None:
    place = Place(model, adapter, Path(output), urls.split(","), int(group), Path(hold))
    for scenario, (ranks, environment) in SCENARIOS.items():
        arguments = ranks, free_ports(1, 29500)[0], environment, scenario, place
        try:
            start_processes(begin, arguments, nprocs=ranks, start_method="fork")
        except (ProcessRaisedException, ProcessExitedException) as error:
            print(f"\n{scenario.__name__} ended: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
