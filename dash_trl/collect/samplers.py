"""Samplers, which sample the completions of a window: this process, a user's `rollout_func`, or vLLM servers::

    begin: prompts are known ──► take: the rows of a window ──► meanwhile: rewards are awaited, and the device is idle

If rewards begin early, a sampler passes rows to the function `on_rows` as soon as they are sampled, including rows of
windows that are sampled ahead. Otherwise `on_rows` is `None`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled

Generate = Callable[[tuple[Any, ...]], tuple[list[list[int]], Any]]  # tokenized prompts → token ids; log-probs or None
Decode = Callable[[Sequence[Any], Sequence[list[int]], Sequence[list[int]]], list[Any]]  # see `decode.decoded`
Versions = Callable[[int], Tensor]  # number of rows → [rows, 2], see `RolloutBatch.policy_version`
# (window, first row, prompts, token ids, completions)
OnRows = Callable[[int, int, list[Any], list[list[int]], list[Any]], None]
OnGroup = Callable[[Prompts, int, list[list[int]]], None]  # (generation batch, first row, token ids)
Timed = Callable[[str], AbstractContextManager[Any]]  # name of a phase → a context whose seconds are logged


class Sampler:
    """Base of all samplers. Unless a sampler says otherwise, a method does nothing.

    All ranks call a method at the same point; `look` and `forget` are the exceptions.
    """

    def begin(self, window: int, new: Sequence[Prompts]) -> None:
        """Begin a generation batch: a window, or another round of a window. The next `take` returns its rows.

        Args:
            window: number of the generation batch that begins.
            new: generation batches that the sampler has not been given before, in the order of their numbers. It may
                sample the later ones ahead.
        """

    def take(self, prompts: Prompts) -> Sampled:
        """Wait for this rank's rows of a generation batch, and return them.

        Args:
            prompts: the generation batch that the last `begin` has begun.
        """
        raise NotImplementedError

    def meanwhile(self) -> None:
        """Sample windows ahead if this process samples. Called while rewards are awaited and the device is idle."""

    def look(self) -> None:
        """Pass on the rows of later windows that were sampled since the last call, without waiting for other rows.

        `on_rows` gets the rows; if callbacks watch groups, `on_group_sampled` gets them, too.
        """

    def log(self) -> None:
        """Log figures of the sampler. It is called once per window."""

    def forget(self) -> None:
        """Drop the prompts and rows of all windows that were not taken yet."""


class ByFunction(Sampler):
    """Samples with a user's `rollout_func`. It samples no window ahead.

    Args:
        function: function that takes prompts, calls the `rollout_func`, checks its result, and returns the result.
        decode: see `decode.decoded`.
        versions: function that takes a number of rows and returns the policy versions of rows sampled now.
        timed: function that returns a context whose seconds are logged as a phase; see `Recorder.timed`.
    """

    def __init__(
        self, function: Callable[[list[Any]], dict[str, Any]], *, decode: Decode, versions: Versions, timed: Timed
    ):
        self._function, self._decode, self._versions, self._timed = function, decode, versions, timed

    def take(self, prompts: Prompts) -> Sampled:
        with self._timed("generate"):
            columns = dict(self._function(deepcopy(prompts.prompts)))
        prompt_ids, completion_ids, log_probs = (
            columns.pop(name) for name in ("prompt_ids", "completion_ids", "logprobs")
        )
        return Sampled(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            completions=self._decode(prompts.prompts, prompt_ids, completion_ids),
            policy_version=self._versions(len(completion_ids)),
            prompts=prompts.prompts,
            log_probs=log_probs,
            own_tokens=columns.pop("env_mask", None),
            columns=columns,
        )


class InProcess(Sampler):
    """Samples in this process, with Transformers or colocated vLLM.

    With `async_level=1`, it samples the next window while rewards are awaited.

    Args:
        generate: function that takes tokenized prompts and returns token ids, and log-probs or `None`.
        decode: see `decode.decoded`.
        versions: function that takes a number of rows and returns the policy versions of rows sampled now.
        on_rows: see the docstring of the module.
        timed: function that returns a context whose seconds are logged as a phase; see `Recorder.timed`.
        log_probs: function that takes prompt ids and completion ids and computes the log-probs of the sampled tokens.
            It is called if `generate` returns no log-probs. `None`: the rows then stay without log-probs, because the
            loss does not need them.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        decode: Decode,
        versions: Versions,
        on_rows: OnRows | None,
        timed: Timed,
        log_probs: Callable[[list[list[int]], list[list[int]]], Any] | None = None,
    ):
        self._generate, self._decode, self._versions = generate, decode, versions
        self._on_rows, self._timed, self._log_probs = on_rows, timed, log_probs
        self._known: dict[int, Prompts] = {}  # generation batches to sample ahead
        self._sampled: dict[int, Sampled] = {}  # generation batches that were sampled ahead

    def begin(self, window: int, new: Sequence[Prompts]) -> None:
        self._known |= {one.number: one for one in new}
        self._known.pop(window, None)

    def take(self, prompts: Prompts) -> Sampled:
        ahead = self._sampled.pop(prompts.number, None)
        return self._sample(prompts) if ahead is None else ahead

    def meanwhile(self) -> None:
        """Sample the known windows with the current weights, and begin their rewards at once."""
        for window in sorted(self._known):
            self._sampled[window] = self._sample(self._known.pop(window))

    def _sample(self, prompts: Prompts) -> Sampled:
        with self._timed("generate"):
            completion_ids, log_probs = self._generate(prompts.tokenized)
            completions = self._decode(prompts.prompts, prompts.ids, completion_ids)
        versions = self._versions(len(completion_ids))
        sampled = Sampled(
            prompts.ids, completion_ids, completions, versions, prompts=prompts.prompts, log_probs=log_probs
        )
        return self._finished(prompts.number, sampled)

    def _finished(self, window: int, sampled: Sampled) -> Sampled:
        """Add log-probs if they are needed, and pass the rows to `on_rows`, so that their rewards begin."""
        if sampled.log_probs is None and self._log_probs is not None:
            sampled = replace(sampled, log_probs=self._log_probs(sampled.prompt_ids, sampled.completion_ids))
        if self._on_rows is not None:
            completions = deepcopy(sampled.completions)
            self._on_rows(window, 0, sampled.prompts, sampled.completion_ids, completions)
        return sampled

    def forget(self) -> None:
        self._known.clear()
        self._sampled.clear()


class OnServers(Sampler):
    """Samples on vLLM servers: all windows whose prompts are known, including windows that have not begun.

    Args:
        pool: a `VLLMPool`.
        generate: function that sends new weights to the pool's servers and then gets completions from the pool. It
            takes tokenized prompts and returns token ids and log-probs.
        decode: see `decode.decoded`.
        on_rows: see the docstring of the module.
        timed: function that returns a context whose seconds are logged as a phase; see `Recorder.timed`.
        figures: function that adds one value to each figure; see `Recorder.log`.
        total: function that sets a running total; see `Recorder.total`.
        add: function that adds up a tensor over the ranks.
        on_group: function that gets each group as soon as it is sampled, for callbacks with `on_group_sampled`. `None`:
            there are no such callbacks.
    """

    def __init__(
        self,
        pool: Any,
        generate: Generate,
        *,
        decode: Decode,
        on_rows: OnRows | None,
        timed: Timed,
        figures: Callable[[dict[str, float]], None],
        total: Callable[[str, float], None],
        add: Callable[[Tensor], Tensor],
        on_group: OnGroup | None = None,
    ):
        self._on_group = on_group
        self._pool, self._generate, self._decode, self._on_rows, self._timed = pool, generate, decode, on_rows, timed
        self._figures, self._total, self._add = figures, total, add
        self._known: dict[int, Prompts] = {}
        self._completions: dict[int, list[Any]] = {}  # generation batch → completions of its rows; None = not sampled

    def begin(self, window: int, new: Sequence[Prompts]) -> None:
        self._known |= {one.number: one for one in new}
        if self._on_rows is not None:
            self._completions |= {one.number: [None] * len(one.examples) for one in new}
        unseen = self._on_rows is None and self._on_group is None
        self._pool.expect(window, {one.number: one.ids for one in new}, None if unseen else self._come)

    def take(self, prompts: Prompts) -> Sampled:
        with self._timed("generate"):
            completion_ids, log_probs = self._generate(
                prompts.tokenized
            )  # while this call waits, the pool calls `_come` on this thread
            versions = self._pool.policy_version
            if self._on_rows is None:  # then `_come` has not decoded the completions
                completions = self._decode(prompts.prompts, prompts.ids, completion_ids)
            else:
                completions = self._completions.pop(prompts.number)
        del self._known[prompts.number]
        return Sampled(prompts.ids, completion_ids, completions, versions, prompts=prompts.prompts, log_probs=log_probs)

    def _come(self, window: int, first: int, completion_ids: list[list[int]]) -> None:
        """Pass rows that have been sampled to `on_group` and `on_rows`. The pool calls it on the main thread."""
        own, prompts = slice(first, first + len(completion_ids)), self._known[window]
        if self._on_group is not None:
            self._on_group(prompts, first, completion_ids)
        if self._on_rows is None:
            return
        completions = self._decode(prompts.prompts[own], prompts.ids[own], completion_ids)
        self._completions[window][own] = completions
        self._on_rows(window, first, prompts.prompts[own], completion_ids, deepcopy(completions))

    def look(self) -> None:
        if self._on_rows is not None or self._on_group is not None:
            self._pool.show_finished()

    def log(self) -> None:
        """Log the healthy servers as the main process counts them, and the retries and waiting groups of all ranks."""
        healthy, *counts = self._pool.metrics()
        retried, queued = self._add(torch.tensor(counts)).tolist()
        self._figures({"servers/healthy": healthy, "async/queued_groups": queued})
        self._total("servers/retried_requests", retried)

    def forget(self) -> None:
        self._known.clear()
        self._completions.clear()
        self._pool.forget_windows()
