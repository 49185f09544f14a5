"""The losses for old rollouts: against their formulas and autograd of these, through a run of the trainer."""

import math

import pytest
import torch

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.monitoring import corrected_share
from tests import reference
from tests.tiny import ScriptedRollouts, Snapshots, assert_same_update, load, refused

NAN = math.nan
BOUND = 1.5
LOSSES = {
    "aipo": {"loss_type": "aipo", "aipo_delta": BOUND},
    "decoupled_ppo": {"loss_type": "decoupled_ppo", "vllm_importance_sampling_clip_max": BOUND},
}


class InAnEnvironment(ScriptedRollouts):
    """Rollouts in which every third token is the environment's: no loss token, with NaN or a wrong log-prob."""

    def __call__(self, prompts, trainer):
        output = super().__call__(prompts, trainer)
        for row in output["logprobs"]:
            row[::3] = [(NAN, -0.1)[t % 2] for t in range(len(row[::3]))]
        return {**output, "env_mask": [[int(t % 3 != 0) for t in range(len(row))] for row in output["logprobs"]]}


class Watch(Snapshots, DASHCallback):
    """Callback that records the windows and the parameters after each step; optionally sets credit per token."""

    def __init__(self, per_token: bool = False):
        super().__init__()
        self.per_token = per_token
        self.windows = []

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        if self.per_token:
            chance = torch.Generator().manual_seed(0)
            credit = torch.randn(rollouts.completion_ids.shape, generator=chance)
            rollouts.advantages = rollouts.advantages[:, None] * credit
        self.windows.append(rollouts)


def log_probs_of(model, rollouts) -> torch.Tensor:
    return reference.distributions(model, rollouts).log_prob(rollouts.completion_ids)


def with_parameters(model: str, values: dict[str, torch.Tensor]):
    loaded = load(model)
    loaded.load_state_dict(values, strict=False)  # but for the tied head
    return loaded


def formula(loss: str, pi: torch.Tensor, prox: torch.Tensor, mu: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """The sum over tokens, as the formulas are written."""
    ratio = (pi - mu).exp()
    if loss == "aipo":
        return -(torch.minimum(ratio, torch.tensor(BOUND)) * advantage).sum()
    u = (pi - prox).exp()
    return -((prox - mu).exp().clamp(max=BOUND) * torch.minimum(u * advantage, u.clamp(0.8, 1.2) * advantage)).sum()


class Scoring(DASHTrainer):
    """Counts the rows that take a pass for old log-probs."""

    scored = 0

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        if not torch.is_grad_enabled():
            self.scored += int(attention_mask[:, -logits_to_keep:].any(dim=1).sum())
        batch = model, input_ids, attention_mask, logits_to_keep
        return super()._get_per_token_logps_and_entropies(*batch, **kwargs)


@pytest.mark.parametrize(
    ("loss", "rollouts", "denominator", "per_token"),
    [
        ("aipo", ScriptedRollouts(noise=0.7), "kept", False),
        ("decoupled_ppo", ScriptedRollouts(noise=0.7), "kept", True),
        ("decoupled_ppo", ScriptedRollouts(noise=0.7), "all", False),
        # Only rows with tokens that the sampler does not know take a pass: these tokens' ratio is π/π_old.
        ("aipo", ScriptedRollouts(noise=0.7, unknown=0.04), "all", True),
        ("aipo", InAnEnvironment(noise=0.7), "all", False),  # no loss counts what is not known
    ],
)
def test_value_and_gradient(tiny_model, train, loss, rollouts, denominator, per_token):
    """Of two steps on one window, the run's second: in the first of them π is π_prox, in the other it has moved away.

    The loss that was logged is the formula's, and the parameters go where its gradient leads.
    """
    watch = Watch(per_token)
    rate = 0.5
    settings = {
        "num_iterations": 2,
        "max_steps": 4,
        "learning_rate": rate,
        "max_tokens_per_microbatch": 60,
        "filter_denominator": denominator,
        "callbacks": [watch],
        "rollouts": rollouts,
        **LOSSES[loss],
    }
    trainer = train(Scoring, **settings)
    logs = trainer.state.log_history
    incomplete = survivors = 0
    for rows in watch.windows:
        own = rows.loss_mask.bool()
        credit = rows.advantages.view(len(own), -1).expand_as(own)
        kept = (credit * own).any(dim=1)
        assert kept.any() and not kept.all()
        counted = own & kept[:, None]
        sampler = rows.sampling_per_token_logps.where(rows.sampling_per_token_logps > -9999.0, NAN)
        incomplete += (sampler.isnan() & counted).any(dim=1).sum()
        survivors += kept.sum()
    assert (0 < incomplete < survivors) == (rollouts.unknown > 0.0)
    assert loss == "decoupled_ppo" or trainer.scored == incomplete

    tokens = (own if denominator == "all" else counted).sum().item()
    with torch.no_grad():
        proximal = log_probs_of(with_parameters(tiny_model, watch.steps[1]), rows)[counted]
    known = sampler[counted]
    advantages = credit[counted]
    filled = torch.where(known.isnan(), proximal, known)
    for before, after, log in zip(watch.steps[1:], watch.steps[2:], logs[2:], strict=False):
        model = with_parameters(tiny_model, before)
        policy = log_probs_of(model, rows)[counted]
        value = formula(loss, policy, proximal, filled, advantages) / tokens
        value.backward()
        assert log["loss"] == pytest.approx(value.item(), abs=1e-5) and abs(value) > 1e-4
        expected = {name: before[name] - rate * value.grad for name, value in model.named_parameters()}
        assert_same_update(before, expected, after)
        ratio, above, kl = reference.off_policy_figures(policy.tolist(), known.tolist(), BOUND)
        if loss == "decoupled_ppo":
            above = reference.off_policy_figures(proximal.tolist(), known.tolist(), BOUND)[1]
        assert [log["off_policy/ratio_mean"], log["off_policy/kl"]] == pytest.approx([ratio, kl], rel=1e-4)
        assert log.get("off_policy/clipped_share", above) == pytest.approx(above, abs=1e-6) and 0.1 < above < 0.9
    assert "off_policy/clipped_share" in logs[2]
    moved = (policy - proximal).exp()
    assert moved.min() < 0.8 and moved.max() > 1.2, "clip(u) has to matter"


class ByHand(DASHTrainer):
    """TRL's loss of a token, written once more."""

    def per_token_loss(self, log_probs, old_log_probs, advantages, mask):
        ratio = (log_probs - old_log_probs).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@pytest.mark.parametrize(
    "others", [{"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}, {"loss_type": "decoupled_ppo"}]
)
def test_a_loss_of_ones_own(tiny_model, train, others):
    """Two steps on one window, in the second of which some ratios are clipped; with KL or a correction by TRL."""
    settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.5, "max_tokens_per_microbatch": 60}
    trl, own = (
        train(kind, rollouts=ScriptedRollouts(noise=0.7), **settings, **others) for kind in (DASHTrainer, ByHand)
    )
    assert trl.state.log_history[1]["clip_ratio/region_mean"] > 0.01
    assert_same_update(tiny_model, trl, own)
    for wrong, said in (
        ({"loss_type": "sapo"}, "loss_type='sapo', and a tensor"),
        ({"beta": 0.1}, "Set use_bias_correc"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold=0.5 does not go"),
    ):
        refused(said, train, ByHand, **wrong)


def test_the_figures_of_trls_losses(train):
    """Wherever the sampler's log-probs are known; a share only where something is clipped or masked."""
    for rollouts, expected in (
        (None, set()),
        (ScriptedRollouts(noise=0.7), {"off_policy/ratio_mean", "off_policy/kl"}),
    ):
        log = train(rollouts=rollouts).state.log_history[0]
        assert {name for name in log if name.startswith("off_policy/")} == expected


def test_the_share_that_a_correction_changes():
    """Ratios of tokens: 2, 0.5, 1 (not reported) and 4 (no loss token); 1 and 0.6 of a row that is 0.6 in all."""
    old = torch.tensor([[2.0, 0.5, 1.0, 4.0], [1.0, 0.6, 1.0, 1.0]], dtype=torch.float64).log()
    sampler = torch.zeros_like(old)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    sampler[0, 2] = NAN
    for mode, low, high, share in (
        ("token_truncate", None, 1.5, 1 / 7),
        ("token_truncate", 0.8, 1.5, 3 / 7),
        ("token_mask", 0.55, 1.5, 2 / 7),
        ("sequence_truncate", 0.8, None, 4 / 7),
        ("sequence_mask", 0.8, None, 4 / 7),
        ("sequence_mask", None, None, 0.0),
    ):
        correction = {"mode": mode, "clip_min": low, "clip_max": high}
        figures = corrected_share(old, sampler, mask, correction=correction, reduce_sum=lambda counts: counts)
        assert figures == {"off_policy/clipped_share": pytest.approx(share)}, (mode, low, high)
    empty = (one[:0] for one in (old, sampler, mask))
    assert corrected_share(*empty, correction=correction, reduce_sum=lambda counts: counts) == {}
