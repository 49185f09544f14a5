"""`DASHConfig`: TRL's `GRPOConfig` and the few options that DASH adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from trl import GRPOConfig

from dash_trl.sampling import check_urls
from dash_trl.update import OFF_POLICY_LOSSES, OUTCOME_ESTIMATORS

# What TRL takes, and says after the first generation, or never.
CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", *OFF_POLICY_LOSSES),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "vllm_weight_sync": ("file", "nccl"),
}

ABOVE_0 = math.nextafter(0.0, 1.0)  # the least positive number, as a lower bound

# The numbers with which a run fails after it has loaded the model, or trains on something else than was meant:
# (least, greatest, what the number does).
LIMITS: dict[str, tuple[float, float, str]] = {
    "num_generations": (2, math.inf, "an advantage compares a prompt's completions"),
    "num_generations_eval": (0, math.inf, "so many completions are sampled per prompt"),
    "max_completion_length": (1, math.inf, "so many tokens are sampled at most"),
    "per_device_train_batch_size": (1, math.inf, "so many rows make a micro-batch"),
    "gradient_accumulation_steps": (1, math.inf, "so many micro-steps make an optimizer step"),
    "steps_per_generation": (1, math.inf, "so many micro-batches are sampled at once"),
    "num_iterations": (1, math.inf, "so often is a generation used; never would train on nothing"),
    "async_level": (0, math.inf, "so many windows at most does sampling run ahead of training"),
    "learning_rate": (0, math.inf, "it is the size of a step down the gradient"),
    "temperature": (ABOVE_0, math.inf, "logits are divided by it, in the loss, too"),
    "top_p": (ABOVE_0, 1, "it is a share of the probability"),
    "min_p": (0, 1, "it is a share of the largest probability"),
    "top_k": (-1, math.inf, "so many tokens may be sampled; all with 0"),
    "repetition_penalty": (ABOVE_0, math.inf, "logits are divided by it"),
    "beta": (0, math.inf, "below 0 it would drive the policy away from the reference"),
    "epsilon": (0, math.inf, "the ratio is clipped to [1 - epsilon, 1 + epsilon_high]"),
    "epsilon_high": (0, math.inf, "the ratio is clipped to [1 - epsilon, 1 + epsilon_high]"),
    "delta": (ABOVE_0, math.inf, "ratios are clipped to it"),
    "aipo_delta": (1, math.inf, "below it no token would have a gradient that the policy itself has just sampled"),
    "sapo_temperature_pos": (ABOVE_0, math.inf, "the loss divides by it"),
    "sapo_temperature_neg": (ABOVE_0, math.inf, "the loss divides by it"),
    "top_entropy_quantile": (0, 1, "it is a share of the tokens"),
    "ref_model_mixup_alpha": (0, 1, "it is the policy's share in the new reference"),
    "ref_model_sync_steps": (1, math.inf, "so many steps lie between updates of the reference"),
    "vllm_importance_sampling_clip_min": (0, math.inf, "ratios are clipped to it"),
    "vllm_importance_sampling_clip_max": (ABOVE_0, math.inf, "ratios are clipped to it"),
    "vllm_gpu_memory_utilization": (ABOVE_0, 1, "it is a share of the GPU's memory"),
}

# What the losses of our own have no room for: option → what they have in its place.
REFUSED: dict[str, dict[str, str]] = {
    "aipo": {
        "beta": "it has no KL term",
        "entropy_coef": "it has no entropy bonus",
        "use_adaptive_entropy": "it has no entropy bonus",
        "top_entropy_quantile": "it counts every token",
        "off_policy_mask_threshold": "it counts every token, an old one by its ratio",
        "importance_sampling_level": "its ratio is one per token",
        "epsilon": "its ratio is bounded by aipo_delta only",
        "epsilon_high": "its ratio is bounded by aipo_delta only",
        "delta": "its ratio is bounded by aipo_delta only",
    },
    "decoupled_ppo": {"importance_sampling_level": "its ratios are one per token"},
}


@dataclass
class DASHConfig(GRPOConfig):
    r"""Configuration of [`DASHTrainer`]: all of [`~trl.GRPOConfig`], and:

    Args:
        gradient_filter_threshold (`float` or `None`, defaults to `0.1`):
            A row is dropped before any model pass when its largest absolute advantage is under this (the paper's
            Section 3.5), when that is 0, or when it is unscored. `None` turns filtering off. `0.0` drops only rows
            without any signal: with `beta=0`, that is exactly GRPO's update. Mind the scale: with
            `scale_rewards="group"`, one right answer among G has advantages ±O(1); with `"none"`, of ±1/G. In the log,
            `kl` and `entropy` are then of the survivors, and other than TRL's, which are of all rows.
        filter_denominator (`str`, defaults to `"all"`):
            What the loss divides by. `"all"`: all rows, dropped ones included, the exact GRPO update. `"kept"`: the
            survivors only, as in the paper: larger steps when few rows survive.
        advantage_estimator (`str`, defaults to `"grpo"`):
            How rewards become advantages. `"grpo"`: TRL's, by `scale_rewards` and `multi_objective_aggregation`. Or one
            that does without these two (`dash_trl.update.advantages`): `"rloo"`, `"reinforce_plus_plus"`,
            `"reinforce_plus_plus_baseline"`, `"opo"`, `"grpo_passk"`.
        loss_type (`str`, defaults to `"dapo"`):
            TRL's, or one for rollouts of older weights, which takes the sampler's log-probs (`docs/async.md`).
            `"aipo"`: each token weighed by min(policy / sampler, `aipo_delta`), and nothing else. `"decoupled_ppo"`:
            `"dapo"` around the weights at the start of the generation window, with
            `vllm_importance_sampling_mode="token_truncate"` at `vllm_importance_sampling_clip_max`.
        aipo_delta (`float`, defaults to `8.0`):
            With `loss_type="aipo"`, the largest weight. A token above it has no gradient.
        aipo_detached (`bool`, defaults to `False`):
            The weight is a factor without gradient: a token above `aipo_delta` keeps that much of its own.
        max_tokens_per_microbatch (`int` or `None`, defaults to `None`):
            Token budget of one model pass (prompt and completion tokens; padding counts where the model cannot run
            padding-free). `None`: at most `per_device_train_batch_size` rows, as in TRL. Set it to what fits in
            memory; short rows then share a pass. A single row above the budget gets a pass of its own.
        async_level (`int`, defaults to `0`):
            So many generation windows at most do the servers sample ahead of training: window n is trained on rollouts
            of the weights with which window n − `async_level` began, or newer. Above 0 it takes servers, and a loss
            that bears it ("aipo", "decoupled_ppo"); see docs/async.md. `0`: a window is sampled when it is needed.
            `1` without servers: the next window is sampled while the rewards of an agent are awaited.
        reward_pipeline (`bool`, defaults to `False`):
            Train on the groups that are scored while the rewards of others are awaited, within one optimizer step; its
            update is the same. Mini's steps take the groups that come next. It takes reward functions that score each
            completion (`dash_trl.RewardAgent`); see docs/rewards.md.
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
    aipo_delta: float = field(
        default=8.0,
        metadata={"help": "With loss_type='aipo': the largest importance weight; a token above has no gradient."},
    )
    aipo_detached: bool = field(
        default=False,
        metadata={"help": "With loss_type='aipo': the weight has no gradient of its own (TRL's 'cispo')."},
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={"help": "Token budget of one model pass. `None`: rows as in TRL (`per_device_train_batch_size`)."},
    )

    async_level: int = field(
        default=0,
        metadata={"help": "So many generation windows at most do the servers sample ahead of training."},
    )
    reward_pipeline: bool = field(
        default=False,
        metadata={"help": "Train on the groups that are scored while the rewards of others are awaited."},
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
        self._check_types()
        self._check_servers()
        self._check_limits()
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
        self._check_choices()

    def _check_types(self) -> None:
        """Refuse text in place of a number or a truth value, and a fraction in place of a count.

        A parser turns text into the declared type; a dict read from YAML (where 1e-6 is text) or os.environ does not.
        """
        hints = get_type_hints(type(self))
        for one in fields(self):
            value, kinds = getattr(self, one.name), set(get_args(hints[one.name]) or [hints[one.name]]) - {NoneType}
            if not kinds <= {int, float, bool}:
                continue
            if isinstance(value, str):
                remedy = "True or False" if kinds == {bool} else "a number; in YAML, 1e-6 is text and 1.0e-6 a number"
                raise ValueError(f"{one.name}={value!r} is text. Use {remedy}.")
            if kinds == {int} and isinstance(value, float):
                raise ValueError(f"{one.name}={value!r} is a float, where an int is needed. Write it without a point.")
            if kinds == {int} and isinstance(value, bool):
                raise ValueError(f"{one.name}={value!r} is a truth value, where an int is needed. Write a number.")
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"{one.name}={value!r} is not a number. The default is {one.default!r}.")

    def _check_limits(self) -> None:
        defaults = {one.name: one.default for one in fields(self)}
        for name, (least, greatest, meaning) in LIMITS.items():
            value: Any = getattr(self, name)
            if name == "top_k" and not self.use_vllm:
                least = 0  # -1 is vLLM's other word for all
            if value is None and defaults[name] is None or value is not None and least <= value <= greatest:
                continue
            span = "above 0" if least == ABOVE_0 else f"at least {least}"
            span += "" if greatest == math.inf else f" and at most {greatest}"
            raise ValueError(f"{name}={value!r} is not {span}: {meaning}. The default is {defaults[name]!r}.")
        weights: Any = [] if self.reward_weights is None else self.reward_weights
        finite = isinstance(weights, list | tuple) and all(isinstance(one, int | float) for one in weights)
        if not (finite and all(map(math.isfinite, weights))):
            raise ValueError(
                f"reward_weights={weights!r} is not a list of finite numbers. Use one for each reward function."
            )

    def _check_choices(self) -> None:
        for name, choices in CHOICES.items():  # now that TRL has read its older spellings
            if getattr(self, name) not in choices:
                *others, last = map(repr, choices)
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown. Use {', '.join(others)} or {last}.")
        for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
            if isinstance(value := getattr(self, name), str):
                raise ValueError(
                    f"{name}={value!r} is text, but names arguments. Use a dict or, on the command line, JSON, as in "
                    """'{"name": "value"}'."""
                )

        self._check_loss()
        self._check_estimator()
        self._check_pipeline()

    def _check_loss(self) -> None:
        defaults, loss = {one.name: one.default for one in fields(self)}, self.loss_type
        for option, reason in REFUSED.get(loss, {}).items():
            if (value := getattr(self, option)) != defaults[option]:
                raise ValueError(
                    f"{option}={value!r} has no place in loss_type={loss!r}: {reason}. Leave {option} out, or use one "
                    "of TRL's losses."
                )
        for option in ("aipo_delta", "aipo_detached") if loss != "aipo" else ():
            if (value := getattr(self, option)) != defaults[option]:
                raise ValueError(
                    f"{option}={value!r} does nothing with loss_type={loss!r}. Leave {option} out, or use "
                    "loss_type='aipo'."
                )
        if loss == "decoupled_ppo":
            mode, name = "token_truncate", "vllm_importance_sampling_mode"
            if getattr(self, name) not in (mode, defaults[name]):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is another loss than loss_type='decoupled_ppo', which is 'dapo' "
                    f"with {mode!r}. Leave {name} out, or use loss_type='dapo' with it."
                )
            if not self.vllm_importance_sampling_correction:
                raise ValueError(
                    "vllm_importance_sampling_correction=False leaves loss_type='decoupled_ppo' without its ratio to "
                    "the sampler. Leave it out, or use loss_type='dapo', which is what remains."
                )

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

    def _check_pipeline(self) -> None:
        """Refuse what needs the rewards of a whole window before its first pass."""
        if not self.reward_pipeline:
            return
        accumulated = self.gradient_accumulation_steps
        rows = self.per_device_train_batch_size * min(accumulated, self.steps_per_generation)
        steps = f"steps_per_generation={self.steps_per_generation}"
        alternatives = {
            "filter_denominator='kept'": (self.filter_denominator == "kept", "divides by all rows that are kept"),
            "scale_rewards='batch'": (self.scale_rewards == "batch", "divides by the deviation of all rewards"),
            "multi_objective_aggregation='normalize_then_sum'": (
                self.multi_objective_aggregation == "normalize_then_sum",
                "divides by the deviation of all rewards",
            ),
            f"advantage_estimator={self.advantage_estimator!r}": (
                self.advantage_estimator.startswith("reinforce_plus_plus"),
                "divides by the deviation of all advantages",
            ),
            f"entropy_coef={self.entropy_coef}": (
                self.entropy_coef != 0 or self.use_adaptive_entropy,
                "is shared out over all rows that are kept",
            ),
            f"top_entropy_quantile={self.top_entropy_quantile}": (
                self.top_entropy_quantile < 1,
                "keeps the tokens of highest entropy of each pass",
            ),
            f"num_iterations={self.num_iterations}": (self.num_iterations > 1, "uses the window in several steps"),
            f"{steps}, gradient_accumulation_steps={accumulated}": (
                accumulated % self.steps_per_generation != 0 and self.steps_per_generation % accumulated != 0,
                "begins a window within an optimizer step",
            ),
            f"{steps}, gradient_accumulation_steps={accumulated}, per_device_train_batch_size="
            f"{self.per_device_train_batch_size}": (
                rows % self.num_generations != 0,
                f"leaves an optimizer step {rows} completions of a process, which are no whole groups of "
                f"{self.num_generations},",
            ),
        }
        for name, (is_set, reason) in alternatives.items():
            if is_set:
                raise ValueError(
                    f"reward_pipeline=True with {name}, which {reason}, while the pipeline trains on groups before it "
                    "knows the others' rewards. Leave one of the two out."
                )

    def _check_servers(self) -> None:
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
