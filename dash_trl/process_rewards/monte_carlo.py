"""`MonteCarloValue` estimates V(prefix) by the mean reward of completions that begin with the prefix::

    prefixes of all ranks ──► sorted, cut into calls ──► each rank finishes some prefixes, K times ──► rewards ──► means

The ranks share the prefixes of a call evenly, so all make the same number of calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from trl import GRPOTrainer

from dash_trl.checks import context_of
from dash_trl.process_rewards.values import ValueRequest
from dash_trl.seams import decoded, nothing_pending, with_settings
from dash_trl.update import weighted_rewards


@dataclass(frozen=True)
class _Prefix:
    """The first `boundary` tokens of the completion in request `row` of `rank`; at most `room` tokens may follow."""

    rank: int
    row: int
    boundary: int
    room: int
    request: ValueRequest


class MonteCarloValue:
    """V(prefix) = mean reward of K completions of the prefix (VinePPO, arXiv 2410.01679, eq. 4).

    This V is unbiased and has the unit of the reward, but takes K rollouts per boundary. The trainer's sampler makes
    them, at most a window's rows at a time, or K on each rank if that is more. With its continuation, a prefix is no
    longer than a completion.

    The trainer's reward functions and weights score the rollouts; what they log is dropped. Unscored rollouts are left
    out of the mean; if all of a prefix are, its value is missing.

    A rollout has one turn, so V would be the value of a policy without tools.

    Args:
        num_rollouts: K >= 1, number of rollouts per boundary.
    Raises:
        ValueError: if K is wrong; during training, if there are tools or an environment, or a `rollout_func` returns
            `env_mask`.
    """

    space = "reward"
    needs_answers = False

    def __init__(self, num_rollouts: int = 9):
        if not isinstance(num_rollouts, int) or num_rollouts < 1:
            raise ValueError(f"num_rollouts={num_rollouts!r}: the mean of a boundary needs 1 rollout or more.")
        self.num_rollouts = num_rollouts

    def __call__(self, requests: Sequence[ValueRequest], trainer: GRPOTrainer) -> list[list[float]]:
        has_function = trainer.rollout_func is not None and any(request.own is not None for request in requests)
        if trainer._conversations is not None or has_function:
            raise ValueError(
                "MonteCarloValue with tools, an environment or env_mask would finish each prefix in one turn: a "
                "rollout that calls a tool gets no answer and is scored without it, so V would be too low wherever a "
                "tool helps. Use AnswerLogProbValue()."
            )
        rank = trainer.ranks.rank
        own = [
            _Prefix(rank, row, boundary, _room(request, boundary, trainer), request)
            for row, request in enumerate(requests)
            for boundary in request.boundaries
        ]
        prefixes = [one for of_rank in trainer.ranks.gather_object(own) for one in of_rank]
        means = {}
        for call, mine in self._calls(prefixes, trainer):
            rows = [prefix for prefix in mine for _ in range(self.num_rollouts)]
            completions = [
                [*row.request.completion_ids[: row.boundary], *ids[: row.room]]
                for row, ids in zip(rows, self._continuations(rows, call[0].room, trainer), strict=True)
            ]
            rewards = _rewards(trainer, rows, completions)
            total = weighted_rewards(rewards, trainer.reward_weights)
            for prefix, mean in zip(call, total.view(-1, self.num_rollouts).nanmean(dim=1).tolist(), strict=True):
                means[prefix.rank, prefix.row, prefix.boundary] = mean
        return [[means[rank, row, boundary] for boundary in request.boundaries] for row, request in enumerate(requests)]

    def _calls(self, prefixes: list[_Prefix], trainer: GRPOTrainer) -> Iterator[tuple[list[_Prefix], list[_Prefix]]]:
        """Cut all ranks' prefixes into calls; yield the prefixes of each call, and those that this rank continues.

        Prefixes with a similar `room` share a call, which takes as long as its longest row; without room, none is
        sampled.
        """
        ranks = trainer.ranks.count
        size = ranks * max(1, trainer.args.generation_batch_size // (ranks * self.num_rollouts))
        prefixes = sorted(prefixes, key=attrgetter("room"), reverse=True)
        for part in ([one for one in prefixes if one.room], [one for one in prefixes if not one.room]):
            for start in range(0, len(part), size):
                call = part[start : start + size]
                call += call[-1:] * (-len(call) % ranks)
                yield call, call[trainer.ranks.own(len(call) // ranks)]

    def _continuations(self, rows: list[_Prefix], longest: int, trainer: GRPOTrainer) -> list[list[int]]:
        """Return the token ids of one continuation of each row, which may be longer than the row's `room`."""
        if not longest:
            return [[] for _ in rows]
        ids = [[*row.request.prompt_ids, *row.request.completion_ids[: row.boundary]] for row in rows]
        owner = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
        name = "max_completion_length" if trainer.use_vllm else "max_new_tokens"
        with with_settings(owner, {name: longest}):
            return trainer._generate_single_turn(ids, None, {}, self.num_rollouts)[0]


def _room(request: ValueRequest, boundary: int, trainer: GRPOTrainer) -> int:
    """Return how many tokens may follow a boundary within `max_completion_length` and the model's context."""
    contexts = [length for length in (context_of(trainer.model.config), trainer.args.vllm_max_model_length) if length]
    left = [trainer.max_completion_length, *(length - len(request.prompt_ids) for length in contexts)]
    return max(0, min(left) - boundary)


def _rewards(trainer: GRPOTrainer, rows: Sequence[_Prefix], completion_ids: list[list[int]]) -> torch.Tensor:
    """Return the rewards [N, F] of all ranks' completions, computed as TRL does; NaN = not applicable."""
    examples = [row.request.example or {} for row in rows]
    prompts = [example["prompt"] for example in examples]
    prompt_ids = [list(row.request.prompt_ids) for row in rows]
    completions = decoded(trainer._tokenizer, prompts, prompt_ids, completion_ids)

    # What reward functions log here is dropped, because it would distort the figures of training.
    with with_settings(trainer, nothing_pending()):
        ask = partial(GRPOTrainer._calculate_rewards, trainer)
        return trainer._run.rewards.of_all(ask, examples, prompts, completions, completion_ids, training=False)
