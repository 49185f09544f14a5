"""`Scorer`: what the models say of tokens that have been sampled, by passes without gradient.

    window ──► micro-batches ──► policy, reference ──► log-probs [B, T] ──► old_per_token_logps, ref_per_token_logps
                                                            │
                                  the sampler's own ────────┴─────────────► importance_sampling_ratio

Letters: B rows of this rank, T completion tokens, R ranks, S rows of a pass, N rows of a rank in a window's `lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_trl.distributed import Ranks
from dash_trl.rollout import SCORED_FIELDS, CreditedRollouts, GenerationWindow, RolloutBatch, Survivors
from dash_trl.update import behaviour_log_probs, importance_sampling_ratio, unknown_log_probs

Inputs = dict[str, Any]  # of a model pass, on the device


@dataclass(frozen=True)
class ScoringRules:
    """What the loss asks for.

    Attributes:
        outlives_its_weights: a window is used by more than one optimizer step, so that its old log-probs are needed.
        reference: those of the reference model are.
        sampler_is_old: the old log-probs are the sampler's.
        correction: the keyword arguments of `importance_sampling_ratio`, where the sampler is corrected.
    """

    outlives_its_weights: bool
    reference: bool
    sampler_is_old: bool
    correction: dict[str, Any] | None

    @property
    def names(self) -> list[str]:
        """Whose log-probs are needed."""
        old = self.outlives_its_weights or self.sampler_is_old or self.correction is not None
        return ["old_per_token_logps"] * old + ["ref_per_token_logps"] * self.reference


class Scorer:
    """Every method is called on every rank at the same point: model passes and gathered lengths are collectives.

    Args:
        inputs_of: (window, lengths [R, N, 3]) → of each pass over the rows with a length, this rank's rows of
            `window.rollouts`, at most S, and its inputs.
        log_probs_of: by the name of the field, the pass that finds it: inputs → [S, T'].
    """

    def __init__(
        self,
        ranks: Ranks,
        inputs_of: Callable[[GenerationWindow, Tensor], Iterator[tuple[list[int], Inputs]]],
        log_probs_of: dict[str, Callable[[Inputs], Tensor]],
    ):
        self._ranks, self._inputs_of, self._log_probs_of = ranks, inputs_of, log_probs_of

    @torch.no_grad()
    def score(self, window: GenerationWindow, rules: ScoringRules) -> None:
        """Old log-probs, importance-sampling ratio and reference log-probs of the survivors, where they are needed.

        Of rows whose old log-probs are the sampler's, only those take a pass of which it did not report all.
        """
        survivors, lengths = window.rollouts, window.lengths
        if rules.sampler_is_old:
            lengths = self._unknown_rows(window)
        known = self._log_probs(window, lengths, rules.names)
        sampled, mask = survivors.sampling_per_token_logps, survivors.loss_mask
        if rules.sampler_is_old:
            assert sampled is not None, "checked where it was sampled"
            known["old_per_token_logps"] = behaviour_log_probs(sampled, known["old_per_token_logps"])
        if rules.correction is not None:
            assert sampled is not None, "checked where it was sampled"
            log_probs = known["old_per_token_logps"], sampled, mask
            known["importance_sampling_ratio"] = importance_sampling_ratio(*log_probs, **rules.correction)
        window.rollouts = survivors.with_log_probs(**known)

    def scored_at_once(self, rollouts: RolloutBatch, num_items_in_batch: Tensor, rules: ScoringRules) -> RolloutBatch:
        """With what `score` finds of all rows: those of later optimizer steps, too, by the weights of the first."""
        count = len(rollouts)
        rows = (rollouts.lengths()[:, 1] > 0).nonzero().squeeze(1)  # one that is fully masked takes no pass
        known = rollouts.with_rewards(torch.zeros(count, 1)).with_advantages(torch.zeros(count)).survivors(rows)
        window = GenerationWindow(known, self._of_all_ranks(rollouts.lengths()), num_items_in_batch)
        self.score(window, rules)
        found = {name: getattr(window.rollouts, name) for name in SCORED_FIELDS}
        return rollouts.with_log_probs(
            **{
                name: value.new_zeros(count, *value.shape[1:]).index_copy(0, rows, value)
                for name, value in found.items()
                if value is not None
            }
        )

    @torch.no_grad()
    def of_sampled(
        self, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], *, pad_token_id: int
    ) -> list[list[float]]:
        """The policy's log-probs of each completion's tokens."""
        rows = Survivors.of_tokens(prompt_ids, completion_ids, pad_token_id=pad_token_id)
        lengths = self._of_all_ranks(rows.lengths())
        window = GenerationWindow(rows, lengths, lengths[..., 2].sum())
        (known,) = self._log_probs(window, lengths, ["old_per_token_logps"]).values()
        return [row[: len(ids)].tolist() for row, ids in zip(known, completion_ids, strict=True)]

    @torch.no_grad()
    def log_probs_and_entropies(
        self, rollouts: CreditedRollouts, rows: Tensor, both: Callable[[Inputs], tuple]
    ) -> tuple[Tensor, Tensor]:
        """[B, T] each, float32, on the CPU: of the loss tokens of some rows; 0 for all others.

        Args:
            rows: [B] bool. both: the pass, inputs → ([S, T'] log-probs, [S, T'] entropies, …).
        """
        lengths = rollouts.lengths() * rows.unsqueeze(1)
        chosen = (lengths[:, 1] > 0).nonzero().squeeze(1)  # one that is fully masked takes no pass
        of_all = self._of_all_ranks(lengths)
        window = GenerationWindow(rollouts.survivors(chosen), of_all, of_all[..., 2].sum())
        found = torch.zeros(2, len(chosen), rollouts.completion_ids.shape[1])
        for own, inputs in self._inputs_of(window, window.lengths):
            for values, known in zip(both(inputs)[:2], found, strict=True):
                _put(values, known, own)
        whole = torch.zeros(2, len(rollouts), found.shape[2]).index_copy(1, chosen, found)
        log_probs, entropies = whole * rollouts.loss_mask
        return log_probs, entropies

    def _log_probs(self, window: GenerationWindow, lengths: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """[B, T] each, float32, on the CPU: the policy's, or the reference's ("ref_…"), of rows with a length."""
        known = {name: torch.zeros(window.rollouts.completion_ids.shape) for name in names}
        for rows, inputs in self._inputs_of(window, lengths) if names else ():
            for name in names:
                _put(self._log_probs_of[name](inputs), known[name], rows)
        return known

    def _unknown_rows(self, window: GenerationWindow) -> Tensor:
        """`window.lengths` of the rows with a token whose log-prob the sampler did not report; 0 for all others."""
        survivors, lengths = window.rollouts, window.lengths
        assert survivors.sampling_per_token_logps is not None, "checked where it was sampled"
        unknown = torch.zeros(lengths.shape[1], dtype=torch.long)
        rows = unknown_log_probs(survivors.sampling_per_token_logps, survivors.loss_mask).any(dim=1)
        unknown[lengths[self._ranks.rank, :, 1] > 0] = rows.long()
        return lengths * self._ranks.gather(unknown).view(self._ranks.count, -1, 1)

    def _of_all_ranks(self, lengths: Tensor) -> Tensor:
        """[B, 3] → [R, B, 3]."""
        return self._ranks.gather(lengths).view(self._ranks.count, -1, 3)


def _put(values: Tensor, known: Tensor, rows: list[int]) -> None:
    """What a pass found of its rows, [S, T'], into those of `known`, [B, T], whose columns may be more or fewer."""
    known[rows, : values.shape[1]] = values[: len(rows), : known.shape[1]].float().cpu()
