"""TRL's internals that DASH reads or sets: the settings of its loss, its step counter, the weights that vLLM has.

What is more than a method that is overridden or an attribute that is read; each with a contract test on a plain
`GRPOTrainer` (`tests/test_seams.py`), so that a new TRL that changes one fails there.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import send_to_device
from huggingface_hub import constants
from torch import Tensor
from transformers.integrations import TrackioCallback
from trl.trainer.utils import shuffle_sequence_dict

from dash_trl.update import ScaledCoefficient


@contextmanager
def with_settings(trainer: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Within it TRL computes with other settings.

    Args:
        settings: attributes of the trainer, and `delta`, which TRL reads from its `args`.
    """
    others = {name: (trainer.args if name == "delta" else trainer, value) for name, value in settings.items()}
    before = {name: getattr(holder, name) for name, (holder, _) in others.items()}
    for name, (holder, value) in others.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, (holder, _) in others.items():
            setattr(holder, name, before[name])


@contextmanager
def regularized(trainer: Any, scale: float) -> Iterator[None]:
    """The coefficients of entropy bonus and router loss times `scale`, where TRL uses them as factors."""
    router = trainer.router_aux_loss_coef
    trainer.router_aux_loss_coef = ScaledCoefficient(router, scale)
    trainer.entropy_coef = ScaledCoefficient(trainer.entropy_coef, scale)
    try:
        yield
    finally:
        trainer.router_aux_loss_coef = router
        trainer.entropy_coef = float(trainer.entropy_coef)  # TRL may have adapted it


def give_late_ratio(inputs: dict[str, Any], ratio: Tensor) -> None:
    """While TRL computes a loss: its importance-sampling ratio, which it reads after the forward pass.

    Args:
        inputs: those of the loss. ratio: [B, T], or [B, 1] of sequences.
    """
    inputs["importance_sampling_ratio"] = ratio


def tool_suffix(trainer: Any, tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """TRL's token ids of tool messages, by a tokenizer that no other thread uses."""
    this: Any = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=trainer.chat_template,
        chat_template_kwargs=trainer.chat_template_kwargs,
    )
    return type(trainer)._get_tool_suffix_ids(this, messages)


def weights_of(trainer: Any) -> int:
    """The optimizer step of the weights by which the trainer samples now."""
    loaded = trainer._last_loaded_step if trainer.use_vllm else -1
    return trainer.state.global_step if loaded < 0 else loaded  # vLLM gets the weights of now before it samples


def sync_weights(trainer: Any) -> None:
    """Give vLLM the weights of now, if it has others, as TRL does before a `rollout_func`."""
    if trainer.use_vllm and trainer.state.global_step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


def vllm_is_behind(trainer: Any) -> None:
    """vLLM has other weights than the model, though no optimizer step was made since it got them."""
    trainer._last_loaded_step = -1


class FirstStates:
    """The states of optimizer and loss scaler before the first run. Each later run begins with them.

    Attributes:
        have_trained: a run was prepared before.
    """

    def __init__(self) -> None:
        self.have_trained = False
        self._states: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def restore(self, optimizer: Any, scaler: Any) -> None:
        """Keeps the states before the first run; gives them back before each later one."""
        for one in (getattr(optimizer, "optimizer", optimizer), scaler):  # within accelerate's
            if self.have_trained and one in self._states:
                one.load_state_dict(deepcopy(self._states[one]))
            elif hasattr(one, "state_dict"):  # not DeepSpeed's placeholder
                self._states[one] = deepcopy(send_to_device(one.state_dict(), "cpu"))


def begin_anew(trainer: Any) -> None:
    """No micro-step has run, no number waits for the next log, its table is empty, vLLM has no weights of this run.

    Nor has the loss scaler (fp16) unscaled gradients, as it has where a step was interrupted.
    """
    if (scaler := trainer.accelerator.scaler) is not None:
        scaler._per_optimizer_states.clear()
    trainer._step, trainer._current_train_step_time, trainer._last_loaded_step = 0, 0.0, -1
    trainer._entropy_window_stats = None
    for pending in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        pending.clear()
    logs = trainer._logs
    rewards = [logs["rewards"][name] for name in trainer.reward_func_names]  # there from the first table on
    for column in (logs["prompt"], logs["completion"], logs["advantages"], logs["extra"], *rewards):
        column.clear()


def begin_trackio(trainer: Any) -> None:
    """TRL's profiler logs to Trackio's run, which Transformers begins with training and ends with it.

    For a run on this machine Trackio would ask the Hub for the user's name, without a time limit.
    """
    remote = trainer.args.trackio_space_id or os.environ.get("TRACKIO_SPACE_ID")
    offline = constants.HF_HUB_OFFLINE
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackioCallback):
            constants.HF_HUB_OFFLINE = offline or not remote
            try:
                callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
            finally:
                constants.HF_HUB_OFFLINE = offline


def count_pass_time(trainer: Any, seconds: float) -> None:
    """Seconds of a micro-step's earlier passes: TRL times the last one only."""
    trainer._current_train_step_time += seconds


def to_training_mode(trainer: Any) -> None:
    """As Transformers' step does, but before a window is sampled: some optimizers swap the weights for it."""
    after_evaluation = not trainer.model_wrapped.training
    trainer.model_wrapped.train()
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # within accelerate's
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
        if after_evaluation:
            vllm_is_behind(trainer)  # it may have the weights of the evaluation


def leave_out_step(accelerator: Any) -> None:
    """No optimizer step follows: accelerate's optimizer steps only if gradients are synchronised."""
    accelerator.gradient_state._set_sync_gradients(False)


def forget_overflow(accelerator: Any) -> None:
    """No optimizer step was skipped: of one that is left out, accelerate tells what became of the step before."""
    for optimizer in accelerator._optimizers:
        optimizer._is_overflow = False
        if optimizer.step_was_skipped:  # by DeepSpeed, whose own optimizer has the flag
            optimizer.optimizer.overflow = False


def step_schedule(accelerator: Any) -> None:
    """Step a learning-rate schedule of DeepSpeed's configuration, which its engine steps with the optimizer only."""
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    if engine is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.step()


def undo_jit_checkpoint(folder: Path) -> None:
    """Remove what `enable_jit_checkpoint` makes before it saves: a checkpoint's folder with a marker in it."""
    with suppress(OSError):  # a folder with more in it is a checkpoint, and stays
        (folder / "checkpoint-is-incomplete.txt").unlink(missing_ok=True)
        folder.rmdir()


def shuffled(rows: int) -> Tensor:
    """[rows] int64: the order in which TRL's shuffle hands rows to the micro-steps; draws its random numbers."""
    return shuffle_sequence_dict({"row": torch.arange(rows)})["row"]
