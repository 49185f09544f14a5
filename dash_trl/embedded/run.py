"""The settings of the embedded run."""

from __future__ import annotations

from typing import Any

import torch


def embedded_defaults() -> dict[str, Any]:
    """`DASHConfig` fields of the default run: 80 optimizer steps of 128 rows, 16 problems with 8 completions each.

    In float32, on the GPU if there is one. The learning rate decays, since near the end a constant one unlearns a sum
    as often as it learns another; much more of it (3e-4) makes the model forget.
    """
    return {
        "output_dir": "outputs/embedded",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 16,
        "num_generations": 8,
        "max_completion_length": 64,
        "max_steps": 80,
        "learning_rate": 1.5e-4,
        "lr_scheduler_type": "linear",
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
