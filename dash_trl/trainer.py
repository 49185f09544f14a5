"""`DASHTrainer`: the hooks that Transformers and TRL call, in the order in which they call them.

    get_batch_samples ──► training_step ──► _clip_grad_norm, _get_grad_norm ──► _save_checkpoint
                              │
        MicroSteps: the passes of a micro-step ◄── Collector: prompts → the parts of a window

`assembly.py` builds these objects and says who gets what.
"""

import math
import time
from collections.abc import Sized
from contextlib import nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from dash_trl.assembly import (
    evaluated_turns,
    knows_log_probs,
    loss_settings,
    new_checkpoints,
    new_collector,
    new_conversations,
    new_micro_steps,
    new_order,
    new_passes,
    new_reader,
    new_recorder,
    new_rewards,
)
from dash_trl.callbacks import DASHCallback, dispatch
from dash_trl.checks import (
    check_another_run,
    check_arguments,
    check_callbacks,
    check_first_step,
    check_per_group,
    check_pipeline,
    check_prompt,
    check_prompt_lengths,
    check_rewards,
    check_subclass,
    check_tied_adapter,
    checked_rollouts,
)
from dash_trl.config import DASHConfig
from dash_trl.distributed import Ranks, accumulating
from dash_trl.model_card import with_settings_of_run
from dash_trl.monitoring import OffPolicyMetrics, PassMetrics, log_traces
from dash_trl.rewards import unpack, watch
from dash_trl.rollout import CreditedRollouts, PromptQueue, RolloutBatch
from dash_trl.sampling import install, without_client
from dash_trl.seams import (
    FirstStates,
    begin_anew,
    begin_trackio,
    count_pass_time,
    forget_overflow,
    leave_out_step,
    regularized,
    step_schedule,
    to_training_mode,
    undo_jit_checkpoint,
    vllm_is_behind,
    with_settings,
)
from dash_trl.tools import ProcessTool
from dash_trl.update import (
    SkippedSteps,
    checked_advantages,
    group_advantages,
    outcome_advantages,
    regularizer_weight,
    to_device,
)


class DASHTrainer(GRPOTrainer):
    """Trains with GRPO's update on the rows that carry signal (DASH, arXiv 2505.17218).

    Takes the arguments of [`~trl.GRPOTrainer`], with a [`DASHConfig`] as `args`. One large generation per
    `steps_per_generation` micro-steps is cached in CPU memory. Rows without signal are dropped before any model pass.
    The survivors are re-packed, padding-free where the model's attention allows it. With `beta=0`, no entropy bonus
    and a threshold that drops only zero-signal rows, the update is TRL's; KL, entropy and auxiliary terms of dropped
    rows are lost. An optimizer step without any signal on any rank changes nothing: no momentum, no weight decay.

    Raises:
        ValueError: for vision-language models, and for what `dash_trl.checks` finds.
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
        check_subclass(cls, DASHTrainer)

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
        if tools := kwargs.get("tools"):
            kwargs["tools"] = [tool.as_function() if isinstance(tool, ProcessTool) else tool for tool in tools]
        own_rollouts = kwargs.get("rollout_func") is not None
        check_rewards(reward_funcs, args, train_dataset, eval_dataset, own_rollouts)
        with without_client(args) as on_servers:
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        if args.use_vllm:
            check_tied_adapter(self.model)
        if on_servers:
            install(self)
        self.ranks = Ranks(self.accelerator, timeout=args.ddp_timeout)
        self._conversations = new_conversations(self)
        functions = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs = [watch(func, name) for func, name in functions]
        if (rollout_func := self.rollout_func) is not None:
            self.rollout_func = lambda prompts, trainer: self.ranks.agree(
                partial(checked_rollouts, rollout_func, prompts, trainer)
            )
        self._passes = new_passes(self)
        self._first_states = FirstStates()
        self._begin_run()

    # ------------------------------------------------------------------ a run begins and ends

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        check_another_run(self._first_states.have_trained, self.is_deepspeed_enabled)
        start = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self.args.reward_pipeline:
            check_pipeline(self, DASHTrainer, self.callback_handler.callbacks)
        elif self.args.max_num_gen_batches > 1:
            check_per_group(self, DASHTrainer, self.callback_handler.callbacks)
        self._begin_run()
        if resume_from_checkpoint is not None:
            start = self._resume(resume_from_checkpoint, start)
        self._reader.epoch = start[0]
        return start

    def _begin_run(self) -> None:
        """Forget the run before: an interrupt leaves half a step behind, and `max_steps` the rest of a window."""
        begin_anew(self)
        self.recorder = new_recorder(self)
        self._reader = new_reader(self)
        self._rewards = new_rewards(self, DASHTrainer)
        self._collector = new_collector(self, self._rewards)
        self._micro_steps = new_micro_steps(self, self._collector)
        self._pass_metrics = PassMetrics(per_row=self.importance_sampling_level == "sequence")
        self._off_policy = OffPolicyMetrics(self.args.aipo_delta if self.args.loss_type == "aipo" else None)
        self._skipped = SkippedSteps(loss_scaling=self.args.fp16)
        self._checkpoints = new_checkpoints(self, self._collector.log_probs)

    def _resume(self, checkpoint: str, start: tuple[int, int]) -> tuple[int, int]:
        """Go on in the checkpoint's window, if it has one that fits.

        Args:
            start: (epochs, micro-batches of a rank since) that Transformers takes for used; returned corrected.
        """
        skip = self.args.ignore_data_skip
        run, self._skipped.total = self._checkpoints.resume(checkpoint, start, ignore_data_skip=skip)
        if run is None:
            return start
        self._step = run.step
        self._micro_steps.resume(run.window)
        if isinstance(self._reader, PromptQueue):
            if not skip:
                self._reader.load_state_dict(run.prompts)
            elif run.window is not None:
                self._reader.has_sampled(run.step)
        return start if skip else run.position  # Transformers' is wrong in a stream that was read more than once

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Transformers', or that of the run before, as it was before that; the loss scaler (fp16), too."""
        optimizer = super().create_optimizer(model)
        self._first_states.restore(optimizer, self.accelerator.scaler)
        return optimizer

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._first_states.have_trained = True
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        begin_trackio(self)
        with self.accelerator.autocast():
            self._passes.prepare(
                self.model_wrapped,
                models,
                super()._get_per_token_logps_and_entropies,
                vocabulary=min(self.model.config.get_text_config().vocab_size, len(self._tokenizer)),
                device=self.accelerator.device,
                ranks=self.ranks,
            )
        return prepared

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:  # also after an interrupt: what waits is dropped, and nobody waits for what still runs
            self._reader.close()
            self._collector.close()

    def get_train_dataloader(self) -> Any:
        dataloader = super().get_train_dataloader()
        if self.args.async_level or self.args.queues_prompts:
            # An epoch that opens draws a seed for the dataloader's workers. When it opens depends on what was read
            # ahead, so the seed may not come from the random numbers that a resumed run has to draw again.
            generator = torch.Generator().manual_seed(self.args.seed)
            getattr(dataloader, "base_dataloader", dataloader).generator = generator
        return dataloader

    def _get_train_sampler(self, dataset=None) -> Sampler:
        return new_order(self, super()._get_train_sampler(dataset))

    # ------------------------------------------------------------------ an optimizer step

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        read = self._reader.read(epoch_iterator, num_batches, step=self._step, state=self.state)
        batches, num_items = super().get_batch_samples(read, num_batches, device)
        if self.state.global_step == 0 and not isinstance(self.train_dataset, Sized):
            self.ranks.agree(partial(check_first_step, len(batches), self.args))
        self._micro_steps.begin_optimizer_step(self._step, len(batches), self.state.global_step)
        self._checkpoints.begin_optimizer_step(self._reader)
        return batches, num_items

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """One micro-step: any number of forward and backward passes, none if nothing survived."""
        started = time.perf_counter()
        to_training_mode(self)
        schedule = self._micro_steps.schedule
        ends_step = schedule.is_last(self._step)
        loss = torch.zeros((), device=self.args.device)
        last_pass: dict[str, Any] | None = None
        for passes, are_last in self._micro_steps.inputs(self._step, self.state.global_step, inputs):
            last_pass = passes.pop() if are_last and passes else None
            with self.recorder.timed("train"):
                for one in passes:
                    with accumulating(self.accelerator, model):
                        loss = loss + Trainer.training_step(self, model, one, num_items_in_batch)
                    self._collector.look()
        with self.recorder.timed("train"):
            count_pass_time(self, time.perf_counter() - started)
            if last_pass is not None:  # by TRL's method, which synchronises gradients and adds 1 to `_step`
                loss = loss + super().training_step(model, last_pass, num_items_in_batch)
        self._collector.look()
        if last_pass is None:
            self._step += 1
            if ends_step and not schedule.ran_model:
                leave_out_step(self.accelerator)
        if ends_step:
            self.recorder.end_step()
            self.recorder.log(self._pass_metrics.of_step(schedule.segments.values()))
            self._collector.log_probs.log_step()
            if knows_log_probs(self):
                self.recorder.log(self._off_policy.of_step(self.ranks.sum))
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Move the inputs of one pass to the device. In evaluation, TRL's: sample, reward, and return the batch."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        return {name: to_device(value, self.accelerator.device) for name, value in generation_batch.items()}

    def _compute_loss(self, model, inputs) -> Tensor:
        """TRL's, at the weight of this pass in the optimizer step."""
        training = self.model.training
        with with_settings(self, loss_settings(self, training=training)):
            if not training:
                return super()._compute_loss(model, inputs)
            one, scale = inputs["pass"], inputs["loss_scale"]
            # Entropy bonus and router loss have a weight of their own, and are multiplied by `scale` with the rest.
            weight = regularizer_weight(one.tokens[self.ranks.rank], one.segment)
            per_token = inputs["advantages"].dim() == 2
            with (
                self._passes.laid_out(inputs),
                regularized(self, weight / scale if scale else 0.0),
                self._pass_metrics.observe(self.recorder.metrics, one, scale, per_token=per_token),
                self._off_policy.observe(inputs),
                self._collector.log_probs.in_pass.observe(
                    inputs, window=self._micro_steps.schedule.share(self._step).start
                ),
            ):
                return super()._compute_loss(model, inputs) * scale

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        """TRL's; in training, on real rows and tokens only."""
        log_probs = super()._get_per_token_logps_and_entropies
        batch = model, input_ids, attention_mask, logits_to_keep
        if not self.model.training:
            return log_probs(*batch, **kwargs)
        with self.accelerator.autocast() if self._passes.padding_free else nullcontext():
            found = self._passes.log_probs(log_probs, *batch, **kwargs)
        self._off_policy.see(found[0])
        self._collector.log_probs.in_pass.see(found[0])
        return found

    def _clip_grad_norm(self, model):
        # A GradScaler (fp16) cannot unscale gradients where there are none.
        return super()._clip_grad_norm(model) if self._micro_steps.schedule.ran_model else None

    def _get_grad_norm(self, model, grad_norm=None):
        if not self._micro_steps.schedule.ran_model:
            forget_overflow(self.accelerator)
            step_schedule(self.accelerator)
            return 0.0
        norm = super()._get_grad_norm(model, grad_norm)  # over all ranks: they come to the same verdict
        step = self.state.global_step + 1
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # has stepped, or skipped, in its backward
            skipped = self.accelerator.optimizer_step_was_skipped
            self._skipped.check_applied(norm, skipped, step)
        elif skipped := not math.isfinite(norm):
            model.zero_grad()  # without gradients an optimizer changes neither parameters nor its state
        self._skipped.count(skipped, step)
        self.recorder.total("skipped_steps", self._skipped.total)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        summary = "train_runtime" in logs  # of the run; its table is that of the last step
        super().log(logs, start_time)
        if self.log_completions and self.model.training and not summary and self.is_world_process_zero():
            if "trackio" in self.args.report_to:
                log_traces(self._logs, self.state.global_step)

    # ------------------------------------------------------------------ what the collector asks for

    def _tokenize_prompts(self, prompts: list) -> tuple:
        tokenize = super()._tokenize_prompts

        def checked() -> tuple:
            for prompt in prompts:
                check_prompt(prompt, "A row")
            tokenized = tokenize(prompts)
            check_prompt_lengths(tokenized[0], self.context_length)
            return tokenized

        return self.ranks.agree(checked)

    @property
    def context_length(self) -> int | None:
        """The tokens that the model has positions for, if its configuration says."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        return self.ranks.agree(partial(super()._generate_single_turn, *args, **kwargs))

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        """TRL's, [rows of all ranks, F], with every row NaN in which a function, or in an evaluation a tool, failed."""
        ask = partial(super()._calculate_rewards, inputs, prompts, completions, completion_ids_list)
        training, failed = self.model.training, None
        if not training and self._conversations is not None:  # in training, the collector knows them
            failed = torch.tensor(self._conversations.failed(len(inputs)))
        return self._rewards.of_all(ask, training=training, failed=failed)

    def _advantages(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """What `compute_advantages` returns, checked; an override of it may have no parameter `lengths`."""
        rewards = rewards.to(self.accelerator.device)
        takes_lengths = "lengths" in signature(self.compute_advantages).parameters
        advantages = self.compute_advantages(rewards, **({"lengths": lengths} if takes_lengths else {}))
        return checked_advantages(advantages, rewards, f"{type(self).__name__}.compute_advantages").cpu()

    def compute_advantages(self, rewards: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Rewards of whole groups → advantages, by `advantage_estimator`; override it for an estimator of your own.

        Args:
            rewards: [N, F], the rows of all ranks, groups adjacent; NaN = not applicable, a row of NaN is unscored.
            lengths: [N], the loss tokens of each row, which "opo" needs. An override may leave them out.
        Returns:
            [N] floats, finite for scored rows. `dash_trl.update.weighted_rewards` gives one reward per row.
        """
        weights, estimator = self.reward_weights, self.args.advantage_estimator
        if estimator == "opo" and lengths is None:
            raise ValueError(
                "advantage_estimator='opo' weighs rewards by the tokens of their rows, and compute_advantages was "
                "called without. Give an override the argument, and hand it on: def compute_advantages(self, rewards, "
                "lengths=None), super().compute_advantages(rewards, lengths)."
            )
        if estimator != "grpo":
            return outcome_advantages(estimator, rewards, weights, self.num_generations, lengths=lengths)
        scale, aggregation = self.scale_rewards, self.multi_objective_aggregation
        return group_advantages(
            rewards, weights, self.num_generations, scale_rewards=scale, multi_objective_aggregation=aggregation
        )

    def log_probs_and_entropies(self, rollouts: CreditedRollouts, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T] each, float32, on the CPU: the policy's, of the loss tokens of some rows; 0 for all others.

        By a forward pass over these rows, in micro-batches as for old log-probs, a third of what training on them
        costs. To be called on every rank at the same point.

        Args:
            rows: [B] bool.
        """
        return self._collector.log_probs.with_entropies(rollouts, rows)

    def _dispatch(self, event: str, rollouts: RolloutBatch) -> None:
        arguments = self.args, self.state, self.control
        others = {"model": self.model, "processing_class": self.processing_class, "trainer": self}
        dispatch(event, rollouts, self._dash_callbacks(), self.ranks, arguments, others)

    def _dash_callbacks(self) -> list[DASHCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, DASHCallback)]

    def add_callback(self, callback: Any) -> None:
        check_callbacks([callback])
        super().add_callback(callback)

    # ------------------------------------------------------------------ evaluations and checkpoints

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, for evaluations only: in training, the collector samples."""
        begin_trackio(self)
        environments = nullcontext() if self._conversations is None else self._conversations.lent()
        with with_settings(self, loss_settings(self, training=False)), environments:
            return super()._generate_and_score_completions(inputs)

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, *others) -> tuple:
        """For evaluations: the turns of training, with its time limits, and on all ranks alike."""
        return evaluated_turns(self, prompt_ids, completion_ids, logprobs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            card = Path(self.args.output_dir, "README.md")
            text = with_settings_of_run(card.read_text(encoding="utf-8"), self.args, self.accelerator.num_processes)
            card.write_text(text, encoding="utf-8")

    def _load_best_model(self) -> None:
        super()._load_best_model()
        vllm_is_behind(self)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Wait first: this may fail, and then no half of a checkpoint may remain; callbacks may draw random numbers.
        if not self.args.save_only_model:
            try:
                self._micro_steps.wait_for_rest()
            except BaseException:
                folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                undo_jit_checkpoint(Path(self._get_output_dir(trial), folder))
                raise
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Beside the random state of each rank, the survivors of its window with their log-probs, and where it stands.

        So a resumed run goes on in the middle of the window. Windows that were sampled ahead are sampled again.
        """
        super()._save_rng_state(output_dir)
        schedule = self._micro_steps.schedule
        step = schedule.completed(self._step, self.state.global_step)
        self._checkpoints.save(
            output_dir,
            epoch=self.state.epoch or 0,
            max_steps=self.state.max_steps,
            step=step,
            skipped_steps=self._skipped.total,
            window=self._micro_steps.window_to_save(step),
            samples_again=schedule.samples_again(step),
            reader=self._reader,
        )
