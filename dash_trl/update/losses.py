"""The losses for rollouts that older weights wrote, and which of TRL's losses each of them is.

    aipo              −(1/N) Σ min(π/μ, δ) Â                                                        δ: aipo_delta
    aipo, detached    −(1/N) Σ sg(min(π/μ, δ)) Â log π                                              sg: no gradient
    decoupled_ppo     −(1/N) Σ min(π_prox/μ, c) min(u Â, clip(u, 1 − ε, 1 + ε_high) Â),  u = π/π_prox
                                                                   c: vllm_importance_sampling_clip_max

over loss tokens: μ is the probability that the sampler gave the token, π_prox that of the weights with which the
generation window began, π that of the weights that learn; Â the advantage, N the loss tokens that TRL's `dapo` divides
by (`filter_denominator="kept"`: the survivors').

AIPO is LlamaRL's (arXiv 2505.24034), at the level of tokens and without KL and entropy terms as PRIME-RL has it, which
differentiates through the minimum: a token above δ has no gradient, whatever the sign of Â. In the detached form it
keeps δ Â ∇log π, as in PipelineRL and TRL's `cispo`. Decoupled PPO is AReaL's (arXiv 2505.24298) with its first factor
truncated at c; AReaL's formula is c = inf.

Letters: B rows, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dash_trl.update.arguments import check_tensor

# They compare the policy with the sampler, whose log-probs they need.
OFF_POLICY_LOSSES = ("aipo", "decoupled_ppo")

# What vLLM's API writes for a log-prob of −inf, which JSON cannot. Its token was sampled: that is no log-prob.
NO_LOG_PROB = -9999.0


def trl_settings(loss_type: str, *, delta: float, detached: bool) -> dict[str, Any]:
    """The attributes of a `GRPOTrainer` with which TRL computes the loss; `delta` is one of its `args`.

    aipo is `dapo` with μ as the old log-probs and r = π/μ: of min(min(r, delta) Â, clip(r, 1 − 1, 1 + δ − 1) Â) both
    terms are min(r, δ) Â, so that the outer minimum, which looks at the sign of Â, has no say. Detached it is `cispo`.
    Decoupled PPO is `dapo` with TRL's correction, whose ratio is π_prox/μ. That correction is bound to `use_vllm`: here
    it serves whoever reports log-probs.

    Args:
        delta: δ. detached: the form of aipo.
    Returns:
        Nothing for a loss of TRL's own.
    """
    if loss_type == "decoupled_ppo":
        correction = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
        return {"loss_type": "dapo", "use_vllm": True, **correction}
    if loss_type != "aipo":
        return {}
    aipo = {"vllm_importance_sampling_correction": False}
    if detached:
        return {**aipo, "loss_type": "cispo", "epsilon_high": delta}
    return {**aipo, "loss_type": "dapo", "epsilon_low": 1.0, "epsilon_high": delta - 1.0, "delta": delta}


def unknown_log_probs(sampling_per_token_logps: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T] bool: the loss tokens whose log-prob the sampler did not report (NaN, or what vLLM writes for −inf).

    Args:
        sampling_per_token_logps: [B, T]. loss_mask: [B, T], 1 = a token that the loss counts.
    """
    check_tensor("sampling_per_token_logps", sampling_per_token_logps, "floats", B=None, T=None)
    rows, tokens = sampling_per_token_logps.shape
    check_tensor("loss_mask", loss_mask, B=rows, T=tokens)
    return ~(sampling_per_token_logps > NO_LOG_PROB) & loss_mask.bool()


def behaviour_log_probs(sampling_per_token_logps: Tensor, old_per_token_logps: Tensor) -> Tensor:
    """[B, T]: the sampler's log-probs, and the trainer's where the sampler reported none.

    Args:
        sampling_per_token_logps: [B, T].
        old_per_token_logps: [B, T], of the weights at the window's start, so that the ratio begins at 1; finite, and
            read only where it is needed.
    """
    return torch.where(sampling_per_token_logps > NO_LOG_PROB, sampling_per_token_logps, old_per_token_logps)
