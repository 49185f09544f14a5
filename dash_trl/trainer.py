"""`DASHTrainer` overrides methods of TRL's `GRPOTrainer`. Transformers and TRL call the main ones in this order::

    get_batch_samples ──► training_step, once per micro-step ──► _clip_grad_norm, _get_grad_norm ──► _save_checkpoint

An optimizer step has up to `gradient_accumulation_steps` micro-steps. `training_step` asks `MicroSteps` for its passes,
and `MicroSteps` asks `Collector` for the window. `ranks.agree(work)` calls `work`, and raises an error of one rank on
all ranks.
"""

import math
import time
from collections.abc import Sized
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, Trainer
from transformers.trainer_utils import rotate_checkpoints, unwrap_peft_model
from trl import GRPOTrainer

from dash_trl import checks, manifest, seams
from dash_trl.callbacks import call_event, dash_callbacks
from dash_trl.checkpoints import check_weights, checkpoint_to_resume, compared
from dash_trl.collect import Rounds, reward_figures
from dash_trl.config import DASHConfig
from dash_trl.distributed import Ranks, accumulating
from dash_trl.host import on_servers
from dash_trl.log_probs import loss_settings
from dash_trl.monitoring import Recorder
from dash_trl.multimodal import freeze_towers, is_multimodal, without_towers
from dash_trl.rewards import distinct, unpack, unscored, watch
from dash_trl.rollout import EpochOrder, RolloutBatch, Rows, loading
from dash_trl.run import Run
from dash_trl.sampling import install, weights_version
from dash_trl.seams_of_tools import new_conversations
from dash_trl.tools import ProcessTool
from dash_trl.update import aipo, outcome_advantages, to_device, with_token_loss


class DASHTrainer(GRPOTrainer):
    """A `GRPOTrainer` that trains only on rows that carry a learning signal (DASH, arXiv 2505.17218).

    A row has signal if its advantage is not 0. The trainer samples all rows of a window (TRL's generation batch), keeps
    them in CPU memory, drops rows without signal, and packs the others into few passes, which are padding-free if the
    model's attention allows that. A `gradient_filter_threshold` above 0 also drops rows with little signal; `None`
    drops no row.

    The update equals TRL's, because a row with an advantage of 0 adds nothing to TRL's policy loss. It differs if the
    loss has a KL term (`beta`), an entropy bonus or an auxiliary loss, or if the threshold drops rows with signal. If
    no rank keeps a row, the optimizer step changes nothing: neither momentum nor weight decay is applied.

    Args:
        model: the policy: a model, or the name or path of one.
        reward_funcs: one or several reward functions in any form of `dash_trl.rewards`, or a `RewardRunner`. `None`:
            the environments give the rewards.
        args: a `DASHConfig`. `None`: the defaults, with the output directory "dash-output".
        train_dataset: dataset with a column "prompt"; see `trl.GRPOTrainer`.
        eval_dataset: dataset, or a dict of datasets, for evaluation.
        processing_class: tokenizer, or the processor of a multimodal model. `None`: that of the model.
        kwargs: the other arguments of `trl.GRPOTrainer`. `tools` may also contain a `dash_trl.ProcessTool`.
    Raises:
        ValueError: for every mistake that `dash_trl.checks` finds.
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

    def __init__(
        self,
        model: PreTrainedModel | str,
        reward_funcs: Any = None,
        args: DASHConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        args = DASHConfig("dash-output") if args is None else args
        reward_funcs = unpack(reward_funcs)
        checks.check_subclass(type(self), DASHTrainer)
        checks.check_arguments(model, reward_funcs, args, train_dataset, eval_dataset, kwargs)
        if tools := kwargs.get("tools"):
            kwargs["tools"] = [tool.as_function() if isinstance(tool, ProcessTool) else tool for tool in tools]
        if adapter := kwargs.get("peft_config"):
            settings = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
            kwargs["peft_config"] = without_towers(adapter, model, settings)
        if processing_class is None and not isinstance(model, str) and not is_multimodal(model.config):
            # The checkpoint of a text model may be a multimodal one, with a processor.
            processing_class = AutoTokenizer.from_pretrained(
                model.name_or_path,
                padding_side="left",
                truncation_side="left",
                trust_remote_code=args.trust_remote_code,
            )
        seams.begin_accelerate(args)
        # TRL's client for servers needs CUDA: hide the servers here; `install` below adds ours.
        hidden = {"use_vllm": False} if args.names_servers else {}
        with seams.with_settings(args, hidden), seams.reference_of(model):
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        self._accelerate_state = dict(vars(self.accelerator.state))
        if is_multimodal(self.model.config):
            freeze_towers(unwrap_peft_model(self.model))
        checks.check_trainable(self.model)
        checks.check_tokenizer(self._tokenizer)
        checks.check_rounding(self.model, args, has_copies=self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if args.use_vllm:
            checks.check_served_adapter(self.model)
            seams.add_end_tokens(self, (args.generation_kwargs or {}).get("stop_token_ids") or ())
            install(self)
            if on_servers(self):
                checks.check_called(type(self), DASHTrainer, ["_generate_single_turn"])
        elif self.rollout_func is None:
            checks.check_generate(self.model, self.generation_config, exact=args.async_level > 0)
            ends = self.generation_config.eos_token_id  # of generation_kwargs, which TRL's masks do not know
            self.eos_token_ids = [ends] if isinstance(ends, int) else ends or self.eos_token_ids
        self.ranks = Ranks(self.accelerator, timeout=args.ddp_timeout)
        self._conversations = new_conversations(self)
        self.reward_func_names = distinct(self.reward_func_names)
        self.reward_funcs = [watch(*one) for one in zip(self.reward_funcs, self.reward_func_names, strict=True)]
        if self.rollout_func is not None:
            self.rollout_func = partial(self.ranks.agree, checks.checked_rollouts, self.rollout_func)
        self._passes = seams.new_passes(self)
        self._begin_run()  # `evaluate` needs the objects of a run, too

    # ------------------------------------------------------------------ a run begins and ends

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        start = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        checks.check_trainable(self.model)  # it may have changed
        checks.check_groups_apart(self, DASHTrainer)
        self.ranks.agree(checks.check_saving, self)
        self._begin_run()
        self._step, start = self._run.checkpoints.begin(
            resume_from_checkpoint, start
        )  # `_step` is TRL's count of micro-steps
        if self.state.global_step < self.state.max_steps:
            return start
        self._run.checkpoints.warn(
            f"The run has made all of its {self.state.max_steps} steps, so no further one is made. Raise max_steps or "
            "num_train_epochs to go on."
        )
        return num_train_epochs, 0  # after the last epoch: Transformers would make one more step

    def _begin_run(self) -> None:
        self._loaded: tuple[int, list[int] | None] = -1, None
        seams.begin_anew(self)
        logs = seams.Logs(self._logs, self._pending_extra_logs, self._pending_metrics, self._metrics["train"])
        self.recorder = Recorder(self.args, self.state, logs)
        self._run = Run(
            self,
            self._passes,
            self.reward_funcs,
            self.reward_func_names,
            may_score_early=type(self)._calculate_rewards is DASHTrainer._calculate_rewards,  # not overridden
            prompts=len(self.train_dataset) if isinstance(self.train_dataset, Sized) else None,
            conversations=self._conversations,
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does. True goes on from the last whole checkpoint of the run in `output_dir`."""
        found = self.ranks.agree(checkpoint_to_resume, resume_from_checkpoint, self.args.output_dir, main_only=True)
        try:
            return super().train(found, *args, **kwargs)
        except KeyboardInterrupt:  # whose traceback has hundreds of lines
            last, _ = manifest.find(Path(self.args.output_dir))
            goes_on = (
                f"train(resume_from_checkpoint=True) goes on from {last.name}" if last else "No checkpoint is saved"
            )
            raise KeyboardInterrupt(
                f"stopped after step {self.state.global_step} of {self.state.max_steps}. {goes_on}. In this "
                "process, train() begins a new run with the current weights."
            ) from None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_weights(resume_from_checkpoint, self.model.peft_config if is_peft_model(self.model) else {})
        with loading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if {*getattr(self.model, "peft_config", ())} > {"default"} and not self.is_fsdp_enabled:
            # "default" and other adapters: Transformers does not load "default".
            self.model.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        asked = [{**group} for group in self.optimizer.param_groups]
        with loading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        # DeepSpeed has loaded its optimizer before, from files of its own.
        if self.is_deepspeed_enabled:
            return
        if said := compared(checkpoint, asked, self.optimizer.param_groups, self.state.max_steps):
            self._run.checkpoints.warn(said)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint) -> tuple:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        seams.begin_trackio(self)
        self.model_wrapped.train()  # with `use_kernels`, the layers of training
        with self.accelerator.autocast():
            self._passes.prepare(
                self.model_wrapped,
                models,
                super()._get_per_token_logps_and_entropies,
                vocabulary=min(self.model.config.get_text_config().vocab_size, len(self._tokenizer)),
                pad_token_id=self._tokenizer.pad_token_id,
                device=self.accelerator.device,
                ranks=self.ranks,
                gradients=not (self.is_deepspeed_enabled or self.is_fsdp_enabled),
            )
        return prepared

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        seams.restore_accelerate(self)
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._run.close()

    def get_train_dataloader(self) -> Any:
        dataloader = super().get_train_dataloader()
        if self._run.queue is not None:  # it reads prompts ahead
            seams.use_own_generator(dataloader, self.args.seed)
        return dataloader

    @property
    def _last_loaded_step(self) -> int:
        """The optimizer step of vLLM's weights; −1 if the model's weights have changed since.

        TRL reads it before vLLM samples, and sets it when it sends the weights.
        """
        step, version = self._loaded
        if step != self.state.global_step or not self.ranks.largest(
            version != weights_version(self.model.parameters())
        ):
            return step
        return -1

    @_last_loaded_step.setter
    def _last_loaded_step(self, step: int) -> None:
        self._loaded = step, None if step < 0 else weights_version(self.model.parameters())

    def _get_train_sampler(self, dataset=None) -> EpochOrder:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    # ------------------------------------------------------------------ an optimizer step

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if (queue := self._run.queue) is not None:  # Transformers then reads the rows from the queue
            epoch_iterator = queue.read(num_batches, micro_step=self._step, state=self.state)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step == 0 and not isinstance(self.train_dataset, Sized):
            self.ranks.agree(checks.check_first_step, len(batches), self.args)
        self._run.micro_steps.begin_optimizer_step(self._step, len(batches))
        self._run.checkpoints.begin_optimizer_step()
        return batches, num_items

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """Run one micro-step: any number of forward and backward passes, or none if no row survived.

        `inputs` are the dataset rows of the micro-step. The result is the sum of the losses of the passes; 0 if it is
        not finite. The loss takes `num_items_in_batch` from the inputs of a pass, not from the argument.
        """
        started = time.perf_counter()
        seams.to_training_mode(self)
        run = self._run
        passes = 0
        losses_before = run.pass_metrics.passes
        ends_step = self.accelerator.sync_gradients  # False: a later micro-step ends the optimizer step
        loss = torch.zeros((), device=self.args.device)
        for one, is_last in run.micro_steps.inputs(self._step, inputs):
            passes += 1
            # Only the last pass of a micro-step may synchronise gradients.
            gradients = nullcontext() if is_last else accumulating(self.accelerator, model)
            with self.recorder.timed("train"), gradients, seams.without_casts(self):
                loss = loss + Trainer.training_step(self, model, one, num_items_in_batch)
        if run.micro_steps.rescale != 1:  # a streamed window, whose number of tokens is known only now
            loss = loss * run.micro_steps.rescale
            for one in model.parameters():
                if one.grad is not None:
                    one.grad.mul_(run.micro_steps.rescale)
        checks.check_losses(self, passes, run.pass_metrics.passes - losses_before)
        seams.end_micro_step(self, time.perf_counter() - started, ends_step=ends_step)
        if ends_step:
            if not run.micro_steps.schedule.ran_model:
                seams.leave_out_step(self.accelerator)  # accelerate skips the step, see `_get_grad_norm`
            run.end_optimizer_step()
        return torch.where(loss.isfinite(), loss, 0.0)  # the log adds losses up, so one NaN would stay in it

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Move a pass's inputs to the device. In an evaluation, add scales of 1, for overridden losses."""
        if not self.model.training:
            return {**super()._prepare_inputs(generation_batch), "loss_scale": 1.0, "regularizer_scale": 1.0}
        return {name: to_device(value, self.accelerator.device) for name, value in generation_batch.items()}

    def _compute_loss(self, model, inputs) -> Tensor:
        """Compute TRL's loss of a pass, multiplied by the share of the pass in the optimizer step.

        These steps follow one another::

            run the pass           log-probs, entropies and router loss
            add to the inputs      1. the ratio of these log-probs to the sampler's, if no earlier pass has computed it
                                   (`CorrectionInPass`); 2. values that make TRL compute `per_token_loss`
            compute TRL's loss     from these inputs and results, with the settings of `loss_settings`
            multiply it            `loss_scale` · (TRL's loss − R) + `regularizer_scale` · R, where R is the part of
                                   TRL's loss that comes from the entropy bonus and the router
            keep TRL's figures     of this pass, until the optimizer step ends (`PassMetrics`)

        An override may add a term. In training, divide it by `current_gradient_accumulation_steps`, as TRL does, and
        multiply it by `inputs["regularizer_scale"]`, because the number of passes is not TRL's number of
        micro-batches::

            steps = self.current_gradient_accumulation_steps if self.model.training else 1
            return super()._compute_loss(model, inputs) + my_term(model, inputs) / steps * inputs["regularizer_scale"]
        """
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        scale = inputs["loss_scale"]
        regularizer_scale = inputs["regularizer_scale"]
        compute = self._get_per_token_logps_and_entropies
        results = self._passes.run(compute, model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled)
        log_probs, entropies, aux_loss = results
        self._run.off_policy.see(inputs, log_probs, mask)
        inputs = self._run.collector.log_probs.in_pass.corrected(inputs, log_probs, mask)
        inputs = with_token_loss(inputs, log_probs, mask, self.per_token_loss, self.args)
        regularizers = seams.regularizer(self, mask, entropies, aux_loss)  # before TRL adapts the entropy's coefficient
        settings = loss_settings(self, training=True)
        settings["_get_per_token_logps_and_entropies"] = lambda *_, **__: results  # TRL does not run the pass again
        with seams.with_settings(self, settings), seams.unread_figures(self) as figures:
            loss = scale * super()._compute_loss(model, inputs) + (regularizer_scale - scale) * regularizers
        self._run.pass_metrics.take(figures, inputs["pass"], scale, per_token=inputs["advantages"].dim() == 2)
        return loss

    def per_token_loss(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tensor | None:
        """Compute the loss of each token in a training pass. Override this method for a loss of your own.

        TRL multiplies it by its importance sampling correction, adds KL, entropy bonus and router loss, and averages as
        `loss_type` says. The options of TRL's own ratio (`epsilon`, `epsilon_high`, `delta`,
        `importance_sampling_level`) have no effect. The loss of an evaluation is TRL's.

        Args:
            log_probs: [S, T], the policy's log-probs of T completion tokens in S rows.
            old_log_probs: [S, T], the policy's when the window began; with `aipo`, the sampler's.
            advantages: [S, 1] or [S, T].
            mask: [S, T], 1 = a token that the loss counts.
        Returns:
            [S, T]. `None`: TRL's own loss of each token.
        """
        if self.args.loss_type != "aipo":
            return None
        return aipo(log_probs, old_log_probs, advantages, delta=self.args.aipo_delta)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        """Compute what TRL's method does. In training, leave out rows without tokens and, if possible, padding.

        The calls: `ModelPasses.run` ──► this method or an override ──► `ModelPasses.log_probs` ──► for a padded pass,
        TRL's method.
        """
        compute = self._passes.padded(super()._get_per_token_logps_and_entropies)
        batch = model, input_ids, attention_mask, logits_to_keep
        if not self.model.training:
            return compute(*batch, **kwargs)
        with self.accelerator.autocast() if self._passes.padding_free else nullcontext():  # as TRL's method does itself
            return self._passes.log_probs(compute, *batch, **kwargs)

    def _clip_grad_norm(self, model):
        # Without a model pass there are no gradients to clip, and a GradScaler (fp16) would raise an error.
        return super()._clip_grad_norm(model) if self._run.micro_steps.schedule.ran_model else None

    def _get_grad_norm(self, model, grad_norm=None):
        # Transformers calls this before the optimizer step. A step whose gradient is not finite is skipped here, or by
        # DeepSpeed.
        if not self._run.micro_steps.schedule.ran_model:
            seams.begin_left_out_step(self.accelerator)
            return 0.0
        norm = super()._get_grad_norm(model, grad_norm)  # over all ranks, so that all skip the same steps
        skipped_by_deepspeed = None
        if self.ranks.steps_in_backward:
            skipped_by_deepspeed = self.accelerator.optimizer_step_was_skipped
        elif not math.isfinite(norm):
            model.zero_grad()  # without gradients, the optimizer changes neither parameters nor its own state
        self._run.skipped.count(norm, self.state.global_step + 1, by_deepspeed=skipped_by_deepspeed)
        self.recorder.total("skipped_steps", self._run.skipped.total)
        return norm

    # ------------------------------------------------------------------ sampling, rewards and advantages

    def _tokenize_prompts(self, prompts: list) -> tuple:
        """Check each prompt and its length, and call TRL's method. An error on one rank is raised on all ranks."""
        tokenize = super()._tokenize_prompts

        def checked() -> tuple:
            tokenized = tokenize([checks.plain_prompt(prompt, "A row") for prompt in prompts])
            config = self.model.config
            checks.check_prompt_ids(tokenized[0], self._tokenizer, self.eos_token_ids, checks.context_of(config))
            checks.check_tokens(tokenized[0], config, "A prompt")
            return tokenized

        return self.ranks.agree(checked)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        """Call TRL's method. An error on one rank is raised on all ranks."""
        return self.ranks.agree(super()._generate_single_turn, *args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        """Call all reward functions, as TRL does, and wait for their rewards.

        TRL calls this method in an evaluation, and `Rewards.of_batch` calls it in training.

        Returns:
            [N, F], the rewards of the rows of all ranks. All rewards of a row are NaN if a function, or in an
            evaluation a tool or the environment, failed on the row.
        """
        training = self.model.training
        rows = inputs, prompts, completions, completion_ids_list
        rewards = self._run.rewards.of_all(super()._calculate_rewards, *rows, training=training)
        if training or self._conversations is None:  # in training, `Rewards.of_batch` leaves out rows that failed
            return rewards
        failed = torch.tensor(self._conversations.failed(len(inputs)))
        return unscored(rewards, self.ranks.gather(failed))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, but the completions of a step only once: the log of the whole run comes after the step's."""
        logged = "train_runtime" in logs and self.state.log_history[-1:]
        ends = {"log_completions": False} if logged and logged[0]["step"] == self.state.global_step else {}
        with seams.with_settings(self, ends):
            super().log(logs, start_time)

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Compute advantages by the estimator `advantage_estimator`. Override this method for your own estimator.

        `dash_trl.update.weighted_rewards` turns the columns of `rewards` into one reward per row.

        Args:
            rewards: [N, F], the rewards of N rows (all ranks) by F functions. Groups are complete and their rows are
                adjacent, but a call may get only some groups of a window. NaN = the function does not apply; a row is
                unscored if all its rewards are NaN.
        Returns:
            [N] floats, finite for scored rows.
        """
        return outcome_advantages(
            self.args.advantage_estimator,
            rewards,
            self.reward_weights,
            self.num_generations,
            scale_rewards=self.scale_rewards,
            multi_objective_aggregation=self.multi_objective_aggregation,
        )

    def add_callback(self, callback: Any) -> None:
        checks.check_callbacks([callback])
        super().add_callback(callback)

    # ------------------------------------------------------------------ what the objects of a run call, see `Host`

    def dispatch(self, event: str, rollouts: RolloutBatch) -> None:
        """Call an event of the callbacks, which may change the rollouts. An error on one rank is raised on all."""
        arguments = self.args, self.state, self.control
        others = {
            "model": self.model,
            "processing_class": self._tokenizer,
            "trainer": self,
            "log_extra": self._log_completion_extra,
        }
        for callback in dash_callbacks(self.callback_handler).values():
            self.ranks.agree(call_event, callback, event, rollouts, arguments, others)

    def run_pass(self, inputs: dict[str, Any], *, reference: bool = False) -> tuple:
        """Run the policy or the reference; return what TRL's method returns. The caller turns gradients off."""
        with seams.reference(self) if reference else nullcontext(self.model) as model:
            return self._passes.run(self._get_per_token_logps_and_entropies, model, inputs)

    # ------------------------------------------------------------------ evaluations and checkpoints

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return TRL's dataloader. Its workers end with it: TRL would return the same ones for another dataset."""
        with seams.with_settings(self.args, {"dataloader_persistent_workers": False}):
            return super().get_eval_dataloader(eval_dataset)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Call TRL's method, and go on as before: a callback may evaluate before the figures of its step are logged."""
        seams.restore_accelerate(self)
        training = self.model.training
        logs = self.control.should_log
        metrics = super().evaluate(*args, **kwargs)
        self.control.should_log |= logs
        if training:
            self.model_wrapped.train()
        # None, if no row was scored, cannot be compared with the figure of the best model.
        return {name: math.nan if value is None else value for name, value in metrics.items()}

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run TRL's evaluation, and average rewards without rows that fill up the last batch.

        All figures get the prefix here. TRL's `log` would call the rewards of all datasets `eval_reward`.
        """
        with seams.with_settings(self, loss_settings(self, training=False)), seams.evaluated_rewards(self) as batches:
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = seams.evaluated_figures(self)
        rewards = torch.cat(batches)
        problems = dataloader.dataset
        real = len(problems) * self.num_generations_eval if isinstance(problems, Sized) else len(rewards)
        if real < len(rewards):  # on several ranks, accelerate has filled the last batch up with the first prompts
            figures |= reward_figures(rewards[:real], self.reward_func_names, self.reward_weights)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        return output

    def _generate_and_score_completions(self, inputs: Rows) -> dict[str, Any]:
        """Call TRL's method, which gets the idle environments. Only evaluations call this."""
        seams.begin_trackio(self)
        with nullcontext() if self._conversations is None else self._conversations.for_evaluation():
            return super()._generate_and_score_completions(inputs)

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, *others) -> tuple:
        """Run tool calls and further turns of an evaluation, with the time limits of training."""
        assert self._conversations is not None, "TRL calls this method only if there are tools"
        kinds = self._batch_environments if self.environments else None
        rows = self._conversations.begun(prompt_ids, self.environments, kinds)
        return Rounds(self, self._conversations).go_on(rows, completion_ids, logprobs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        stale = Path(output_dir or self.args.output_dir, "adapter_config.json")
        if stale.exists() and not is_peft_model(self.model):  # its adapter, of an earlier run, would be loaded, too
            stale.rename(f"{stale}.old")
        super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Wait for this window's rewards before saving anything. If waiting fails, no incomplete checkpoint may remain.
        # Callbacks that run during waiting may draw random numbers, which must happen before the random state is saved.
        if not self.args.save_only_model:
            self._run.micro_steps.wait_for_rest()
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        older: list[dict[str, Any]] = []  # they go when this checkpoint is whole
        with (
            self._run.checkpoints.saving(folder),
            seams.with_settings(transformers.trainer, {"rotate_checkpoints": lambda **which: older.append(which)}),
        ):
            self.ranks.agree(super()._save_checkpoint, model, trial)
        for which in older:
            rotate_checkpoints(**which)

    def _save_rng_state(self, output_dir: str) -> None:
        # Transformers calls this on every rank, for each checkpoint that a run can be resumed from.
        super()._save_rng_state(output_dir)
        self._run.checkpoints.save(output_dir, self._step)
