"""`RunnerReward`: one of a runner's functions as TRL calls it, on the main thread, with the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dash_trl.rewards.failures import WatchedReward, described, has_failed
from dash_trl.rewards.forms import RewardForm, Score
from dash_trl.rewards.outcomes import score_of, scored, scored_async, scored_elsewhere
from dash_trl.workers import GivenUp

LOGS = ("log_extra", "log_metric")  # TRL's, handed to reward functions; neither may be called from other threads


def scores_alone(reward: Any) -> bool:
    """Whether it scores one completion at a time, beside the trainer."""
    return isinstance(reward, RunnerReward) and not reward.form.batch


class RunnerReward(WatchedReward):
    """Waits for the runner's outcomes of a batch and returns its column.

    Args:
        runner: the `RewardRunner`. number: of the function, among the runner's.
    Attributes:
        group_size: of the batches that TRL calls it with.
        score: calls a per-sample function and reads its score.
    """

    def __init__(self, form: RewardForm, runner: Any, number: int):
        super().__init__(form.function, form.name)
        self.form, self.runner, self.number = form, runner, number
        self.group_size: Callable[[], int] = lambda: 1
        here = scored_async if form.asynchronous else scored
        self.score = partial(scored_elsewhere if runner.backend in ("process", "ray") else here, form.function)
        self._texts: set[str] = set()  # columns of the logged completions: once there, they are written always

    def __call__(self, /, *, log_extra: Any = None, log_metric: Any = None, **batch: Any) -> list[float | None]:
        try:
            outcomes = self.runner.team.outcomes(self, batch)
        except Exception as error:  # of what runs the calls, as a cluster that does not answer
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
        # One that was not even called tells most.
        self.error = next(filter(None, sorted(errors, key=lambda error: not isinstance(error, GivenUp))), None)
        self.raised = [error is not None for error in errors]
        self.failed = [has_failed(value) for value in values]
        if any(self.failed):
            first = self.failed.index(True)
            error = errors[first]
            why = f"returned {values[first]}" if error is None else described(error)
            self._warn(f"failed on {sum(self.failed)} of {len(values)} completions; on the first it {why}")
        return [None if has_failed(value) else value for value in values]

    def _log(self, outcomes: Sequence[Score | BaseException], log_extra: Any, log_metric: Any) -> None:
        """Numbers beside the scores as metrics, texts with the logged completions."""
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
        """Where it has to: on all ranks, after TRL's method (see `WatchedReward.mistake`)."""
        if isinstance(self.error, GivenUp):
            self.mistake = RuntimeError(
                f"The reward function '{self.name}' hangs: {self.error}. A thread cannot be ended. Give the function a "
                "time limit of its own, or run it in processes, which can: RewardRunner(..., backend='process')."
            )
        elif self.runner.on_error == "raise" and any(self.failed):
            self.mistake = RuntimeError(f"The reward function '{self.name}' {self.failure} (on_error='raise').")
