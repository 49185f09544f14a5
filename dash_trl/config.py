"""`DASHConfig`: TRL's `GRPOConfig` and the few options that DASH adds."""

import inspect
import logging
import os
import re
import warnings
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import get_type_hints

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from dash_trl.server_key import check_urls
from dash_trl.update import ESTIMATORS, OFF_POLICY_LOSSES, registered

logger = logging.getLogger(__name__)
TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# Option → the words that it accepts. TRL refuses an unknown word only after the first generation, or never.
CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": (*TRL_LOSSES, *OFF_POLICY_LOSSES),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    # options that DASH adds
    "filter_denominator": ("all", "kept"),
}

# Option → its smallest value, and the reason.
LIMITS: dict[str, tuple[float, str]] = {
    "gradient_filter_threshold": (0, "rows with a smaller advantage are dropped; None keeps all rows"),
    "max_tokens_per_microbatch": (
        1,
        "it is the token budget of a model pass; None is that of TRL's padded micro-batch",
    ),
    "max_num_gen_batches": (1, "it is the number of generation batches that a window may take; 1 is off"),
    "async_level": (0, "it is the number of windows that are sampled ahead of training"),
    "aipo_delta": (1, "with a smaller one, tokens that the policy itself has just sampled would have no gradient"),
    "tool_timeout": (1e-3, "it is the number of seconds that a tool may take for one call"),
    "vllm_request_timeout": (1e-3, "it is the number of seconds that a server may take for a prompt's completions"),
    # TRL accepts 0 (greedy sampling in vLLM, like any value below 1e-5) and divides the loss's logits by it.
    "temperature": (1e-5, "logits are divided by it, when sampling and in the loss"),
    # TRL does not check these.
    "beta": (0, "a negative one would reward the policy for moving away from the reference model"),
    "num_iterations": (1, "it is the number of times that a window is trained on"),
    "max_grad_norm": (0, "it is the norm to which gradients are clipped; 0 does not clip"),
}

# Option of Transformers → a pattern of the values that do not work here, the reason, and the remedy.
UNUSABLE: dict[str, tuple[str, str]] = {
    "remove_unused_columns": ("True", "the columns are for the reward functions. Leave it out"),
    "metric_for_best_model": (
        ".*loss",
        "the loss is about 0, whatever the policy can do. Name another figure, such as 'eval_reward'",
    ),
    "label_smoothing_factor": (".*[1-9].*", "sampled tokens are no labels, so TRL's loss has none. Leave it out"),
    "train_sampling_strategy": ("(?!random).*", "TRL draws whole groups. Leave it out, or set shuffle_dataset=False"),
    "optim": (
        ".*(layerwise|lomo)",
        "it makes a step in each backward pass, and an optimizer step has any number of passes. Use 'adamw_torch'",
    ),
    "dispatch_batches": ("True", "rows are texts, which ranks cannot send each other. Leave it out"),
    "split_batches": ("True", "each rank takes its own rows. Leave it out"),
}

# Setting → the options that do not go with it, unless they have their defaults, each with the reason.
REFUSED: dict[str, dict[str, str]] = {
    "loss_type='aipo'": {
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
    "loss_type='decoupled_ppo'": {
        "importance_sampling_level": "its ratios are one per token",
        "vllm_importance_sampling_correction": "without the ratio to the sampler it is loss_type='dapo'",
    },
    "max_num_gen_batches": {
        "multi_objective_aggregation": "it divides by the deviation of all rewards",
        "reward_pipeline": "it trains before it is known which groups the window has",
    },
    "reward_pipeline": {
        "multi_objective_aggregation": "it divides by the deviation of all rewards",
        "filter_denominator": "it divides by all rows that are kept",
        "entropy_coef": "it is distributed over all rows that are kept",
        "use_adaptive_entropy": "it is distributed over all rows that are kept",
        "top_entropy_quantile": "it keeps the tokens of highest entropy of each pass",
        "num_iterations": "it uses the window in several steps",
    },
}


def computes_bf16() -> bool:
    """Return whether the accelerator computes in bf16. GPUs before Ampere emulate it, which is slower than float32."""
    if not torch.cuda.is_available():
        return is_torch_bf16_gpu_available()
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    if not native:
        logger.warning("This GPU does not compute in bf16, so passes compute in float32. --fp16 true is faster.")
    return native


@dataclass
class DASHConfig(GRPOConfig):
    r"""Configuration of `DASHTrainer`: all options of `trl.GRPOConfig`, and the ones below.

    Args:
        gradient_filter_threshold (`float` or `None`, defaults to `0.0`):
            Drop a row (a completion with its prompt) before any model pass if its largest absolute advantage is 0 or
            below this threshold, or if it has no reward: a function failed, or none applies. With `0.0` and `beta=0`,
            the update is exactly GRPO's. The paper uses 0.1 (Section 3.5; see docs/concepts/exact.md). `None` turns the
            filter off. The logged `kl` and `entropy` are means over the rows that are kept; TRL's are means over all
            rows.
        filter_denominator (`str`, defaults to `"all"`):
            Which rows count in the denominator of the loss. `"all"`: dropped rows, too, as if their advantages were 0
            (as in the paper). `"kept"`: only the rows of the optimizer step that are kept, so a step is larger if few
            rows are kept.
        advantage_estimator (`str`, defaults to `"grpo"`):
            How advantages are computed from rewards. `"grpo"`: TRL's definition, with `scale_rewards` and
            `multi_objective_aggregation`, which have no effect on the others (see `dash_trl.update.advantages`):
            `"rloo"`, `"single_path"` and `"grpo_passk"`.
        loss_type (`str`, defaults to `"dapo"`):
            One of TRL's `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"cispo"`, `"sapo"`, `"luspo"`, `"vespo"`, or
            `"aipo"` or `"decoupled_ppo"`, which are for rollouts that older weights sampled, and need the sampler's
            log-probs; docs/concepts/staleness.md has the equations. `"aipo"` weights
            each token by min(r, `aipo_delta`), where r is the policy's probability of the token, divided by the
            sampler's. `"decoupled_ppo"` is `"dapo"` with TRL's importance-sampling correction, which truncates ratios
            at `vllm_importance_sampling_clip_max` (mode `"token_truncate"`).
        aipo_delta (`float`, defaults to `8.0`):
            With `loss_type="aipo"`, the largest weight of a token. A token with a larger ratio has no gradient.
        max_tokens_per_microbatch (`int` or `None`, defaults to `None`):
            Largest number of prompt and completion tokens in one model pass. Set it to what fits in memory, so that
            many short rows run in one pass. A shared prompt counts once, but each of its rows has a copy of its keys,
            and 12 of these count as a token. Padding counts if passes are padded. A row with more tokens runs in a pass
            of its own. `None`: as many tokens as TRL's padded micro-batch, `per_device_train_batch_size` times the
            longest row.
        share_prompts (`bool` or `None`, defaults to `None`):
            Compute a prompt only once for all rows of a model pass that have it. The update is the same. `None`:
            prompts of at least 16 tokens. `True`: of at least 2. `False`: none.
        async_level (`int`, defaults to `0`):
            Number of generation windows that servers may sample ahead of training. Window n is sampled by the weights
            with which training of window n − `async_level` began, or by newer ones: above 0, use `"aipo"` or
            `"decoupled_ppo"`; see docs/howto/async.md. Without servers, at most `1`: the trainer samples the next
            window while a `RewardRunner` scores.
        max_num_gen_batches (`int`, defaults to `1`):
            Dynamic sampling (DAPO; the option has verl's name). If some groups of a window have no signal
            (`gradient_filter_threshold` keeps none of their rows), further prompts are sampled, until the window is
            full of groups with signal, or this many times its number of groups have been sampled. `1`: off. Needs
            `max_steps`; see docs/howto/dynamic-sampling.md.
        bf16 (`bool` or `None`, defaults to `None`):
            Compute in bf16. `None`: if a GPU can (Ampere and newer) and `fp16` is not set; otherwise in float32. TRL's
            default is `True`.
        logging_nan_inf_filter (`bool`, defaults to `False`):
            Transformers' option, whose default `True` makes each micro-step wait for the device. A loss that is not
            finite is 0 in the log anyway, and its optimizer step is skipped (`skipped_steps`).
        reward_pipeline (`bool`, defaults to `False`):
            Train on each group as soon as it is scored, on vLLM servers while they sample the rest of the window. The
            update is the same. If several optimizer steps share a window (`steps_per_generation` above
            `gradient_accumulation_steps`), each trains on the groups that are scored next, once all are sampled. Needs
            reward functions that score each completion by itself (`dash_trl.RewardRunner`); see docs/howto/async.md.
        tool_timeout (`float`, defaults to `600.0`):
            Seconds that a call of a tool, or of an environment's `reset` or `get_reward`, may take. After that, its row
            is not trained on; see docs/howto/tools.md.
        vllm_server_urls (`list[str]` or `None`, defaults to `None`):
            vLLM servers to sample from, e.g. `http://127.0.0.1:8000 http://127.0.0.1:8001`; `dash_trl serve` starts
            them. Implies `use_vllm=True` and `vllm_mode="server"`. Without a usable one, the run waits at most
            `vllm_server_timeout` seconds.
        vllm_request_timeout (`float`, defaults to `600.0`):
            Seconds that a server with requests may be silent, or that a weight update may take. After that, other
            servers get its requests, and it gets none until it has answered a probe.
        vllm_weight_dir (`str` or `None`, defaults to `None`):
            Folder to which the trainer writes weights for the servers, which must see it under the same path. A folder
            in memory, such as `/dev/shm`, is fast. `None`: a folder in `output_dir`.
    """

    gradient_filter_threshold: float | None = 0.0
    filter_denominator: str = "all"
    advantage_estimator: str = "grpo"
    loss_type: str = "dapo"
    aipo_delta: float = 8.0
    max_tokens_per_microbatch: int | None = None
    share_prompts: bool | None = None
    async_level: int = 0
    max_num_gen_batches: int = 1
    bf16: bool | None = None
    logging_nan_inf_filter: bool = False
    reward_pipeline: bool = False
    tool_timeout: float = 600.0
    vllm_server_urls: list[str] | None = None
    vllm_request_timeout: float = 600.0
    vllm_weight_dir: str | None = None

    def __post_init__(self) -> None:
        if self.vllm_server_urls is not None:
            self.vllm_server_urls = check_urls(self.vllm_server_urls)  # takes a string, too
            self.use_vllm = True
            self.vllm_mode = "server"
        self.use_cpu |= not torch.accelerator.is_available()  # else each of several processes would train alone
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and computes_bf16()
        # TRL 1.16 uses names that transformers has replaced, here and in each step.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
        super().__post_init__()
        for name in ("output_dir", "vllm_weight_dir"):  # a reward function may change the current folder
            if (path := getattr(self, name)) is not None:
                setattr(self, name, os.path.abspath(path))
        if (
            self.deepspeed
            and self.max_grad_norm != 1
            and self.hf_deepspeed_config.get_value("gradient_clipping") is None
        ):
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm}, but DeepSpeed's configuration has no gradient_clipping, so "
                'gradients would be clipped at accelerate\'s default of 1. Add "gradient_clipping": "auto" to it.'
            )
        self._check_values()
        self._check_loss()
        registered(self.advantage_estimator, "outcome", "advantage_estimator")
        if self.advantage_estimator != "grpo":
            self._refuse(
                {
                    "scale_rewards": "the estimator has a scale of its own",
                    "multi_objective_aggregation": "the estimator takes the weighted sum of the rewards",
                },
                f"advantage_estimator={self.advantage_estimator!r}",
            )
        self._check_groups_apart()

    @property
    def samples_dynamically(self) -> bool:
        """Whether a window samples more prompts while too few groups have signal."""
        return self.max_num_gen_batches > 1

    @property
    def names_servers(self) -> bool:
        """Whether vLLM servers sample, unless there is a `rollout_func`."""
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def groups_of_rank(self) -> int:
        """The number of groups that a rank has in a generation batch, if each group is on one rank."""
        return self.per_device_train_batch_size * self.steps_per_generation // self.num_generations

    @property
    def window_batches(self) -> int:
        """The number of micro-steps from one window to the next."""
        return self.steps_per_generation * self.num_iterations

    def _check_values(self) -> None:
        types = get_type_hints(type(self))  # HfArgumentParser changes the types of the fields
        for name, (least, reason) in LIMITS.items():
            value = getattr(self, name)
            allowed = "None" in str(types[name]) if value is None else value >= least  # refuses NaN, too
            if not allowed:
                raise ValueError(f"{name}={value!r} is not at least {least}: {reason}.")
        for name, (refused, reason) in UNUSABLE.items():
            value = getattr(self, name, getattr(self.accelerator_config, name, None))
            value = getattr(value, "value", value)  # of an enum
            if value is not None and re.fullmatch(refused, str(value)):
                raise ValueError(f"{name}={value!r} does not work here: {reason}.")
        for name, choices in CHOICES.items():  # by now, TRL has replaced its older spellings
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(map(repr, choices))}.")

    def _refuse(self, reasons: dict[str, str], other: str) -> None:
        """Raise an error if an option in `reasons` (option → reason) has been set, because `other` would ignore it."""
        for option, reason in reasons.items():
            if (value := getattr(self, option)) != getattr(type(self), option):  # the default
                raise ValueError(f"{option}={value!r} does not go with {other}: {reason}. Leave one of the two out.")

    def _check_loss(self) -> None:
        loss = f"loss_type={self.loss_type!r}"
        self._refuse(REFUSED.get(loss, {}), loss)
        if self.loss_type != "aipo":
            self._refuse({"aipo_delta": "only 'aipo' has it"}, loss)
        if self.loss_type == "decoupled_ppo" and self.vllm_importance_sampling_mode != "token_truncate":
            self._refuse({"vllm_importance_sampling_mode": "it is 'dapo' with 'token_truncate'"}, loss)

    def _check_groups_apart(self) -> None:
        """Raise an error for a setting that needs all groups of a window at once."""
        size = self.num_generations
        accumulated = self.gradient_accumulation_steps
        device = f"per_device_train_batch_size={self.per_device_train_batch_size}"
        steps = f"steps_per_generation={self.steps_per_generation}"
        of_window = self.per_device_train_batch_size * self.steps_per_generation
        of_step = self.per_device_train_batch_size * min(accumulated, self.steps_per_generation)
        rest = f", which do not split into groups of num_generations={size}"
        both = {
            "scale_rewards='batch'": (self.scale_rewards == "batch", "divides by the deviation of all rewards"),
            f"advantage_estimator={self.advantage_estimator!r}": (
                not ESTIMATORS[self.advantage_estimator].per_group,
                "uses the rewards of all rows of the window",
            ),
        }
        queue = {
            f"max_steps={self.max_steps}": (
                self.max_steps < 1,
                "leaves the end of the learning-rate schedule open: set it",
            ),
            f"{device}, {steps}": (of_window % size != 0, f"leaves a process {of_window} completions{rest}"),
        }
        pipeline = {
            f"{steps}, gradient_accumulation_steps={accumulated}": (
                accumulated % self.steps_per_generation != 0 and self.steps_per_generation % accumulated != 0,
                "begins a window within an optimizer step",
            ),
            f"{steps}, gradient_accumulation_steps={accumulated}, {device}": (
                of_step % size != 0,
                f"leaves an optimizer step {of_step} completions of a process{rest}",
            ),
        }
        for option, is_on, others in (
            ("max_num_gen_batches", self.samples_dynamically, both | queue),
            ("reward_pipeline", self.reward_pipeline, both | pipeline),
        ):
            if not is_on:
                continue
            setting = f"{option}={getattr(self, option)}"
            self._refuse(REFUSED[option], setting)
            for name, (is_set, reason) in others.items():
                if is_set:
                    raise ValueError(
                        f"{setting} with {name}, which {reason}. But the groups of a window come one after the other. "
                        "Change one of these options."
                    )


# Each option is documented once: its help is its text in the docstring. In a help, argparse reads % as a format.
TEXTS = dict(re.findall(r"^    (\w+) \(.*\):\n((?: {8}.*\n?)+)", inspect.getdoc(DASHConfig) or "", re.MULTILINE))
for _option in fields(DASHConfig):
    if _option.name in TEXTS:
        _option.metadata = MappingProxyType({"help": " ".join(TEXTS[_option.name].split()).replace("%", "%%")})
