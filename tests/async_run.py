"""Launches of `test_vllm.py`: whole runs with `async_level` on real servers, on several ranks.

torchrun --nproc_per_node 2 tests/async_run.py MODEL OUTPUT URL,URL killed
torchrun --nproc_per_node 2 tests/async_run.py MODEL OUTPUT URL,URL resumed PROCESS_GROUP

killed: a run that ends in SIGKILL of all ranks, at a checkpoint.
resumed: that run from its checkpoint; then a run while which the last server, PROCESS_GROUP, dies.

Every rank prints what it saw. A window is 4 groups of a rank and two optimizer steps, an epoch three windows.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl import DASHCallback, DASHConfig, DASHTrainer
from tests.distributed_run import equal_on_all_ranks, whole
from tests.tiny import ScriptedReward, leave

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LEVEL, WINDOWS, STEPS_PER_WINDOW = 2, 6, 2
GROUPS = 4  # of a rank's window
CHECKPOINT = 3  # the optimizer step: half of window 1 is used, window 2 ends the epoch, window 3 begins the next
SECONDS = 120.0  # that something is waited for which has to happen


def wait_until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


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


class InFlight(Watch):
    """While window 1 is trained on, windows 1 and 2 have been sampled, and window 3 is in flight.

    It lies with servers that go on waiting when they have the weights with which window 1 begins, so that this depends
    on no clock.
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
    """All ranks; none before all have said what they saw."""

    def on_save(self, args, state, control, **kwargs):
        seen = {"windows": self.windows, "finished": self.finished(), "running": len(self.running())}
        files = [Path(args.output_dir, f"killed-{rank}.json") for rank in range(RANKS)]
        partial = files[RANK].with_suffix(".partial")
        partial.write_text(json.dumps({**seen, "step": state.global_step}))
        partial.rename(files[RANK])
        wait_until(lambda: all(file.exists() for file in files))
        os.kill(os.getpid(), signal.SIGKILL)


class ServerDies(InFlight):
    """While requests of all ranks are in flight on it."""

    def __init__(self, url: str, group: int):
        super().__init__()
        self.url, self.group = url, group
        self.had: list[int] = []  # each rank

    def in_flight(self) -> None:
        self.had = gather_object([self.running().count(self.url)])
        if RANK == 0:
            os.killpg(self.group, signal.SIGKILL)


def run(
    model: str, output: str, urls: list[str], watch: Watch, resume: str | None = None, **settings: Any
) -> dict[str, Any]:
    """A whole run; what this rank saw of it."""
    problems = [f"{a}+{b}=" for a in range(1, 7) for b in range(1, 5)]
    trainer = DASHTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=ScriptedReward(constant=0.0),
        args=DASHConfig(
            output_dir=output,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            num_generations=4,
            max_completion_length=12,
            max_steps=WINDOWS * STEPS_PER_WINDOW,
            optim="sgd",  # the state of others on several CPUs cannot be loaded: torch knows no device cpu:0
            learning_rate=0.1,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            ddp_timeout=2 * int(SECONDS),  # a rank that fails leaves no other behind
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            async_level=LEVEL,
            vllm_server_urls=urls,
            **{"save_strategy": "no", **settings},
        ),
        train_dataset=Dataset.from_dict({"prompt": problems[: 3 * 4 * RANKS]}),
        callbacks=[watch],
    )
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    return {
        "windows": watch.windows,
        "steps": trainer.state.global_step,
        "ranks_agree": equal_on_all_ranks(whole(trainer)),
        "losses": [log["loss"] for log in logs if "loss" in log],
        "retried": max(log.get("servers/retried_requests", 0) for log in logs),  # so far
        "healthy": [log["servers/healthy"] for log in logs if "servers/healthy" in log][-1],
    }


def main(model: str, output: str, servers: str, what: str, group: str = "") -> None:
    urls = servers.split(",")
    if what == "killed":
        run(model, output, urls, KilledAtItsCheckpoint(), save_strategy="steps", save_steps=CHECKPOINT)
        raise AssertionError("nothing killed this run")
    resumed = run(model, output, urls, Watch(), resume=f"{output}/checkpoint-{CHECKPOINT}")
    watch = ServerDies(urls[-1], int(group))
    died = run(model, output, urls, watch) | {"had": watch.had}
    results = gather_object([{"resumed": resumed, "a server died": died}])
    if RANK == 0:
        print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
