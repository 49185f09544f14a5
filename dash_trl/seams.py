"""TRL's internals that DASH reads or sets: its model passes while it samples, its step counter, its logs.

What is more than a method that is overridden or an attribute that is read; each with a contract test on a plain
`GRPOTrainer` (`tests/test_seams.py`), so that a new TRL that changes one fails there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import nanstd, shuffle_sequence_dict

from dash_trl.update import ScaledCoefficient


class Instead:
    """An object as one of its own methods sees it, with other values of some attributes.

    What the method sets is set on the object; the object itself never has the other values.
    """

    def __init__(self, target: Any, **values: Any):
        vars(self).update(_target=target, _values=values)

    def __getattr__(self, name: str) -> Any:  # what is not found here
        values = vars(self)["_values"]
        return values[name] if name in values else getattr(vars(self)["_target"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_target"], name, value)


def sample(trainer: Any, examples: list[dict[str, Any]], method: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """TRL's sampling and scoring without its model passes, which wait until the filter has spoken.

    Args:
        method: `_generate_and_score_completions`, TRL's or of a class between, not bound to the trainer.
    """
    muted = Instead(
        trainer,
        beta=0.0,
        vllm_importance_sampling_correction=False,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (None, None, None),
    )
    return method(muted, examples)


class Decoder:
    """TRL's decoding: of some rows of a batch as soon as they have come, and each row once.

    Args:
        method: `_generate`, TRL's or of a class between, not bound to the trainer.
    """

    def __init__(self, trainer: Any, method: Callable[..., tuple]):
        self._texts: dict[tuple, str] = {}
        self._messages: dict[tuple, Any] = {}
        tokenizer = Instead(
            trainer._tokenizer,
            batch_decode=self._batch_decode,
            decode=lambda ids, **settings: self._batch_decode([ids], **settings)[0],
            parse_response=self._parse_response,
        )
        self._tokenizer, self._method = trainer._tokenizer, method
        self._trainer = Instead(trainer, processing_class=tokenizer, _tokenizer=tokenizer)

    def completions(
        self, prompts: list[Any], prompt_ids: Sequence[list[int]], completion_ids: list[list[int]]
    ) -> list[Any]:
        """Of rows that have been sampled, as they are in what `generate` returns; the trainer is as it was."""
        alone = Instead(
            self._trainer,
            accelerator=SimpleNamespace(device="cpu", gather=lambda rows: rows),
            state=SimpleNamespace(num_input_tokens_seen=0),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _tokenize_prompts=lambda *args: (prompt_ids, None, {}),
            _generate_single_turn=lambda *args: (completion_ids, None),
        )
        return self._method(alone, prompts)[3]

    def generate(self, prompts: list[Any]) -> tuple:
        """The method on the whole batch; what was decoded is not decoded again."""
        return self._method(self._trainer, prompts)

    def _batch_decode(self, sequences: Sequence[list[int]], **settings: Any) -> list[str]:
        rows = [tuple(ids) for ids in sequences]
        new = [list(ids) for ids in dict.fromkeys(rows) if ids not in self._texts]
        if new:
            texts = self._tokenizer.batch_decode(new, **settings)
            self._texts.update(zip(map(tuple, new), texts, strict=True))
        return [self._texts[ids] for ids in rows]

    def _parse_response(self, ids: list[int], **settings: Any) -> Any:
        row = tuple(settings.get("prefix", ())), tuple(ids)
        if row not in self._messages:
            self._messages[row] = self._tokenizer.parse_response(ids, **settings)
        return deepcopy(self._messages[row])  # TRL changes it


def seen_as(trainer: Any, settings: dict[str, Any]) -> Any:
    """The trainer as one of TRL's methods sees it that computes with other settings; itself where there are none.

    Args:
        settings: attributes of the trainer, and `delta`, which TRL reads from its `args`.
    """
    if not settings:
        return trainer
    others = {name: value for name, value in settings.items() if name != "delta"}
    if "delta" in settings:
        others["args"] = Instead(trainer.args, delta=settings["delta"])
    return Instead(trainer, **others)


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


def sampled_by(trainer: Any, rows: int) -> Tensor:
    """[rows, 2] int64: the optimizer steps of the oldest and newest weights that sampled the last batch."""
    own = getattr(getattr(trainer, "vllm_generation", None), "policy_version", None)  # of a `VLLMPool`
    if own is not None and trainer.rollout_func is None:
        return own
    step = trainer._last_loaded_step if trainer.use_vllm else trainer.state.global_step
    return torch.full((rows, 2), step)


@dataclass(frozen=True)
class Generated:
    """What `_generate` returned for a window before its time, and what it logged.

    Attributes:
        policy_version: [B, 2], see `sampled_by`. tokens: by which it counted up those of the run.
    """

    output: tuple[Any, ...]
    policy_version: Tensor
    metrics: dict[str, list[float]]
    tokens: int


def generate_apart(trainer: Any, generate: Callable[[Any], tuple[Any, ...]]) -> Generated:
    """Rollouts of a window that has not begun, without a trace in the logs of the one that has.

    Args:
        generate: TRL's `_generate` for its prompts, not bound to the trainer.
    """
    seen, metrics = trainer.state.num_input_tokens_seen, {**trainer._metrics, "train": defaultdict(list)}
    output = generate(Instead(trainer, _metrics=metrics))
    tokens, trainer.state.num_input_tokens_seen = trainer.state.num_input_tokens_seen - seen, seen
    return Generated(output, sampled_by(trainer, len(output[0])), metrics["train"], tokens)


def log_generated(trainer: Any, generated: Generated) -> None:
    """Its window has begun: what it logged is logged."""
    metrics = trainer._metrics["train"]
    for name, values in generated.metrics.items():
        metrics[name].extend(values)
    trainer.state.num_input_tokens_seen += generated.tokens
    metrics["num_tokens"] = [trainer.state.num_input_tokens_seen]


def begin_anew(trainer: Any) -> None:
    """No micro-step has run, no number waits for the next log, and vLLM has no weights of this run.

    Nor has the loss scaler (fp16) unscaled gradients, as it has where a step was interrupted.
    """
    if (scaler := trainer.accelerator.scaler) is not None:
        scaler._per_optimizer_states.clear()
    trainer._step, trainer._current_train_step_time, trainer._last_loaded_step = 0, 0.0, -1
    trainer._entropy_window_stats = None
    for pending in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
        pending.clear()


def count_pass_time(trainer: Any, seconds: float) -> None:
    """Seconds of a micro-step's earlier passes: TRL times the last one only."""
    trainer._current_train_step_time += seconds


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


def withhold_rewards(trainer: Any) -> dict[str, list[Any]]:
    """What TRL logged of the last batch without its rewards is not logged, its table of completions neither.

    Returns:
        The prompts and completions of all ranks, for `relog_rewards`.
    """
    metrics, logs = trainer._metrics["train"], trainer._logs
    for name in _reward_metrics(trainer):
        metrics[name].pop()
        if not metrics[name]:
            del metrics[name]
    withheld = {name: list(logs[name]) for name in ("prompt", "completion")}
    for logged in (*logs["rewards"].values(), *(logs[name] for name in (*withheld, "advantages"))):
        logged.clear()
    logs["extra"].clear()
    return withheld


def _reward_metrics(trainer: Any) -> list[str]:
    functions = [f"rewards/{name}/{figure}" for name in trainer.reward_func_names for figure in ("mean", "std")]
    return [*functions, "reward", "reward_std", "frac_reward_zero_std"]


def relog_rewards(trainer: Any, rewards: Tensor, withheld: dict[str, list[Any]]) -> None:
    """A batch with its rewards, and with what reward functions logged; its advantages are left to `relog_advantages`.

    Args:
        rewards: [N, F], the rows of all ranks; NaN = not applicable or unscored. withheld: see `withhold_rewards`.
    """
    metrics, logs = trainer._metrics["train"], trainer._logs
    for name, rows in withheld.items():  # the tables have room for one batch: an evaluation's rows leave them
        logs[name].extend(rows)
    logs["advantages"].extend([torch.nan] * len(rewards))
    for number, name in enumerate(trainer.reward_func_names):
        column = rewards[:, number]
        metrics[f"rewards/{name}/mean"].append(column.nanmean().item())
        metrics[f"rewards/{name}/std"].append(nanstd(column).item())
        logs["rewards"][name].extend(column.tolist())
    total = (rewards * trainer.reward_weights.to(rewards.device)).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = torch.nan
    metrics["reward"].append(total.nanmean().item())
    metrics["reward_std"].append(nanstd(total).item())
    metrics["frac_reward_zero_std"].append(torch.nan)

    own = len(rewards) // trainer.accelerator.num_processes
    for column in sorted(set(gather_object(list(trainer._pending_extra_logs)))):
        logs["extra"][column].extend(gather_object(trainer._pending_extra_logs.get(column, [None] * own)))
    for name in sorted(set(gather_object(list(trainer._pending_metrics)))):
        values = [one for rank in gather_object([trainer._pending_metrics.get(name, [])]) for one in rank]
        metrics[name].append(sum(values) / len(values))
    trainer._pending_extra_logs.clear()
    trainer._pending_metrics.clear()


def relog_advantages(trainer: Any, advantages: list[float], zero_std: Tensor) -> None:
    """The window's advantages in place of those that TRL logged from its own.

    Args:
        advantages: of the rows of all ranks. zero_std: [groups] bool, True = the group has no signal.
    """
    logged = trainer._logs["advantages"]
    for i, value in enumerate(reversed(advantages), 1):
        logged[-i] = value
    trainer._metrics["train"]["frac_reward_zero_std"][-1] = zero_std.float().mean().item()
