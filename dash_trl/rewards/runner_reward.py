"""`RunnerReward`: wraps a function of a `RewardRunner` for TRL, which calls it on the main thread with a batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dash_trl.rewards.failures import WatchedReward, described, has_failed
from dash_trl.rewards.forms import RewardForm, Score
from dash_trl.rewards.outcomes import score_of, scored, scored_async, scored_elsewhere
from dash_trl.workers import GivenUp

LOGS = ("log_extra", "log_metric")  # functions that TRL passes to reward functions; only the main thread may call them


def scores_alone(reward: Any) -> bool:
    """Returns whether a reward function scores one completion at a time, in a runner.

    Args:
        reward: one of TRL's `reward_funcs`.

    Returns:
        True for a `RunnerReward` whose function scores one completion per call. False for a function of TRL's form,
        and for a function without a runner.
    """
    return isinstance(reward, RunnerReward) and not reward.form.batch


class RunnerReward(WatchedReward):
    """A function of a `RewardRunner`, in the form in which TRL calls it.

    A call waits until the runner has the outcomes of the batch, and returns the rewards of this function.

    Args:
        form: the reward function, with a description of how it is called.
        runner: the `RewardRunner` that the function belongs to.
        number: index of the function among the runner's functions.

    Attributes:
        group_size: function that returns the number of adjacent rows in TRL's next batch that are completions of one
            prompt.
        score: what the runner calls for one row, if the function is per-sample: calls `form.function` and returns its
            score.
    """

    def __init__(self, form: RewardForm, runner: Any, number: int):
        super().__init__(form.function, form.name)
        self.form, self.runner, self.number = form, runner, number
        self.group_size: Callable[[], int] = lambda: 1
        here = scored_async if form.asynchronous else scored
        self.score = partial(scored_elsewhere if runner.backend in ("process", "ray") else here, form.function)
        # Names of the text notes so far; each is a column of the table of completions. All columns must have the same
        # length, so after the first batch with a text note, its column is written for every later batch, too.
        self._texts: set[str] = set()

    def __call__(self, /, *, log_extra: Any = None, log_metric: Any = None, **batch: Any) -> list[float | None]:
        """Returns the rewards of a batch and writes the function's notes to TRL's logs.

        Args:
            log_extra: TRL's function that logs a column of the table of completions.
            log_metric: TRL's function that logs a number.
            batch: the other arguments that TRL passes, with `prompts` and `completions`.

        Returns:
            A list with one reward per row; None = the function does not apply, or has failed.
        """
        try:
            outcomes = self.runner.team.outcomes(self, batch)
        except Exception as error:  # a backend failed, for example a cluster does not answer
            rewards = self._unscore(error, len(batch["completions"]))
            self.mistake = error
            return rewards
        logs = dict(zip(LOGS, (log_extra, log_metric), strict=True))
        if not self.form.batch:
            rewards = self._observe_each(outcomes)
            self._log(outcomes, log_extra, log_metric)
        elif isinstance(outcomes[0], BaseException):
            rewards = self._unscore(outcomes[0], len(outcomes))
        else:
            for name, arguments in outcomes[0].logged:
                logs[name](*arguments)
            rewards = self._observe(outcomes[0].output, len(outcomes))
        self._end_the_run()
        return rewards

    def _observe_each(self, outcomes: Sequence[Score | BaseException]) -> list[float | None]:
        errors = [one if isinstance(one, BaseException) else None for one in outcomes]
        values = [score_of(one) for one in outcomes]
        self.mistake, self.failure = None, ""
        # The first GivenUp, else the first error: a GivenUp gives the reason why no more calls are made.
        self.error = next(filter(None, sorted(errors, key=lambda error: not isinstance(error, GivenUp))), None)
        self.raised = [error is not None for error in errors]
        self.failed = [has_failed(value) for value in values]
        if any(self.failed):
            first = self.failed.index(True)
            error = errors[first]
            why = f"returned {values[first]}" if error is None else described(error)
            self._warn(f"failed on {sum(self.failed)} of {len(values)} completions; on the first of them it {why}")
        return [None if has_failed(value) else value for value in values]

    def _log(self, outcomes: Sequence[Score | BaseException], log_extra: Any, log_metric: Any) -> None:
        """Logs the notes: numbers as metrics, strings as columns of the table of completions."""
        notes: list[Mapping[str, Any]] = [{} if isinstance(one, BaseException) else one.notes for one in outcomes]
        for name, value in (note for one in notes for note in one.items()):
            if isinstance(value, str):
                self._texts.add(name)
            elif log_metric is not None:
                log_metric(f"rewards/{self.name}/{name}", value)
        if log_extra is not None:
            for name in sorted(self._texts):
                log_extra(f"{self.name}/{name}", [str(one.get(name, "")) for one in notes])

    def _end_the_run(self) -> None:
        """Records an error that ends the run, if the function hangs or `on_error` is "raise".

        The error is raised later, on all ranks (see `WatchedReward.mistake`).
        """
        if isinstance(self.error, GivenUp):
            self.mistake = RuntimeError(
                f"The reward function '{self.name}' hangs: {self.error}. A hanging thread cannot be ended. Give the "
                "function a time limit of its own, or run it in worker processes, which are killed when they take too "
                "long: RewardRunner(..., backend='process')."
            )
        elif self.runner.on_error == "raise" and any(self.failed):
            self.mistake = RuntimeError(f"The reward function '{self.name}' {self.failure} (on_error='raise').")
