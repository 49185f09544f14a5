"""`DASHCallback`: a `TrainerCallback` with three more events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dash_trl.config import DASHConfig

if TYPE_CHECKING:
    from dash_trl.distributed import Ranks
    from dash_trl.rollout import CreditedRollouts, RolloutBatch, ScoredRollouts

ROLLOUT_EVENTS = ("on_group_sampled", "on_rollouts_sampled", "on_rewards", "on_advantages")
TRAINER_EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))

# A name this similar to an event's (difflib's ratio) is one with a slip: `on_advantage` has 0.96, `on_train_epoch_end`,
# an event of other libraries, 0.80.
MISSPELT = 0.9


@dataclass(frozen=True)
class SampledGroup:
    """Completions of one prompt, as soon as a server has sampled all of them.

    Attributes:
        number: of their generation batch, in the order in which these are sampled.
        examples: the dataset row of each. prompt_ids, completion_ids: token ids of each.
    """

    number: int
    examples: list[dict[str, Any]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]


class DASHCallback(TrainerCallback):
    """A callback that sees the rollouts on their way from birth to the filter.

    The three events follow each other once per generation batch, on every rank, with this rank's rows in the order of
    their groups. Each may change in place the field that it is about; the keyword arguments are those of every
    `TrainerCallback` event (`model`, `processing_class`, …) and `trainer`. What an event leaves with a wrong shape or
    dtype is a `ValueError` that names the callback. Collectives and model passes are allowed if all ranks do the same
    number of them. Evaluation runs TRL's path and has no such events.

    Attributes:
        per_group: what it does with a group depends on no other one. With `reward_pipeline`, `on_rewards` and
            `on_advantages` get some groups at a time, as their rewards come; with `max_num_gen_batches`, those of a
            round. There a callback has to say that it may.
        watches_groups: `on_group_sampled` is to be called.

    Raises:
        ValueError: when a subclass is defined, if the name of a method is that of an event with a slip; when a trainer
            is made with it, if that is no `DASHTrainer`. Such methods would never be called, without a word.
    """

    per_group = False
    watches_groups = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            meant = misspelt(name, (*ROLLOUT_EVENTS, *TRAINER_EVENTS))
            if name.startswith("on_") and callable(value) and meant not in (None, name):
                raise ValueError(
                    f"{cls.__name__}.{name} is no event, so that no trainer calls it. Rename it to {meant}; a method "
                    "that you call yourself needs a name that resembles no event."
                )

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raises in a trainer that sends no rollout events: it is not a `DASHTrainer` if it has no `DASHConfig`."""
        if not isinstance(args, DASHConfig):
            raise ValueError(
                f"{type(self).__name__} is a DASHCallback, but this trainer sends no {', '.join(ROLLOUT_EVENTS)}: it "
                "would do nothing. Train with dash_trl.DASHTrainer, or derive the callback from TrainerCallback."
            )

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of it beside the generation window; None: nothing.

        Tensors, numbers, texts, lists and dicts, so that `torch.load(weights_only=True)` reads it; the same on all
        ranks, of which the first one's is saved; not changed after it was handed out.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the checkpoint that a run is resumed from, on every rank."""

    def on_group_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, group: SampledGroup, **kwargs
    ) -> None:
        """A vLLM server has finished a group, while others are sampled; not with tools or environments.

        Called on the main thread of one rank, without the others: no collectives here.
        """

    def on_rollouts_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """The rollouts are in CPU memory. A `tool_mask`, [B, T], takes tokens out of the loss; the other masks say
        where tokens are.
        """

    def on_rewards(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: ScoredRollouts, **kwargs
    ) -> None:
        """`rollouts.rewards`, [B, F], is there to be changed. NaN = not applicable; a row of NaN is unscored."""

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: CreditedRollouts,
        **kwargs,
    ) -> None:
        """`rollouts.advantages`, [B], is there to be changed, or replaced by [B, T] for per-token credit."""


def dispatch(
    event: str,
    rollouts: RolloutBatch,
    callbacks: Iterable[DASHCallback],
    ranks: Ranks,
    arguments: tuple[Any, Any, Any],
    others: Mapping[str, Any],
) -> None:
    """Hand the rollouts to each callback; what fails on one rank is an error on all.

    Args:
        arguments: `args`, `state`, `control`. others: the keyword arguments.
    Raises:
        ValueError: a callback left a field unusable, or took tokens out of the loss after they had been counted.
    """
    for callback in callbacks:
        ranks.agree(partial(_call, callback, event, rollouts, arguments, others))


def _call(callback: DASHCallback, event: str, rollouts: RolloutBatch, arguments: tuple, others: Mapping) -> None:
    before, loss_mask = rollouts.tensors(), rollouts.loss_mask.clone()
    getattr(callback, event)(*arguments, rollouts, **others)
    rollouts.validate(like=before, culprit=f"{type(callback).__name__}.{event}")
    if event != "on_rollouts_sampled" and not (loss_mask == rollouts.loss_mask).all():
        raise ValueError(
            f"{type(callback).__name__}.{event} changed which tokens the loss counts, after their number was taken "
            "for its normaliser. Change completion_mask and tool_mask in on_rollouts_sampled."
        )


def _named(callbacks: Iterable[DASHCallback]) -> Iterator[tuple[str, DASHCallback]]:
    """By the names of their classes; the second of one class is `Name-2`."""
    count: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        yield name if count[name] == 1 else f"{name}-{count[name]}", callback


def states_of(callbacks: Iterable[DASHCallback]) -> dict[str, Any]:
    """What a checkpoint keeps of those that have a state; not copied."""
    found = {name: callback.state_dict() for name, callback in _named(callbacks)}
    return {name: state for name, state in found.items() if state is not None}


def restore_states(callbacks: Iterable[DASHCallback], states: dict[str, Any]) -> list[str]:
    """Load them, and name those that have a state, but none here."""
    missing = []
    for name, callback in _named(callbacks):
        if name in states:
            callback.load_state_dict(states[name])
        elif callback.state_dict() is not None:
            missing.append(name)
    return missing


def misspelt(name: str, events: Iterable[str]) -> str | None:
    """The event that `name` is meant to be, if it is one with a slip or without."""
    return next(iter(get_close_matches(name, list(events), n=1, cutoff=MISSPELT)), None)
