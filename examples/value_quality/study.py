"""Samples responses, the truth at their boundaries, and rollouts for fitting a value::

    measured problems ──► responses ──► boundaries ──► K completions of each prefix ──► truth
    other problems ─────► rollouts, to learn from

Every sample is written to a file (`evaluation.Records`) before it is used. So an interrupted study can continue, and
other estimators can be measured on the same samples.

Letters: K completions of each prefix.
"""

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

logger = logging.getLogger("dash_trl.value_quality")  # the command shows the log of dash_trl

RESPONSES, ROLLOUTS, TRUTH = range(3)  # the stages; each has its own random numbers
FIT_SAMPLES = 8  # number of rollouts per problem for fitting a value, like a group in training
ANSWER = "answer"
FILES = ("responses.jsonl", "rollouts.jsonl", "truth.jsonl")  # one per stage


@dataclass(frozen=True)
class Plan:
    """How much is sampled, and how.

    Args:
        num_problems: number of measured problems.
        num_samples: number of responses of each problem.
        num_rollouts: K, the number of completions of each prefix.
        fit_rollouts: sizes of the fits, in rollouts of other problems; a larger fit includes the rollouts of smaller
            ones.
        temperature: sampling temperature.
        max_completion_length: limit of a response with its completion, in tokens.
        shortest: least number of tokens of an episode, for the upper bound of the cost.
        seed: seed for choosing problems and for sampling.
    """

    num_problems: int = 64
    num_samples: int = 4
    num_rollouts: int = 32
    fit_rollouts: tuple[int, ...] = ()
    temperature: float = 1.0
    max_completion_length: int = 2048
    shortest: int = 16
    seed: int = 0

    @property
    def fit_problems(self) -> int:
        """Number of problems for the largest fit."""
        return math.ceil(max(self.fit_rollouts, default=0) / FIT_SAMPLES)

    def cost(self) -> str:
        """Describes what a study samples at most; the number of boundaries is known only after the responses."""
        responses, rollouts = self.num_problems * self.num_samples, self.fit_problems * FIT_SAMPLES
        most = responses * self.num_rollouts * (1 + max(1, self.max_completion_length // self.shortest))
        return (
            f"This samples {responses:,} responses of {self.num_problems} problems, {rollouts:,} rollouts of "
            f"{self.fit_problems} other problems, and {self.num_rollouts} completions of each response's prefixes at "
            f"its boundaries, {most:,} at most. Each has at most {self.max_completion_length:,} tokens, "
            f"{(responses + rollouts + most) * self.max_completion_length:,} in all."
        )


@dataclass(frozen=True)
class Study:
    """The samples of a study, with the truth.

    Attributes:
        requests: one request per response; the responses of a problem are adjacent.
        truth: for each response and boundary, the mean reward of K completions; NaN = all K rewards failed.
        halves: two tables like `truth`: one from every second of the scored completions, one from the others.
        lessons: rollouts of other problems, for fitting values.
        lesson_outcomes: the rewards of `lessons`; None = failed.
        probabilities: True = all rewards are within 0 … 1.
    """

    requests: list[ValueRequest]
    truth: list[list[float]]
    halves: tuple[list[list[float]], list[list[float]]]
    lessons: list[ValueRequest]
    lesson_outcomes: list[float | None]
    probabilities: bool


@dataclass(frozen=True)
class _Source:
    """Samples and scores completions, and writes them to the files of a folder."""

    sampler: Sampler
    reward: Reward
    plan: Plan
    folder: Path

    def responses(
        self, rows: Sequence[Any], num_samples: int, stage: int, settings: Mapping[str, Any], segmenter: Segmenter
    ) -> tuple[list[ValueRequest], list[float | None]]:
        """Samples `num_samples` responses of each problem; returns them and their rewards, None = failed."""
        asked = [
            ValueRequest(
                prompt_ids=tuple(
                    prompt_ids(row["prompt"], self.sampler.tokenizer, settings.get("chat_template_kwargs"))
                ),
                completion_ids=(),
                boundaries=(0,),
                answers=accepted_answers(row, ANSWER) if ANSWER in row else (),
                example=dict(row),
            )
            for row in rows
        ]
        drawn = self.scored([(one, 0) for one in asked], num_samples, stage, settings)
        responses = [(one, sample) for one, samples in zip(asked, drawn, strict=True) for sample in samples]
        requests = [
            replace(
                one, completion_ids=tuple(sample["token_ids"]), boundaries=segmenter(sample["token_ids"]).boundaries
            )
            for one, sample in responses
        ]
        return requests, [sample["reward"] for _, sample in responses]

    def scored(
        self, asked: Sequence[tuple[ValueRequest, int]], num_samples: int, stage: int, settings: Mapping[str, Any]
    ) -> list[list[dict[str, Any]]]:
        """Samples and scores completions of prefixes.

        Args:
            asked: each prefix as a response and the boundary at which it is cut.
            num_samples: number of completions of each prefix.
            stage: one of `RESPONSES`, `ROLLOUTS`, `TRUTH`.
            settings: the settings of the file: all that its samples depend on.
        Returns:
            For each prefix its samples, with `reward` (None = failed) and, except for the truth, `token_ids`.
        """
        heads = [list(one.completion_ids[:boundary]) for one, boundary in asked]
        prefixes = [[*one.prompt_ids, *head] for (one, _), head in zip(asked, heads, strict=True)]
        rooms = [self.plan.max_completion_length - len(head) for head in heads]
        draw = Draw(num_samples, self.plan.temperature, rooms, 3 * self.plan.seed + stage)
        with (
            Records(self.folder / FILES[stage], settings) as records,
            tqdm(total=len(asked), initial=len(records.rows), desc=records.path.stem, unit="prefix") as bar,
        ):
            for index, samples in self.sampler.continuations(prefixes, draw, done=set(records.rows)):
                ends = self.sampler.completions([[*heads[index], *sample.token_ids] for sample in samples])
                scores = self.reward.scores(dict(asked[index][0].example or {}), ends)
                rows: list[dict[str, Any]] = [{"reward": score} for score in scores]
                if stage != TRUTH:  # the truth has too many samples to keep their tokens
                    rows = [{"token_ids": end.token_ids, **row} for end, row in zip(ends, rows, strict=True)]
                records.add(index, {"samples": rows})
                bar.update()
            records.sort()
            return [records.rows[index]["samples"] for index in range(len(asked))]


def choose(problems: Iterable[Any], others: Iterable[Any] | None, plan: Plan) -> tuple[list[Any], list[Any]]:
    """Chooses the problems that are measured, and those for fitting values; no problem is in both sets.

    They are shuffled by the seed, since datasets may be sorted. All problems for fitting are returned, so that a
    larger fit includes those of a smaller one.

    Args:
        problems: problems of the test split.
        others: problems of another split, for fitting. None = fit to problems of the test split that are not measured.
        plan: the numbers of problems, and the seed.
    Raises:
        ValueError: if there are too few problems.
    """
    pool = list(_distinct(problems, plan.seed).items())
    measured = dict(pool[: plan.num_problems])
    rest = pool if others is None else list(_distinct(others, plan.seed).items())
    to_fit = [row for prompt, row in rest if prompt not in measured]
    if len(measured) < plan.num_problems or len(to_fit) < plan.fit_problems:
        where = "in the test split" if others is None else f"there and {len(rest)} in the other split"
        raise ValueError(
            f"There are {len(pool)} distinct problems {where}, but {plan.num_problems} are to be measured and "
            f"{plan.fit_problems} others are needed for fitting. Use smaller --num_problems or --fit_rollouts "
            f"({FIT_SAMPLES} of each problem), or name another split for fitting, --dataset_train_split."
        )
    return list(measured.values()), to_fit


def _distinct(rows: Iterable[Any], seed: int) -> dict[str, Any]:
    found = list({json.dumps(row["prompt"]): row for row in rows}.items())
    random.Random(seed).shuffle(found)
    return dict(found)


def check_files(
    measured: Sequence[Any], to_fit: Sequence[Any], plan: Plan, folder: Path, settings: Mapping[str, Any]
) -> None:
    """Checks the settings of existing files before a sampler starts.

    The file of the truth is checked later, since its settings depend on the responses.

    Args:
        measured: see `collect`.
        to_fit: see `collect`.
        plan: see `collect`.
        folder: see `collect`.
        settings: see `collect`.
    Raises:
        ValueError: if a file has other settings.
    """
    for stage, of_file in _settings_of_files(measured, to_fit, plan, settings).items():
        if (folder / FILES[stage]).exists():
            Records(folder / FILES[stage], of_file).close()


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
    """Samples everything that is missing in the files of a folder.

    Args:
        sampler: samples responses and completions.
        reward: scores them.
        measured: the measured problems, rows with a `prompt` and the columns that the reward function reads.
        to_fit: problems for fitting, in the same form; as many are used as needed.
        plan: how much is sampled, and how.
        segmenter: cuts responses into episodes.
        folder: folder of the files.
        settings: everything that samples depend on, except the problems and the plan. The entry "segmentation" has the
            settings of the segmenter.
    Raises:
        ValueError: if the files have other settings, if all rewards failed, or if all are equal.
    """
    of_files = _settings_of_files(measured, to_fit, plan, settings)
    source = _Source(sampler, reward, plan, folder)
    requests, outcomes = source.responses(measured, plan.num_samples, RESPONSES, of_files[RESPONSES], segmenter)
    _check_outcomes(outcomes)
    lessons, lesson_outcomes = [], []
    if ROLLOUTS in of_files:
        others = to_fit[: plan.fit_problems]
        lessons, lesson_outcomes = source.responses(others, FIT_SAMPLES, ROLLOUTS, of_files[ROLLOUTS], segmenter)

    # A response of full length cannot be completed: its own reward is the truth, and both halves of it.
    truth, even, odd = (
        [
            [math.nan if outcome is None else outcome for _ in request.boundaries]
            for request, outcome in zip(requests, outcomes, strict=True)
        ]
        for _ in range(3)
    )
    places = [(boundary, r, k) for r, one in enumerate(requests) for k, boundary in enumerate(one.boundaries)]
    unfinished = sorted(place for place in places if place[0] < plan.max_completion_length)
    most = sum(plan.max_completion_length - boundary for boundary, _, _ in unfinished)
    logger.info(
        f"The {len(requests):,} responses have {len(places):,} boundaries: {len(unfinished) * plan.num_rollouts:,} "
        f"completions of at most {most * plan.num_rollouts:,} tokens in all."
    )
    of_truth = {
        **of_files[RESPONSES],
        **settings,
        "num_rollouts": plan.num_rollouts,
        "responses": hash_of({"token_ids": request.completion_ids} for request in requests),
    }
    rewards = [*outcomes, *lesson_outcomes]
    asked = [(requests[r], boundary) for boundary, r, _ in unfinished]
    for (_, r, k), samples in zip(unfinished, source.scored(asked, plan.num_rollouts, TRUTH, of_truth), strict=True):
        scored = [one["reward"] for one in samples if one["reward"] is not None]
        for means, of in ((truth, scored), (even, scored[::2]), (odd, scored[1::2])):
            means[r][k] = math.fsum(of) / len(of) if of else math.nan
        rewards += scored
    probabilities = all(one is None or 0 <= one <= 1 for one in rewards)
    return Study(requests, truth, (even, odd), lessons, lesson_outcomes, probabilities)


def _settings_of_files(
    measured: Sequence[Any], to_fit: Sequence[Any], plan: Plan, settings: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """For each stage, exactly the settings that its samples depend on."""
    shared = {name: value for name, value in settings.items() if name != "segmentation"}
    found = {RESPONSES: {**shared, "problems": hash_of(measured), "num_samples": plan.num_samples}}
    if plan.fit_problems:
        found[ROLLOUTS] = {**shared, "problems": hash_of(to_fit), "num_samples": FIT_SAMPLES}
    return found


def _check_outcomes(outcomes: Sequence[float | None]) -> None:
    known = {outcome for outcome in outcomes if outcome is not None}
    if not known:
        raise ValueError(f"The reward failed on all {len(outcomes)} responses: correct it; its error is shown above.")
    if len(known) == 1:
        raise ValueError(
            f"All {len(outcomes)} responses have the reward {known.pop():g}, so there are no better and worse prefixes "
            "to tell apart. Take problems that the model solves sometimes, or more problems (--num_problems)."
        )
