"""What is sampled: responses to be cut and valued, the truth at their boundaries, and rollouts to fit a value to.

    measured problems ──► responses ──► boundaries ──► K completions of each prefix ──► truth
    other problems ─────► rollouts, to learn from

Every sample is in a file (`evaluation.Records`) when it is used: an interrupted study goes on where it was, and other
estimators are measured on the same samples. Letters: K completions of each prefix.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dash_trl.evaluation import Draw, Records, Reward, Sampler, hash_of, prompt_ids
from dash_trl.process_rewards import Segmenter, ValueRequest, accepted_answers

logger = logging.getLogger(__name__)

RESPONSES, ROLLOUTS, TRUTH = range(3)  # the stages, each with random numbers of its own
FIT_SAMPLES = 8  # rollouts of each problem that a value is fitted to, as in a group of training
ANSWER = "answer"
RESPONSES_FILE, ROLLOUTS_FILE = "responses.jsonl", "rollouts.jsonl"


@dataclass(frozen=True)
class Plan:
    """How much is sampled, and how.

    Args:
        num_problems, num_samples: that are measured, and responses of each.
        num_rollouts: K.
        fit_rollouts: sizes of the fits, in rollouts of other problems; a larger one has the rollouts of the smaller.
        shortest: tokens of an episode at least, for the bound on what it costs.
    Raises:
        ValueError: for what cannot be measured.
    """

    num_problems: int = 64
    num_samples: int = 4
    num_rollouts: int = 32
    fit_rollouts: tuple[int, ...] = ()
    temperature: float = 1.0
    max_completion_length: int = 2048
    shortest: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_problems < 2 or self.num_samples < 1:
            raise ValueError(
                f"num_problems={self.num_problems} with num_samples={self.num_samples}: what is measured within "
                "problems and its interval over them take at least 2 problems with a response each."
            )
        if self.num_rollouts < 2:
            raise ValueError(
                f"num_rollouts={self.num_rollouts}: one completion of a prefix says only that it can end so. The truth "
                "is a share of at least 2, and of 32 it is known to ±0.09."
            )
        if wrong := [size for size in self.fit_rollouts if size < FIT_SAMPLES or size % FIT_SAMPLES]:
            raise ValueError(
                f"fit_rollouts={wrong[0]} are not {FIT_SAMPLES} of each of some problems: use a multiple of "
                f"{FIT_SAMPLES}, e.g. 512."
            )
        if self.temperature == 0:
            raise ValueError(
                "temperature=0: greedy decoding completes a prefix in one way, so that there is no probability to "
                "measure. Use the temperature of training, e.g. 1."
            )
        self.draw(1, self.max_completion_length, 0)

    @property
    def fit_problems(self) -> int:
        return max(self.fit_rollouts, default=0) // FIT_SAMPLES

    def draw(self, num_samples: int, room: int | Sequence[int], stage: int) -> Draw:
        return Draw(num_samples, self.temperature, room, 3 * self.seed + stage)

    def cost(self) -> str:
        """What a study samples, at most: how many boundaries there are shows when the responses are there."""
        responses, rollouts = self.num_problems * self.num_samples, self.fit_problems * FIT_SAMPLES
        most = responses * self.num_rollouts * (1 + max(1, self.max_completion_length // self.shortest))
        to_fit = f", {rollouts:,} rollouts of {self.fit_problems} other problems" * bool(rollouts)
        return (
            f"This samples {responses:,} responses of {self.num_problems} problems{to_fit}, and "
            f"{self.num_rollouts} completions of each response's prefixes at its boundaries: {most:,} if all were as "
            f"many as they can be. Each has at most {self.max_completion_length:,} tokens, "
            f"{(responses + rollouts + most) * self.max_completion_length:,} in all."
        )


@dataclass(frozen=True)
class Study:
    """What was sampled.

    Attributes:
        requests: one per response. problems: the number of each response's problem.
        truth: of each response, per boundary the mean reward of K completions, NaN where all of them failed.
        lessons, lesson_outcomes: rollouts of other problems, and their rewards, None where they failed.
        probabilities: whether all rewards lie in 0 … 1.
    """

    requests: list[ValueRequest]
    problems: list[int]
    truth: list[list[float]]
    lessons: list[ValueRequest]
    lesson_outcomes: list[float | None]
    probabilities: bool


@dataclass(frozen=True)
class _Asked:
    """What is completed: a problem, and the beginning of a completion of it; at most `room` tokens may follow."""

    row: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    head: tuple[int, ...]
    room: int

    def begun(self, request: ValueRequest, boundary: int) -> _Asked:
        return replace(self, head=request.completion_ids[:boundary], room=self.room - boundary)


def choose(problems: Iterable[Any], others: Iterable[Any] | None, plan: Plan) -> tuple[list[Any], list[Any]]:
    """The problems that are measured, and those that a value is fitted to; no problem is both.

    Drawn by the seed, since data sets may be in an order. All that may be fitted to are returned, so that more of them
    are the same ones and some more.

    Args:
        others: of another split; None: those of the same one that are not measured.
    Raises:
        ValueError: if there are too few.
    """
    pool = list(_distinct(problems, plan.seed).items())
    measured = dict(pool[: plan.num_problems])
    rest = pool if others is None else list(_distinct(others, plan.seed).items())
    to_fit = [row for prompt, row in rest if prompt not in measured]
    if len(measured) < plan.num_problems or len(to_fit) < plan.fit_problems:
        where = "in the test split" if others is None else f"there and {len(rest)} in the other split"
        raise ValueError(
            f"There are {len(pool)} distinct problems {where}, but {plan.num_problems} are to be measured and "
            f"{plan.fit_problems} others fitted to. Use smaller --num_problems or --fit_rollouts ({FIT_SAMPLES} of "
            "each problem), or name a split to fit to, --dataset_train_split."
        )
    return list(measured.values()), to_fit


def _distinct(rows: Iterable[Any], seed: int) -> dict[str, Any]:
    found = list({json.dumps(row["prompt"]): row for row in rows}.items())
    random.Random(seed).shuffle(found)
    return dict(found)


def check_files(
    measured: Sequence[Any], to_fit: Sequence[Any], plan: Plan, folder: Path, settings: Mapping[str, Any]
) -> None:
    """Refuse files of other settings before there is a sampler; whose the truth is shows when the responses are there.

    Raises:
        ValueError: as `collect`.
    """
    for name, of_file in _settings_of_files(measured, to_fit, plan, settings).items():
        if (folder / name).exists():
            Records(folder / name, of_file).close()


def collect(
    sampler: Sampler,
    reward: Reward,
    measured: Sequence[Any],
    to_fit: Sequence[Any],
    plan: Plan,
    segmenter: Segmenter,
    folder: Path,
    settings: Mapping[str, Any],
) -> Study:
    """Samples what the files in the folder lack.

    Args:
        measured, to_fit: rows with a `prompt` and what the reward reads; of the second as many are used as needed.
        settings: all that samples depend on beside the problems and the plan; "segmentation": how responses are cut.
    Raises:
        ValueError: the files are of other settings; no reward came, or all rewards are the same.
    """
    of_files = _settings_of_files(measured, to_fit, plan, settings)
    whole = [_whole(row, sampler, plan) for row in measured]
    with Records(folder / RESPONSES_FILE, of_files[RESPONSES_FILE]) as records:
        drawn = _scored(sampler, reward, whole, plan, plan.num_samples, RESPONSES, records)
    outcomes = [one["reward"] for samples in drawn for one in samples]
    _check_outcomes(outcomes)
    problems = [number for number, samples in enumerate(drawn) for _ in samples]
    requests = _requests(measured, whole, drawn, segmenter)

    taught = [_whole(row, sampler, plan) for row in to_fit[: plan.fit_problems]]
    lessons: list[ValueRequest] = []
    lesson_outcomes: list[float | None] = []
    if taught:
        with Records(folder / ROLLOUTS_FILE, of_files[ROLLOUTS_FILE]) as records:
            drawn = _scored(sampler, reward, taught, plan, FIT_SAMPLES, ROLLOUTS, records)
        lessons = _requests(to_fit, taught, drawn, segmenter)
        lesson_outcomes = [one["reward"] for samples in drawn for one in samples]

    # Where a response was cut short there is nothing to complete: its own reward is the truth.
    truth = [
        [math.nan if outcome is None else outcome for _ in request.boundaries]
        for request, outcome in zip(requests, outcomes, strict=True)
    ]
    places = [(r, k) for r, row in enumerate(truth) for k in range(len(row))]
    prefixes = {(r, k): whole[problems[r]].begun(requests[r], requests[r].boundaries[k]) for r, k in places}
    places = sorted((place for place in places if prefixes[place].room), key=lambda place: len(prefixes[place].head))
    asked = [prefixes[place] for place in places]
    logger.info(
        f"The {len(requests):,} responses have {len(prefixes):,} boundaries: {len(asked) * plan.num_rollouts:,} "
        f"completions of at most {sum(one.room for one in asked) * plan.num_rollouts:,} tokens in all."
    )
    of_truth = {
        **of_files[RESPONSES_FILE],
        **settings,
        "num_rollouts": plan.num_rollouts,
        "responses": hash_of({"token_ids": request.completion_ids} for request in requests),
    }
    with Records(folder / "truth.jsonl", of_truth) as records:
        ends = _scored(sampler, reward, asked, plan, plan.num_rollouts, TRUTH, records)
    rewards = [*outcomes, *lesson_outcomes]
    for (r, k), samples in zip(places, ends, strict=True):
        scored = [one["reward"] for one in samples if one["reward"] is not None]
        truth[r][k] = math.fsum(scored) / len(scored) if scored else math.nan
        rewards += scored
    return Study(
        requests, problems, truth, lessons, lesson_outcomes, all(one is None or 0 <= one <= 1 for one in rewards)
    )


def _settings_of_files(
    measured: Sequence[Any], to_fit: Sequence[Any], plan: Plan, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """All that samples depend on which no other sample has a part in, by the name of their file."""
    shared = {name: value for name, value in settings.items() if name != "segmentation"}
    found = {RESPONSES_FILE: {**shared, "problems": hash_of(measured), "num_samples": plan.num_samples}}
    if plan.fit_problems:
        found[ROLLOUTS_FILE] = {**shared, "problems": hash_of(to_fit), "num_samples": FIT_SAMPLES}
    return found


def _whole(row: Mapping[str, Any], sampler: Sampler, plan: Plan) -> _Asked:
    return _Asked(row, tuple(prompt_ids(row["prompt"], sampler.tokenizer)), (), plan.max_completion_length)


def _scored(
    sampler: Sampler,
    reward: Reward,
    asked: Sequence[_Asked],
    plan: Plan,
    num_samples: int,
    stage: int,
    records: Records,
) -> list[list[dict[str, Any]]]:
    """`reward` of each sample, None where it failed, and its `token_ids`, but for the truth."""
    rooms = [one.room for one in asked]
    drawn = sampler.continuations(
        [[*one.prompt_ids, *one.head] for one in asked], plan.draw(num_samples, rooms, stage), done=set(records.rows)
    )
    with tqdm(total=len(asked), initial=len(records.rows), desc=records.path.stem, unit="prefix") as bar:
        for index, samples in drawn:
            one = asked[index]
            ends = sampler.completions([[*one.head, *sample.token_ids] for sample in samples])
            scores = reward.scores(dict(one.row), ends)
            rows: list[dict[str, Any]] = [{"reward": score} for score in scores]
            if stage != TRUTH:  # of which there are many
                rows = [{"token_ids": end.token_ids, **row} for end, row in zip(ends, rows, strict=True)]
            records.add(index, {"samples": rows})
            bar.update()
    records.sort()
    return [records.rows[index]["samples"] for index in range(len(asked))]


def _requests(
    rows: Sequence[Any], asked: Sequence[_Asked], drawn: Sequence[Sequence[Mapping[str, Any]]], segmenter: Segmenter
) -> list[ValueRequest]:
    return [
        ValueRequest(
            prompt_ids=one.prompt_ids,
            completion_ids=tuple(sample["token_ids"]),
            boundaries=segmenter(sample["token_ids"]).boundaries,
            answers=accepted_answers(row, ANSWER) if ANSWER in row else (),
            example=dict(row),
        )
        for row, one, samples in zip(rows, asked, drawn, strict=False)
        for sample in samples
    ]


def _check_outcomes(outcomes: Sequence[float | None]) -> None:
    known = {outcome for outcome in outcomes if outcome is not None}
    if not known:
        raise ValueError(f"The reward failed on all {len(outcomes)} responses: correct it, see above what it said.")
    if len(known) == 1:
        raise ValueError(
            f"All {len(outcomes)} responses have the reward {known.pop():g}: there is no better and no worse prefix to "
            "tell apart. Take problems that the model solves now and then, or more of them (--num_problems)."
        )
    if wrong := [outcome for outcome in sorted(known) if not 0 <= outcome <= 1]:
        logger.warning(
            f"There are rewards outside 0 … 1, such as {wrong[0]:g}: the truth is then a mean reward and no "
            "probability. OutcomeValue is fitted by least squares, Brier score and calibration are left out; AUC still "
            "tells a truth above 0.5 from others."
        )
