"""What TRL logs of a window: its tokens, its rewards, and the table of its completions."""

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import nanstd

from dash_trl.collect.decode import Sampled, TurnCounts
from dash_trl.distributed import Ranks

BROKEN_AFTER = 3  # windows in a row whose rows all failed; the first one is enough, as for reward functions


def length_figures(lengths: Tensor, truncated: Tensor) -> dict[str, float]:
    """TRL's figures of completions.

    Args:
        lengths: [N], the tokens that the policy wrote in each. truncated: [N] bool, see `decode.is_truncated`.
    """
    ended = lengths[~truncated] if not truncated.all() else torch.zeros(1)
    figures = {"completions/clipped_ratio": truncated.float().mean().item()}
    for name, values in (("", lengths.float()), ("terminated_", ended.float())):
        figures[f"completions/mean_{name}length"] = values.mean().item()
        figures[f"completions/min_{name}length"] = values.min().item()
        figures[f"completions/max_{name}length"] = values.max().item()
    return figures


def reward_figures(rewards: Tensor, names: Sequence[str], weights: Tensor) -> dict[str, float]:
    """TRL's figures of rewards.

    Args:
        rewards: [N, F]; NaN = the function does not apply. A row of NaN is left out of the figures of the sum.
        names, weights: F each.
    """
    figures = {}
    for name, column in zip(names, rewards.T, strict=True):
        figures[f"rewards/{name}/mean"] = column.nanmean().item()
        figures[f"rewards/{name}/std"] = nanstd(column).item()
    total = (rewards * weights.to(rewards.device)).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)
    return {**figures, "reward": total.nanmean().item(), "reward_std": nanstd(total).item()}


class WindowLog:
    """Writes where TRL's `log` reads. Every method is called on every rank at the same point.

    Args:
        figures: takes one more value of each name. total: takes a running total.
        tables: TRL's `_logs`: the columns of the table of completions.
        extra, metrics: what reward functions have logged by `log_extra` and `log_metric`, TRL's `_pending_extra_logs`
            and `_pending_metrics`.
        names: of the F reward functions. weights: theirs, as they are now.
        count_tokens: adds to the tokens that the run has seen; returns their number.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        figures: Callable[[Mapping[str, float]], None],
        total: Callable[[str, float], None],
        tables: MutableMapping[str, Any],
        extra: MutableMapping[str, list[Any]],
        metrics: MutableMapping[str, list[float]],
        names: Sequence[str],
        weights: Callable[[], Tensor],
        count_tokens: Callable[[int], int],
    ):
        self._ranks, self._figures, self._total = ranks, figures, total
        self._tables, self._extra, self._metrics = tables, extra, metrics
        self._names, self._weights, self._count_tokens = names, weights, count_tokens
        self._failed_in_a_row = BROKEN_AFTER - 1  # windows without a row that came to its end

    def sampled(self, sampled: Sampled, truncated: Tensor) -> None:
        """The tokens of a window that has begun.

        Args:
            truncated: [B] bool.
        """
        own = sampled.own_tokens
        completions = torch.tensor([len(ids) for ids in sampled.completion_ids] if own is None else list(map(sum, own)))
        prompts = torch.tensor(list(map(len, sampled.prompt_ids)))
        prompts, completions = self._ranks.gather(prompts), self._ranks.gather(completions)
        self._total("num_tokens", self._count_tokens(int(prompts.sum() + completions.sum())))
        self._figures(length_figures(completions, self._ranks.gather(truncated)))
        if sampled.turns is not None:
            self._turns(sampled.turns)

    def _turns(self, turns: TurnCounts) -> None:
        """
        Raises:
            RuntimeError: on all ranks, if tools or environments are broken.
        """
        failed = self._ranks.gather(turns.failed)
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed.all() else 0
        if self._failed_in_a_row == BROKEN_AFTER:
            raise RuntimeError(
                f"Tools or environments failed on every row of the last windows, at last with {turns.failure}. "
                "Nothing can be learned from such rows: correct the tool or environment. A tool that hangs can run in "
                "processes, which are ended (dash_trl.ProcessTool), or get more time (tool_timeout)."
            )
        self._figures({"tools/failed_rows": failed.float().mean().item()})
        if turns.calls is not None:
            made, in_vain = self._ranks.gather(turns.calls).sum(dim=0).tolist()
            frequency = {"call": made / len(failed), "failure": in_vain / made if made else 0.0}
            self._figures({f"tools/{name}_frequency": value for name, value in frequency.items()})

    def rewarded(
        self, prompts: Sequence[Any], completions: Sequence[Any], rewards: Tensor, advantages: Tensor, silent: Tensor
    ) -> None:
        """The rewards and the table of a window, and what its reward functions have logged.

        Args:
            prompts, completions: B each, of this rank.
            rewards: [N, F], of all ranks, as the functions gave them; NaN = does not apply, or unscored.
            advantages: [N], of all ranks: the mean over a row's loss tokens.
            silent: [groups] bool, the group has no signal.
        """
        self._figures(reward_figures(rewards, self._names, self._weights()))
        self._figures({"frac_reward_zero_std": silent.float().mean().item()})
        for name, rows in (("prompt", prompts), ("completion", completions)):
            self._tables[name] = _table(self._gathered(rows))
        for name, column in zip(self._names, rewards.T, strict=True):
            self._tables["rewards"][name] = _table(column.tolist())
        self._tables["advantages"] = _table(advantages.tolist())
        # Sorted: ranks may have logged them in another order, and each is gathered by itself.
        for name in sorted(set(self._gathered(list(self._extra)))):
            self._tables["extra"][name] = _table(self._gathered(self._extra.get(name, [None] * len(prompts))))
        for name in sorted(set(self._gathered(list(self._metrics)))):
            values = self._gathered([float(one) for one in self._metrics.get(name, [])])
            self._figures({name: sum(values) / len(values)})
        self._extra.clear()
        self._metrics.clear()

    def _gathered(self, values: Sequence[Any]) -> list[Any]:
        return [one for rank in self._ranks.gather_object(list(values)) for one in rank]


def _table(rows: list[Any]) -> deque[Any]:
    """A column as TRL has it: one window; the rows of an evaluation push the oldest out."""
    return deque(rows, maxlen=len(rows))
