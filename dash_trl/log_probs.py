"""`LogProbs` computes log-probs of sampled tokens, by passes without gradient::

    window ──► micro-batches ──► policy, reference ──► log-probs [B, T] ──► old_per_token_logps, ref_per_token_logps
                                                            │
                                  the sampler's own ────────┴─────────────► importance_sampling_ratio

Letters: B rows of this rank, T completion tokens, R ranks, S rows of a pass, T' completion tokens of a pass, which may
differ from T, M rows of a rank in a window's `lengths`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.models.utils import disable_gradient_checkpointing

from dash_trl.host import Host
from dash_trl.micro_batches import Inputs, MicroBatches
from dash_trl.monitoring import corrected_share, sampler_metrics
from dash_trl.rollout import COMPLETION, LOG_PROB_FIELDS, LOSS, PROMPT, Part, RolloutBatch
from dash_trl.update import (
    NO_LOG_PROB,
    OFF_POLICY_LOSSES,
    Pass,
    has_dropout,
    importance_sampling_ratio,
    to_device,
    unknown_log_probs,
)


def loss_settings(host: Host, *, training: bool) -> dict[str, Any]:
    """Return the settings that replace attributes of the trainer while TRL computes the loss.

    TRL corrects for the difference between sampler and policy only with `use_vllm=True`. In training, `use_vllm` is
    therefore also True with `loss_type="decoupled_ppo"`, and if this process samples the next window while it waits for
    rewards. In an evaluation, our losses have no correction, because the policy itself samples.
    """
    loss_type = host.args.loss_type
    settings = OFF_POLICY_LOSSES.get(loss_type, {})
    if not training:
        return {**settings, "vllm_importance_sampling_correction": False} if settings else {}
    return settings | ({"use_vllm": True} if loss_type == "decoupled_ppo" or host.args.async_level else {})


class LogProbRules:
    """Rules that determine which log-probs the loss needs.

    Attributes:
        outlives_its_weights: True = several optimizer steps use a window, so its old log-probs must be computed.
        reference: True = the loss needs the log-probs of the reference model.
        sampler_is_old: True = the old log-probs are the sampler's log-probs.
        correction: the keyword arguments of `importance_sampling_ratio`. `None`: the loss has no correction.
        noisy: True = NEFTune adds noise, or a row has several training passes (`num_iterations`), between which an
            optimizer step may come if a stream ends within a window.
    """

    def __init__(self, host: Host):
        args = host.args
        settings = vars(args) | loss_settings(host, training=True)
        correction = {
            "mode": settings["vllm_importance_sampling_mode"],
            "clip_min": args.vllm_importance_sampling_clip_min,
            "clip_max": args.vllm_importance_sampling_clip_max,
        }
        corrects = settings["use_vllm"] and settings["vllm_importance_sampling_correction"]
        self.outlives_its_weights = args.gradient_accumulation_steps % args.window_batches != 0
        self.reference = args.beta != 0.0
        self.sampler_is_old = args.loss_type == "aipo"
        self.correction = correction if corrects else None
        self.noisy = args.num_iterations > 1 or args.neftune_noise_alpha is not None
        self._model = host.model

    def names(self, *, serves_one_step: bool) -> list[str]:
        """Return the fields of log-probs that must be computed before training.

        If the window `serves_one_step`, its training passes use the same weights as the old log-probs, so they can
        compute these themselves; see `CorrectionInPass`.
        """
        repeatable = serves_one_step and not self.noisy and not has_dropout(self._model)
        corrects = self.correction is not None and not repeatable
        old = self.outlives_its_weights or self.sampler_is_old or corrects
        return ["old_per_token_logps"] * old + ["ref_per_token_logps"] * self.reference


class LogProbs:
    """Computes old log-probs, reference log-probs and importance sampling ratios.

    All ranks call every method at the same point, because model passes and the gathering of lengths are collectives.

    Attributes:
        in_pass: computes importance sampling ratios within training passes.
    """

    def __init__(self, host: Host, micro_batches: MicroBatches):
        self._host = host
        self._micro_batches = micro_batches
        self._ranks = host.ranks
        self.rules = LogProbRules(host)
        self.in_pass = CorrectionInPass(self.rules.correction, host.ranks.rank)

    @torch.no_grad()
    def added(self, part: Part, shares: Sequence[range]) -> Part:
        """Add old log-probs, reference log-probs and ratios to the survivors, as far as the loss needs them.

        The passes have the micro-batches of the training passes. With other rows or another width, bf16 would round
        differently, and ratios of equal policies would differ from 1. If the old log-probs are the sampler's, only rows
        with a token whose log-prob is not reported need a pass. For `shares` see `Schedule.shares_of_window`.
        """
        rules = self.rules
        survivors = part.rollouts
        names = rules.names(serves_one_step=len(shares) == 1 and not part.by_group)
        if not names:
            return part
        sampled: Any = survivors.sampling_per_token_logps  # the trainer has checked that it is set if the rules need it
        needed = part.lengths[..., COMPLETION] > 0
        if rules.sampler_is_old:
            own = needed[self._ranks.rank]
            own[own.clone()] = unknown_log_probs(sampled, survivors.loss_mask).any(1)
            needed = self._ranks.gather(own).view(needed.shape)

        with self._host.recorder.timed("logprobs"):
            known = self._found(part, shares, needed, names)
        if rules.sampler_is_old:
            # A token whose log-prob the sampler did not report has the ratio π/μ = 1 at the beginning of the window.
            known["old_per_token_logps"] = torch.where(sampled > NO_LOG_PROB, sampled, known["old_per_token_logps"])
        if rules.correction is not None and "old_per_token_logps" in known:
            log_probs = known["old_per_token_logps"], sampled, survivors.loss_mask
            known["importance_sampling_ratio"] = importance_sampling_ratio(*log_probs, **rules.correction)
        return replace(part, rollouts=replace(survivors, **known))

    def of_all(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Add the fields of `added` to all B rows of a window without rewards, before it is known which rows survive.

        This is for a window that several optimizer steps use, and whose rewards come group by group. All log-probs must
        be computed before the first of these steps changes the weights, but some rewards come only after it.
        """
        rows, window = self._window(rollouts, by_group=True)
        survivors = self.added(window, [range(1)]).rollouts
        whole = {
            name: value.new_zeros(len(rollouts), *value.shape[1:]).index_copy(0, rows, value)
            for name, value in survivors.tensors().items()
            if name in LOG_PROB_FIELDS
        }
        return replace(rollouts, **whole)

    @torch.no_grad()
    def of_policy(self, rollouts: RolloutBatch) -> list[list[float | None]]:
        """Compute one log-prob by the policy for each token of B completions."""
        with self._host.recorder.timed("logprobs"):
            _, window = self._window(rollouts)
            needed = window.lengths[..., COMPLETION] > 0
            (known,) = self._found(window, [range(1)], needed, ["old_per_token_logps"]).values()
        return [row[mask].tolist() for row, mask in zip(known, rollouts.completion_mask.bool(), strict=True)]

    def log(self, survivors: RolloutBatch) -> None:
        """Log the ratios of a whole window, and how the sampler's log-probs differ from the old ones.

        Ratios that training passes compute are left to `log_step`.
        """
        sampled = survivors.sampling_per_token_logps
        mask = survivors.loss_mask
        old = survivors.old_per_token_logps
        ratio = survivors.importance_sampling_ratio
        if ratio is not None:
            assert old is not None and sampled is not None, "the ratio was computed from them"
            self._log_correction(old, sampled, mask, ratio)

    def log_step(self) -> None:
        """Log the figures of the ratios that the training passes of the ending optimizer step have computed."""
        for tables in self.in_pass.of_step():
            self._log_correction(*tables)

    def _log_correction(self, old: Tensor, sampled: Tensor, mask: Tensor, ratio: Tensor) -> None:
        correction = self.rules.correction
        assert correction is not None, "the ratio was computed with it"
        self._host.recorder.log(sampler_metrics(sampled, old, ratio, mask, self._ranks.gather))
        self._host.recorder.log(corrected_share(old, sampled, mask, correction=correction, reduce_sum=self._ranks.sum))

    def _found(self, part: Part, shares: Sequence[range], needed: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Run passes over the `needed` rows ([R, M] bool) of a part; return name → log-probs, float32 [B, T]."""
        args = self._host.args
        passes = []
        with disable_gradient_checkpointing(self._host.model, args.gradient_checkpointing_kwargs):
            for steps in shares:
                own, share = part.of_steps(steps, shares[-1].stop, self._ranks.rank, needed)
                for rows, inputs in self._micro_batches.without_gradient(share):
                    on_device = {name: to_device(value, args.device) for name, value in inputs.items()}
                    results = [
                        self._host.run_pass(on_device, reference=name == "ref_per_token_logps")[0] for name in names
                    ]
                    passes.append((own[rows].tolist(), results))
        found = {name: torch.zeros(part.rollouts.completion_ids.shape) for name in names}
        for rows, results in passes:  # read after the last pass, because reading waits for the device
            for values, known in zip(results, found.values(), strict=True):  # which may differ in columns
                known[rows, : values.shape[1]] = values[: len(rows), : known.shape[1]].float().cpu()
        return found

    def _window(self, rollouts: RolloutBatch, *, by_group: bool = False) -> tuple[Tensor, Part]:
        """Build a window from the rows that are not fully masked; return the indices of these rows, and the window."""
        lengths = rollouts.lengths()
        rows = (lengths[:, COMPLETION] > 0).nonzero().squeeze(1)
        of_all = self._ranks.gather(lengths).view(self._ranks.count, -1, 4)
        width = int(of_all[..., [PROMPT, COMPLETION]].amax(dim=1).sum(dim=1).max())
        return rows, Part(rollouts.rows(rows), of_all, width, of_all[..., LOSS].sum(), by_group)


class CorrectionInPass:
    """Computes importance sampling ratios within training passes, which saves the passes for old log-probs.

    This works if one optimizer step uses the whole window. Its training passes use the same weights as the old
    log-probs, so their log-probs, detached, are the old log-probs.
    """

    def __init__(self, correction: dict[str, Any] | None, rank: int):
        self._correction = correction
        self._rank = rank
        self._tables = defaultdict[int, list[tuple[Tensor, ...]]](list)

    def corrected(self, inputs: Inputs, log_probs: Tensor, mask: Tensor) -> Inputs:
        """Return the inputs of the loss, with the ratios of a training pass if the pass needs them.

        The policy's `log_probs` in this pass, and `mask` (1 = a token that the loss counts), are [S, T].
        """
        if self._correction is None or "importance_sampling_ratio" in inputs:
            return inputs
        old = log_probs.detach().float()
        sampled = inputs["sampling_per_token_logps"]
        ratio = importance_sampling_ratio(old, sampled, mask, **self._correction)
        one: Pass = inputs["pass"]
        rows = len(one.micro_batch.rows[self._rank])  # the rows after these are dummy rows
        self._tables[one.share.first].append(tuple(table[:rows] for table in (old, sampled, mask, ratio)))
        return {**inputs, "importance_sampling_ratio": ratio}

    def of_step(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield and forget, for each window, the old and the sampler's log-probs, the loss mask and the ratios."""
        tables = self._tables
        self._tables = defaultdict(list)
        for passes in tables.values():
            widest = max(old.shape[1] for old, *_ in passes)
            # A table with one column has one figure per row and stays as it is.
            yield tuple(
                torch.cat([pad(one, (0, widest - one.shape[1])) if one.shape[1] > 1 else one for one in table]).cpu()
                for table in zip(*passes, strict=True)
            )
