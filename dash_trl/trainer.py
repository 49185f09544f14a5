"""`DASHTrainer`: TRL's `GRPOTrainer` with the rooms of this package wired into it.

The way of the data in one generation window: TRL samples and scores (`_sample_window`) → the rows move to CPU memory
(`RolloutBatch`) → advantages → filter → TRL's shuffle → old and reference log-probs of the survivors
(`_score_survivors`) → packing (`_pack`) → TRL's loss on one micro-batch at a time (`training_step`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sized
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object, is_peft_model
from torch import Tensor
from torch.utils.data import Sampler
from transformers import Trainer
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import shuffle_sequence_dict, use_adapter

from dash_trl.callbacks import DASHCallback, promise_events
from dash_trl.checks import (
    check_arguments,
    check_callbacks,
    check_estimator,
    check_prompt,
    check_prompt_lengths,
    long_prompt_lengths,
)
from dash_trl.config import DASHConfig
from dash_trl.monitoring import EmptyWindows, PassMetrics, filter_metrics, packing_metrics, sampler_metrics
from dash_trl.rewards import FailureWatch, watch
from dash_trl.rollout import (
    SAMPLED_FIELDS,
    EpochOrder,
    GenerationWindow,
    RolloutBatch,
    SavedRun,
    Shapes,
    agree,
    why_a_new_window,
)
from dash_trl.sampling import install, without_client
from dash_trl.update import (
    Filtered,
    MicroBatch,
    PackedLayout,
    ScaledCoefficient,
    Schedule,
    SkippedSteps,
    checked_advantages,
    enable_padding_free,
    filter_rows,
    forget_plain_passes,
    group_advantages,
    importance_sampling_ratio,
    loss_scale,
    outcome_advantages,
    packed_log_probs,
    packing_flaw,
    plan_segment,
    real_rows_only,
    regularizer_weight,
    to_device,
)

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
        check_arguments(model, args, train_dataset, eval_dataset, processing_class, kwargs)
        self._sampling_only = False  # TRL's sampling method must not run the model
        with without_client(args) as servers:
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        if servers:
            install(self)

        functions = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs = [watch(func, name) for func, name in functions]
        self._layout: PackedLayout | int | None = None  # of the pass that is running; `None`: found from its mask
        # Prompt tuning: padding lies between virtual tokens and prompt, so that its width is part of the input.
        adapter = getattr(self.model, "active_peft_config", None)
        self._virtual_tokens = getattr(adapter, "is_prompt_learning", False)
        # Continuous batching samples with paged variants of the attention that a model came with.
        if args.use_transformers_continuous_batching:
            self._padded_because: str | None = "continuous batching brings its own attention"
        elif self._virtual_tokens:
            self._padded_because = "every sample has virtual tokens before it"
        else:
            self._padded_because = next(filter(None, [enable_padding_free(one) for one in self._text_models()]), None)
        self._padding_free = self._padded_because is None  # until `_prepare_for_training` finds a flaw
        self._prepared = False  # for training, once
        self._head_hook: Any = None
        self._flash = "flash" in (self.model.config.get_text_config()._attn_implementation or "")
        self._begin_run()
        self._context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        lengths = long_prompt_lengths(train_dataset, self._tokenize_prompts, self._context)
        check_prompt_lengths(lengths, self._context, self.max_completion_length)

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
        promise_events(self.state)
        self._begin_run()
        return start if resume_from_checkpoint is None else self._resume(resume_from_checkpoint, start)

    def _begin_run(self) -> None:
        """Forget the run before: an interrupt leaves half a step behind, and `max_steps` the rest of a window."""
        args = self.args
        self._window: GenerationWindow | None = None
        self._scored: Any = None  # (rewards of all ranks, completions of this one)
        self._completion_lengths: Tensor | None = None  # of all ranks, in loss tokens
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failures = FailureWatch(self.reward_funcs, self.reward_func_names)
        self._empty_windows = EmptyWindows(args.gradient_filter_threshold)
        self._pass_metrics = PassMetrics(per_row=self.importance_sampling_level == "sequence")
        self._schedule = Schedule(
            steps_per_generation=args.steps_per_generation,
            num_iterations=args.num_iterations,
            rows_per_step=args.per_device_train_batch_size,
            pack=self._pack,
        )
        self._skipped = SkippedSteps(loss_scaling=args.fp16)
        # TRL's: it counts micro-steps, collects numbers for the next log, and knows the weights that vLLM has by step.
        self._step, self._current_train_step_time, self._last_loaded_step = 0, 0.0, -1
        self._entropy_window_stats = None
        for pending in (*self._metrics.values(), self._pending_metrics, self._pending_extra_logs):
            pending.clear()

    # ------------------------------------------------------------------ what is known of the models before a pass

    def _models(self) -> list[Any]:
        """The policy and, where there is one, the reference model, as they are called."""
        return [self.model] if self.ref_model is None else [self.model, self.ref_model]

    def _text_models(self) -> list[Any]:
        """The transformers models within them, without wrappers and adapters."""
        models = [self.accelerator.unwrap_model(model) for model in self._models()]
        return [model.get_base_model() if is_peft_model(model) else model for model in models]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._prepared = True
        if self._head_hook is not None:
            self._head_hook.remove()
        self._head_hook = forget_plain_passes(self.model_wrapped)
        if self._padding_free:
            flaws = [flaw for flaw in map(self._packing_flaw, self._models()) if flaw]
            found = torch.tensor(float(len(flaws)), device=self.args.device)
            if self.accelerator.reduce(found, "sum").item():  # all ranks pad if one has to
                self._padding_free, self._padded_because = False, next(iter(flaws), "of what another rank found")
        if self.accelerator.is_main_process:
            self._say_layout()
        return prepared

    def _say_layout(self) -> None:
        name = type(self._text_models()[0]).__name__
        if self._padding_free:
            logger.info(f"{name}: model passes are padding-free.")
        else:
            logger.warning(
                f"{name}: model passes are padded, not padding-free, because {self._padded_because}. The update is the "
                "same; it takes longer."
            )

    def _packing_flaw(self, model: Any) -> str | None:
        """Why packed passes of a prepared model would be wrong; a collective under ZeRO-3 and FSDP."""
        with self.accelerator.autocast():
            return packing_flaw(
                partial(packed_log_probs, model, flash=self._flash),
                partial(super()._get_per_token_logps_and_entropies, model),
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
            padding_free=self._padding_free,
        )

    # ------------------------------------------------------------------ from prompts to a window of survivors

    def _tokenize_prompts(self, prompts: list) -> tuple:
        for prompt in prompts:  # a stream's, or a transform's
            check_prompt(prompt, "A row")
        return super()._tokenize_prompts(prompts)

    def _generate(self, prompts: list) -> tuple:
        with self._timed("generate"):
            output = super()._generate(prompts)
        check_prompt_lengths([len(ids) for ids in output[0]], self._context, 0)
        return output

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        """TRL's, [rows of all ranks, F], with every row NaN in which a function failed."""
        with self._timed("reward"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = self._failures.unscore(rewards, self.accelerator.gather, counts=self.model.training)
        self._scored = rewards, completions
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """In training, TRL's method without its model passes: they wait until the filter has spoken."""
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        beta, correction = self.beta, self.vllm_importance_sampling_correction
        try:
            self.beta, self.vllm_importance_sampling_correction, self._sampling_only = 0.0, False, True
            return super()._generate_and_score_completions(inputs)
        finally:
            self.beta, self.vllm_importance_sampling_correction, self._sampling_only = beta, correction, False

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Rewards of whole groups → advantages, by `advantage_estimator`; override it for an estimator of your own.

        Args:
            rewards: [N, F], the rows of all ranks, groups adjacent; NaN = not applicable, a row of NaN is unscored.
        Returns:
            [N] floats, finite for scored rows. `dash_trl.update.advantages.weighted_rewards` gives one reward per row.
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

    def _sample_window(self, examples: list[dict[str, Any]]) -> GenerationWindow:
        """Sample, score, give credit, filter: one generation batch becomes a window of survivors on the CPU."""
        sampled = self._generate_and_score_completions(examples)
        rewards, completions = self._scored
        rows, rank, device = len(examples), self.accelerator.process_index, self.accelerator.device
        local = slice(rank * rows, (rank + 1) * rows)
        rollouts = RolloutBatch(
            **{name: value.cpu() for name, value in sampled.items() if name in SAMPLED_FIELDS},
            group=torch.arange(local.start, local.stop) // self.num_generations,
            policy_version=torch.full((rows,), self._last_loaded_step if self.use_vllm else self.state.global_step),
            examples=examples,
            completions=completions,
        )
        self._dispatch("on_rollouts_sampled", rollouts)
        rollouts.rewards = rewards[local].cpu()
        self._dispatch("on_rewards", rollouts)
        unscored = ~rollouts.scored.unsqueeze(1)  # a callback may have failed a row, too
        rewards = self.accelerator.gather(rollouts.rewards.masked_fill(unscored, torch.nan).to(device))
        self._completion_lengths = self.accelerator.gather(rollouts.loss_mask.sum(dim=1).to(device))
        culprit = f"{type(self).__name__}.compute_advantages"
        outcome = checked_advantages(self.compute_advantages(rewards), rewards, culprit).cpu()
        rollouts.advantages = outcome[local].clone()
        self._dispatch("on_advantages", rollouts)

        threshold = self.args.gradient_filter_threshold
        filtered = filter_rows(rollouts.advantages, rollouts.loss_mask, rollouts.scored, threshold)
        self._log_window(rollouts, filtered, outcome)
        order = shuffle_sequence_dict({"row": torch.arange(rows)})["row"]  # TRL's, from the same random numbers
        lengths = rollouts.lengths()[order] * filtered.keep[order].unsqueeze(1)
        survivors = rollouts.select(order[lengths[:, 1] > 0])  # a fully masked row (TRL's truncated ones) has no length
        lengths = self.accelerator.gather(lengths.to(device)).cpu().view(-1, rows, 3)
        window = GenerationWindow(survivors, lengths, sampled["num_items_in_batch"].cpu())
        with self._timed("logprobs"):
            self._score_survivors(window)
        return window

    @torch.no_grad()
    def _score_survivors(self, window: GenerationWindow) -> None:
        """Old log-probs, importance-sampling ratio and reference log-probs, where TRL's rules ask for them."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        correct = self.use_vllm and self.vllm_importance_sampling_correction
        names = []
        if correct or self.args.gradient_accumulation_steps % generate_every != 0:
            names.append("old_per_token_logps")
        if self.beta != 0.0:
            names.append("ref_per_token_logps")
        rollouts = window.rollouts
        for name in names:
            setattr(rollouts, name, torch.zeros(rollouts.completion_ids.shape))
        plan = self._pack(window.lengths, 1)[0] if names else []
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for micro_batch in plan:
                rows, inputs = self._rows(window, micro_batch)
                inputs = self._prepare_inputs(inputs)
                for name in names:
                    reference = name.startswith("ref")
                    logps = self._reference_logps(inputs) if reference else self._logps(self.model, inputs)
                    known = getattr(rollouts, name)
                    known[rows, : logps.shape[1]] = logps[: len(rows), : known.shape[1]].float().cpu()
        if correct:
            assert rollouts.old_per_token_logps is not None and rollouts.sampling_per_token_logps is not None
            rollouts.importance_sampling_ratio = importance_sampling_ratio(
                rollouts.old_per_token_logps,
                rollouts.sampling_per_token_logps,
                rollouts.loss_mask,
                mode=self.vllm_importance_sampling_mode,
                clip_min=self.vllm_importance_sampling_clip_min,
                clip_max=self.vllm_importance_sampling_clip_max,
            )
            self._log(sampler_metrics(rollouts, self.accelerator.gather, self.accelerator.device))

    def _logps(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with self._laid_out(inputs):
            return self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]

    def _reference_logps(self, inputs: dict[str, Any]) -> Tensor:
        if self.ref_model is not None:
            return self._logps(self.ref_model, inputs)
        # PEFT: the base model, or the adapter that training began with
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logps(self.model, inputs)

    # ------------------------------------------------------------------ from a window to optimizer steps

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._schedule.begin_optimizer_step(self._step, len(batches), self.state.global_step)
        return batches, num_items

    def _rows(self, window: GenerationWindow, micro_batch: MicroBatch) -> tuple[list[int], dict[str, Any]]:
        """This rank's rows of `window.rollouts` in a micro-batch, and the model inputs and layout made of them."""
        rank = self.accelerator.process_index
        rows = window.survivors(rank)[list(micro_batch.rows[rank])].tolist()
        inputs = window.rollouts.micro_batch(
            rows,
            size=micro_batch.size,
            pad_token_id=self._tokenizer.pad_token_id,
            trim_prompts=not self._virtual_tokens,
        )
        layout: PackedLayout | int = max(len(rows), 1)  # the rows that have a token
        if self._padding_free:
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            layout = PackedLayout.of(mask, inputs["completion_mask"].shape[1])
        return rows, {**inputs, "layout": layout}

    def _micro_batches(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The inputs of this micro-step's model passes, on the CPU; samples a new window where one is due."""
        if self._window is None or self._schedule.window_due(self._step):
            self._window = self._sample_window(examples)
            self._schedule.window_sampled(self._step)
        window = self._window
        passes, planned = self._schedule.passes(self._step, window.lengths, window.num_items_in_batch.item())
        if planned:
            self._log(packing_metrics(planned, window.lengths, padding_free=self._padding_free))
        batches = []
        for one in passes:
            _, inputs = self._rows(window, one.micro_batch)
            scale = loss_scale(
                self.loss_type,
                self.args.filter_denominator,
                rows=one.micro_batch.size,
                tokens=one.tokens[self.accelerator.process_index],
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
        device = self.accelerator.device
        moved = {
            name: to_device(value, device) for name, value in generation_batch.items() if isinstance(value, Tensor)
        }
        layout = generation_batch["layout"]
        return {**generation_batch, **moved, "layout": layout.to(device) if self._padding_free else layout}

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """One micro-step: any number of forward and backward passes, none if nothing survived."""
        started = time.perf_counter()
        model.train()
        micro_batches = self._micro_batches(inputs)
        is_last = self._schedule.is_last(self._step)
        loss = torch.zeros((), device=self.args.device)
        with self._timed("train"):
            for micro_batch in micro_batches[:-1]:
                with self._accumulating(model):  # Trainer's own step: TRL's counts a micro-step
                    loss = loss + Trainer.training_step(self, model, micro_batch, num_items_in_batch)
            self._current_train_step_time += time.perf_counter() - started  # TRL times the last pass only
            if micro_batches:
                loss = loss + super().training_step(model, micro_batches[-1], num_items_in_batch)
        if not micro_batches:
            self._step += 1
            if is_last and not self._schedule.ran_model:
                # Nothing to learn anywhere: accelerate's optimizer steps only if gradients are synchronised.
                self.accelerator.gradient_state._set_sync_gradients(False)
        if is_last:
            names = ("generate", "reward", "logprobs", "train")
            self._log({f"time/{name}": self._seconds.pop(name, 0.0) for name in names})
            self._log(self._pass_metrics.of_step(self._schedule.segments))
        return loss

    @contextmanager
    def _accumulating(self, model: Any) -> Iterator[None]:
        """No gradient synchronisation and no DeepSpeed step after this backward pass: more follow in the micro-step."""
        state = self.accelerator.gradient_state
        synchronise = state.sync_gradients
        state._set_sync_gradients(False)
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED  # its engine has its own boundary
        with nullcontext() if deepspeed else self.accelerator.no_sync(model):
            yield
        state._set_sync_gradients(synchronise)

    def _clip_grad_norm(self, model):
        # A GradScaler (fp16) cannot unscale gradients of which there are none.
        return super()._clip_grad_norm(model) if self._schedule.ran_model else None

    def _get_grad_norm(self, model, grad_norm=None):
        if not self._schedule.ran_model:
            return 0.0
        norm = super()._get_grad_norm(model, grad_norm)  # over all ranks, so that they come to the same verdict
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # has stepped, or skipped, in its backward
            skipped = self.accelerator.optimizer_step_was_skipped
            self._skipped.check_applied(norm, skipped, self.state.global_step + 1)
        elif skipped := not math.isfinite(norm):
            model.zero_grad()  # without gradients an optimizer changes neither parameters nor its state
        self._skipped.count(skipped, self.state.global_step + 1)
        self._metrics["train"]["skipped_steps"] = [self._skipped.total]  # a running total, as TRL's `num_tokens`
        return norm

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        """TRL's, on real rows and tokens only; (None, None, None) while TRL only samples."""
        if self._sampling_only:
            return None, None, None
        log_probs = super()._get_per_token_logps_and_entropies
        batch = model, input_ids, attention_mask, logits_to_keep
        if not self.model.training:
            return log_probs(*batch, **kwargs)
        if not self._padding_free:
            return real_rows_only(log_probs, *batch, real=self._layout, **kwargs)
        with self.accelerator.autocast():
            return packed_log_probs(*batch, flash=self._flash, layout=self._layout, **kwargs)

    @contextmanager
    def _laid_out(self, inputs: dict[str, Any]) -> Iterator[None]:
        """The layout of `inputs` for `_get_per_token_logps_and_entropies`, which TRL hands only their masks."""
        self._layout = inputs["layout"]
        try:
            yield
        finally:
            self._layout = None

    def _compute_loss(self, model, inputs) -> Tensor:
        """TRL's, at the weight of this pass in the optimizer step."""
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        one, scale = inputs["pass"], inputs["loss_scale"]
        weight = regularizer_weight(one.tokens[self.accelerator.process_index], one.segment)
        with self._laid_out(inputs), self._regularized(weight / scale if scale else 0.0):
            per_token = inputs["advantages"].dim() == 2
            with self._pass_metrics.observe(self._metrics["train"], one, scale, per_token=per_token):
                return super()._compute_loss(model, inputs) * scale

    @contextmanager
    def _regularized(self, scale: float) -> Iterator[None]:
        """The coefficients of entropy bonus and router loss times `scale`, where TRL uses them as factors."""
        router = self.router_aux_loss_coef
        self.router_aux_loss_coef = ScaledCoefficient(router, scale)
        self.entropy_coef: float = ScaledCoefficient(self.entropy_coef, scale)
        try:
            yield
        finally:
            self.router_aux_loss_coef = router
            self.entropy_coef = float(self.entropy_coef)  # TRL may have adapted it

    # ------------------------------------------------------------------ order, resume, events, metrics

    def _get_train_sampler(self, dataset=None) -> Sampler:
        return EpochOrder(super()._get_train_sampler(dataset), epoch=lambda: int(self.state.epoch or 0))

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

    def _resume(self, checkpoint: str, start: tuple[int, int]) -> tuple[int, int]:
        """Go on in the checkpoint's window, or say why with a new one.

        Args:
            start: (epochs, micro-batches of a rank since) that Transformers takes for used; returned corrected.
        """
        own = SavedRun.load(self._window_file(checkpoint))
        found = gather_object([own.without_window() if isinstance(own, SavedRun) else own])
        saved = agree(found, self.accelerator.num_processes, checkpoint)
        skip = self.args.ignore_data_skip
        reason = why_a_new_window(saved, self._shapes(), start, checkpoint=checkpoint, ignore_data_skip=skip)
        if saved is not None:
            self._skipped.total = saved.skipped_steps
        if reason is not None:
            if self.accelerator.is_main_process:
                logger.warning(f"{reason}; training goes on with a new generation window.")
            return start
        assert isinstance(own, SavedRun), "a window is gone on with where every rank has its part"
        self._step, self._window = own.step, own.window
        return start if skip else own.position  # Transformers' is wrong in a stream that was read more than once

    def _shapes(self) -> Shapes:
        prompts = len(self.train_dataset) if isinstance(self.train_dataset, Sized) else None
        return Shapes.of(self.args, processes=self.accelerator.num_processes, prompts=prompts)

    def _window_file(self, directory: str) -> str:
        return os.path.join(directory, f"generation_window_{self.accelerator.process_index}.pt")

    def add_callback(self, callback: Any) -> None:
        check_callbacks([callback])
        super().add_callback(callback)

    def _dispatch(self, event: str, rollouts: RolloutBatch) -> None:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, DASHCallback):
                before = rollouts.tensors()
                extras = {"model": self.model, "processing_class": self.processing_class, "trainer": self}
                getattr(callback, event)(self.args, self.state, self.control, rollouts, **extras)
                rollouts.validate(like=before, culprit=f"{type(callback).__name__}.{event}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Seconds of a training phase; logged per optimizer step as `time/<name>`."""
        started = time.perf_counter()
        yield
        if self.model.training:
            self._seconds[name] += time.perf_counter() - started

    def _log(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _log_window(self, rollouts: RolloutBatch, filtered: Filtered, outcome: Tensor) -> None:
        """DASH's numbers instead of those that TRL logged from its own advantages, and what the filter did."""
        per_row = self.accelerator.gather(rollouts.mean_advantages().to(self.args.device)).tolist()
        for i, value in enumerate(reversed(per_row), 1):
            self._logs["advantages"][-i] = value
        no_spread = (outcome.view(-1, self.num_generations) == 0).all(dim=1)
        self._metrics["train"]["frac_reward_zero_std"][-1] = no_spread.float().mean().item()
        metrics = filter_metrics(rollouts, filtered, lambda x: self.accelerator.reduce(x.to(self.args.device), "sum"))
        self._log(metrics)
        if self.accelerator.is_main_process:
            self._empty_windows.note(metrics)
