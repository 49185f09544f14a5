"""`DASHConfig`: TRL's `GRPOConfig` and the few options that DASH adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trl import GRPOConfig


@dataclass
class DASHConfig(GRPOConfig):
    r"""Configuration of [`DASHTrainer`]: all of [`~trl.GRPOConfig`], and:

    Args:
        gradient_filter_threshold (`float` or `None`, defaults to `0.1`):
            A row is dropped before any model pass when its largest absolute advantage is under this (the paper's
            Section 3.5), when that is 0, or when it is unscored. `None` turns filtering off. `0.0` drops only rows
            without any signal: with `beta=0`, that is exactly GRPO's update. Mind the scale: with
            `scale_rewards="group"`, one right answer among G has advantages ±O(1); with `"none"`, of ±1/G.
        filter_denominator (`str`, defaults to `"all"`):
            What the loss divides by. `"all"`: all rows, dropped ones included, the exact GRPO update. `"kept"`: the
            survivors only, as in the paper: larger steps when few rows survive.
        max_tokens_per_microbatch (`int` or `None`, defaults to `None`):
            Token budget of one model pass (prompt and completion tokens; padding counts where the model cannot run
            padding-free). `None`: at most `per_device_train_batch_size` rows, as in TRL. Set it to what fits in
            memory; short rows then share a pass. A single row above the budget gets a pass of its own.
    """

    gradient_filter_threshold: float | None = field(
        default=0.1,
        metadata={
            "help": "Drop a row before any model pass when its largest absolute advantage is under this. `None`: off."
        },
    )
    filter_denominator: str = field(
        default="all",
        metadata={
            "help": "What the loss divides by: 'all' rows (exactly GRPO's update) or the 'kept' ones (the paper's).",
            "choices": ["all", "kept"],
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={"help": "Token budget of one model pass. `None`: rows as in TRL (`per_device_train_batch_size`)."},
    )

    def __post_init__(self) -> None:
        threshold = self.gradient_filter_threshold
        if threshold is not None and not (math.isfinite(threshold) and threshold >= 0):
            raise ValueError(
                f"gradient_filter_threshold={threshold} is not a finite number >= 0, so no advantage can be compared "
                "with it. Use 0.1 (the paper's), 0 to drop only rows without any signal, or None to keep all rows."
            )
        if self.filter_denominator not in ("all", "kept"):
            raise ValueError(
                f"filter_denominator={self.filter_denominator!r} is unknown. Use 'all' (exactly GRPO's update) or "
                "'kept' (the average over the rows that survive the filter, as in the paper)."
            )
        if self.max_tokens_per_microbatch is not None and self.max_tokens_per_microbatch < 1:
            raise ValueError(
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch} leaves no room for a token. Use a "
                "positive number of tokens, or None to pack `per_device_train_batch_size` rows."
            )
        try:
            super().__post_init__()
        except ValueError as error:
            if "divisible by num_generations" not in str(error):
                raise
            raise ValueError(
                f"{error} A prompt's completions must be sampled together. Choose per_device_train_batch_size × "
                f"steps_per_generation × processes as a multiple of num_generations={self.num_generations}; here "
                f"per_device_train_batch_size={self.per_device_train_batch_size}, steps_per_generation="
                f"{self.steps_per_generation}, processes={self.world_size}."
            ) from error
