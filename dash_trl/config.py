"""`DASHConfig`: TRL's `GRPOConfig` and the few options that DASH adds."""

from dataclasses import dataclass, field, fields

from trl import GRPOConfig

from dash_trl.sampling import check_urls
from dash_trl.update import OFF_POLICY_LOSSES, OUTCOME_ESTIMATORS

TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# The words that an option accepts. TRL refuses an unknown word only after the first generation, or never.
CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": (*TRL_LOSSES, *OFF_POLICY_LOSSES),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    # our own
    "advantage_estimator": ("grpo", *OUTCOME_ESTIMATORS),
    "filter_denominator": ("all", "kept"),
    "vllm_weight_sync": ("file", "nccl"),
}

# The smallest value of a number, and the reason.
LIMITS: dict[str, tuple[float, str]] = {
    "gradient_filter_threshold": (0, "rows with a smaller advantage are dropped; None keeps all rows"),
    "max_tokens_per_microbatch": (1, "it is the token budget of a model pass; None packs rows as TRL does"),
    "max_num_gen_batches": (1, "it is the number of generation batches that a window may take; 1 is off"),
    "max_skipped_epochs": (0, "it is the number of epochs in a row that may skip a prompt; 0 is off"),
    "async_level": (0, "it is the number of windows that are sampled ahead of training"),
    "aipo_delta": (1, "with a smaller one, tokens that the policy itself has just sampled would have no gradient"),
    "tool_timeout": (1e-3, "it is the number of seconds that a tool may take for one call"),
    "vllm_request_timeout": (1e-3, "it is the number of seconds that a server may take for a prompt's completions"),
    # TRL accepts 0 (greedy sampling in vLLM, like any value below 1e-5) and divides the loss's logits by it.
    "temperature": (1e-5, "logits are divided by it, when sampling and in the loss"),
    # TRL does not check these.
    "beta": (0, "a negative one would reward the policy for moving away from the reference model"),
    "num_iterations": (1, "it is the number of times that a window is trained on"),
}

# The options that our own losses refuse, each with the reason.
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
    "decoupled_ppo": {
        "importance_sampling_level": "its ratios are one per token",
        "vllm_importance_sampling_correction": "without the ratio to the sampler it is loss_type='dapo'",
    },
}


@dataclass
class DASHConfig(GRPOConfig):
    r"""Configuration of `DASHTrainer`: all options of `trl.GRPOConfig`, and the ones below.

    Args:
        gradient_filter_threshold (`float` or `None`, defaults to `0.0`):
            Drop a row before any model pass if its largest absolute advantage is 0 or below this threshold, or if it is
            unscored. `0.0` drops only rows without any signal: with `beta=0`, the update is then exactly GRPO's. The
            paper uses 0.1 (Section 3.5). With rewards of 0 or 1, that drops no row with signal if groups have at most 9
            rows (64 with `scale_rewards="group"`). With rewards that are uniform on 0 … 1 and groups of 8, it drops 23
            % of the rows with `scale_rewards="none"` and 6 % with `"group"`. `None` turns filtering off. The logged
            `kl` and `entropy` are those of the survivors; they differ from TRL's, which cover all rows.
        filter_denominator (`str`, defaults to `"all"`):
            What the loss is divided by. `"all"`: all rows, dropped ones included. This is exactly GRPO's update;
            filtering then equals setting small advantages to 0, as in the paper. `"kept"`: only the survivors of the
            optimizer step, so steps are larger when few rows survive.
        advantage_estimator (`str`, defaults to `"grpo"`):
            How rewards become advantages. `"grpo"`: TRL's definition, with `scale_rewards` and
            `multi_objective_aggregation`. The other estimators do not use these two options (see
            `dash_trl.update.advantages`): `"rloo"`, `"reinforce_plus_plus"`, `"reinforce_plus_plus_baseline"`, `"opo"`,
            `"grpo_passk"`.
        loss_type (`str`, defaults to `"dapo"`):
            One of TRL's losses, or one of two losses for rollouts of older weights, which need the sampler's log-probs
            (`docs/concepts/staleness.md`). `"aipo"` weighs each token by min(policy / sampler, `aipo_delta`) and has no
            other term. `"decoupled_ppo"` is `"dapo"` around the weights at the start of the generation window, with
            `vllm_importance_sampling_mode="token_truncate"` at `vllm_importance_sampling_clip_max`.
        aipo_delta (`float`, defaults to `8.0`):
            With `loss_type="aipo"`, the largest weight of a token. A token whose ratio is above it has no gradient.
        aipo_detached (`bool`, defaults to `False`):
            With `loss_type="aipo"`, treat the weight as a factor without gradient. A token whose ratio is above
            `aipo_delta` then keeps a gradient, with the weight `aipo_delta`.
        max_tokens_per_microbatch (`int` or `None`, defaults to `None`):
            Token budget of one model pass: prompt and completion tokens, a shared prompt counted once. Padding counts,
            too, if the model cannot run padding-free. `None`: at most `per_device_train_batch_size` rows, as in TRL.
            Set it to what fits in memory; short rows then share a pass. A single row above the budget gets a pass of
            its own.
        share_prompts (`bool` or `None`, defaults to `None`):
            Compute a prompt once for all rows of a pass that have it. The update is the same. `None`: share prompts of
            at least 16 tokens, for which it is faster. `True`: share prompts of at least 2 tokens. `False`: never.
        async_level (`int`, defaults to `0`):
            The number of generation windows that servers may sample ahead of training. Window n is trained on rollouts
            of the weights with which window n − `async_level` began, or of newer ones. A value above 0 needs servers
            and a loss for older rollouts (`"aipo"`, `"decoupled_ppo"`); see docs/howto/async.md. `0`: a window is
            sampled when training needs it. `1` without servers: this process samples the next window while it waits
            for the rewards of a `RewardRunner`.
        max_num_gen_batches (`int`, defaults to `1`):
            Dynamic sampling (DAPO; the option has verl's name). While a window has fewer groups with signal than a
            generation batch has groups, more prompts are sampled, until this number of generation batches is reached.
            The window is trained on the groups with signal that came first. `1`: off. Needs `max_steps`; see
            docs/howto/dynamic-sampling.md.
        max_skipped_epochs (`int`, defaults to `0`):
            An epoch may skip prompts whose groups had no signal in recent epochs. No prompt is skipped in more than
            this number of epochs in a row. `0`: no prompt is skipped. Needs `max_steps`; see
            docs/howto/dynamic-sampling.md.
        reward_pipeline (`bool`, defaults to `False`):
            Within an optimizer step, train on the groups that are scored while the rewards of others are awaited. The
            update is the same. In the Mini set-up, each optimizer step takes the groups that are scored next. Needs
            reward functions that score each completion by itself (`dash_trl.RewardRunner`); see
            docs/howto/slow-rewards.md.
        eval_k (`list[int]` or `None`, defaults to `None`):
            Log accuracy and pass@k for these k in evaluations, each with its 95 % interval over the problems, from the
            `num_generations_eval` completions of each problem. A completion is correct if its reward is above 0.5. Such
            evaluations leave the random numbers of training unchanged. See docs/howto/evaluate.md.
        tool_timeout (`float`, defaults to `600.0`):
            Seconds that one call of a tool, or of an environment's `reset` or `get_reward`, may take. If it takes
            longer, the run no longer waits for the call, and its row is unscored; see docs/howto/tools.md.
        vllm_server_urls (`list[str]` or `None`, defaults to `None`):
            URLs of the vLLM servers to sample from, e.g. `http://127.0.0.1:8000 http://127.0.0.1:8001`. The command
            `python -m dash_trl.serve` starts such servers. Implies `use_vllm=True` and `vllm_mode="server"`. TRL's
            `vllm_server_timeout` is how long a run waits while no server can be used.
        vllm_request_timeout (`float`, defaults to `600.0`):
            Seconds that a server may take for one prompt's completions, or for one weight update. After that, the
            server is treated as suspect, and another server gets the prompt.
        vllm_weight_sync (`str`, defaults to `"file"`):
            How servers get new weights: `"file"` (any device) or `"nccl"` (GPU to GPU, experimental).
        vllm_weight_dir (`str` or `None`, defaults to `None`):
            Folder that `"file"` writes weights to. Trainer and servers must see it under the same path. `None`: a
            folder in `output_dir`.
        vllm_weight_difference (`bool`, defaults to `False`):
            Send a server only the weights that changed since the version that it holds, over HTTP. The trainer keeps a
            copy of the last version in CPU memory. This pays off if few bf16 weights change in a step; see
            docs/howto/vllm.md.
    """

    gradient_filter_threshold: float | None = field(
        default=0.0,
        metadata={
            "help": "Drop a row before any model pass if its largest absolute advantage is 0 or below this (the "
            "paper: 0.1). `None`: off."
        },
    )
    filter_denominator: str = field(
        default="all",
        metadata={
            "help": "What the loss is divided by: 'all' rows (exactly GRPO's update) or the 'kept' ones only.",
            "choices": ["all", "kept"],
        },
    )
    advantage_estimator: str = field(
        default="grpo",
        metadata={
            "help": "How rewards become advantages: 'grpo' is TRL's definition, with `scale_rewards`.",
            "choices": ["grpo", *OUTCOME_ESTIMATORS],
        },
    )
    loss_type: str = field(
        default="dapo",
        metadata={
            "help": f"How the loss weighs tokens. TRL's: {', '.join(TRL_LOSSES)} (see trl.GRPOConfig). For rollouts of "
            "older weights, by the sampler's log-probs: 'aipo' weighs each token by min(policy / sampler, aipo_delta); "
            "'decoupled_ppo' is 'dapo' around the weights at the start of the generation window "
            "(docs/concepts/staleness.md)."
        },
    )
    aipo_delta: float = field(
        default=8.0,
        metadata={"help": "With loss_type='aipo': the largest importance weight. A token above it has no gradient."},
    )
    aipo_detached: bool = field(
        default=False,
        metadata={"help": "With loss_type='aipo': treat the weight as a factor without gradient (TRL's 'cispo')."},
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={"help": "Token budget of one model pass. `None`: rows as in TRL (`per_device_train_batch_size`)."},
    )
    share_prompts: bool | None = field(
        default=None,
        metadata={"help": "Compute a prompt once for all rows of a pass that have it. `None`: if it is faster."},
    )

    async_level: int = field(
        default=0,
        metadata={"help": "The number of generation windows that may be sampled ahead of training."},
    )
    max_num_gen_batches: int = field(
        default=1,
        metadata={
            "help": "Sample up to this number of generation batches to fill a window with groups that have signal."
        },
    )
    max_skipped_epochs: int = field(
        default=0,
        metadata={"help": "Skip a prompt without signal in at most this number of epochs in a row."},
    )
    reward_pipeline: bool = field(
        default=False,
        metadata={"help": "Train on groups that are scored while the rewards of others are awaited."},
    )
    eval_k: list[int] | None = field(
        default=None,
        metadata={"help": "Evaluations log accuracy and pass@k for these k, at most `num_generations_eval`."},
    )
    tool_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds that one call of a tool, or of an environment's `reset` or `get_reward`, may take."},
    )
    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={"help": "Sample from these vLLM servers, e.g. http://127.0.0.1:8000. Implies `use_vllm`."},
    )
    vllm_request_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds that a server may take for one prompt's completions; then another server is asked."},
    )
    vllm_weight_sync: str = field(
        default="file",
        metadata={"help": "How servers get new weights.", "choices": ["file", "nccl"]},
    )
    vllm_weight_dir: str | None = field(
        default=None,
        metadata={"help": "Folder in which weights are written for the servers. `None`: in `output_dir`."},
    )
    vllm_weight_difference: bool = field(
        default=False,
        metadata={"help": "Send servers only the weights that changed since the last version."},
    )

    def __post_init__(self) -> None:
        if self.vllm_server_urls is not None:
            if self.vllm_server_base_url is not None:
                raise ValueError(
                    f"vllm_server_urls={self.vllm_server_urls} and vllm_server_base_url={self.vllm_server_base_url!r} "
                    "both name servers. Put all of them into vllm_server_urls."
                )
            self.vllm_server_urls = check_urls(self.vllm_server_urls)  # takes a string, too
            self.use_vllm, self.vllm_mode = True, "server"
        try:
            super().__post_init__()
        except ValueError as error:
            if "support bf16" not in str(error):
                raise
            raise ValueError(
                "bf16=True, which is TRL's default, but no GPU of this machine computes in bf16. To train on a CPU, "
                "set use_cpu=True and bf16=False (--use_cpu true --bf16 false); on an older GPU, set bf16=False or "
                "fp16=True."
            ) from error
        self._check_values()
        self._check_loss()
        if self.vllm_weight_sync != "file":
            self._refuse(
                {"vllm_weight_difference": "NCCL sends all weights"}, f"vllm_weight_sync={self.vllm_weight_sync!r}"
            )
        if self.advantage_estimator != "grpo":
            self._refuse(
                {
                    "scale_rewards": "the estimator has a scale of its own",
                    "multi_objective_aggregation": "the estimator takes the weighted sum of the rewards",
                },
                f"advantage_estimator={self.advantage_estimator!r}",
            )
        if self.eval_k is not None:
            self._check_eval_k(self.eval_k)
        if self.queues_prompts:
            self._check_queue()
        if self.reward_pipeline:
            self._check_pipeline()

    @property
    def queues_prompts(self) -> bool:
        """Whether the number of prompts that an epoch or a window takes depends on earlier samples."""
        return self.max_num_gen_batches > 1 or self.max_skipped_epochs > 0

    def _check_values(self) -> None:
        for name, (least, reason) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # refuses NaN, too
                raise ValueError(f"{name}={value!r} is not at least {least}: {reason}.")
        for name, choices in CHOICES.items():  # by now, TRL has replaced its older spellings
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(map(repr, choices))}.")

    def _refuse(self, reasons: dict[str, str], other: str) -> None:
        """Refuse options that `other` would ignore, if they are not left at their defaults.

        Args:
            reasons: option → why `other` ignores it.
            other: the setting to name in the error.
        """
        defaults = {one.name: one.default for one in fields(self)}
        for option, reason in reasons.items():
            if (value := getattr(self, option)) != defaults[option]:
                raise ValueError(f"{option}={value!r} does not go with {other}: {reason}. Leave one of the two out.")

    def _check_eval_k(self, ks: list[int]) -> None:
        samples = self.num_generations_eval or self.num_generations
        if not all(1 <= k <= samples for k in ks) or not ks:
            raise ValueError(
                f"eval_k={ks} with {samples} completions of each problem of an evaluation: pass@k takes 1 <= k <= that "
                f"many. Set num_generations_eval={max(ks, default=1)}, or ask for other k."
            )

    def _check_loss(self) -> None:
        loss = f"loss_type={self.loss_type!r}"
        self._refuse(REFUSED.get(self.loss_type, {}), loss)
        if self.loss_type != "aipo":
            self._refuse(dict.fromkeys(("aipo_delta", "aipo_detached"), "only 'aipo' has it"), loss)
        if self.loss_type == "decoupled_ppo" and self.vllm_importance_sampling_mode != "token_truncate":
            self._refuse({"vllm_importance_sampling_mode": "it is 'dapo' with 'token_truncate'"}, loss)

    def _check_queue(self) -> None:
        rounds = self.max_num_gen_batches > 1
        option = f"max_num_gen_batches={self.max_num_gen_batches}" if rounds else ""
        option = option or f"max_skipped_epochs={self.max_skipped_epochs}"
        rows, group = self.per_device_train_batch_size * self.steps_per_generation, self.num_generations
        if self.max_steps < 1:
            raise ValueError(
                f"{option} with max_steps={self.max_steps}: the number of optimizer steps in an epoch depends on what "
                "is sampled. Set max_steps, which fixes the learning-rate schedule."
            )
        if rows % group:
            raise ValueError(
                f"{option}, but a process has {rows} completions in a generation batch (per_device_train_batch_size="
                f"{self.per_device_train_batch_size} × steps_per_generation={self.steps_per_generation}), which do not "
                f"split into groups of num_generations={group}. Change one of the three."
            )
        if not rounds:
            return
        if self.gradient_filter_threshold is None:
            raise ValueError(
                f"{option} with gradient_filter_threshold=None: without the filter, every group counts as one with "
                "signal, so no further prompt would be sampled. Set it to 0.0, its default."
            )
        if self.reward_pipeline:
            raise ValueError(
                f"{option} with reward_pipeline=True, which trains on groups before it is known which groups the "
                "window has, and what the loss is divided by. Leave one of the two out."
            )
        for name, reason in self._of_whole_window().items():
            raise ValueError(
                f"{option} with {name}, which {reason}. But the groups of a window come in rounds, and some of them "
                "are dropped. Leave one of the two out."
            )

    def _of_whole_window(self) -> dict[str, str]:
        """Return the settings that make an advantage depend on other groups, each with the way in which it does."""
        options = {
            "scale_rewards='batch'": (self.scale_rewards == "batch", "divides by the deviation of all rewards"),
            "multi_objective_aggregation='normalize_then_sum'": (
                self.multi_objective_aggregation == "normalize_then_sum",
                "divides by the deviation of all rewards",
            ),
            f"advantage_estimator={self.advantage_estimator!r}": (
                self.advantage_estimator.startswith("reinforce_plus_plus"),
                "divides by the deviation of all advantages",
            ),
        }
        return {name: reason for name, (is_set, reason) in options.items() if is_set}

    def _check_pipeline(self) -> None:
        """Refuse settings that need the rewards of a whole window before its first pass."""
        accumulated = self.gradient_accumulation_steps
        rows = self.per_device_train_batch_size * min(accumulated, self.steps_per_generation)
        steps = f"steps_per_generation={self.steps_per_generation}"
        alternatives = {
            "filter_denominator='kept'": (self.filter_denominator == "kept", "divides by all rows that are kept"),
            **{name: (True, reason) for name, reason in self._of_whole_window().items()},
            f"entropy_coef={self.entropy_coef}": (
                self.entropy_coef != 0 or self.use_adaptive_entropy,
                "is distributed over all rows that are kept",
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
                f"leaves an optimizer step {rows} completions of a process, which do not split into groups of "
                f"{self.num_generations},",
            ),
        }
        for name, (is_set, reason) in alternatives.items():
            if is_set:
                raise ValueError(
                    f"reward_pipeline=True with {name}, which {reason}. But the pipeline trains on groups before the "
                    "rewards of the others are known. Leave one of the two out."
                )
