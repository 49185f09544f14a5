"""`DASHConfig`: TRL's `GRPOConfig` and the few options that DASH adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from dash_trl.advantages import OUTCOME_ESTIMATORS
from dash_trl.sampling.urls import check_urls


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
        advantage_estimator (`str`, defaults to `"grpo"`):
            How rewards become advantages. `"grpo"`: TRL's, by `scale_rewards` and `multi_objective_aggregation`. Or one
            that does without these two (`dash_trl.advantages`): `"rloo"`, `"reinforce_plus_plus"`,
            `"reinforce_plus_plus_baseline"`, `"opo"`, `"grpo_passk"`.
        max_tokens_per_microbatch (`int` or `None`, defaults to `None`):
            Token budget of one model pass (prompt and completion tokens; padding counts where the model cannot run
            padding-free). `None`: at most `per_device_train_batch_size` rows, as in TRL. Set it to what fits in
            memory; short rows then share a pass. A single row above the budget gets a pass of its own.
        vllm_server_urls (`list[str]` or `None`, defaults to `None`):
            Sample from these vLLM servers (`python -m dash_trl.serve` starts some), e.g. `http://127.0.0.1:8000
            http://127.0.0.1:8001`. Implies `use_vllm=True` and `vllm_mode="server"`; TRL's `vllm_server_timeout` is how
            long a run waits while none of them can be used.
        vllm_request_timeout (`float`, defaults to `600.0`):
            Seconds for one prompt's completions, or one weight update; then the server is suspected and the prompt goes
            to another.
        vllm_weight_sync (`str`, defaults to `"file"`):
            How servers get new weights: `"file"` (any device) or `"nccl"` (GPU to GPU, experimental).
        vllm_weight_dir (`str` or `None`, defaults to `None`):
            Where `"file"` writes; trainer and servers must see it under the same path. `None`: in `output_dir`.
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
    advantage_estimator: str = field(
        default="grpo",
        metadata={
            "help": "How rewards become advantages: 'grpo' is TRL's, by `scale_rewards`.",
            "choices": ["grpo", *OUTCOME_ESTIMATORS],
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={"help": "Token budget of one model pass. `None`: rows as in TRL (`per_device_train_batch_size`)."},
    )

    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={"help": "Sample from these vLLM servers, e.g. http://127.0.0.1:8000. Implies `use_vllm`."},
    )
    vllm_request_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds for one prompt's completions; then another server is asked."},
    )
    vllm_weight_sync: str = field(
        default="file",
        metadata={"help": "How servers get new weights.", "choices": ["file", "nccl"]},
    )
    vllm_weight_dir: str | None = field(
        default=None,
        metadata={"help": "Where weights are written for the servers. `None`: in `output_dir`."},
    )

    def __post_init__(self) -> None:
        self._check_servers()
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

        self._check_estimator()

    def _check_estimator(self) -> None:
        name = self.advantage_estimator
        if name == "grpo":
            return
        if not (isinstance(name, str) and name in OUTCOME_ESTIMATORS):
            raise ValueError(
                f"advantage_estimator={name!r} is unknown. Use 'grpo' or one of {', '.join(OUTCOME_ESTIMATORS)}. GPG "
                "is scale_rewards='none' with filter_denominator='kept', Dr. GRPO scale_rewards='none' with "
                "loss_type='dr_grpo'; estimators of process rewards are ProcessRewardCallback(estimator=...)."
            )
        for option, default in (("scale_rewards", "group"), ("multi_objective_aggregation", "sum_then_normalize")):
            if (value := getattr(self, option)) != default:
                raise ValueError(
                    f"{option}={value!r} does nothing with advantage_estimator={name!r}, which has a scale of its own "
                    f"and takes the weighted sum of the rewards. Leave {option} out, or use advantage_estimator='grpo'."
                )

    def _check_servers(self) -> None:
        if self.vllm_weight_sync not in ("file", "nccl"):
            raise ValueError(f"vllm_weight_sync={self.vllm_weight_sync!r} is unknown. Use 'file' or 'nccl'.")
        if not self.vllm_request_timeout > 0:
            raise ValueError(
                f"vllm_request_timeout={self.vllm_request_timeout} gives no server time to answer. Use the "
                "seconds that a prompt's completions take at most, e.g. 600."
            )
        if self.vllm_server_urls is None:
            return
        if self.vllm_server_base_url is not None:
            raise ValueError(
                f"vllm_server_urls={self.vllm_server_urls} and vllm_server_base_url={self.vllm_server_base_url!r} both "
                "name servers. Put all of them into vllm_server_urls."
            )
        self.vllm_server_urls = check_urls(self.vllm_server_urls)  # a string, too
        self.use_vllm, self.vllm_mode = True, "server"
