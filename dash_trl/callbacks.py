"""`DASHCallback`: a `TrainerCallback` with more events, which see rollouts, rewards and advantages."""

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

# A method counts as misspelt if its name is at least this similar to the name of an event (difflib's ratio). The ratio
# of `on_advantage` is 0.96; that of `on_train_epoch_end`, an event of other libraries, is 0.80.
MISSPELT = 0.9


@dataclass(frozen=True)
class SampledGroup:
    """The completions of one prompt, as soon as a vLLM server has sampled all of them.

    Attributes:
        number: number of the generation batch that the group belongs to, in the order in which batches are sampled.
        examples: the dataset row of each completion.
        prompt_ids: token ids of each completion's prompt.
        completion_ids: token ids of each completion.
    """

    number: int
    examples: list[dict[str, Any]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]


class DASHCallback(TrainerCallback):
    """A callback that can read and change rollouts between sampling and filtering.

    On every rank, the trainer calls `on_rollouts_sampled`, `on_rewards` and `on_advantages`, in this order, once per
    generation batch, with this rank's rows in the order of their groups. Each event may change its field in place:
    tokens and masks, rewards, or advantages. The keyword arguments are those of every `TrainerCallback` event (`model`,
    `processing_class`, …) and `trainer`. Collectives and model passes are allowed if all ranks run the same number of
    them. Evaluations use TRL's code and have no such events.

    If an event leaves a field with a wrong shape or dtype, the trainer raises a `ValueError` that names the callback.

    Attributes:
        per_group: True = the result of the callback for a group does not depend on other groups. Two options need
            that: with `reward_pipeline`, `on_rewards` and `on_advantages` get some groups at a time, as their rewards
            come; with `max_num_gen_batches`, they get the groups of one round.
        watches_groups: True = the trainer calls `on_group_sampled`.
    Raises:
        ValueError: when a subclass is defined, if the name of a method resembles that of an event; when a trainer is
            created with the callback, if the trainer is not a `DASHTrainer`. In both cases, methods would never be
            called, without any message.
    """

    per_group = False
    watches_groups = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            meant = misspelt(name, (*ROLLOUT_EVENTS, *TRAINER_EVENTS))
            if name.startswith("on_") and callable(value) and meant not in (None, name):
                raise ValueError(
                    f"{cls.__name__}.{name} is no event, so no trainer calls it. Rename it to {meant}. If you call it "
                    "yourself, give it a name that does not resemble an event's."
                )

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise an error if the trainer is not a `DASHTrainer`, because other trainers call no rollout events.

        Raises:
            ValueError: if the trainer's `args` is not a `DASHConfig`.
        """
        if not isinstance(args, DASHConfig):
            raise ValueError(
                f"{type(self).__name__} is a DASHCallback, but this trainer sends no {', '.join(ROLLOUT_EVENTS)}, so "
                "it would do nothing. Train with dash_trl.DASHTrainer, or derive the callback from TrainerCallback."
            )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of this callback for a checkpoint; `None` = the callback has no state.

        The state consists of tensors, numbers, texts, lists and dicts, so that `torch.load(weights_only=True)` can read
        it. The state must be the same on all ranks, because only that of the first rank is saved. It must not be
        changed after it was returned.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state when a run is resumed from a checkpoint. It is called on every rank.

        Args:
            state: the state that `state_dict` returned when the checkpoint was saved.
        """

    def on_group_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, group: SampledGroup, **kwargs
    ) -> None:
        """Called when a vLLM server has finished a group, while other groups are still sampled.

        It is called on the main thread of one rank, independently of other ranks, so it must not use collectives. It is
        not called for rows with tools or environments.

        Args:
            args: the trainer's `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            group: the group.
            kwargs: `trainer`.
        """

    def on_rollouts_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """Called when the rollouts have been sampled and are in CPU memory.

        To take tokens out of the loss, set or change `tool_mask`, [B, T]. The other masks only mark tokens and padding.

        Args:
            args: the trainer's `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            rollouts: B rows.
            kwargs: see the class.
        """

    def on_rewards(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: ScoredRollouts, **kwargs
    ) -> None:
        """Called when the rewards have come. It may change `rollouts.rewards`, [B, F].

        NaN = the function does not apply. A row in which all F rewards are NaN is unscored.

        Args:
            args: the trainer's `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            rollouts: B rows with rewards.
            kwargs: see the class.
        """

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: CreditedRollouts,
        **kwargs,
    ) -> None:
        """Called when the advantages are computed. It may change `rollouts.advantages`, [B].

        For per-token credit, replace `rollouts.advantages` with a tensor [B, T].

        Args:
            args: the trainer's `DASHConfig`.
            state: the `TrainerState`.
            control: the `TrainerControl`.
            rollouts: B rows with advantages.
            kwargs: see the class.
        """


def dispatch(
    event: str,
    rollouts: RolloutBatch,
    callbacks: Iterable[DASHCallback],
    ranks: Ranks,
    arguments: tuple[Any, Any, Any],
    others: Mapping[str, Any],
) -> None:
    """Call an event of each callback. An error on one rank is raised on all ranks.

    Args:
        event: name of the event.
        rollouts: the rows, which callbacks may change in place.
        callbacks: the callbacks, in the order in which they are called.
        ranks: the ranks of the run.
        arguments: `args`, `state` and `control`.
        others: the keyword arguments of the event.
    Raises:
        ValueError: if a callback left a field with a wrong shape or dtype, or if it changed the loss tokens after they
            had been counted.
    """
    for callback in callbacks:
        ranks.agree(partial(_call, callback, event, rollouts, arguments, others))


def _call(callback: DASHCallback, event: str, rollouts: RolloutBatch, arguments: tuple, others: Mapping) -> None:
    before, loss_mask = rollouts.tensors(), rollouts.loss_mask.clone()
    getattr(callback, event)(*arguments, rollouts, **others)
    rollouts.validate(like=before, culprit=f"{type(callback).__name__}.{event}")
    if event != "on_rollouts_sampled" and not (loss_mask == rollouts.loss_mask).all():
        raise ValueError(
            f"{type(callback).__name__}.{event} changed which tokens the loss counts, but they are counted already "
            "(the loss divides by their number). Change completion_mask and tool_mask in on_rollouts_sampled."
        )


def _named(callbacks: Iterable[DASHCallback]) -> Iterator[tuple[str, DASHCallback]]:
    """Yield each callback with a name: that of its class, then `Name-2` for the second callback of a class."""
    count: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        count[name] += 1
        yield name if count[name] == 1 else f"{name}-{count[name]}", callback


def states_of(callbacks: Iterable[DASHCallback]) -> dict[str, Any]:
    """Return the states of the callbacks that have a state, by the names of the callbacks. States are not copied.

    Args:
        callbacks: the callbacks, in the order of the run.
    """
    found = {name: callback.state_dict() for name, callback in _named(callbacks)}
    return {name: state for name, state in found.items() if state is not None}


def restore_states(callbacks: Iterable[DASHCallback], states: dict[str, Any]) -> list[str]:
    """Load the states into the callbacks.

    Args:
        callbacks: the callbacks, in the same order as when the states were saved.
        states: the result of `states_of`.
    Returns:
        The names of the callbacks that have a state, but are not in `states`.
    """
    missing = []
    for name, callback in _named(callbacks):
        if name in states:
            callback.load_state_dict(states[name])
        elif callback.state_dict() is not None:
            missing.append(name)
    return missing


def misspelt(name: str, events: Iterable[str]) -> str | None:
    """Return the event whose name equals or closely resembles `name`; `None` if there is no such event.

    Args:
        name: name of a method.
        events: names of the events.
    """
    return next(iter(get_close_matches(name, list(events), n=1, cutoff=MISSPELT)), None)
