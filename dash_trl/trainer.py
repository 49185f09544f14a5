"""`DASHTrainer`: TRL's `GRPOTrainer` with the rooms of this package wired into it.

The way of a generation batch is `_new_window`: sample → reward → credit → filter → score. What is left of it, a
`GenerationWindow`, is spent in `training_step`: pack → loss → backward, until `_get_grad_norm` lets the optimizer step.
"""

import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, DynamoBackend, is_peft_model, send_to_device
from torch import Tensor
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from dash_trl.callbacks import DASHCallback, restore_states, states_of
from dash_trl.checks import (
    check_arguments,
    check_callbacks,
    check_estimator,
    check_first_step,
    check_pipeline,
    check_prompt,
    check_prompt_lengths,
    check_rewards,
    check_tied_adapter,
    checked_rollouts,
)
from dash_trl.config import DASHConfig
from dash_trl.distributed import Ranks, accumulating
from dash_trl.monitoring import (
    EmptyWindows,
    OffPolicyMetrics,
    PassMetrics,
    Recorder,
    corrected_share,
    filter_metrics,
    packing_metrics,
    sampler_metrics,
    staleness_metrics,
)
from dash_trl.rewards import (
    AgentReward,
    EarlyRewards,
    FailureWatch,
    RewardTeam,
    arrivals,
    raise_mistakes,
    reward_rows,
    scores_alone,
    unpack,
    watch,
)
from dash_trl.rollout import (
    SAMPLED_FIELDS,
    STATES,
    ArrivingWindow,
    CreditedRollouts,
    EpochOrder,
    GenerationWindow,
    PromptReader,
    RolloutBatch,
    RunAhead,
    SavedRun,
    ScoredRollouts,
    Shapes,
    Survivors,
    in_parts,
    load_states,
    one_run,
    open_epoch,
    why_a_new_window,
)
from dash_trl.sampling import install, without_client
from dash_trl.scoring import Scorer, ScoringRules
from dash_trl.seams import (
    Decoder,
    Generated,
    begin_anew,
    count_pass_time,
    forget_overflow,
    generate_apart,
    log_generated,
    regularized,
    relog_advantages,
    relog_rewards,
    sample,
    sampled_by,
    seen_as,
    shuffled,
    step_schedule,
    undo_jit_checkpoint,
    withhold_rewards,
)
from dash_trl.update import (
    NO_LOG_PROB,
    Filtered,
    MicroBatch,
    ModelPasses,
    Pass,
    Schedule,
    SkippedSteps,
    behaviour_log_probs,
    checked_advantages,
    filter_rows,
    forget_plain_passes,
    group_advantages,
    loss_scale,
    outcome_advantages,
    packed_log_probs,
    packing_flaw,
    plan_segment,
    regularizer_weight,
    to_device,
    trl_settings,
    unknown_log_probs,
)
from dash_trl.workers import Request

logger = logging.getLogger(__name__)


class DASHTrainer(GRPOTrainer):
    """Trains with GRPO's update on the rows that carry signal (DASH, arXiv 2505.17218).

    Takes the arguments of [`~trl.GRPOTrainer`], with a [`DASHConfig`] as `args`. One large generation per
    `steps_per_generation` micro-steps is cached in CPU memory; rows without signal are dropped before any model pass;
    the survivors are re-packed, padding-free where the model's attention allows it. With `beta=0`, no entropy bonus
    and a threshold that drops only zero-signal rows the update is TRL's; KL, entropy and auxiliary terms of dropped
    rows are lost. An optimizer step without any signal on any rank changes nothing: no momentum, no weight decay.

    Raises:
        ValueError: for tools, environments and vision-language models, and for what `dash_trl.checks` finds.
    """

    _tag_names = ["trl", "grpo", "dash"]
    _name = "DASH"
    _paper = {
        "title": "Effective Reinforcement Learning for Reasoning in Language Models",
        "id": "2505.17218",
        "citation": "@article{huang2025effective,\n    title = {Effective Reinforcement Learning for Reasoning in "
        "Language Models},\n    author = {Lianghuan Huang and Shuo Li and Sagnik Anupam and Insup Lee and Osbert "
        "Bastani},\n    year = 2025,\n    eprint = {arXiv:2505.17218}\n}",
    }

    _window: GenerationWindow | None  # that is being used
    _rewarded: Any  # of the last batch: the rewards of all ranks, the completions of this one
    _completion_lengths: Tensor | None  # of the last batch, all ranks: loss tokens
    _policy_version: Any  # of the last batch, see `RolloutBatch`
    _streaming: bool  # the rewards of the batch that is being sampled are not waited for
    _awaited: Any  # of the last such batch: the request, and what TRL asked for it with
    _generated: Generated | None  # the window after the one that has begun
    _sampled_by: Tensor | None  # policy versions of a batch that was sampled before its time
    _arriving: ArrivingWindow | None  # its parts
    _states_before: dict[str, Any]  # of the callbacks, as they were before the optimizer step that runs
    _tokenized: Any  # the prompts of the window that begins, where it is sampled ahead: what TRL's method returned

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_estimator(cls)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: DASHConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        args = DASHConfig("dash-output") if args is None else args
        reward_funcs = unpack(reward_funcs)
        check_arguments(model, args, train_dataset, eval_dataset, processing_class, kwargs)
        own_rollouts = kwargs.get("rollout_func") is not None
        check_rewards(reward_funcs, args, train_dataset, eval_dataset, own_rollouts)
        with without_client(args) as self._servers:
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        if args.use_vllm:
            check_tied_adapter(self.model)
        if self._servers:
            install(self)

        self.ranks = Ranks(self.accelerator, timeout=args.ddp_timeout)
        self._loss_settings = trl_settings(args.loss_type, delta=args.aipo_delta, detached=args.aipo_detached)
        # Sampling and training share the device: what can be done ahead is done while rewards are awaited.
        self._one_ahead = args.async_level > 0 and not self._servers and self.rollout_func is None
        self._sampler_is_old = args.loss_type == "aipo"  # its old log-probs are the sampler's
        if self._sampler_is_old and self.use_vllm and self.vllm_importance_sampling_correction:
            logger.warning(
                "vllm_importance_sampling_correction=True is TRL's default and is off here: loss_type='aipo' weighs "
                "tokens by their ratio to the sampler itself. Set it to False, and this is not said."
            )
        functions = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs = [watch(func, name) for func, name in functions]
        if self.rollout_func is not None:
            rollout_func = self.rollout_func
            self.rollout_func = lambda prompts, trainer: self.ranks.agree(
                partial(checked_rollouts, rollout_func, prompts, trainer)
            )
        adapter = getattr(self.model, "active_peft_config", None)
        # By `torch_compile`, or by accelerate's own configuration
        self._compiled = self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        self._passes = ModelPasses(
            self._text_models(),
            virtual_tokens=getattr(adapter, "is_prompt_learning", False),
            continuous_batching=args.use_transformers_continuous_batching,
            noisy_embeddings=args.neftune_noise_alpha is not None,
            compiled=self._compiled,
        )
        self._scorer = Scorer(
            self.ranks,
            self._forward_inputs,
            {
                "old_per_token_logps": lambda inputs: self._logps(self.model, inputs),
                "ref_per_token_logps": self._reference_logps,
            },
        )
        self._prepared = False  # for training, once
        # The optimizer and the loss scaler → their states before the first run
        self._untouched: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._head_hook: Any = None
        self._begin_run()
        self._context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    # ------------------------------------------------------------------ the way of a generation batch

    def _new_window(self, examples: list[dict[str, Any]]) -> GenerationWindow:
        """The way of a generation batch, from this rank's prompts to the survivors that optimizer steps use."""
        sampled, num_items_in_batch = self._sample(examples)
        scored = self._reward(sampled)
        credited = self._credit(scored)
        survivors, lengths = self._filter(credited)
        window = GenerationWindow(survivors, lengths, num_items_in_batch)
        with self.recorder.timed("logprobs"):
            self._score(window)
        self._log_sampler(window.rollouts)
        return window

    def _sample(self, examples: list[dict[str, Any]]) -> tuple[RolloutBatch, Tensor]:
        """This rank's rollouts, in CPU memory, and the loss tokens of all ranks, as callbacks leave them."""
        by_pool = self._servers and self.rollout_func is None
        if by_pool or self._one_ahead:
            self._run_ahead(examples)
        sampled = self._generate_and_score_completions(examples)
        self._tokenized = None
        version = self._policy_version
        if by_pool or self._one_ahead:
            self.ranks.agree(partial(self._ahead.check, int(version.min())))
            self.recorder.log(staleness_metrics(version, self.state.global_step, self.ranks.gather))
        own = self.ranks.own(len(examples))
        tokens = {name: value.cpu() for name, value in sampled.items() if name in SAMPLED_FIELDS}
        if (log_probs := tokens.get("sampling_per_token_logps")) is not None:
            tokens["sampling_per_token_logps"] = log_probs.masked_fill(log_probs <= NO_LOG_PROB, torch.nan)
        rollouts = RolloutBatch(
            **tokens,
            group=torch.arange(own.start, own.stop) // self.num_generations,
            policy_version=version,
            examples=examples,
            completions=self._rewarded[1],
        )
        if by_pool:
            self._log_servers()
        self._dispatch("on_rollouts_sampled", rollouts)
        return rollouts, self.ranks.sum(rollouts.loss_mask.sum())

    def _run_ahead(self, examples: list[dict[str, Any]]) -> None:
        """Announce the prompts of the window that begins, and of those that may be sampled ahead.

        They are tokenized once: a chat template may tell the time.
        """
        number, rows = self._ahead.window + 1, [examples, *self._reader.upcoming(self._step)]
        other = number in self._announced and self._announced[number][0] is not examples
        if other:
            self._warn(
                f"Window {number} has other prompts than those that were read ahead for it, as where a callback ends "
                "an epoch. What was sampled ahead is thrown away."
            )
            self._forget_windows()
        windows = self._ahead.begin(self.state.global_step, known=len(rows) - 1, anew=other)
        generate = super()._generate.__func__
        for window in windows:
            own = rows[window - number]
            self._announced[window] = own, self._tokenize_prompts([row["prompt"] for row in own])
            if self._servers:
                self._early.begin(window, own, self._announced[window][1][0], Decoder(self, generate))
        if self._servers:
            prompts = {window: self._announced[window][1][0] for window in windows}
            self.vllm_generation.expect(number, prompts, self._early.take if self._early.wanted else None)
        _, self._tokenized = self._announced.pop(number)

    def _forget_windows(self) -> None:
        """What was sampled ahead is not needed any more."""
        self._announced.clear()
        self._generated = None
        self._early.forget()
        if self._servers:
            self.vllm_generation.forget_windows()

    def _log_servers(self) -> None:
        """Healthy ones as the main process sees them, and sums over the ranks."""
        healthy, *counts = self.vllm_generation.metrics()
        retried, queued = self.ranks.sum(torch.tensor(counts)).tolist()
        self.recorder.log({"servers/healthy": healthy, "async/queued_groups": queued})
        self.recorder.total("servers/retried_requests", retried)

    def _reward(self, rollouts: RolloutBatch) -> ScoredRollouts:
        return self._scored(rollouts, self._rewarded[0][self.ranks.own(len(rollouts))].cpu())

    def _scored(self, rollouts: RolloutBatch, rewards: Tensor) -> ScoredRollouts:
        scored = rollouts.with_rewards(rewards)
        self._dispatch("on_rewards", scored)
        return scored

    def _credit(self, rollouts: ScoredRollouts) -> CreditedRollouts:
        credited, outcome = self._credited(rollouts)
        self._log_credit(credited, outcome)
        return credited

    def _credited(self, rollouts: ScoredRollouts) -> tuple[CreditedRollouts, Tensor]:
        """The advantages, computed by every rank from the rewards of all; and those of all by outcome alone, [N]."""
        device = self.accelerator.device
        unscored = ~rollouts.scored.unsqueeze(1)  # a callback may have failed a row, too
        rewards = self.accelerator.gather(rollouts.rewards.masked_fill(unscored, torch.nan).to(device))
        self._completion_lengths = self.accelerator.gather(rollouts.loss_mask.sum(dim=1).to(device))
        culprit = f"{type(self).__name__}.compute_advantages"
        outcome = checked_advantages(self.compute_advantages(rewards), rewards, culprit).cpu()
        credited = rollouts.with_advantages(outcome[self.ranks.own(len(rollouts))].clone())
        self._dispatch("on_advantages", credited)
        return credited, outcome

    def _log_credit(self, rollouts: CreditedRollouts, outcome: Tensor) -> None:
        no_signal = (outcome.view(-1, self.num_generations) == 0).all(dim=1)
        relog_advantages(self, self.ranks.gather(rollouts.mean_advantages()).tolist(), no_signal)

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Rewards of whole groups → advantages, by `advantage_estimator`; override it for an estimator of your own.

        Args:
            rewards: [N, F], the rows of all ranks, groups adjacent; NaN = not applicable, a row of NaN is unscored.
        Returns:
            [N] floats, finite for scored rows. `dash_trl.update.weighted_rewards` gives one reward per row.
        """
        if self.args.advantage_estimator != "grpo":
            return outcome_advantages(
                self.args.advantage_estimator,
                rewards,
                self.reward_weights,
                self.num_generations,
                lengths=self._completion_lengths,
            )
        return group_advantages(
            rewards,
            self.reward_weights,
            self.num_generations,
            scale_rewards=self.scale_rewards,
            multi_objective_aggregation=self.multi_objective_aggregation,
        )

    def _filter(self, rollouts: CreditedRollouts) -> tuple[Survivors, Tensor]:
        """This rank's survivors, and of all ranks' rows, in the order of TRL's shuffle, the lengths; 0 if dropped."""
        filtered = self._verdict(rollouts)
        self._log_filter(rollouts, filtered)
        return self._kept(rollouts, filtered, shuffled(len(rollouts)))

    def _log_filter(self, rollouts: CreditedRollouts, filtered: Filtered) -> None:
        metrics = filter_metrics(rollouts, filtered, self.ranks.sum)
        self.recorder.log(metrics)
        if self.accelerator.is_main_process:
            self._empty_windows.note(metrics)

    def _verdict(self, rollouts: CreditedRollouts) -> Filtered:
        threshold = self.args.gradient_filter_threshold
        return filter_rows(rollouts.advantages, rollouts.loss_mask, rollouts.scored, threshold)

    def _kept(self, rollouts: CreditedRollouts, filtered: Filtered, order: Tensor) -> tuple[Survivors, Tensor]:
        """As `_filter`, the rows in this order."""
        lengths = rollouts.lengths()[order] * filtered.keep[order].unsqueeze(1)
        kept = order[lengths[:, 1] > 0]  # a fully masked row (TRL's truncated ones) has no length
        return rollouts.survivors(kept), self.ranks.gather(lengths).view(-1, len(rollouts), 3)

    def _score(self, window: GenerationWindow) -> None:
        self._scorer.score(window, self._scoring_rules())

    def _scoring_rules(self) -> ScoringRules:
        """What TRL's rules ask for."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        trl = seen_as(self, self._settings())
        correction = {
            "mode": trl.vllm_importance_sampling_mode,
            "clip_min": self.vllm_importance_sampling_clip_min,
            "clip_max": self.vllm_importance_sampling_clip_max,
        }
        return ScoringRules(
            outlives_its_weights=self.args.gradient_accumulation_steps % generate_every != 0,
            reference=self.beta != 0.0,
            sampler_is_old=self._sampler_is_old,
            correction=correction if trl.use_vllm and trl.vllm_importance_sampling_correction else None,
        )

    def _log_sampler(self, survivors: Survivors) -> None:
        """How far they are from the sampler, and what was made of it: of all that a window leaves, once scored."""
        sampled, mask = survivors.sampling_per_token_logps, survivors.loss_mask
        old, ratio = survivors.old_per_token_logps, survivors.importance_sampling_ratio
        if self._sampler_is_old:
            assert sampled is not None, "checked where it was sampled"
            rows = unknown_log_probs(sampled, mask).any(dim=1)
            found, kept = self.ranks.sum(torch.tensor([int(rows.sum()), len(rows)])).tolist()
            self.recorder.log({"off_policy/rescored_rows": found / kept} if kept else {})
        if ratio is not None:
            assert old is not None and sampled is not None, "of which it was made"
            self.recorder.log(sampler_metrics(sampled, old, ratio, mask, self.ranks.gather))
            mode = seen_as(self, self._settings()).vllm_importance_sampling_mode
            self.recorder.log(corrected_share(ratio, old, sampled, mask, mode=mode, reduce_sum=self.ranks.sum))

    def _forward_inputs(self, window: GenerationWindow, lengths: Tensor) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Of each pass without gradient over the rows with a length: this rank's rows, and its inputs."""
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for micro_batch in self._pack(lengths, 1)[0]:
                rows, inputs = self._rows(window, micro_batch)
                yield rows, self._prepare_inputs(inputs)

    def log_probs_and_entropies(self, rollouts: CreditedRollouts, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] each, float32, on the CPU: of the loss tokens of some rows by the policy; 0 for all others.

        By a forward pass over these rows, in micro-batches as for old log-probs, a third of what training on them
        costs. To be called on every rank at the same point.

        Args:
            rows: [B] bool.
        """
        return self._scorer.log_probs_and_entropies(
            rollouts, rows, partial(self._pass, self.model, compute_entropy=True)
        )

    def _logps(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return self._pass(model, inputs)[0]

    def _pass(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> tuple:
        """What `_get_per_token_logps_and_entropies` finds."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with self._passes.laid_out(inputs):
            width = inputs["completion_ids"].shape[1]
            return self._get_per_token_logps_and_entropies(model, ids, mask, width, **kwargs)

    def _reference_logps(self, inputs: dict[str, Any]) -> Tensor:
        if self.ref_model is not None:
            return self._logps(self.ref_model, inputs)
        # PEFT: the base model, or the adapter that training began with
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logps(self.model, inputs)

    # ------------------------------------------------------------------ rewards that come while others are awaited

    def _begin_window(self, examples: list[dict[str, Any]]) -> ArrivingWindow:
        """As `_new_window`, without waiting for rewards: the parts of the window, as `arrivals` hands them out."""
        self._streaming = True
        sampled, num_items_in_batch = self._sample(examples)
        self._streaming = False
        withheld = withhold_rewards(self)
        shuffled(len(sampled))  # its random numbers: what is sampled next is what it would be without the pipeline
        mini = len(self._schedule.share(self._step)) < self.args.steps_per_generation
        if mini:
            with self.recorder.timed("logprobs"):
                sampled = self._scorer.scored_at_once(sampled, self._scoring_rules())
        request, arguments = self._awaited

        def part(rows: Tensor) -> tuple[CreditedRollouts, Tensor, GenerationWindow]:
            """Reward → credit → filter → score, of some groups."""
            rewards = self._reward_team.rewards(request, self.reward_funcs, rows.tolist())
            credited, outcome = self._credited(self._scored(sampled.rows(rows), rewards))
            kept = self._kept(credited, self._verdict(credited), torch.arange(len(rows)))
            window = GenerationWindow(*kept, num_items_in_batch)
            if not mini:
                with self.recorder.timed("logprobs"):
                    self._score(window)
            return credited, outcome, window

        def log(whole: CreditedRollouts, outcome: Tensor, survivors: Survivors) -> None:
            self._reward_team.hand_over(request, arguments[2])
            relog_rewards(self, self._take_rewards(*arguments), withheld)
            self._log_credit(whole, outcome)
            self._log_filter(whole, self._verdict(whole))
            self._log_sampler(survivors)

        waiting = arrivals(request, len(sampled) // self.num_generations, self._on_all_ranks, self._groups_of_step)
        waiting = self.recorder.timed_each("wait_for_rewards", waiting)
        return ArrivingWindow(in_parts(waiting, len(sampled), part, when_whole=log), self.state.global_step)

    def _on_all_ranks(self, groups: int) -> int:
        """So many have come on each."""
        with self.recorder.timed("wait_for_ranks"):
            return self.ranks.least(groups)

    def _groups_of_step(self) -> int:
        """Of this rank, that the optimizer step takes of the window in use."""
        rows = len(self._schedule.share(self._step)) * self.args.per_device_train_batch_size
        return rows // self.num_generations

    def _wait_for_rest(self) -> None:
        """Wait for the rest of a window that comes in parts; from then on it is an ordinary window."""
        if self._arriving is not None:
            self.model.train()  # an evaluation has left it otherwise
            ran = self._arriving.rows
            self._window, self._arriving = self._arriving.whole(), None
            self._schedule.window_is_whole(ran, self._window.lengths)

    def _settings(self) -> dict[str, Any]:
        """Of TRL's loss. Its correction is bound to `use_vllm`, but serves whoever knows the sampler's log-probs."""
        if not self._one_ahead:
            return self._loss_settings
        return {**self._loss_settings, "use_vllm": self.model.training or self.use_vllm}

    # ------------------------------------------------------------------ from a window to optimizer steps

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        read = self._reader.read(epoch_iterator, num_batches, step=self._step, state=self.state)
        batches, num_items = super().get_batch_samples(read, num_batches, device)
        if self.state.global_step == 0 and not isinstance(self.train_dataset, Sized):
            self.ranks.agree(partial(check_first_step, len(batches), self.args))
        self._schedule.begin_optimizer_step(self._step, len(batches), self.state.global_step)
        if self._arriving is not None:
            self._arriving.begin_optimizer_step(self.state.global_step)
        self._states_before = states_of(self._dash_callbacks())
        return batches, num_items

    def _rows(self, window: GenerationWindow, micro_batch: MicroBatch) -> tuple[list[int], dict[str, Any]]:
        """This rank's rows of `window.rollouts` in a micro-batch, and the model inputs and layout made of them."""
        rows = window.rows(self.ranks.rank)[list(micro_batch.rows[self.ranks.rank])].tolist()
        pad_token_id = self._tokenizer.pad_token_id
        return rows, self._passes.inputs(window.rollouts, rows, size=micro_batch.size, pad_token_id=pad_token_id)

    def _micro_batches(self, examples: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """The inputs of this micro-step's model passes, on the CPU; samples a new window where one is due.

        Yields:
            Some of them, and whether these are the last ones.
        """
        step, schedule = self._step, self._schedule
        piped = self.args.reward_pipeline and schedule.has_whole_share(step)
        if not piped:
            self._wait_for_rest()
        if self._arriving is None and (self._window is None or schedule.window_due(step)):
            if piped:
                self._arriving = self._begin_window(examples)
            else:
                self._window = self._new_window(examples)
            schedule.window_sampled(step)
        if self._arriving is not None:
            yield from self._arrived()
            return
        window = self._window
        assert window is not None, "there is one or the other"
        passes, planned = schedule.passes(step, window.lengths, window.num_items_in_batch.item())
        yield self._inputs(window, passes, planned), True

    def _arrived(self) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """The passes of an optimizer step's share of a window whose rewards are awaited, all in the last micro-step."""
        step, schedule = self._step, self._schedule
        if step + 1 < schedule.share(step).stop:
            yield [], True
            return
        assert self._arriving is not None, "looked at before"
        for window, last in self._arriving:
            items = window.num_items_in_batch.item()
            passes, planned = schedule.plan_part(step, window.lengths, items, last=last)
            yield self._inputs(window, passes, planned), last
            if last:
                break
        if schedule.ends_window(step):
            self._wait_for_rest()  # of which nothing is left

    def _inputs(self, window: GenerationWindow, passes: list[Pass], planned: list[MicroBatch]) -> list[dict[str, Any]]:
        if planned:
            self.recorder.log(packing_metrics(planned, window.lengths, padding_free=self._passes.padding_free))
        batches = []
        for one in passes:
            _, inputs = self._rows(window, one.micro_batch)
            scale = loss_scale(
                self.loss_type,
                self.args.filter_denominator,
                rows=one.micro_batch.size,
                tokens=one.tokens[self.ranks.rank],
                segment=one.segment,
            )
            batches.append(
                {**inputs, "num_items_in_batch": window.num_items_in_batch, "loss_scale": scale, "pass": one}
            )
        return batches

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Move one micro-batch to the device; in evaluation, TRL's: sample, score, and return the batch."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        return {name: to_device(value, self.accelerator.device) for name, value in generation_batch.items()}

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """One micro-step: any number of forward and backward passes, none if nothing survived."""
        started = time.perf_counter()
        self._to_training_mode()
        is_last = self._schedule.is_last(self._step)
        loss = torch.zeros((), device=self.args.device)
        final: dict[str, Any] | None = None
        for micro_batches, last in self._micro_batches(inputs):
            final = micro_batches.pop() if last and micro_batches else None
            with self.recorder.timed("train"):
                for micro_batch in micro_batches:
                    with accumulating(self.accelerator, model):  # Trainer's own step: TRL's counts a micro-step
                        loss = loss + Trainer.training_step(self, model, micro_batch, num_items_in_batch)
                    self._look_at_servers()
        with self.recorder.timed("train"):
            count_pass_time(self, time.perf_counter() - started)
            if final is not None:
                loss = loss + super().training_step(model, final, num_items_in_batch)
        self._look_at_servers()
        if final is None:
            self._step += 1
            if is_last and not self._schedule.ran_model:
                # Nothing to learn anywhere: accelerate's optimizer steps only if gradients are synchronised.
                self.accelerator.gradient_state._set_sync_gradients(False)
        if is_last:
            self.recorder.end_step()
            self.recorder.log(self._pass_metrics.of_step(self._schedule.segments.values()))
            if self.use_vllm or self.rollout_func is not None or self._one_ahead:  # whose log-probs may be known
                self.recorder.log(self._off_policy.of_step(self.ranks.sum))
        return loss

    def _to_training_mode(self) -> None:
        """As Transformers' step does, but before a window is sampled: some optimizers swap the weights for it."""
        after_evaluation = not self.model_wrapped.training
        self.model_wrapped.train()
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # within accelerate's
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
            if after_evaluation:
                self._last_loaded_step = -1  # TRL's: vLLM may have the weights of the evaluation

    def _look_at_servers(self) -> None:
        """Between passes: rows of later windows that have come may be scored meanwhile."""
        if self._servers and self._early:
            self.vllm_generation.show_finished()

    def _clip_grad_norm(self, model):
        # A GradScaler (fp16) cannot unscale gradients of which there are none.
        return super()._clip_grad_norm(model) if self._schedule.ran_model else None

    def _get_grad_norm(self, model, grad_norm=None):
        if not self._schedule.ran_model:
            forget_overflow(self.accelerator)
            step_schedule(self.accelerator)
            return 0.0
        norm = super()._get_grad_norm(model, grad_norm)  # over all ranks, so that they come to the same verdict
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # has stepped, or skipped, in its backward
            skipped = self.accelerator.optimizer_step_was_skipped
            self._skipped.check_applied(norm, skipped, self.state.global_step + 1)
        elif skipped := not math.isfinite(norm):
            model.zero_grad()  # without gradients an optimizer changes neither parameters nor its state
        self._skipped.count(skipped, self.state.global_step + 1)
        self.recorder.total("skipped_steps", self._skipped.total)
        return norm

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        """TRL's, in training on real rows and tokens only."""
        log_probs = super()._get_per_token_logps_and_entropies
        batch = model, input_ids, attention_mask, logits_to_keep
        if not self.model.training:
            return log_probs(*batch, **kwargs)
        with self.accelerator.autocast() if self._passes.padding_free else nullcontext():
            found = self._passes.log_probs(log_probs, *batch, **kwargs)
        self._off_policy.see(found[0])
        return found

    def _compute_loss(self, model, inputs) -> Tensor:
        """TRL's, at the weight of this pass in the optimizer step."""
        loss = partial(super()._compute_loss.__func__, seen_as(self, self._settings()))
        if not self.model.training:
            return loss(model, inputs)
        one, scale = inputs["pass"], inputs["loss_scale"]
        weight = regularizer_weight(one.tokens[self.ranks.rank], one.segment)
        with self._passes.laid_out(inputs), regularized(self, weight / scale if scale else 0.0):
            per_token = inputs["advantages"].dim() == 2
            with (
                self._pass_metrics.observe(self.recorder.metrics, one, scale, per_token=per_token),
                self._off_policy.observe(inputs),
            ):
                return loss(model, inputs) * scale

    # ------------------------------------------------------------------ within TRL's sampling

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        method = super()._generate_and_score_completions.__func__
        if self.model.training:
            return sample(self, inputs, method)
        if not self._sampler_is_old:
            return method(seen_as(self, self._settings()), inputs)
        sampled = sample(self, inputs, method)
        return {**sampled, "old_per_token_logps": self._sampler_log_probs(sampled)}

    @torch.no_grad()
    def _sampler_log_probs(self, sampled: dict[str, Any]) -> Tensor:
        """[B, T] of a batch in evaluation, with the policy's own where the sampler did not report one."""
        log_probs = sampled.get("sampling_per_token_logps")
        if log_probs is None:  # transformers' generate reports none
            log_probs = torch.full(sampled["completion_mask"].shape, torch.nan, device=self.accelerator.device)
        own = torch.zeros_like(log_probs)
        if self.ranks.sum(unknown_log_probs(log_probs, sampled["completion_mask"]).sum()):
            own = self._logps(self.model, {**sampled, "layout": None})
        return behaviour_log_probs(log_probs, own)

    def _tokenize_prompts(self, prompts: list) -> tuple:
        if self._tokenized is not None:
            known, self._tokenized = self._tokenized, None
            return known
        tokenize = super()._tokenize_prompts

        def checked() -> tuple:
            for prompt in prompts:
                check_prompt(prompt, "A row")
            tokenized = tokenize(prompts)
            check_prompt_lengths(tokenized[0], self._context)
            return tokenized

        return self.ranks.agree(checked)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        return self.ranks.agree(partial(super()._generate_single_turn, *args, **kwargs))

    def _generate(self, prompts: list) -> tuple:
        ahead, training = self._generated, self.model.training
        if training and ahead is not None:
            self._generated, self._sampled_by = None, ahead.policy_version
            log_generated(self, ahead)
            return ahead.output
        decoder = self._early.decoder(self._ahead.window) if training else None
        return self._generate_now(super()._generate if decoder is None else decoder.generate, prompts)

    def _generate_now(self, generate: Callable[[list], tuple], prompts: list) -> tuple:
        training = self.model.training
        with self.recorder.timed("generate", counts=training):
            output = generate(prompts)
        return self._with_log_probs(output) if training and self._one_ahead else output

    def _generate_next(self) -> None:
        """The next window's rollouts, by the weights of now: the device has nothing else to do while rewards come.

        Its own rewards begin at once.
        """
        window = self._ahead.window + 1
        examples, self._tokenized = self._announced.get(window, ([], None))
        if examples:
            generate, prompts = super()._generate.__func__, [example["prompt"] for example in examples]
            self._generated = generate_apart(
                self, lambda trainer: self._generate_now(partial(generate, trainer), prompts)
            )
            prompt_ids, completion_ids, _, completions, *_ = self._generated.output
            self._early.begin(window, examples, prompt_ids)
            self._early.take(window, 0, completion_ids, completions)

    def _with_log_probs(self, output: tuple) -> tuple:
        """What `_generate` returns, with the log-probs of the weights that sampled: transformers reports none."""
        prompt_ids, completion_ids, tool_mask, completions, log_probs, *others = output
        if log_probs is None:
            with self.recorder.timed("logprobs"):
                pad_token_id = self._tokenizer.pad_token_id
                log_probs = self._scorer.of_sampled(prompt_ids, completion_ids, pad_token_id=pad_token_id)
        return prompt_ids, completion_ids, tool_mask, completions, log_probs, *others

    def _join_agents(self) -> RewardTeam:
        """Those that compute rewards here."""
        functions = [func for func in self.reward_funcs if isinstance(func, AgentReward)]
        size = weakref.WeakMethod(self._group_size)  # an agent may outlive the trainer, and its model
        return RewardTeam(functions, self.ranks.count, lambda: (size() or int)())

    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        """TRL's, see `_take_rewards`; or zeros, where the rewards come later."""
        ahead, self._sampled_by = self._sampled_by, None
        # Before a reward function asks the servers, too.
        self._policy_version = sampled_by(self, len(inputs)) if ahead is None else ahead
        arguments = inputs, prompts, completions, completion_ids_list
        request = None
        if self.model.training and self._early:
            request = self._early.claim(self._ahead.window, reward_rows(*arguments), self._warn)
        if self.model.training and (self._streaming or self._one_ahead):
            # All ranks meet here: the rows may be others on one of them only.
            request = self.ranks.agree(lambda: request or self._ask(*arguments))
        if request is None:
            return self._take_rewards(*arguments)
        if self._one_ahead:
            self._generate_next()
        if not self._streaming:
            self._reward_team.hand_over(request, completions)
            return self._take_rewards(*arguments)
        self._rewarded, self._awaited = (None, completions), (request, arguments)
        return torch.zeros(self.ranks.count * len(inputs), len(self.reward_funcs), device=self.args.device)

    def _take_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        """TRL's, [rows of all ranks, F], with every row NaN in which a function failed."""
        arguments = inputs, prompts, completions, completion_ids_list
        self._reward_team.join()
        with self.recorder.timed("reward", counts=self.model.training):
            rewards = super()._calculate_rewards(*arguments)
        self.ranks.agree(partial(raise_mistakes, self.reward_funcs))
        rewards = self._failures.unscore(rewards, self.accelerator.gather, counts=self.model.training)
        if self.model.training:
            self.recorder.log({f"rewards/{name}/failed": share for name, share in self._failures.failed.items()})
        self._rewarded = rewards, completions
        return rewards

    def _ask(self, *arguments: Any) -> Request:
        """Start the rewards of a batch without waiting for them."""
        rows = reward_rows(*arguments)
        request = self._reward_team.begin(len(rows), self.num_generations)
        self._reward_team.start(request, 0, rows)
        return request

    # ------------------------------------------------------------------ the beginning of a run

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        if self._prepared and self.is_deepspeed_enabled:
            raise ValueError(
                "train() was called a second time, but DeepSpeed's engine of the first is gone, and Transformers makes "
                "no other for the same trainer. Make a new DASHTrainer; resume from a checkpoint if it should go on."
            )
        start = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self.args.reward_pipeline:
            check_pipeline(self, DASHTrainer, self.callback_handler.callbacks)
        self._begin_run()
        if resume_from_checkpoint is not None:
            start = self._resume(resume_from_checkpoint, start)
        self._reader.epoch = start[0]
        return start

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:  # also where it is interrupted: neither servers nor the dataloader's workers shall work for nobody
            self._reader.close()
            self._forget_windows()
            self._reward_team.cancel()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # TRL's: vLLM has the weights of the last step, and none was made since

    def _begin_run(self) -> None:
        """Forget the run before: an interrupt leaves half a step behind, and `max_steps` the rest of a window."""
        args = self.args
        self._window = self._rewarded = self._policy_version = self._completion_lengths = self._tokenized = None
        self._reward_team = self._join_agents()
        self._streaming, self._arriving, self._awaited = False, None, None
        self._states_before = {}
        self._generated = self._sampled_by = None
        self._ahead = RunAhead(args.async_level)
        self._announced: dict[int, tuple[list[Any], Any]] = {}  # window to come → its examples, and them tokenized
        ahead_of_training = (self._servers and self.rollout_func is None) or self._one_ahead
        self._early = EarlyRewards(
            self._reward_team,
            self.num_generations,
            wanted=bool(ahead_of_training and self.reward_funcs) and all(map(scores_alone, self.reward_funcs)),
        )
        self.recorder = Recorder(
            self._metrics["train"],
            self.accelerator.device,
            self._will_log,
            servers=self._servers,
            rewards=args.reward_pipeline,
        )
        self._failures = FailureWatch(self.reward_funcs, self.reward_func_names)
        self._empty_windows = EmptyWindows(args.gradient_filter_threshold)
        self._pass_metrics = PassMetrics(per_row=self.importance_sampling_level == "sequence")
        self._off_policy = OffPolicyMetrics(args.aipo_delta if self._sampler_is_old else None)
        self._schedule = Schedule(
            steps_per_generation=args.steps_per_generation,
            num_iterations=args.num_iterations,
            accumulation=args.gradient_accumulation_steps,
            rows_per_step=args.per_device_train_batch_size,
            pack=self._pack,
        )
        self._reader = PromptReader(
            args.async_level,
            window_batches=args.steps_per_generation * args.num_iterations,
            step_batches=args.gradient_accumulation_steps,
            sized=isinstance(self.train_dataset, Sized),
            open_epoch=lambda epoch: open_epoch(self.callback_handler.train_dataloader, epoch),
        )
        self._skipped = SkippedSteps(loss_scaling=args.fp16)
        begin_anew(self)

    def _will_log(self) -> bool:
        """Whether the optimizer step that is running will be logged, as far as that is known now."""
        step, every = self.state.global_step + 1, self.state.logging_steps
        return self.args.logging_strategy != "steps" or step % every == 0 or step == 1 and self.args.logging_first_step

    # ------------------------------------------------------------------ what is known of the models before a pass

    def _models(self) -> list[Any]:
        """The policy and, where there is one, the reference model, as they are called."""
        return [self.model] if self.ref_model is None else [self.model, self.ref_model]

    def _text_models(self) -> list[Any]:
        """The transformers models within them, without wrappers and adapters."""
        models = [self.accelerator.unwrap_model(model) for model in self._models()]
        return [model.get_base_model() if is_peft_model(model) else model for model in models]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Transformers', or that of the run before, as it was before that; the loss scaler (fp16), too."""
        optimizer = super().create_optimizer(model)
        for one in (getattr(optimizer, "optimizer", optimizer), self.accelerator.scaler):  # within accelerate's
            if self._prepared and one in self._untouched:
                one.load_state_dict(deepcopy(self._untouched[one]))
            elif hasattr(one, "state_dict"):  # not DeepSpeed's placeholder
                self._untouched[one] = deepcopy(send_to_device(one.state_dict(), "cpu"))
        return optimizer

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._prepared = True
        if self._head_hook is not None:
            self._head_hook.remove()
        self._head_hook = forget_plain_passes(self.model_wrapped)
        if self._passes.padding_free:
            flaws = [flaw for flaw in map(self._packing_flaw, self._models()) if flaw]
            if self.ranks.sum(torch.tensor(len(flaws))):  # all ranks pad if one has to
                self._passes.padded_because = next(iter(flaws), "of what another rank found")
        if self.accelerator.is_main_process:
            self._passes.say()
        return prepared

    def _packing_flaw(self, model: Any) -> str | None:
        """Why packed passes of a prepared model would be wrong; a collective under ZeRO-3 and FSDP."""
        # A trace may take another way through the policy. Unwrapped by accelerate, that would lose DDP's `no_sync`.
        called = self.model_wrapped if self._compiled and model is self.model else model
        with self.accelerator.autocast():
            return packing_flaw(
                partial(packed_log_probs, called, flash=self._passes.flash),
                partial(super()._get_per_token_logps_and_entropies, called),
                model,
                vocabulary=min(self.model.config.get_text_config().vocab_size, len(self._tokenizer)),
                device=self.accelerator.device,
            )

    def _pack(self, lengths: Tensor, micro_steps: int, last_must_run: bool = False) -> list[list[MicroBatch]]:
        return plan_segment(
            lengths,
            micro_steps,
            last_must_run,
            max_rows=self.args.per_device_train_batch_size,
            max_tokens=self.args.max_tokens_per_microbatch,
            padding_free=self._passes.padding_free,
        )

    # ------------------------------------------------------------------ order, resume, events

    def get_train_dataloader(self) -> Any:
        dataloader = super().get_train_dataloader()
        if self.args.async_level:
            # An epoch that opens draws a seed for the dataloader's workers. When it opens depends on what was read
            # ahead, so the seed may not come from the random numbers that a resumed run has to draw again.
            generator = torch.Generator().manual_seed(self.args.seed)
            getattr(dataloader, "base_dataloader", dataloader).generator = generator
        return dataloader

    def _get_train_sampler(self, dataset=None) -> Sampler:
        return EpochOrder(super()._get_train_sampler(dataset), epoch=lambda: int(self.state.epoch or 0))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # First: it may fail, which shall leave no half of a checkpoint, and callbacks may draw random numbers in it.
        if not self.args.save_only_model:
            try:
                self._wait_for_rest()
            except BaseException:
                folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                undo_jit_checkpoint(Path(self._get_output_dir(trial), folder))
                raise
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Beside the random state of each rank, its window: a resumed run goes on where the checkpoint was taken."""
        super()._save_rng_state(output_dir)
        shapes, step = self._shapes(), self._schedule.completed(self._step, self.state.global_step)
        SavedRun(
            shapes=shapes,
            position=shapes.position(self.state.epoch or 0, self.state.max_steps),
            step=step,
            skipped_steps=self._skipped.total,
            window=None if self._schedule.sampled_after(step) else self._window,
        ).save(self._window_file(output_dir))
        states = self._states_before if self._schedule.samples_again(step) else states_of(self._dash_callbacks())
        if states and self.accelerator.is_main_process:
            torch.save(states, os.path.join(output_dir, STATES))

    def _resume(self, checkpoint: str, start: tuple[int, int]) -> tuple[int, int]:
        """Go on in the checkpoint's window, or say why with a new one.

        Args:
            start: (epochs, micro-batches of a rank since) that Transformers takes for used; returned corrected.
        """
        own = self.ranks.agree(partial(SavedRun.load, self._window_file(checkpoint)))
        found = self.ranks.gather_object(own and replace(own, window=None))
        saved = one_run(found, self.ranks.count, checkpoint)
        skip = self.args.ignore_data_skip
        reason = why_a_new_window(saved, self._shapes(), start, checkpoint=checkpoint, ignore_data_skip=skip)
        if saved is not None:
            self._skipped.total = saved.skipped_steps
        states = self.ranks.agree(partial(load_states, checkpoint), main_only=True)
        for name in self.ranks.agree(partial(restore_states, self._dash_callbacks(), states)):
            self._warn(f"{checkpoint} holds nothing that {name} has learned; it goes on as it is.")
        if reason is not None:
            self._warn(f"{reason}; training goes on with a new generation window.")
            return start
        assert own is not None, "a window is gone on with where every rank has its part"
        self._step, self._window = own.step, own.window
        return start if skip else own.position  # Transformers' is wrong in a stream that was read more than once

    def _shapes(self) -> Shapes:
        prompts = len(self.train_dataset) if isinstance(self.train_dataset, Sized) else None
        return Shapes.of(self.args, processes=self.ranks.count, prompts=prompts, one_ahead=self._one_ahead)

    def _window_file(self, directory: str) -> str:
        return os.path.join(directory, f"generation_window_{self.ranks.rank}.pt")

    def add_callback(self, callback: Any) -> None:
        check_callbacks([callback])
        super().add_callback(callback)

    def _warn(self, message: str) -> None:
        if self.accelerator.is_main_process:
            logger.warning(message)

    def _dispatch(self, event: str, rollouts: RolloutBatch) -> None:
        """Hand the rollouts to each `DASHCallback`; what fails on one rank is an error on all."""
        for callback in self._dash_callbacks():
            self.ranks.agree(partial(self._call, callback, event, rollouts))

    def _dash_callbacks(self) -> list[DASHCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, DASHCallback)]

    def _call(self, callback: DASHCallback, event: str, rollouts: RolloutBatch) -> None:
        before, loss_mask = rollouts.tensors(), rollouts.loss_mask.clone()
        extras = {"model": self.model, "processing_class": self.processing_class, "trainer": self}
        getattr(callback, event)(self.args, self.state, self.control, rollouts, **extras)
        rollouts.validate(like=before, culprit=f"{type(callback).__name__}.{event}")
        if event != "on_rollouts_sampled" and not torch.equal(loss_mask, rollouts.loss_mask):
            raise ValueError(
                f"{type(callback).__name__}.{event} changed which tokens the loss counts, after their number was taken "
                "for its normaliser. Change completion_mask and tool_mask in on_rollouts_sampled."
            )
