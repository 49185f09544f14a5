"""Who samples a window: this process, a user's function, or vLLM servers.

    begin: prompts are known ──► take: the rows of a window ──► meanwhile: rewards are awaited, and the device is idle

Rows are handed to `on_rows` as they come, those of windows that have not begun yet, too: their rewards may begin.
`on_rows` is None where nobody asks for rows before their window is taken.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dash_trl.collect.decode import Prompts, Sampled

Generate = Callable[[tuple[Any, ...]], tuple[list[list[int]], Any]]  # tokenized prompts → token ids, log-probs or None
Decode = Callable[[Sequence[Any], Sequence[list[int]], Sequence[list[int]]], list[Any]]  # see `decode.decoded`
Versions = Callable[[int], Tensor]  # rows → [rows, 2], see `RolloutBatch.policy_version`
# (window, first row, prompts, token ids, completions)
OnRows = Callable[[int, int, list[Any], list[list[int]], list[Any]], None]
OnGroup = Callable[[Prompts, int, list[list[int]]], None]  # (its generation batch, first row, token ids)
Timed = Callable[[str], AbstractContextManager[Any]]  # a phase whose seconds are logged


class Sampler(Protocol):
    """All methods but `look` and `forget` are called on every rank at the same point."""

    def begin(self, window: int, new: Sequence[Prompts]) -> None:
        """A window begins, or goes on with more groups: this generation batch is taken next.

        Args:
            window: its number. new: generation batches that were not announced before, in order.
        """

    def take(self, prompts: Prompts) -> Sampled:
        """This rank's rows of the window that has begun; waits for them."""

    def meanwhile(self) -> None:
        """The device has nothing to do while rewards are awaited."""

    def look(self) -> None:
        """Hands to `on_rows` what has come of later windows, without waiting."""

    def log(self) -> None:
        """Figures of the sampler, once a window."""

    def forget(self) -> None:
        """What is known or sampled ahead is not needed any more."""


class ByFunction:
    """A user's `rollout_func`, which never runs ahead.

    Args:
        function: prompts → what it returns, checked.
    """

    def __init__(
        self, function: Callable[[list[Any]], dict[str, Any]], *, decode: Decode, versions: Versions, timed: Timed
    ):
        self._function, self._decode, self._versions, self._timed = function, decode, versions, timed

    def begin(self, window: int, new: Sequence[Prompts]) -> None: ...

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

    def meanwhile(self) -> None: ...

    def look(self) -> None: ...

    def log(self) -> None: ...

    def forget(self) -> None: ...


class InProcess:
    """This process samples, with Transformers or with vLLM inside it; the next window while rewards are awaited.

    Args:
        log_probs: of tokens that were sampled, where the generator reports none but the loss asks for them.
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
        self._known: dict[int, Prompts] = {}  # windows to come
        self._sampled: dict[int, Sampled] = {}

    def begin(self, window: int, new: Sequence[Prompts]) -> None:
        self._known |= {one.number: one for one in new}
        self._known.pop(window, None)

    def take(self, prompts: Prompts) -> Sampled:
        ahead = self._sampled.pop(prompts.number, None)
        return self._sample(prompts) if ahead is None else ahead

    def meanwhile(self) -> None:
        """Samples the windows that are known, by the weights of now; their rewards begin at once."""
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
        """With log-probs, if they are asked for; its rewards may begin."""
        if sampled.log_probs is None and self._log_probs is not None:
            sampled = replace(sampled, log_probs=self._log_probs(sampled.prompt_ids, sampled.completion_ids))
        if self._on_rows is not None:
            completions = deepcopy(sampled.completions)
            self._on_rows(window, 0, sampled.prompts, sampled.completion_ids, completions)
        return sampled

    def look(self) -> None: ...

    def log(self) -> None: ...

    def forget(self) -> None:
        self._known.clear()
        self._sampled.clear()


class OnServers:
    """vLLM servers sample, as far ahead as prompts are known.

    Args:
        pool: a `VLLMPool`. generate: asks it, after it has sent the weights where these are new.
        on_group: gets each group as it comes; `None`: nobody asks for it.
        figures: takes one more value of each name. total: takes a running total.
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
        self._completions: dict[int, list[Any]] = {}  # of the rows that have come

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
            )  # while it waits, on this thread, the pool calls `_come`
            versions = self._pool.policy_version
            if self._on_rows is None:  # then the pool does not call it
                completions = self._decode(prompts.prompts, prompts.ids, completion_ids)
            else:
                completions = self._completions.pop(prompts.number)
        del self._known[prompts.number]
        return Sampled(prompts.ids, completion_ids, completions, versions, prompts=prompts.prompts, log_probs=log_probs)

    def _come(self, window: int, first: int, completion_ids: list[list[int]]) -> None:
        own, prompts = slice(first, first + len(completion_ids)), self._known[window]
        if self._on_group is not None:
            self._on_group(prompts, first, completion_ids)
        if self._on_rows is None:
            return
        completions = self._decode(prompts.prompts[own], prompts.ids[own], completion_ids)
        self._completions[window][own] = completions
        self._on_rows(window, first, prompts.prompts[own], completion_ids, deepcopy(completions))

    def meanwhile(self) -> None: ...

    def look(self) -> None:
        if self._on_rows is not None or self._on_group is not None:
            self._pool.show_finished()

    def log(self) -> None:
        """Healthy servers as the main process sees them, and sums over the ranks."""
        healthy, *counts = self._pool.metrics()
        retried, queued = self._add(torch.tensor(counts)).tolist()
        self._figures({"servers/healthy": healthy, "async/queued_groups": queued})
        self._total("servers/retried_requests", retried)

    def forget(self) -> None:
        self._known.clear()
        self._completions.clear()
        self._pool.forget_windows()
