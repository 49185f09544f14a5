"""One launch of `test_vllm.py`: two steps with vLLM; then all servers are killed and sampling has to fail on all ranks.

accelerate launch … tests/vllm_run.py MODEL OUTPUT URL,URL PROCESS_GROUP,PROCESS_GROUP
python -m tests.vllm_run MODEL OUTPUT colocate ""
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl import DASHCallback, DASHConfig, DASHTrainer
from dash_trl.embedded.problems import arithmetic_dataset, arithmetic_reward
from tests.distributed_run import whole
from tests.tiny import leave


class Watch(DASHCallback):
    """What each window and each log says."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.differences: list[float] = []

    def on_rewards(self, args, state, control, rollouts, **kwargs):
        self.versions = rollouts.policy_version.tolist()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "sampling/sampling_logp_difference/mean" in (logs or {}):
            self.differences.append(logs["sampling/sampling_logp_difference/mean"])


def fail(trainer: Any, groups: list[int]) -> dict[str, Any]:
    """Sampling after the end of all servers."""
    if trainer.accelerator.is_main_process:
        for group in groups:
            os.killpg(group, signal.SIGKILL)
    trainer.accelerator.wait_for_everyone()
    trainer.vllm_generation.pool.server_timeout = 3.0
    started = time.monotonic()
    try:
        # one rank has nothing to ask for, and must fail all the same
        trainer.vllm_generation.generate([[5, 6, 7]] * 8 if trainer.accelerator.is_main_process else [], None, 8)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
    return {"error": None}


def main(path: str, output: str, where: str, groups: str) -> None:
    colocate = where == "colocate"
    sampler: dict[str, Any] = {"vllm_server_urls": where.split(",")}
    if colocate:
        sampler = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    watch = Watch()
    before = AutoModelForCausalLM.from_pretrained(path).state_dict()  # before ZeRO-3 shards whatever is loaded
    trainer = DASHTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=arithmetic_reward,
        args=DASHConfig(
            output_dir=output,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=48,
            max_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            **sampler,
        ),
        train_dataset=arithmetic_dataset("train", 64),
        callbacks=[watch],
    )
    trainer.train()
    moved = max((value.cpu() - before[name]).abs().max().item() for name, value in whole(trainer).items())
    result = {
        "steps": trainer.state.global_step,
        "moved": moved,
        "differences": watch.differences,
        "versions": watch.versions,
        "synced": trainer._last_loaded_step,
        "rows": len(watch.versions),
        "urls": where.split(","),
    }
    if not colocate:
        result |= fail(trainer, [int(group) for group in groups.split(",")])
    results = gather_object([result])
    if trainer.accelerator.is_main_process:
        print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
