"""`ProcessRewardCallback` replaces the outcome advantages of a window by one advantage per token::

    rollouts ──► Segmenter ──► ValueEstimator ──► credit estimator ──► rollouts.advantages [B, T]

Letters: B rows of this rank, N rows that the credit estimator sees, T completion tokens, K boundaries per row.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerControl, TrainerState, TrainingArguments

from dash_trl.callbacks import DASHCallback, SampledGroup
from dash_trl.distributed import Ranks
from dash_trl.process_rewards.arguments import named
from dash_trl.process_rewards.credit import (
    ALIKE,
    ESTIMATORS,
    FLOORS,
    SETTINGS,
    CreditSettings,
    Rewards,
    anchor,
    check_settings,
    place_rewards,
)
from dash_trl.process_rewards.diagnostics import Diagnostics, batch_figures, process_metrics
from dash_trl.process_rewards.episodes import EPISODE_MARKERS, FINAL_ANSWER, Episodes, Markers, Segmenter
from dash_trl.process_rewards.picture import credit_lines
from dash_trl.process_rewards.values import AnswerLogProbValue, ValueEstimator, ValueRequest, checked_values
from dash_trl.process_rewards.worth import Evidence, Watch, evidence_of
from dash_trl.rollout import CreditedRollouts, joined
from dash_trl.update import check_tensor, unknown_log_probs, weighted_rewards

logger = logging.getLogger(__name__)


# With these estimators, the credit of a group does not depend on other groups of the window. `reward_pipeline` needs
# such an estimator, because it trains on one part of the window after the other.
PER_GROUP = ("centered_return", "episode", "grpo_process")
WITHOUT_UTILITIES = ("gae", "grpo")  # estimators that do not use the utilities U
# Estimators with a baseline from the same group, so that nothing is learned if all have the same reward.
GROUP_BASELINE = (*PER_GROUP, "grpo", "deepseek_process", "prime_rloo", "rloo", "reinforce_plus_plus_baseline")
CREDIT = "credit"  # name of the column with the credit per episode in TRL's table of completions


@dataclass(frozen=True)
class _Part:
    """The data of one part of a window, from which the figures and the evidence of the whole window are computed.

    The rows are the rows of this rank or, if groups are spread over several ranks, the rows of all ranks.

    Letters: R rows, T tokens that the policy wrote, K boundaries, M groups.

    Attributes:
        rewards: the input of the credit estimator.
        credit: [R, T], the advantages that the credit estimator returned.
        boundaries: [R, K] int, padded with −1.
        values: [R, K], V at each boundary; NaN = missing or not needed.
        skipped: [R] bool, True = V is not needed, because the row is unscored, has no token, or its group is solved.
        groups: [M] int64, the numbers of the groups.
        evidence: the sums that measure how well V predicted the outcomes of these groups.
        entropy: [1, 2], the sum of the entropies of this rank's tokens and the number of these tokens; 0 and 0 if
            entropies are not known.
        alone: True = the rows are the rows of this rank only.
    """

    rewards: Rewards
    credit: Tensor
    boundaries: Tensor
    values: Tensor
    skipped: Tensor
    groups: Tensor
    evidence: Evidence
    entropy: Tensor
    alone: bool


class ProcessRewardCallback(DASHCallback):
    """Replaces the outcome advantages by one advantage per token, computed from the values of each row's prefixes::

        trainer = DASHTrainer(..., callbacks=[ProcessRewardCallback()])

    Values are computed once per completion, after sampling and before the filter. So the policy can learn from a
    problem that no completion solves: if the completions differ in progress, their advantages are not 0 and the filter
    keeps them. With anchored values only `estimator="episode"` pays this progress; with "centered_return", V is a mere
    baseline (see there). A group whose outcomes are all the same then has no scale of its own, so its process rewards
    get the scale of the last windows (`credit._scaled`). If no group of these windows has different outcomes, there is
    no scale, and the advantages of the group stay 0.

    Below, a value estimator *learns* if it has a method `learn`, as `OutcomeValue` does; see `ValueEstimator`.

    Args:
        value: the value estimator, which computes V(prefix). None = `AnswerLogProbValue()`.
        estimator: name of the credit estimator, one of `dash_trl.process_rewards.ESTIMATORS`.
        settings: the `CreditSettings` of the credit estimator. None = `CreditSettings()`, or
            `CreditSettings(process_weight="auto")` if the value estimator learns, the credit estimator has weights and
            `anchored` is not False. With "auto", V has the weight 0 at first, and later a weight that depends on how
            well V predicts outcomes.
        markers: see `Segmenter`.
        max_episode_tokens: see `Segmenter`.
        min_episode_tokens: see `Segmenter`.
        final_answer: see `Segmenter`.
        answer_column: name of the dataset column with the accepted answer, which is a text, a number or a list of
            these. The column is needed only if the value estimator needs answers.
        skip_solved: True = compute no values for solved groups, whose rows then keep their outcome advantages. A group
            is solved if all its completions have the same reward and this reward is at least `solved_reward`. A value
            estimator that learns still learns from solved groups. None = True if the baseline of the credit estimator
            and the trainer's `advantage_estimator` come from the group (`GROUP_BASELINE`), so that the policy cannot
            learn from such a group. With "gae", "reinforce_plus_plus" or a credit estimator of your own, solved groups
            may have advantages: None = False. So pass False if your own `compute_advantages` has another baseline.
        solved_reward: number. A completion is solved if its weighted sum of rewards is at least this number. None =
            for each completion, the sum of the positive `reward_weights` of the reward functions that apply to the
            completion (their reward is not NaN). None is right if the highest reward of each function is 1.
        anchored: True = make the outcome the last value, so that the process rewards of a row add up to outcome − V_0;
            see `dash_trl.process_rewards.credit.anchor`. Then a policy that learns to raise V gains nothing without a
            better outcome. None = True if the value estimator learns or `process_weight` is "auto", and both estimators
            allow it; otherwise False.
    Raises:
        ValueError: if the credit estimator is unknown, or a setting does not fit the estimators; when training begins,
            if an argument of `Segmenter` is wrong; during training, if the answer column or the servers are missing,
            or if an estimator of your own returns values or advantages of the wrong form.
    """

    def __init__(
        self,
        value: ValueEstimator | None = None,
        *,
        estimator: str = "centered_return",
        settings: CreditSettings | None = None,
        markers: Markers = EPISODE_MARKERS,
        max_episode_tokens: int = 256,
        min_episode_tokens: int = 16,
        final_answer: str = FINAL_ANSWER,
        answer_column: str = "answer",
        skip_solved: bool | None = None,
        solved_reward: float | None = None,
        anchored: bool | None = None,
    ):
        if estimator not in ESTIMATORS:
            raise ValueError(
                f"estimator={estimator!r} is unknown: use one of {', '.join(ESTIMATORS)}. Register an estimator of "
                "your own under a name: dash_trl.process_rewards.ESTIMATORS['mine'] = function."
            )
        self.value = AnswerLogProbValue() if value is None else value
        if isinstance(value, type) or not callable(self.value):
            raise ValueError(
                f"value={value!r} cannot estimate V(prefix): pass AnswerLogProbValue(...), MonteCarloValue(...), "
                "OutcomeValue(...) or another instance or function that takes (requests, trainer). The name of a "
                "credit estimator goes into estimator='...', and a force prompt into AnswerLogProbValue('...')."
            )
        space = getattr(self.value, "space", None)
        in_its_unit = space in ("probability", "reward")
        if estimator == "gae" and not in_its_unit:
            raise ValueError(
                "estimator='gae' compares values with the outcome, so both must have the same unit: pass "
                "value=AnswerLogProbValue(space='probability'), MonteCarloValue(), OutcomeValue() or "
                "StepValue(..., rewards=False). A value estimator of your own needs the attribute "
                "space = 'probability' or 'reward'."
            )
        can_be_anchored = in_its_unit and estimator not in WITHOUT_UTILITIES
        if anchored and not can_be_anchored:
            raise ValueError(
                f"anchored=True makes the outcome the last value, which is not possible with estimator={estimator!r} "
                f"and a value whose space is {space!r}. Leave anchored out for estimators that do not use differences "
                f"of values ({', '.join(WITHOUT_UTILITIES)}). For other estimators, the value must have the unit of "
                "the outcome: pass OutcomeValue(), MonteCarloValue() or AnswerLogProbValue(space='probability'). A "
                "value estimator of your own needs the attribute space = 'probability' or 'reward'."
            )
        self._learns = hasattr(self.value, "learn")
        if settings is None:
            pays_its_worth = self._learns and _is_weighed(estimator) and anchored is not False
            settings = CreditSettings(process_weight="auto" if pays_its_worth else 1.0)
        check_settings(estimator, settings)
        self._auto = settings.process_weight == "auto"
        self.anchored = can_be_anchored and (self._learns or self._auto) if anchored is None else anchored
        if self._auto and not self.anchored:
            raise ValueError(
                f"process_weight='auto' is not possible with anchored={anchored} and a value whose space is {space!r}: "
                "this weight follows from how far V reduces the variance of the outcome, so V must be anchored and "
                "have the unit of the outcome. Leave anchored out and pass OutcomeValue(), MonteCarloValue() or "
                "AnswerLogProbValue(space='probability'), or give the weight as a number."
            )
        if self.anchored and settings.scale_floor is not None:
            raise ValueError(
                f"scale_floor={settings.scale_floor} does nothing with anchored values, because they get the scale of "
                "the outcome advantages. Leave scale_floor out."
            )
        if settings.scale_floor is None:
            settings = replace(settings, scale_floor=FLOORS.get(str(space), FLOORS["log"]))
        self.estimator, self.settings = estimator, settings
        self._warn_of_losses(anchored)
        self.per_group = estimator in PER_GROUP
        self.needs_log_probs = getattr(self.value, "needs_log_probs", False)
        self._needs_answers = getattr(self.value, "needs_answers", True)
        self.watches_groups = hasattr(self.value, "begin") and not self.needs_log_probs
        # Saved with the evidence. A resumed run uses the evidence of its checkpoint only if this description is equal.
        self._watched = {"of": named(self.value), "space": space, "fields": [one.name for one in fields(Evidence)]}
        self.segmentation: dict[str, Any] = {
            "markers": markers,
            "max_episode_tokens": max_episode_tokens,
            "min_episode_tokens": min_episode_tokens,
            "final_answer": final_answer,
        }
        self.answer_column, self.solved_reward = answer_column, solved_reward
        self._skips_by_default = skip_solved is None
        self.skip_solved = estimator in GROUP_BASELINE if skip_solved is None else skip_solved
        # One pair (boundaries, values) for each row of this rank in the last window, for users who inspect the values.
        self.last: list[tuple[tuple[int, ...], list[float]]] = []
        self._weight = 0.0  # the weight of the process part in this window, if process_weight is "auto"
        self._unit = 0.0  # the outcome advantage per unit of reward in the last windows; see `Watch.unit`
        self._logged_entropy: float | None = None
        self._diagnostics = Diagnostics()
        self._watch = Watch()
        self._columns: dict[str, Any] = {}  # the additional columns of TRL's table of completions

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The parts of the current window, until the window is whole. These lists are emptied here and not in __init__,
        # because a run that was interrupted within a window leaves parts in them.
        self._parts: list[_Part] = []
        self._lessons: list[tuple[int, ValueRequest, float]] = []  # (group, request, outcome), the data for `learn`
        self._cells: list[tuple[int, str]] = []  # (group, credit per episode), if completions are logged
        self._segmenter = Segmenter(kwargs["processing_class"], **self.segmentation)
        if self._skips_by_default:
            outcomes = getattr(args, "advantage_estimator", "grpo")
            self.skip_solved = self.estimator in GROUP_BASELINE and outcomes != "reinforce_plus_plus"
        # `_key` of a request → the result of the value estimator's `begin` for this completion.
        self._begun: dict[tuple[Any, ...], Any] = {}

    def on_group_sampled(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, group: SampledGroup, **kwargs: Any
    ) -> None:
        """Starts to compute the values of a group while other groups are sampled.

        Rewards are not known yet, so the values of all groups are computed, including those of solved groups.
        """
        trainer, requests = kwargs["trainer"], {}
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        rows = zip(group.examples, map(tuple, group.prompt_ids), map(tuple, group.completion_ids), strict=True)
        for example, prompt, completion in rows:
            if trainer.mask_truncated_completions and completion[-1] not in ends:
                continue  # the completion is truncated and masked, so none of its tokens counts
            request = ValueRequest(
                prompt_ids=prompt,
                completion_ids=completion,
                boundaries=self._segmenter(completion, None).boundaries,
                answers=accepted_answers(example, self.answer_column) if self._needs_answers else (),
                example=example,
            )
            requests[_key(request)] = request
        begun = self.value.begin(list(requests.values()), trainer, group.number)  # type: ignore[attr-defined]
        self._begun.update(zip(requests, begun, strict=True))

    @property
    def _pays(self) -> bool:
        """Whether the callback changes the advantages of this window; False if the "auto" weight of V is 0."""
        return not self._auto or self._weight > 0

    def state_dict(self) -> dict[str, Any]:
        evidence, entropies = self._watch.state_dict(), list(self._diagnostics.entropies)
        state: dict[str, Any] = {"worth": {**self._watched, "evidence": evidence, "entropies": entropies}}
        if hasattr(self.value, "state_dict"):
            state[type(self.value).__name__] = self.value.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = type(self.value).__name__
        if (of_value := state.get(name)) is not None:  # None if the checkpoint's run had another value estimator
            self.value.load_state_dict(of_value)  # type: ignore[attr-defined]
        elif hasattr(self.value, "state_dict"):
            logger.warning(
                f"The checkpoint holds nothing that {name} has learned: it comes from a run with another value. "
                "Learning starts anew."
            )
        worth = state.get("worth", {})  # checkpoints of earlier versions have no "worth", or no evidence in "worth"
        if {one: worth.get(one) for one in self._watched} == self._watched:
            self._watch.load_state_dict(worth.get("evidence", []))
            self._diagnostics.entropies = list(worth["entropies"])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._logged_entropy = (logs or {}).get("entropy", self._logged_entropy)  # TRL's mean over the survivors

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Removes the credit column from TRL's table of completions, because an evaluation adds rows without credit."""
        self._columns.pop(CREDIT, None)

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: CreditedRollouts,
        **kwargs,
    ) -> None:
        trainer, started = kwargs["trainer"], time.perf_counter()
        if not self._parts:
            self.last, self._seconds = [], 0.0  # `_seconds`: the time that values and credit of this window take
            if self._auto:
                self._weight = trainer.ranks.agree(self._watch.weight, from_main=True)
            if self.anchored:
                self._unit = trainer.ranks.agree(self._watch.unit, from_main=True)
        part, credit = self._part(rollouts, trainer)
        if self._pays:  # else the advantages stay bitwise the same
            rollouts.advantages = credit.float()
        if trainer.log_completions:
            self._cells += zip(rollouts.group.tolist(), self._credit_cells(rollouts, trainer._tokenizer), strict=True)
        self._parts.append(part)
        self._seconds += time.perf_counter() - started
        piped = getattr(args, "reward_pipeline", False)  # then a window comes in several parts
        if not piped or len(self.last) >= args.per_device_train_batch_size * args.steps_per_generation:
            self._end_window(trainer)

    def _part(self, rollouts: CreditedRollouts, trainer: Any) -> tuple[_Part, Tensor]:
        """Computes the values and the credit of this rank's rows. Returns the part of the window, and credit [B, T]."""
        ranks, group_size = trainer.ranks, trainer.num_generations
        # If each rank has whole groups, which is usual, it computes the credit of its own rows only. If groups are
        # spread over ranks, each rank computes the credit of all rows.
        alone = len(rollouts) % group_size == 0
        gather = _as_it_is if alone else ranks.gather
        mine, columns = slice(None) if alone else ranks.own(len(rollouts)), rollouts.completion_ids.shape[1]
        width = max(columns, 1) if alone else max(1, *ranks.gather_object(columns))

        outcome = weighted_rewards(rollouts.rewards, trainer.reward_weights).masked_fill(~rollouts.scored, torch.nan)
        # The credit estimator gets only the tokens that the policy wrote. So from here on, lengths, boundaries and
        # columns do not count the tokens of tools.
        own = rollouts.loss_mask.bool()
        outcomes, lengths = gather(outcome), gather(own.sum(dim=1))
        skipped = self._skipped(outcomes, gather(self._highest(rollouts, trainer.reward_weights)), lengths, group_size)
        requests, found, entropy = self._values(rollouts, skipped[mine], outcome, trainer)
        paid = [
            ((0,), [math.nan]) if skip else (request.boundaries, row)
            for skip, request, row in zip(skipped[mine].tolist(), requests, found, strict=True)
        ]
        self.last += paid

        boundaries = gather(_among_own(_table([at for at, _ in paid], -1), own), pad=-1)
        values = gather(_table([row for _, row in paid], math.nan), pad=math.nan).double()
        paid_at, earned = anchor(boundaries, values, lengths, outcomes) if self.anchored else (boundaries, values)
        process, ends, levels, valued = place_rewards(paid_at, earned, lengths, width)
        rewards = Rewards(
            process=process,
            ends=ends,
            values=levels,
            mask=torch.arange(width) < lengths.unsqueeze(1),
            outcome=outcomes.double(),
            outcome_advantages=gather(rollouts.advantages).double(),
            valued=valued & ~outcomes.isnan(),
            group_size=group_size,
            unit=self._unit if self.anchored else None,
            sum_over_ranks=partial(_sum, ranks) if alone else _as_it_is,
        )
        credit = ranks.agree(partial(self._credit, rewards))
        per_token = credit.new_zeros(own.shape).masked_scatter(own, credit[mine][rewards.mask[mine]])
        return _Part(
            rewards=rewards,
            credit=credit,
            boundaries=boundaries,
            values=values,
            skipped=skipped,
            groups=gather(rollouts.group)[::group_size],
            evidence=evidence_of(
                boundaries, values, rewards.outcome, rewards.outcome_advantages, group_size=group_size
            ),
            entropy=entropy,
            alone=alone,
        ), per_token

    def _end_window(self, trainer: Any) -> None:
        """Finishes a window after its last part: calls `learn`, compares V with the outcomes, and logs figures."""
        window, self._parts = joined(self._parts), []
        ready, started = getattr(self.value, "ready", True), time.perf_counter()
        if self._learns:  # the rows are sorted by the number of their group, because rewards may arrive in any order
            lessons, self._lessons = sorted(self._lessons, key=lambda lesson: lesson[0]), []
            self.value.learn([one[1] for one in lessons], [one[2] for one in lessons], trainer)  # type: ignore[attr-defined]
        worth = self._judged(window, trainer.ranks)
        if trainer.log_completions:
            cells, self._cells = sorted(self._cells, key=lambda cell: cell[0]), []
            trainer._log_completion_extra(CREDIT, [text for _, text in cells])
            self._columns = trainer._logs["extra"]
        seconds = self._seconds + time.perf_counter() - started
        figures = batch_figures(window.rewards, window.boundaries, window.values, window.credit, skipped=window.skipped)
        trainer.recorder.log({**process_metrics(figures), **worth, "time/values": seconds})
        self._diagnostics.check(
            figures, seconds=seconds, estimator=self.estimator, ready=ready, pays=self._pays, auto=self._auto
        )
        weighs = self.estimator != "grpo" and self.settings.process_weight != 0
        if self._pays and weighs and figures["process/valued_rows"][0]:
            mean = worth.get("process/entropy", self._logged_entropy) if self.needs_log_probs else None
            self._diagnostics.watch(worth, full=self._watch.full, entropy=mean)

    def _credit_cells(self, rollouts: CreditedRollouts, tokenizer: Any) -> list[str]:
        """Returns one text per row. It lists the row's episodes, each with the mean advantage of its loss tokens."""
        advantages, cells = rollouts.advantages, []
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).expand_as(rollouts.loss_mask)
        for row, (boundaries, _) in enumerate(self.last[-len(rollouts) :]):
            tokens = rollouts.completion_mask[row].bool()
            ids, own = rollouts.completion_ids[row][tokens], rollouts.loss_mask[row][tokens].bool()
            credit, episodes = advantages[row][tokens], Episodes(boundaries, len(ids)).slices()
            cells.append(
                credit_lines(
                    (credit[one][own[one]].mean().item(), tokenizer.decode(ids[one], skip_special_tokens=True))
                    for one in episodes
                    if own[one].any()
                )
            )
        return cells

    def _highest(self, rollouts: CreditedRollouts, weights: Tensor) -> Tensor:
        """Returns [B]: for each row, the least weighted sum of rewards with which the row counts as solved."""
        applies = ~rollouts.rewards.isnan()
        if self.solved_reward is not None:
            return torch.full(applies.shape[:1], float(self.solved_reward))
        return (applies * weights.to(applies.device).clamp(min=0)).sum(dim=1)

    def _skipped(self, outcomes: Tensor, highest: Tensor, lengths: Tensor, group_size: int) -> Tensor:
        """Returns [N] bool, True = V is not needed: the row is unscored, has no loss token, or its group is solved."""
        groups, solved = (cells.view(-1, group_size) for cells in (outcomes, outcomes > highest - ALIKE))
        solved = (groups == groups[:, :1]).all(dim=1) & solved.all(dim=1) & self.skip_solved
        return solved.repeat_interleave(group_size) | outcomes.isnan() | (lengths == 0)

    def _values(
        self, rollouts: CreditedRollouts, skipped: Tensor, outcome: Tensor, trainer: Any
    ) -> tuple[list[ValueRequest], list[list[float]], Tensor]:
        """Computes V for this rank's rows.

        If the value estimator learns from a skipped row, the request of this row has boundaries, too. The estimator
        does not learn from rows without a loss token: they have no prefix with known log-probs, so their outcomes would
        change V_0 only.

        Args:
            rollouts: the rows of this rank.
            skipped: [B] bool, the result of `_skipped` for these rows.
            outcome: [B], the weighted sum of each row's rewards; NaN = unscored.
            trainer: the `DASHTrainer`.
        Returns:
            One request per row, the values of each request, and `_Part.entropy`.
        """
        learned = ~outcome.isnan() & rollouts.loss_mask.any(dim=1) & self._learns
        asked = ~skipped | learned
        log_probs, entropies = _log_probs(rollouts, asked, trainer) if self.needs_log_probs else (None, None)
        requests = trainer.ranks.agree(partial(self._requests, rollouts, asked, log_probs, entropies))
        for row in learned.nonzero().flatten().tolist():
            self._lessons.append((int(rollouts.group[row]), requests[row], float(outcome[row])))
        found = checked_values(self.value(requests, trainer), requests, self.value)
        entropy = torch.zeros(1, 2, dtype=torch.double)
        if entropies is not None:
            tokens = rollouts.loss_mask * asked.unsqueeze(1)
            entropy[0] = torch.stack([(entropies * tokens).sum(dtype=torch.double), tokens.sum().double()])
        return requests, found, entropy

    def _requests(
        self, rollouts: CreditedRollouts, asked: Tensor, log_probs: Tensor | None, entropies: Tensor | None
    ) -> list[ValueRequest]:
        """Returns one request for each row of this rank. A request has boundaries only if `asked` is True for its row.

        Args:
            rollouts: the rows of this rank.
            asked: [B] bool, True = V of the row is needed, or the value estimator learns from the row.
            log_probs: see `_log_probs`. None = the value estimator does not need log-probs.
            entropies: see `_log_probs`.
        """
        requests: list[ValueRequest] = []
        loss_mask = None if rollouts.tool_mask is None else rollouts.loss_mask
        for row, example in enumerate(rollouts.examples):
            tokens = rollouts.completion_mask[row].bool()
            prompt = tuple(rollouts.prompt_ids[row][rollouts.prompt_mask[row].bool()].tolist())
            completion = tuple(rollouts.completion_ids[row][tokens].tolist())
            own = None if loss_mask is None else tuple(loss_mask[row][tokens].tolist())
            request = ValueRequest(
                prompt_ids=prompt,
                completion_ids=completion,
                boundaries=self._segmenter(completion, own).boundaries if asked[row] else (),
                answers=accepted_answers(example, self.answer_column) if self._needs_answers else (),
                example=example,
                log_probs=None if log_probs is None else tuple(log_probs[row][tokens].tolist()),
                entropies=None if entropies is None else tuple(entropies[row][tokens].tolist()),
                own=own,
            )
            # What began early is not used for a row without boundaries: no V is needed there.
            begun = self._begun.get(_key(request)) if own is None and asked[row] else None
            requests.append(replace(request, begun=begun))
        for request in requests:  # not in the loop above, because several rows may have the same tokens
            self._begun.pop(_key(request), None)
        return requests

    def _judged(self, window: _Part, ranks: Ranks) -> dict[str, float]:
        """Adds the evidence of a window to the evidence of earlier windows, and returns the figures for the log.

        Each rank gets the evidence of all groups. It is sorted by the numbers of the groups, because rewards may arrive
        in any order.
        """
        of_ranks = ranks.gather_object((window.groups, window.evidence))
        of_all = of_ranks if window.alone else of_ranks[:1]  # if not alone, each rank has the rows of all ranks
        order = torch.cat([groups for groups, _ in of_all]).argsort(stable=True)
        self._watch.add(joined([evidence for _, evidence in of_all]).of_groups(order))
        worth = self._watch.figures()
        total, tokens = _sum(ranks, window.entropy.sum(dim=0)).tolist()
        if tokens:
            worth["process/entropy"] = total / tokens
        return {**worth, "process/weight": self._weight} if self._auto else worth

    def _credit(self, rewards: Rewards) -> Tensor:
        """Returns [N, T]: the advantages that the chosen credit estimator computes."""
        if not self._pays:
            return ESTIMATORS["grpo"](rewards, CreditSettings())  # only for the logged figures
        settings = self.settings
        if self._auto:  # (1 − w)·outcome + w·(outcome − V) = outcome − w·V
            settings = replace(settings, outcome_weight=1 - self._weight, process_weight=self._weight)
        credit = ESTIMATORS[self.estimator](rewards, settings)
        rows, tokens = rewards.mask.shape
        check_tensor(f"What estimator={self.estimator!r} returned", credit, "floats", N=rows, T=tokens)
        return credit

    def _warn_of_losses(self, anchored: bool | None) -> None:
        """Warns of settings with which V can mislead the policy."""
        if self._auto and self.estimator == "episode":
            logger.warning(
                "process_weight='auto' with estimator='episode': the better V predicts outcomes, the less the outcome "
                "counts, until an episode is paid for the change of V alone. So an error of V changes what the policy "
                "learns, and it may learn less than from outcomes alone (docs/results/process-rewards.md). Use "
                "estimator='centered_return', or give the weights as numbers."
            )
        if not self._learns:
            return
        name = named(self.value)
        if anchored is False and self.estimator not in WITHOUT_UTILITIES:
            logger.warning(
                f"anchored=False with {name}, which learns during the run: the process rewards of a completion do not "
                "depend on its outcome, so the policy may learn to raise V while its outcomes become worse. Leave "
                "anchored out."
            )
        if self.estimator == "gae":
            logger.warning(
                f"estimator='gae' uses {name} as its critic from the beginning, even if V predicts outcomes badly. "
                "'centered_return' gives V a weight that depends on how well V predicted the outcomes of the previous "
                "windows."
            )


def _key(request: ValueRequest) -> tuple[Any, ...]:
    """Returns what the values of a completion depend on; the same prompt may have other answers in another row."""
    return request.prompt_ids, request.completion_ids, request.answers


def _is_weighed(estimator: str) -> bool:
    return "process_weight" in SETTINGS.get(estimator, {"process_weight"})  # a user's estimator may use any setting


def _log_probs(rollouts: CreditedRollouts, rows: Tensor, trainer: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the log-probs of the completions' tokens, and the entropies if a model pass is needed anyway.

    Args:
        rollouts: the rows of this rank.
        rows: [B] bool, True = log-probs of this row are needed.
        trainer: the `DASHTrainer`.
    Returns:
        Log-probs [B, T] and entropies [B, T]; both are 0 outside the loss tokens. If the sampler reports log-probs,
        these are returned for all rows, with NaN for tokens whose log-prob was not reported, and None instead of the
        entropies. Otherwise both come from a forward pass of the policy over the needed rows, and are 0 in other rows.
    """
    sampled, mask = rollouts.sampling_per_token_logps, rollouts.loss_mask
    if sampled is None:
        return trainer.log_probs_and_entropies(rollouts, rows)
    unknown = unknown_log_probs(sampled, mask)
    return sampled.masked_fill(mask == 0, 0.0).masked_fill(unknown, math.nan), None


def accepted_answers(example: dict[str, Any], column: str) -> tuple[str, ...]:
    """Returns the accepted answers of a dataset row.

    If a text contains `####`, as the solutions of GSM8K do, the answer is the text after the last `####`. None and NaN
    are missing cells of a table and are left out.

    Args:
        example: the dataset row.
        column: name of the column with the answer, which is a text, a number, or a list of these.
    Raises:
        ValueError: if the column is missing or holds a value of another type.
    """
    if column not in example:
        raise ValueError(
            f"A dataset row has the columns {sorted(example)}, but not {column!r}, where ProcessRewardCallback looks "
            "for the answer from whose probability V(prefix) is computed. Name the column of your dataset with "
            "ProcessRewardCallback(answer_column=...), or use a value that needs no answer, such as OutcomeValue() "
            "(examples/train_math_process.py: --value outcome)."
        )
    answers = example[column]
    answers = answers if isinstance(answers, list | tuple) else [answers]
    answers = [one for one in answers if one is not None and one == one]
    for answer in answers:
        if not isinstance(answer, str | Number):
            raise ValueError(
                f"The column {column!r} has {answer!r}, a {type(answer).__name__}, in a dataset row. An answer is a "
                "text or a number, or a list of these: make such a column with dataset.map, and name it with "
                "ProcessRewardCallback(answer_column=...)."
            )
    # A table with an empty cell has floats in this column: 42.0 is the answer 42.
    answers = [int(one) if isinstance(one, float) and one.is_integer() else one for one in answers]
    texts = [str(answer).rsplit("####", 1)[-1].strip() for answer in answers]
    return tuple(text for text in texts if text)


def _table(rows: Sequence[Sequence[float]], padding: float) -> Tensor:
    """Returns rows of different lengths as one padded tensor [B, K].

    The dtype is int64 if `padding` is an int, and float32 if it is a float, because MPS can gather only these two.
    """
    dtype = torch.tensor(padding).dtype
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=padding)


def _among_own(boundaries: Tensor, own: Tensor) -> Tensor:
    """Returns for each boundary the number of tokens before it that the policy wrote; padding (−1) stays −1.

    Args:
        boundaries: [B, K] int, token positions in the completion, padded with −1.
        own: [B, T] bool, True = the policy wrote the token.
    """
    before = torch.nn.functional.pad(own.long().cumsum(dim=1), (1, 0))
    return before.gather(1, boundaries.clamp(min=0)).where(boundaries >= 0, boundaries)


def _as_it_is(rows: Tensor, *, pad: float = 0) -> Tensor:
    """Returns `rows`.

    It replaces `ranks.gather` if each rank has whole groups, and `_sum` if each rank has the rows of all ranks.
    """
    return rows


def _sum(ranks: Ranks, sums: Tensor) -> Tensor:
    """Returns the sum over the ranks in float64. Ranks exchange lists, because not every device has float64."""
    return torch.tensor(ranks.gather_object(sums.tolist()), dtype=torch.double).sum(dim=0)
