"""Rows on their way: selected, trimmed, filled with dummies."""

from dataclasses import dataclass, fields

import torch
from trl import GRPOTrainer

from dash_trl.rollout import GenerationWindow, RolloutBatch, Survivors, joined


def rollouts() -> Survivors:
    prompt_mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    completion_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    return Survivors(
        prompt_ids=torch.arange(12).view(3, 4) * prompt_mask,
        prompt_mask=prompt_mask,
        completion_ids=torch.arange(15).view(3, 5) * completion_mask,
        completion_mask=completion_mask,
        group=torch.zeros(3, dtype=torch.long),
        policy_version=torch.zeros(3, 2, dtype=torch.long),
        rewards=torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")], [float("inf"), 1.0]]),
        advantages=torch.tensor([0.5, -0.5, 1.0]),
        importance_sampling_ratio=torch.ones(3, 1),
    )


def test_a_micro_batch():
    its_own_rows = {
        "prompt_ids": [[5, 6, 7], [0, 2, 3]],
        "completion_ids": [[5, 0, 0], [0, 1, 2]],
        "advantages": [-0.5, 0.5],
        "importance_sampling_ratio": [[1.0], [1.0]],
    }
    dummies = {  # without token and weight
        "prompt_mask": [[1, 1, 1], [0, 0, 0], [0, 0, 0]],
        "completion_ids": [[5, 0], [99, 99], [99, 99]],
        "completion_mask": [[1, 0], [0, 0], [0, 0]],
        "advantages": [-0.5, 0.0, 0.0],
    }
    no_rows = {"prompt_mask": [[1, 1], [0, 0]], "completion_mask": [[0, 0], [0, 0]]}
    for rows, size, expected in (([1, 0], 2, its_own_rows), ([1], 3, dummies), ([], 2, no_rows)):
        inputs = rollouts().micro_batch(rows, size=size, pad_token_id=99)
        assert {name: inputs[name].tolist() for name in expected} == expected
        assert "rewards" not in inputs and "group" not in inputs


def test_survivors_keep_tensors_only():
    batch = rollouts()
    batch.examples = [{"prompt": "a"}] * 3
    chosen = batch.survivors(torch.tensor([2, 0]))
    assert len(chosen) == 2 and chosen.examples == [] and chosen.advantages.tolist() == [1.0, 0.5]


def test_window_survives_a_save(tmp_path):
    window = GenerationWindow(rollouts(), torch.ones(1, 3, 3, dtype=torch.long), torch.tensor(9))
    torch.save(window.state_dict(), tmp_path / "window.pt")
    loaded = GenerationWindow.from_state_dict(torch.load(tmp_path / "window.pt", weights_only=True))
    assert loaded.lengths.equal(window.lengths) and loaded.rollouts.advantages.equal(window.rollouts.advantages)


def test_survivors_are_counted_over_dropped_positions():
    lengths = torch.tensor([[[1, 2, 2], [0, 0, 0], [3, 4, 4]]])
    assert GenerationWindow(rollouts(), lengths, torch.tensor(6)).rows(0)[[0, 2]].tolist() == [0, 1]


def test_completions_have_two_columns_at_least():
    """TRL takes one column for a figure per sequence, and would average it over dummies, too."""
    batch = rollouts()
    for field in ("completion_ids", "completion_mask"):
        setattr(batch, field, getattr(batch, field)[:, :1])
    for rows in ([0], []):
        inputs = batch.survivors(torch.arange(len(batch))).micro_batch(rows, size=2, pad_token_id=99)
        assert inputs["completion_ids"].shape == inputs["completion_mask"].shape == (2, 2)
        assert inputs["completion_mask"].sum() == len(rows) and inputs["completion_ids"][:, 1].tolist() == [99, 99]


def test_a_padded_ratio_leaves_the_weights_of_vespo_as_they_are():
    """TRL multiplies the ratios of all columns, without a mask."""
    batch = rollouts()
    for field in ("completion_ids", "completion_mask"):
        setattr(batch, field, getattr(batch, field)[:, :1])
    inputs = batch.micro_batch([0, 1], size=2, pad_token_id=99)
    mask, ratio = inputs["completion_mask"], inputs["importance_sampling_ratio"]
    weights = GRPOTrainer.get_gamma_weights(inputs["advantages"][:, None], torch.zeros(2, 2), mask, ratio)
    torch.testing.assert_close(weights, torch.ones(2, 1))  # φ(1) = 1


def test_a_row_has_at_each_stage_what_is_known_of_it():
    whole = rollouts()
    sampled = RolloutBatch(**{one.name: getattr(whole, one.name) for one in fields(RolloutBatch)})
    assert not hasattr(sampled, "rewards")
    scored = sampled.with_rewards(whole.rewards)
    assert scored.scored.tolist() == [True, False, False] and not hasattr(scored, "advantages")
    credited = scored.with_advantages(whole.advantages)
    kept = credited.survivors(torch.tensor([0])).with_log_probs(old_per_token_logps=torch.ones(1, 5))
    assert kept.old_per_token_logps.equal(torch.ones(1, 5)) and kept.ref_per_token_logps is None
    assert credited.prompt_ids is sampled.prompt_ids  # nothing is copied


def test_rows_are_chosen_and_joined_again():
    batch = rollouts()
    batch.examples = [{"prompt": text} for text in "abc"]
    parts = [batch.rows(torch.tensor(rows)) for rows in ([2], [0, 1])]
    assert [one["prompt"] for one in parts[1].examples] == ["a", "b"] and parts[1].completions == []
    again = joined(parts).rows(torch.tensor([1, 2, 0]))
    assert again.examples == batch.examples and again.completions == [] and again.tool_mask is None
    for name, value in batch.tensors().items():
        assert torch.equal(getattr(again, name).nan_to_num(), value.nan_to_num()), name
    assert joined(parts[:1]) is parts[0]


@dataclass(frozen=True)
class Table:
    name: str
    counts: torch.Tensor
    batch: Survivors


def test_narrower_parts_are_padded_and_dataclasses_joined():
    wide, narrow = rollouts(), rollouts()
    narrow.prompt_ids, narrow.advantages = narrow.prompt_ids[:, :3], torch.zeros(3, 2)
    wide.advantages = torch.ones(3, 3)
    found = joined([Table("first", torch.tensor([1]), narrow), Table("second", torch.tensor([2, 3]), wide)])
    assert found.name == "first" and found.counts.tolist() == [1, 2, 3]
    assert found.batch.prompt_ids[:, 3].tolist() == [-1, -1, -1, 3, 7, 11]
    assert found.batch.advantages[:, 2].isnan().tolist() == [True] * 3 + [False] * 3
