"""Logs what TRL logs about each window: figures about tokens and rewards, and the table of completions.

Letters: B rows of this rank, N rows of all ranks, F reward functions.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from dash_trl.collect.decode import Sampled
from dash_trl.host import Host
from dash_trl.rewards import BROKEN_AFTER
from dash_trl.update import weighted_rewards


def length_figures(lengths: Tensor, truncated: Tensor) -> dict[str, float]:
    """Return TRL's figures about the length of completions.

    Args:
        lengths: [N], the number of tokens that the policy wrote in each row.
        truncated: [N] bool; see `decode.is_truncated`.
    """
    ended = lengths[~truncated] if not truncated.all() else torch.zeros(1)
    figures = {"completions/clipped_ratio": truncated.float().mean().item()}
    for name, values in (("", lengths.float()), ("terminated_", ended.float())):
        figures[f"completions/mean_{name}length"] = values.mean().item()
        figures[f"completions/min_{name}length"] = values.min().item()
        figures[f"completions/max_{name}length"] = values.max().item()
    return figures


def reward_figures(rewards: Tensor, names: Sequence[str], weights: Tensor) -> dict[str, float]:
    """Return TRL's figures about rewards.

    Args:
        rewards: [N, F]; NaN = the function does not apply. A row whose rewards are all NaN does not count in the sum.
        names: names of the F reward functions.
        weights: [F], the weight of each reward function.
    """
    figures = {}
    for name, column in zip(names, rewards.T, strict=True):
        figures[f"rewards/{name}/mean"] = column.nanmean().item()
        figures[f"rewards/{name}/std"] = nanstd(column).item()
    total = weighted_rewards(rewards, weights)
    return {**figures, "reward": total.nanmean().item(), "reward_std": nanstd(total).item()}


class WindowLog:
    """Writes a window's figures and its table of completions to the fields that TRL's `log` reads.

    All ranks call every method at the same point.
    """

    def __init__(self, host: Host, names: Sequence[str]):
        self._host = host
        self._ranks = host.ranks
        self._figures = host.recorder.log
        self._names = names
        logs = host.recorder.logs
        self._tables = logs.tables
        self._extra = logs.extra
        self._metrics = logs.metrics
        # Number of consecutive windows on whose rows tools or environments all failed. The run ends at `BROKEN_AFTER`,
        # or at once if the first window fails, as with reward functions.
        self._failed_in_a_row = BROKEN_AFTER - 1
        self._columns = set[str]()  # columns that were logged in the earlier rounds of a window

    def sampled(self, batches: Sequence[Sampled], truncated: Tensor) -> None:
        """Log the figures of a window that do not need rewards: numbers of tokens, truncated rows and tool calls.

        Args:
            batches: this rank's rows, by generation batch.
            truncated: [B] bool, True = the completion is truncated.
        Raises:
            RuntimeError: on all ranks, if tools or environments failed on every row of the first window, or of the last
                `BROKEN_AFTER` windows.
        """
        completions = torch.tensor([length for batch in batches for length in batch.lengths()])
        prompts = torch.tensor([len(ids) for batch in batches for ids in batch.prompt_ids])
        prompts = self._ranks.gather(prompts)
        completions = self._ranks.gather(completions)
        self._host.state.num_input_tokens_seen += int(prompts.sum() + completions.sum())
        self._host.recorder.total("num_tokens", self._host.state.num_input_tokens_seen)
        self._figures(length_figures(completions, self._ranks.gather(truncated)))
        if failures := [failure for batch in batches for failure in batch.failures]:
            self._turns(failures, [pair for batch in batches for pair in batch.calls])

    def _turns(self, failures: list[str | None], calls: list[tuple[int, int]]) -> None:
        """Log the tool calls of a window, and raise if tools or environments fail on all rows."""
        failed = self._ranks.gather(torch.tensor([failure is not None for failure in failures]))
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed.all() else 0
        if self._failed_in_a_row == BROKEN_AFTER:
            raise RuntimeError(
                f"Tools or environments failed on every row of the last windows, most recently with {failures[0]}. "
                "Nothing can be learned from such rows. Correct the tool or environment. If a tool hangs, run it in a "
                "process that can be killed (dash_trl.ProcessTool), or give it more time (tool_timeout)."
            )
        self._figures({"tools/failed_rows": failed.float().mean().item()})
        if calls:
            made, in_vain = self._ranks.gather(torch.tensor(calls)).sum(dim=0).tolist()
            self._figures(
                {
                    "tools/call_frequency": made / len(failed),
                    "tools/failure_frequency": in_vain / made if made else 0.0,
                }
            )

    def end_round(self, before: int, rows: int) -> None:
        """Complete the columns that were logged in only some rounds of a window.

        Args:
            before: number of this rank's rows in the window's earlier rounds.
            rows: number of this rank's rows in this round.
        """
        known = self._columns if before else set()
        for name, values in self._extra.items():
            missing = [None] * (before + rows - len(values))
            self._extra[name] = [*values, *missing] if name in known else [*missing, *values]
        self._columns = set(self._extra)

    def rewarded(
        self, prompts: Sequence[Any], completions: Sequence[Any], rewards: Tensor, advantages: Tensor, silent: Tensor
    ) -> None:
        """Log the rewards of a window, its table of completions, and the values that reward functions have logged.

        Args:
            rewards: [N, F]; NaN = the function does not apply, or the row is unscored.
            advantages: [N], the mean advantage of a row's loss tokens.
            silent: [N] bool, True = all advantages by outcome of the group are 0.
        Raises:
            ValueError: with `log_completions`, if reward functions have logged fewer values than rows in a column.
        """
        self._figures(
            reward_figures(rewards, self._names, self._host.reward_weights)
            | {"frac_reward_zero_std": silent.float().mean().item()}
        )
        for name, rows in (("prompt", prompts), ("completion", completions)):
            self._tables[name] = _table(self._gathered(rows))
        for name, column in zip(self._names, rewards.T, strict=True):
            self._tables["rewards"][name] = _table(column.tolist())
        self._tables["advantages"] = _table(advantages.tolist())
        # Sorted, because each name is gathered in its own collective, and ranks may have logged in different orders.
        names = sorted(set(self._gathered(list(self._extra))))
        self._tables["extra"].clear()  # of an earlier window, which may have had another number of rows
        missing = [None] * len(prompts)
        wanted = len(rewards) if self._host.args.log_completions else 0
        for name in names:  # if two functions have logged a column, the values of the second stay, as in TRL
            if len(values := self._gathered(self._extra.get(name, missing)[-len(prompts) :])) < wanted:
                raise ValueError(
                    f"log_extra({name!r}) got {len(values)} values for {wanted} completions, so it is not known which "
                    "rows of the table of completions they belong to. Log one value for each completion (None = no "
                    "value), or single numbers with log_metric."
                )
            self._tables["extra"][name] = _table(values)
        numbers = {
            name: self._gathered([float(one) for one in self._metrics.get(name, [])])
            for name in sorted(set(self._gathered(list(self._metrics))))
        }
        self._figures({name: sum(values) / len(values) for name, values in numbers.items()})
        self._extra.clear()
        self._metrics.clear()

    def _gathered(self, values: Sequence[Any]) -> list[Any]:
        return [one for rank in self._ranks.gather_object(list(values)) for one in rank]


def _table(rows: list[Any]) -> deque[Any]:
    """Make a column of the table of completions as TRL does: a deque with room for one window."""
    return deque(rows, maxlen=len(rows))
