"""`ProcessRewardCallback`: per-token credit by one entry in `DASHTrainer(..., callbacks=[...])`.

rollouts ──► Segmenter ──► ValueEstimator ──► credit estimator ──► rollouts.advantages [B, T]
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import TrainerControl, TrainerState, TrainingArguments

from dash_trl.callbacks import DASHCallback
from dash_trl.distributed import Ranks
from dash_trl.process_rewards.arguments import check_switch, check_text, is_number, named
from dash_trl.process_rewards.credit import (
    ESTIMATORS,
    SETTINGS,
    CreditSettings,
    Rewards,
    anchor,
    check_settings,
    place_rewards,
    spread_over_episodes,
)
from dash_trl.process_rewards.diagnostics import Diagnostics, batch_figures, process_metrics
from dash_trl.process_rewards.episodes import (
    EPISODE_MARKERS,
    FINAL_ANSWER,
    Episodes,
    Markers,
    Segmenter,
    check_segmentation,
)
from dash_trl.process_rewards.picture import credit_html
from dash_trl.process_rewards.values import (
    NO_SERVERS,
    AnswerLogProbValue,
    ServerValue,
    ValueEstimator,
    ValueRequest,
    checked_values,
)
from dash_trl.process_rewards.worth import Evidence, Watch, evidence_of
from dash_trl.rollout import CreditedRollouts
from dash_trl.update import check_tensor, unknown_log_probs, weighted_rewards

logger = logging.getLogger(__name__)


# Estimators whose credit of a group depends on no other group of the window: `reward_pipeline` may hand over some.
PER_GROUP = ("centered_return", "episode", "grpo_process")


@dataclass(frozen=True)
class _Part:
    """Rows of a window that have come together: this rank's, or where groups lie across the ranks, those of all.

    Letters: R rows, T completion tokens, K boundaries, G groups.

    Attributes:
        credit: [R, T]. boundaries: [R, K], padded with −1. values: [R, K], NaN where V is missing, or not asked for.
        skipped: [R] bool. groups: [G] int64, their numbers. evidence: what they say of V.
        entropy: (sum, tokens) of this rank's, as far as it is known. alone: the rows are this rank's.
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
    """Replaces the advantages by per-token ones, from the values of each completion's prefixes.

        trainer = DASHTrainer(..., callbacks=[ProcessRewardCallback()])

    Values are computed once per rollout, in the sampling phase, before the filter. A problem that no completion solves
    can still teach: its completions differ in progress, so the filter keeps them.

    Args:
        value: estimates V(prefix); default `AnswerLogProbValue()`.
        estimator: name of the credit estimator, see `dash_trl.process_rewards.ESTIMATORS`.
        settings: weights of outcome and process, floor of the scale, γ and λ. Default: `CreditSettings()`; for a value
            that learns with process_weight="auto", so that it pays as much as it was worth, and nothing at first.
        markers, max_episode_tokens, min_episode_tokens, final_answer: see `Segmenter`.
        answer_column: dataset column with the accepted answer, a text or a list of texts; for values that need it.
        skip_solved: no values for groups whose rewards are all the same and positive: nothing is left to learn there.
            A value that learns, `OutcomeValue`, learns from them all the same, and is watched on them.
        anchored: whether the outcome takes the place of V_n, so that all that V pays is outcome − V_0; see
            `dash_trl.process_rewards.credit.anchor`. Default: with a value that learns, where it keeps a V that the
            policy has learned to please from paying without an outcome.
        unproductive_penalty: subtracted from the advantage of each token of an episode with |U| < `unproductive_below`.
    Raises:
        ValueError: for unknown or impossible settings; at the start of training without the answer column or servers;
            in it, for values or positions that a function of yours got wrong.
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
        skip_solved: bool = True,
        anchored: bool | None = None,
        unproductive_penalty: float = 0.0,
        unproductive_below: float = 0.01,
    ):
        if not (isinstance(estimator, str) and estimator in ESTIMATORS):
            raise ValueError(
                f"estimator={estimator!r} is unknown: use one of {', '.join(ESTIMATORS)}. One of your own needs a "
                "name, too: dash_trl.process_rewards.ESTIMATORS['mine'] = function."
            )
        self.value = AnswerLogProbValue() if value is None else value
        if isinstance(value, type) or not callable(self.value):
            raise ValueError(
                f"value={value!r} cannot estimate V(prefix): pass AnswerLogProbValue(...), MonteCarloValue(...), "
                "OutcomeValue(...) or another instance or function that takes (requests, trainer). A name of an "
                "estimator is estimator='...', words before an answer are AnswerLogProbValue('...')."
            )
        if estimator == "gae" and getattr(self.value, "space", None) != "probability":
            raise ValueError(
                "estimator='gae' compares values with the outcome, so they have to be probabilities: pass "
                "value=AnswerLogProbValue(space='probability'), MonteCarloValue() or OutcomeValue(); one of your own "
                "says so by an attribute, space = 'probability'."
            )
        check_segmentation(markers, max_episode_tokens, min_episode_tokens, final_answer)
        check_text("answer_column", answer_column, example="'answer'")
        check_switch("skip_solved", skip_solved)
        learns = hasattr(self.value, "learn")
        self.anchored = _is_anchored(anchored, self.value, estimator, learns=learns)
        for name, number in (
            ("unproductive_penalty", unproductive_penalty),
            ("unproductive_below", unproductive_below),
        ):
            if not (is_number(number) and number >= 0):
                raise ValueError(
                    f"{name}={number!r} cannot charge an episode without progress: use a number >= 0; a penalty of 0 "
                    "charges none."
                )
        self.estimator = estimator
        self.per_group = estimator in PER_GROUP
        self.needs_log_probs = bool(getattr(self.value, "needs_log_probs", False))
        if settings is None:
            auto = learns and _is_weighed(estimator)
            settings = CreditSettings(process_weight="auto") if auto else CreditSettings()
        self.settings = settings
        check_settings(estimator, self.settings)
        if learns:
            _warn_of_losses(estimator, self.settings, self.value)
        self.segmentation: dict[str, Any] = {
            "markers": markers,
            "max_episode_tokens": max_episode_tokens,
            "min_episode_tokens": min_episode_tokens,
            "final_answer": final_answer,
        }
        self.answer_column = answer_column
        self.skip_solved = skip_solved
        self.unproductive_penalty = unproductive_penalty
        self.unproductive_below = unproductive_below
        self.last: list[tuple[Episodes, list[float]]] = []  # of the last generation batch, for a look at it
        self._parts: list[_Part] = []  # of a window, until it is whole
        self._seconds = 0.0  # that they took
        self._lessons: list[tuple[int, ValueRequest, float]] = []  # in them, if V learns: group, rollout, outcome
        self._weight = 0.0  # of the process part in this window, if it is "auto"
        self._logged_entropy: float | None = None
        self._segmenter: Segmenter | None = None
        self._diagnostics = Diagnostics()
        self._watch = Watch()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._parts, self._lessons = [], []  # of a run that was interrupted
        if isinstance(self.value, ServerValue) and not getattr(args, "vllm_server_urls", None):
            raise ValueError(NO_SERVERS)
        if (tokenizer := kwargs.get("processing_class")) is not None:
            self._segmenter = Segmenter(tokenizer, **self.segmentation)
        loader = kwargs.get("train_dataloader")
        columns = getattr(getattr(loader, "dataset", None), "column_names", None)
        if columns is not None and self._needs_answers and self.answer_column not in columns:
            raise ValueError(
                f"The dataset has the columns {columns}, but not {self.answer_column!r}, whose answer V(prefix) is the "
                "probability of. Name the column with answer_column=..."
            )

    @property
    def _needs_answers(self) -> bool:
        return getattr(self.value, "needs_answers", True)

    @property
    def _learns(self) -> bool:
        return hasattr(self.value, "learn")

    @property
    def _watched(self) -> dict[str, Any]:
        """Whose worth it is: that of the same value in another space would be other numbers."""
        return {"of": named(self.value), "space": getattr(self.value, "space", None)}

    @property
    def _auto(self) -> bool:
        return self.settings.process_weight == "auto"

    @property
    def _pays(self) -> bool:
        """False while V is worth nothing and weighs what it is worth: this batch is as without the callback."""
        return not self._auto or self._weight > 0

    def state_dict(self) -> dict[str, Any]:
        windows, entropies = self._watch.state_dict(), list(self._diagnostics.entropies)
        state: dict[str, Any] = {"worth": {**self._watched, "windows": windows, "entropies": entropies}}
        if hasattr(self.value, "state_dict"):
            state[type(self.value).__name__] = self.value.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = type(self.value).__name__
        if (of_value := state.get(name)) is not None:  # not that of another value
            self.value.load_state_dict(of_value)  # type: ignore[attr-defined]
        elif hasattr(self.value, "state_dict"):
            logger.warning(f"The checkpoint holds nothing that {name} has learned, but another value's state.")
        worth = state.get("worth", {})  # missing in one of an earlier version
        if {one: worth.get(one) for one in self._watched} == self._watched:
            self._watch.load_state_dict(worth["windows"])
            self._diagnostics.entropies = list(worth["entropies"])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._logged_entropy = (logs or {}).get("entropy", self._logged_entropy)  # TRL's, of the rows trained on

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        rollouts: CreditedRollouts,
        **kwargs,
    ) -> None:
        trainer, started = kwargs["trainer"], time.perf_counter()
        if self._segmenter is None:
            self._segmenter = Segmenter(trainer._tokenizer, **self.segmentation)
        if rollouts.advantages.dim() != 1:
            raise ValueError(
                f"rollouts.advantages has the shape {tuple(rollouts.advantages.shape)}: another callback has given "
                "each token its credit already. Use one ProcessRewardCallback, and put a callback of your own behind "
                "it."
            )
        first = not self._parts
        if first:
            self.last, self._seconds = [], 0.0
            if self._auto:
                self._weight = trainer.ranks.agree(self._watch.weight, from_main=True)
        part, credit = self._part(rollouts, trainer)
        if self._pays:  # else they stay as they are, to the bit
            rollouts.advantages = credit.float()
        self._parts.append(part)
        self._seconds += time.perf_counter() - started
        logged = state.is_world_process_zero and state.global_step % state.logging_steps == 0
        if first and args.log_completions and logged:
            path = Path(args.output_dir) / "completions" / f"credit_{state.global_step:05d}.html"
            self._draw(path, rollouts, credit, trainer)
        piped = getattr(args, "reward_pipeline", False)  # it hands over whole groups of a process
        if not piped or len(self.last) >= args.per_device_train_batch_size * args.steps_per_generation:
            self._end_window(trainer)

    def _part(self, rollouts: CreditedRollouts, trainer: Any) -> tuple[_Part, Tensor]:
        """What V says of these rows, and [B, T], their credit."""
        ranks, group_size = trainer.ranks, trainer.num_generations
        # Groups lie within a rank as a rule: then each computes the credit of its own rows, else of the rows of all.
        alone = len(rollouts) % group_size == 0
        gather = _as_it_is if alone else ranks.gather
        mine, columns = slice(None) if alone else ranks.own(len(rollouts)), rollouts.completion_ids.shape[1]
        width = max(columns, 1) if alone else max(1, *ranks.gather_object(columns))

        outcome = weighted_rewards(rollouts.rewards, trainer.reward_weights).masked_fill(~rollouts.scored, torch.nan)
        outcomes = gather(outcome)
        skipped = self._skipped(outcomes, group_size)
        episodes, asked, found, entropy = self._values(rollouts, skipped[mine], outcome, trainer)
        paid = [[math.nan] if skip else one for skip, one in zip(skipped[mine].tolist(), found, strict=True)]
        self.last = [*self.last, *zip(episodes, paid, strict=True)]

        boundaries = gather(_table([request.boundaries or (0,) for request in asked], -1), pad=-1)
        watched = gather(_table(found, math.nan), pad=math.nan).double()
        values = watched.masked_fill(skipped.unsqueeze(1), math.nan)
        lengths = gather(rollouts.completion_mask.sum(dim=1))
        earned = anchor(boundaries, values, outcomes.double()) if self.anchored else values
        process, ends, per_token, valued = place_rewards(boundaries, earned, lengths, width)
        rewards = Rewards(
            process=process,
            ends=ends,
            values=per_token,
            mask=torch.arange(width) < lengths.unsqueeze(1),
            outcome=outcomes.double(),
            outcome_advantages=gather(rollouts.advantages).double(),
            valued=valued & ~outcomes.isnan(),
            group_size=group_size,
            sum_over_ranks=partial(_sum, ranks) if alone else _as_it_is,
        )
        credit = ranks.agree(partial(self._credit, rewards))
        part = _Part(
            rewards=rewards,
            credit=credit,
            boundaries=boundaries,
            values=values,
            skipped=skipped,
            groups=gather(rollouts.group)[::group_size],
            evidence=evidence_of(boundaries, watched, lengths, rewards.outcome, group_size=group_size),
            entropy=entropy,
            alone=alone,
        )
        return part, credit[mine, :columns]

    def _end_window(self, trainer: Any) -> None:
        """All its parts have come: V learns from it, and what V was worth in it is noted and logged."""
        parts, self._parts = self._parts, []
        ready, started = getattr(self.value, "ready", True), time.perf_counter()
        self._learn(trainer)
        worth = self._judged(parts, trainer.ranks)
        seconds = self._seconds + time.perf_counter() - started
        figures = batch_figures(
            _joined([part.rewards for part in parts]),
            _cat([part.boundaries for part in parts], pad=-1),
            _cat([part.values for part in parts], pad=math.nan),
            _cat([part.credit for part in parts]),
            skipped=torch.cat([part.skipped for part in parts]),
        )
        trainer.recorder.log({**process_metrics(figures), **worth, "time/values": seconds})
        self._diagnostics.check(figures, seconds=seconds, estimator=self.estimator, ready=ready, pays=self._pays)
        weighs = self.estimator != "grpo" and self.settings.process_weight != 0
        if self._pays and weighs and figures["process/valued_rows"][0]:
            mean = worth.get("process/entropy", self._logged_entropy) if self.needs_log_probs else None
            self._diagnostics.watch(worth, full=self._watch.full, entropy=mean)

    def _skipped(self, outcomes: Tensor, group_size: int) -> Tensor:
        """[N] bool: unscored rows, and rows of solved groups."""
        groups = outcomes.view(-1, group_size)
        solved = (groups == groups[:, :1]).all(dim=1) & (groups[:, 0] > 0) & self.skip_solved
        return solved.repeat_interleave(group_size) | outcomes.isnan()

    def _values(
        self, rollouts: CreditedRollouts, skipped: Tensor, outcome: Tensor, trainer: Any
    ) -> tuple[list[Episodes], list[ValueRequest], list[list[float]], Tensor]:
        """This rank's episodes, what was asked for and found, and the entropies' sum and number, as far as known.

        A skipped row has no episodes; it is asked for where it is learned from, since V is watched there, too.
        """
        learned = ~outcome.isnan() & self._learns
        known: tuple[Tensor | None, Tensor | None] = None, None
        if self.needs_log_probs:
            known = _log_probs(rollouts, ~skipped | learned, trainer)
        of_rows = partial(self._requests, rollouts, skipped, learned, *known)
        episodes, requests, whole = trainer.ranks.agree(of_rows)
        rows = learned.nonzero().flatten().tolist()
        self._lessons += [(int(rollouts.group[row]), whole[row], float(outcome[row])) for row in rows]
        found = checked_values(self.value(requests, trainer), requests, self.value)
        entropy = torch.zeros(2, dtype=torch.double)
        if known[1] is not None:
            tokens = rollouts.loss_mask * (~skipped | learned).unsqueeze(1)
            entropy = torch.stack([(known[1] * tokens).sum(dtype=torch.double), tokens.sum().double()])
        return episodes, requests, [values or [math.nan] for values in found], entropy

    def _requests(
        self,
        rollouts: CreditedRollouts,
        skipped: Tensor,
        learned: Tensor,
        log_probs: Tensor | None,
        entropies: Tensor | None,
    ) -> tuple[list[Episodes], list[ValueRequest], list[ValueRequest]]:
        """What is read in this rank's rows: their episodes, what is asked for, and the whole requests."""
        assert self._segmenter is not None
        episodes, requests, whole = [], [], []
        for row, example in enumerate(rollouts.examples):
            tokens = rollouts.completion_mask[row].bool()
            completion = rollouts.completion_ids[row][tokens].tolist()
            none, needed = Episodes((0,), len(completion)), bool(learned[row] or not skipped[row])
            cut = self._segmenter(completion) if needed else none
            whole.append(
                ValueRequest(
                    prompt_ids=tuple(rollouts.prompt_ids[row][rollouts.prompt_mask[row].bool()].tolist()),
                    completion_ids=tuple(completion),
                    boundaries=cut.boundaries,
                    answers=accepted_answers(example, self.answer_column) if self._needs_answers else (),
                    example=example,
                    log_probs=None if log_probs is None else tuple(log_probs[row][tokens].tolist()),
                    entropies=None if entropies is None else tuple(entropies[row][tokens].tolist()),
                )
            )
            episodes.append(none if skipped[row] else cut)
            requests.append(whole[-1] if needed else replace(whole[-1], boundaries=()))
        return episodes, requests, whole

    def _learn(self, trainer: Any) -> None:
        """Of a window that has been valued, its rows in the order of their groups, in whatever order those came."""
        if not self._learns:
            return
        lessons, self._lessons = sorted(self._lessons, key=lambda lesson: lesson[0]), []
        requests, outcomes = [lesson[1] for lesson in lessons], [lesson[2] for lesson in lessons]
        self.value.learn(requests, outcomes, trainer)  # type: ignore[attr-defined]

    def _judged(self, parts: Sequence[_Part], ranks: Ranks) -> dict[str, float]:
        """What V and the policy have shown up to this window, on all ranks, in the order of the groups."""
        own = torch.cat([part.groups for part in parts]), Evidence.joined([part.evidence for part in parts])
        of_ranks = ranks.gather_object(own)
        of_all = of_ranks if parts[0].alone else of_ranks[:1]  # where a group lies on several ranks, each has all
        numbers, evidence = torch.cat([one[0] for one in of_all]), Evidence.joined([one[1] for one in of_all])
        self._watch.add(evidence.groups(numbers.argsort(stable=True)))
        worth = self._watch.figures(probability=getattr(self.value, "space", None) == "probability")
        total, tokens = _sum(ranks, torch.stack([part.entropy for part in parts]).sum(dim=0)).tolist()
        if tokens:
            worth["process/entropy"] = total / tokens
        return {**worth, "process/weight": self._weight} if self._auto else worth

    def _draw(self, path: Path, rollouts: CreditedRollouts, credit: Tensor, trainer: Any) -> None:
        """The first group's credit, as a page beside TRL's completions table."""
        pictures = []
        for row in range(min(trainer.num_generations, len(rollouts))):
            ids = rollouts.completion_ids[row][rollouts.completion_mask[row].bool()].tolist()
            episodes, values = self.last[row]
            pictures.append(
                credit_html(
                    [trainer._tokenizer.decode([token]) for token in ids],
                    credit[row, : len(ids)].tolist(),
                    episodes.boundaries,
                    values,
                    title=f"rewards {rollouts.rewards[row].tolist()}",
                )
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('<!doctype html><meta charset="utf-8">' + "<hr>".join(pictures))

    def _credit(self, rewards: Rewards) -> Tensor:
        """[N, T]: the estimator's, less what the tokens of unproductive episodes are charged."""
        if not self._pays:
            return ESTIMATORS["grpo"](rewards, CreditSettings())  # for a look at it
        settings = replace(self.settings, process_weight=self._weight) if self._auto else self.settings
        credit = ESTIMATORS[self.estimator](rewards, settings)
        rows, tokens = rewards.mask.shape
        check_tensor(f"What estimator={self.estimator!r} returned", credit, "floats", N=rows, T=tokens)
        if self.unproductive_penalty:
            idle = rewards.ends & (rewards.process.abs() < self.unproductive_below)
            credit = credit - self.unproductive_penalty * spread_over_episodes(idle.double(), rewards.ends)
        return credit


def _is_anchored(anchored: bool | None, value: Any, estimator: str, *, learns: bool) -> bool:
    """What is asked for; None: where a value learns."""
    comparable, without = getattr(value, "space", None) in ("probability", "reward"), estimator in ("gae", "grpo")
    if anchored is None:
        return learns and comparable and not without
    check_switch("anchored", anchored)
    if anchored and without:
        raise ValueError(f"anchored=True does nothing with estimator={estimator!r}, which uses no U. Leave it out.")
    if anchored and not comparable:
        raise ValueError(
            "anchored=True puts the outcome in the place of V_n, so values have to be in its unit: pass "
            "value=OutcomeValue(), MonteCarloValue() or AnswerLogProbValue(space='probability'); one of your own "
            "says so by an attribute, space = 'probability' or 'reward'."
        )
    if learns and not (anchored or without):
        logger.warning(
            f"anchored=False with {named(value)}, which learns while it pays: what it pays is bound to no outcome, and "
            "a policy that learns to please V may lose all else. Leave it out."
        )
    return anchored


def _is_weighed(estimator: str) -> bool:
    return "process_weight" in SETTINGS.get(estimator, {"process_weight"})  # a user's own may use any setting


def _warn_of_losses(estimator: str, settings: CreditSettings, value: Any) -> None:
    """Of what has learned less than by the outcome alone, with a value that learns."""
    if estimator == "gae":
        logger.warning(
            f"estimator='gae' takes {named(value)} for its critic at once, whatever that is worth, and has "
            "learned slower with it than by the outcome alone (docs/process_rewards.md). Use 'centered_return'."
        )
    elif _is_weighed(estimator) and settings.process_weight not in ("auto", 0):
        logger.warning(
            f"process_weight={settings.process_weight} pays by {named(value)}, whatever that is worth, and policies "
            "whose errors are confident have unlearned all with a weight of 1, anchored or not "
            "(docs/process_rewards.md). Leave it out for 'auto'."
        )


def _log_probs(rollouts: CreditedRollouts, rows: Tensor, trainer: Any) -> tuple[Tensor, Tensor | None]:
    """[B, T] each: the sampler's log-probs, NaN where it did not report one; or the policy's, with the entropies."""
    sampled, mask = rollouts.sampling_per_token_logps, rollouts.loss_mask
    if sampled is None or rollouts.witnessed_entropies is not None:
        return trainer.log_probs_and_entropies(rollouts, rows)
    unknown = unknown_log_probs(sampled, mask)
    return sampled.masked_fill(mask == 0, 0.0).masked_fill(unknown, math.nan), None


def accepted_answers(example: dict[str, Any], column: str) -> tuple[str, ...]:
    """The answers of a dataset row: a text, a number, or a list of either; what follows `####` in GSM8K's solutions.

    None and NaN, which tables have for what is missing, are no answers.
    """
    if column not in example:
        raise ValueError(
            f"A dataset row has the columns {sorted(example)}, but not {column!r}, whose answer V(prefix) is the "
            "probability of. Name the column with answer_column=..."
        )
    answers = example[column]
    answers = answers if isinstance(answers, list | tuple) else [answers]
    answers = [one for one in answers if one is not None and one == one]
    for answer in answers:
        if not isinstance(answer, str | Number):
            raise ValueError(
                f"The column {column!r} has {answer!r}, a {type(answer).__name__}, in a dataset row. An answer is a "
                "text or a number, several are a list of them: make one with dataset.map, and name it with "
                "answer_column=..."
            )
    texts = [str(answer).rsplit("####", 1)[-1].strip() for answer in answers]
    return tuple(text for text in texts if text)


def _table(rows: Sequence[Sequence[float]], padding: float) -> Tensor:
    """Rows of different lengths → [B, K], int64 or float32 as the padding is: MPS, too, can gather these."""
    counts = torch.tensor([len(row) for row in rows])
    table = torch.full((len(rows), max(map(len, rows), default=1)), padding)
    cells = [cell for row in rows for cell in row]
    table[torch.arange(table.shape[1]) < counts.unsqueeze(1)] = torch.tensor(cells, dtype=table.dtype)
    return table


def _cat(parts: Sequence[Tensor], *, pad: float | None = None) -> Tensor:
    """One is not copied: it may be large. `pad` fills up those that have fewer columns."""
    if len(parts) == 1:
        return parts[0]
    if pad is not None:
        columns = max(one.shape[1] for one in parts)
        parts = [functional.pad(one, (0, columns - one.shape[1]), value=pad) for one in parts]
    return torch.cat(list(parts))


def _joined(parts: Sequence[Rewards]) -> Rewards:
    """Those of all parts, whose columns are as many."""
    names = [name for name, value in vars(parts[0]).items() if isinstance(value, Tensor)]
    tensors: dict[str, Any] = {name: _cat([getattr(one, name) for one in parts]) for name in names}
    return replace(parts[0], **tensors)


def _as_it_is(rows: Tensor, *, pad: float = 0) -> Tensor:
    """In place of what ranks exchange, where they need nothing of each other."""
    return rows


def _sum(ranks: Ranks, sums: Tensor) -> Tensor:
    """Over the ranks, in float64, which not every device has: as objects."""
    return torch.tensor(ranks.gather_object(sums.tolist()), dtype=torch.double).sum(dim=0)
