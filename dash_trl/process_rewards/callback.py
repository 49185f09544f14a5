"""`ProcessRewardCallback` replaces the outcome advantages of a window by one advantage per token::

    rollouts ──► Segmenter ──► ValueEstimator ──► credit estimator ──► rollouts.advantages [B, T]

B rows of this rank, T completion tokens, K boundaries per row.
"""

import math
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerControl, TrainerState, TrainingArguments

from dash_trl.callbacks import DASHCallback
from dash_trl.process_rewards.credit import CreditSettings, Rewards, check_settings, place_rewards
from dash_trl.process_rewards.diagnostics import Diagnostics, batch_figures, process_metrics
from dash_trl.process_rewards.episodes import EPISODE_MARKERS, FINAL_ANSWER, Episodes, Markers, Segmenter
from dash_trl.process_rewards.values import ValueEstimator, ValueRequest, checked_values
from dash_trl.rewards import plain_answer
from dash_trl.rollout import CreditedRollouts, RolloutBatch
from dash_trl.update import ESTIMATORS, check_tensor, registered, weighted_rewards


class ProcessRewardCallback(DASHCallback):
    """Callback that replaces a row's outcome advantage by one per token, from the values of its prefixes::

        trainer = DASHTrainer(..., callbacks=[ProcessRewardCallback(AnswerLogProbValue())])

    Values are computed after sampling; those of `AnswerLogProbValue` while a `RewardRunner` scores one completion at a
    time.

    Args:
        value: the value estimator, which computes V(prefix).
        estimator: a credit estimator in `dash_trl.process_rewards.ESTIMATORS`. The default is of "Training-Free Process
            Rewards for LLM RL".
        settings: settings of the credit estimator. None = `CreditSettings()`.
        markers: see `Segmenter`.
        max_episode_tokens: see `Segmenter`.
        min_episode_tokens: see `Segmenter`.
        final_answer: see `Segmenter`.
        answer_column: dataset column with the accepted answer: a text, a number or a list of these.
        skip_silent: True = no process rewards for groups whose outcome advantages are all 0, so V alone never drives a
            step. False = none for solved ones only (all rewards above 0): the policy can learn from a problem that no
            completion solves, but learns whatever V pays, right or wrong.
    Raises:
        ValueError: if the credit estimator is unknown, or the value or a setting does not fit it; in training, if an
            argument of `Segmenter` is wrong, the answer column is missing, or your own estimator returns something of
            the wrong form.
    """

    def __init__(
        self,
        value: ValueEstimator,
        *,
        estimator: str = "grpo_process",
        settings: CreditSettings | None = None,
        markers: Markers = EPISODE_MARKERS,
        max_episode_tokens: int = 256,
        min_episode_tokens: int = 1,
        final_answer: str = FINAL_ANSWER,
        answer_column: str = "answer",
        skip_silent: bool = True,
    ):
        self.value = value
        self.settings = CreditSettings() if settings is None else settings
        self.estimator = estimator
        self.per_group = registered(estimator, "credit", "estimator").per_group
        if isinstance(self.value, type) or not callable(self.value):
            raise ValueError(
                f"value={self.value!r} cannot estimate V(prefix): pass AnswerLogProbValue(...), MonteCarloValue(...) "
                "or another instance or function that takes (requests, trainer). The name of a credit "
                "estimator goes into estimator='...', and a force prompt into AnswerLogProbValue('...')."
            )
        if self.estimator in ("gae", "vineppo") and getattr(self.value, "space", None) not in ("probability", "reward"):
            raise ValueError(
                f"estimator={self.estimator!r} compares values with the outcome, so both must have the same unit: pass "
                "value=AnswerLogProbValue(space='probability') or MonteCarloValue(). A value estimator of your own "
                "needs the attribute space = 'probability' or 'reward'."
            )
        check_settings(estimator, self.settings)
        self._needs_answers = getattr(self.value, "needs_answers", True)
        self.overlaps_rewards = not getattr(self.value, "needs_rewards", True)
        self._new_segmenter = partial(
            Segmenter,
            markers=markers,
            max_episode_tokens=max_episode_tokens,
            min_episode_tokens=min_episode_tokens,
            final_answer=final_answer,
        )
        self.answer_column = answer_column
        self.skip_silent = skip_silent
        # One pair (boundaries, values) for each row of this rank in the last window, for users who inspect the values.
        self.last: list[tuple[tuple[int, ...], list[float]]] = []
        self._diagnostics = Diagnostics()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.reward_pipeline:  # type: ignore[attr-defined]
            raise ValueError(
                "reward_pipeline=True with a ProcessRewardCallback: its figures and checks are of whole windows, but "
                "the groups of a window would come one after the other. Leave one of the two out."
            )
        rows = args.per_device_train_batch_size * args.steps_per_generation  # type: ignore[attr-defined]
        if rows % args.num_generations:  # type: ignore[attr-defined]
            raise ValueError(
                f"ProcessRewardCallback needs whole groups, but a process has {rows} completions "
                "(per_device_train_batch_size x steps_per_generation), which is not a multiple of num_generations="
                f"{args.num_generations}: change one of these options."  # type: ignore[attr-defined]
            )
        # Set here and not in __init__, because a run that was interrupted within a window leaves something in them.
        self._seconds = 0.0  # the time that values and credit of the current window take
        self._early: dict[tuple[Any, ...], list[float]] = {}  # `_key` of a request → its values
        tokenizer = kwargs["processing_class"]  # of a multimodal model: its processor
        self._segmenter = self._new_segmenter(getattr(tokenizer, "tokenizer", tokenizer))

    def on_rollouts_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, rollouts: RolloutBatch, **kwargs
    ) -> None:
        """Compute the values of all rows while reward functions run in the background."""
        trainer = kwargs["trainer"]
        started = time.perf_counter()
        if self.overlaps_rewards and kwargs["rewards_run"]:
            requests, values = self._values(rollouts, rollouts.loss_mask.any(dim=1), trainer)
            self._early.update(zip(map(_key, requests), values, strict=True))
            self._seconds += time.perf_counter() - started

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: CreditedRollouts,
        **kwargs,
    ) -> None:
        trainer = kwargs["trainer"]
        started = time.perf_counter()
        group_size = trainer.num_generations
        width = max(rollouts.completion_ids.shape[1], 1)
        outcome = weighted_rewards(rollouts.rewards, trainer.reward_weights).masked_fill(~rollouts.scored, torch.nan)
        # The credit estimator gets only the tokens that the policy wrote. So from here on, lengths, boundaries and
        # columns do not count the tokens of tools.
        own = rollouts.loss_mask.bool()
        lengths = own.sum(dim=1)
        silent = (rollouts.advantages == 0).view(-1, group_size).all(dim=1)
        solved = (outcome > 0).view(-1, group_size).all(dim=1)
        silent &= solved | self.skip_silent
        skipped = silent.repeat_interleave(group_size) | outcome.isnan() | (lengths == 0)
        requests, found = self._values(rollouts, ~skipped, trainer)
        pairs = zip(requests, found, strict=True)
        self.last = [(request.boundaries or (0,), row or [math.nan]) for request, row in pairs]

        before = torch.nn.functional.pad(own.cumsum(dim=1), (1, 0))  # the number of the policy's tokens before a token
        places = [before[row, list(at)] for row, (at, _) in enumerate(self.last)]
        boundaries = pad_sequence(places, batch_first=True, padding_value=-1)
        levels = [torch.tensor(row) for _, row in self.last]
        values = pad_sequence(levels, batch_first=True, padding_value=math.nan).double()
        process, ends, per_token, valued = place_rewards(boundaries, values, lengths, width)
        rewards = Rewards(
            process=process,
            ends=ends,
            values=per_token,
            mask=torch.arange(width) < lengths.unsqueeze(1),
            outcome=outcome.double(),
            outcome_advantages=rollouts.advantages.double(),
            valued=valued & ~outcome.isnan(),
            group_size=group_size,
            sum_over_ranks=trainer.ranks.exact_sum,
        )
        credit = trainer.ranks.agree(self._credit, rewards)
        rollouts.advantages = credit.new_zeros(own.shape).masked_scatter(own, credit[rewards.mask]).float()
        if trainer.log_completions:
            kwargs["log_extra"]("credit", self._credit_cells(rollouts, kwargs["processing_class"]))
        figures = batch_figures(rewards, boundaries, values, credit, skipped=skipped)
        self._seconds += time.perf_counter() - started
        trainer.recorder.log({**process_metrics(figures), "time/values": self._seconds})
        self._diagnostics.check(figures, estimator=self.estimator)
        self._seconds = 0.0

    def _credit_cells(self, rollouts: CreditedRollouts, tokenizer: Any) -> list[str]:
        """Return one text per row, with a line per episode: its mean advantage and its text, as in `[+0.52] 7+5=12`."""
        tables = (rollouts.completion_ids, rollouts.loss_mask.bool(), rollouts.advantages)
        cells = []
        for row, (boundaries, _) in enumerate(self.last):
            ids, own, credit = (table[row][rollouts.completion_mask[row].bool()] for table in tables)
            lines = [
                f"[{credit[one][own[one]].mean():+.2f}] {tokenizer.decode(ids[one], skip_special_tokens=True).strip()}"
                for one in Episodes(boundaries, len(ids)).slices()
                if own[one].any()
            ]
            cells.append("\n".join(lines))
        return cells

    def _values(
        self, rollouts: RolloutBatch, asked: Tensor, trainer: Any
    ) -> tuple[list[ValueRequest], list[list[float]]]:
        """Return the requests, and one list of values for each; known values are not computed again."""
        requests = trainer.ranks.agree(self._requests, rollouts, asked)
        # What is known is not used for a row without boundaries: no V is needed there.
        known = [self._early.get(_key(request)) if request.boundaries else None for request in requests]
        for request in requests:  # afterwards, because several rows may have the same tokens
            self._early.pop(_key(request), None)
        rest = [request for request, values in zip(requests, known, strict=True) if values is None]
        found = iter(checked_values(self.value(rest, trainer), rest, self.value))
        return requests, [next(found) if values is None else values for values in known]

    def _requests(self, rollouts: RolloutBatch, asked: Tensor) -> list[ValueRequest]:
        """Return one request for each row of this rank; where `asked` [B] is False, it has no boundaries."""
        requests: list[ValueRequest] = []
        for row, example in enumerate(rollouts.examples):
            tokens = rollouts.completion_mask[row].bool()
            completion = tuple(rollouts.completion_ids[row][tokens].tolist())
            own = None if rollouts.tool_mask is None else tuple(rollouts.tool_mask[row][tokens].tolist())
            requests.append(
                ValueRequest(
                    prompt_ids=tuple(rollouts.prompt_ids[row][rollouts.prompt_mask[row].bool()].tolist()),
                    completion_ids=completion,
                    boundaries=self._segmenter(completion, own).boundaries if asked[row] else (),
                    answers=accepted_answers(example, self.answer_column) if self._needs_answers else (),
                    example=example,
                    own=own,
                )
            )
        return requests

    def _credit(self, rewards: Rewards) -> Tensor:
        """Return the advantages of the credit estimator, [N, T]."""
        credit = ESTIMATORS[self.estimator](rewards, self.settings)
        rows, tokens = rewards.mask.shape
        check_tensor(f"What estimator={self.estimator!r} returned", credit, floats=True, N=rows, T=tokens)
        return credit


def _key(request: ValueRequest) -> tuple[Any, ...]:
    """Return what a completion's values depend on; rows with the same prompt may have different answers."""
    return request.prompt_ids, request.completion_ids, request.answers, request.own


def accepted_answers(example: dict[str, Any], column: str) -> tuple[str, ...]:
    """Return the accepted answers of a dataset row; of a text with `####`, as in GSM8K, what follows the last one.

    None, NaN and empty texts are left out.

    Args:
        example: the dataset row.
        column: column with a value that `plain_answer` reads, or a list of these.
    Raises:
        ValueError: if the column is missing, or `plain_answer` cannot read its value.
    """
    if column not in example:
        raise ValueError(
            f"A dataset row has the columns {sorted(example)}, but not {column!r}, where ProcessRewardCallback looks "
            "for the answer from whose probability V(prefix) is computed. Name the column of your dataset with "
            "ProcessRewardCallback(answer_column=...), or use a value that needs no answer, such as MonteCarloValue()."
        )
    answers = example[column]
    texts = map(plain_answer, answers if isinstance(answers, list | tuple) else [answers])
    return tuple(answer for text in texts if (answer := text.rsplit("####", 1)[-1].strip()))
