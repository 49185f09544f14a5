"""`ProcessRewardCallback` replaces the outcome advantages of a window by one advantage per token::

    rollouts ──► Segmenter ──► ValueEstimator ──► credit estimator ──► rollouts.advantages [B, T]

B rows of this rank, T completion tokens, K boundaries per row.
"""

import logging
import math
import time
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from dash_trl.callbacks import DASHCallback
from dash_trl.process_rewards.credit import CreditSettings, Rewards, place_rewards
from dash_trl.process_rewards.diagnostics import batch_figures
from dash_trl.process_rewards.episodes import Segmenter
from dash_trl.process_rewards.values import ValueEstimator, ValueRequest, checked_values
from dash_trl.rewards import plain_answer
from dash_trl.rollout import RolloutBatch
from dash_trl.update import ESTIMATORS, check_tensor, registered, weighted_rewards

logger = logging.getLogger(__name__)


class ProcessRewardCallback(DASHCallback):
    """Callback that replaces a row's outcome advantage by one per token, from the values of its prefixes::

        trainer = DASHTrainer(..., callbacks=[ProcessRewardCallback(AnswerLogProbValue())])

    Args:
        value: the value estimator, which computes V(prefix).
        estimator: a credit estimator in `dash_trl.process_rewards.ESTIMATORS`. The default is of "Training-Free Process
            Rewards for LLM RL".
        settings: settings of the credit estimator. None = `CreditSettings()`.
        answer_column: dataset column with the accepted answer: a text, a number or a list of these.
        skip_silent: True = no process rewards for groups whose outcome advantages are all 0, so V alone never drives a
            step. False = none for solved ones only (all rewards above 0): the policy can learn from a problem that no
            completion solves, but learns whatever V pays, right or wrong.
        episodes: options of `Segmenter`, such as `markers`.
    Raises:
        ValueError: if the credit estimator is unknown, or the value does not fit it; in training, if an
            option of `Segmenter` or the answer column is wrong, or your own estimator returns another form.
    """

    def __init__(
        self,
        value: ValueEstimator,
        *,
        estimator: str = "grpo_process",
        settings: CreditSettings | None = None,
        answer_column: str = "answer",
        skip_silent: bool = True,
        **episodes: Any,
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
        self._needs_answers = getattr(self.value, "needs_answers", True)
        signature(Segmenter).bind(None, **episodes)  # the tokenizer is not known yet, but a misspelt option is
        self._episodes = episodes
        self.answer_column = answer_column
        self.skip_silent = skip_silent
        # One pair (boundaries, values) for each row of this rank in the last window, for users who inspect the values.
        self.last: list[tuple[tuple[int, ...], list[float]]] = []
        self._told = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.reward_pipeline:
            raise ValueError(
                "reward_pipeline=True with a ProcessRewardCallback: its figures and checks are of whole windows, but "
                "the groups of a window would come one after the other. Leave one of the two out."
            )
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if rows % args.num_generations:
            raise ValueError(
                f"ProcessRewardCallback needs whole groups, but a process has {rows} completions "
                "(per_device_train_batch_size x steps_per_generation), which is not a multiple of num_generations="
                f"{args.num_generations}: change one of these options."
            )
        tokenizer = kwargs["processing_class"]  # of a multimodal model: its processor
        self._segmenter = Segmenter(getattr(tokenizer, "tokenizer", tokenizer), **self._episodes)

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: RolloutBatch,
        **kwargs,
    ) -> None:
        trainer = kwargs["trainer"]
        started = time.perf_counter()
        group_size = trainer.num_generations
        outcome = weighted_rewards(rollouts.rewards, trainer.reward_weights).masked_fill(~rollouts.scored, torch.nan)
        # The credit estimator gets only the tokens that the policy wrote. So from here on, lengths, boundaries and
        # columns do not count the tokens of tools.
        own = rollouts.loss_mask.bool()
        lengths = own.sum(dim=1)
        silent = (rollouts.advantages == 0).view(-1, group_size).all(dim=1)
        solved = (outcome > 0).view(-1, group_size).all(dim=1)
        silent &= solved | self.skip_silent
        skipped = silent.repeat_interleave(group_size) | outcome.isnan() | (lengths == 0)
        requests = trainer.ranks.agree(self._requests, rollouts, ~skipped)
        found = checked_values(self.value(requests, trainer), requests, self.value)
        pairs = zip(requests, found, strict=True)
        self.last = [(request.boundaries or (0,), row or [math.nan]) for request, row in pairs]

        before = torch.nn.functional.pad(own.cumsum(dim=1), (1, 0))  # the number of the policy's tokens before a token
        values = [row for _, row in self.last]
        rewards = place_rewards(
            [before[row, list(at)].tolist() for row, (at, _) in enumerate(self.last)],
            values,
            lengths,
            outcome,
            rollouts.advantages,
            group_size=group_size,
            sum_over_ranks=trainer.ranks.exact_sum,
        )
        credit = trainer.ranks.agree(self._credit, rewards)
        rollouts.advantages = credit.new_zeros(own.shape).masked_scatter(own, credit[rewards.mask]).float()
        figures = batch_figures(rewards, values, credit, skipped=skipped)
        trainer.recorder.log({**figures, "time/values": time.perf_counter() - started})
        episodes = figures.get("process/episodes", math.inf)  # no row was asked for
        if not self._told and (episodes <= 1 or episodes < math.inf and not figures["process/valued_rows"]):
            self._told = True
            logger.warning(
                f"There is no process reward: rows have {episodes:.1f} episodes on average (1 or less: no step is "
                f"recognised, so set `markers`), and {figures['process/valued_rows']:.0%} of them have a value at both "
                "their beginning and their end (0%: are the answers empty, or does the value return only NaN?)."
            )

    def _requests(self, rollouts: RolloutBatch, asked: Tensor) -> list[ValueRequest]:
        """Return one request for each row of this rank; where `asked` [B] is False, it has no boundaries."""
        requests = []
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


def accepted_answers(example: dict[str, Any], column: str) -> tuple[str, ...]:
    """Return the accepted answers of a dataset row; of a text with `####`, as in GSM8K, what follows the last one.

    None, NaN and empty texts are left out. The `column` has a value that `plain_answer` reads, or a list of these.

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
    found = dict.fromkeys(text.rsplit("####", 1)[-1].strip() for text in texts)  # equal ones would count twice
    return tuple(filter(None, found))
