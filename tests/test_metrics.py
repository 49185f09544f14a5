"""What is counted over the ranks."""

import pytest
import torch

from dash_trl.monitoring import EmptyWindows, PassMetrics, filter_metrics, sampler_metrics
from dash_trl.update import MicroBatch, Pass, Share, filter_rows
from tests.doubles import rollouts


def test_shares_are_of_the_rows_of_all_ranks():
    """Rows of 3, 1 and 5 tokens, the first kept; the other ranks together have 2 of everything."""
    batch = rollouts()
    batch.advantages = torch.tensor([0.5, 0.05, 0.0])
    batch.dropped = filter_rows(batch.advantages, batch.loss_mask, torch.ones(3, dtype=torch.bool), 0.1)
    metrics = filter_metrics(batch, lambda local: local + 2)
    assert metrics["filter/kept_tokens"] == (3 + 2) / (9 + 2)
    assert metrics["filter/dropped_threshold"] == metrics["filter/dropped_constant"] == (1 + 2) / (3 + 4 * 2)
    assert metrics["advantage/abs_mean"] == (0.5 + 2) / (1 + 2)


def test_ten_windows_in_a_row_without_a_kept_row_are_warned_of_with_what_dropped_them(caplog):
    """`test_rewards_failures.py` has the first window of a run."""
    empty = EmptyWindows()
    nothing = {"filter/kept_rows": 0.0, "filter/dropped_constant": 0.75}
    nothing |= {"filter/dropped_threshold": 0.2, "filter/dropped_unscored": 0.05}
    for metrics in (*[nothing] * 9, nothing | {"filter/kept_rows": 0.125}, *[nothing] * 9):
        empty.note(metrics, 0.0)
    caplog.clear()
    empty.note(nothing, 0.25)  # a callback has changed the threshold
    (record,) = caplog.records
    assert "Of the last window's rows 75% have no signal" in record.message and "5% are unscored:" in record.message
    assert "20% are under gradient_filter_threshold=0.25: lower" in record.message


def test_figures_of_the_sampler_leave_out_a_rank_that_has_none():
    """One rank has no survivor. On the other, the log-prob of one of two tokens is not reported."""
    log_probs = torch.tensor([[-1.0, -2.0]])
    mask = torch.ones(1, 2)
    found = sampler_metrics(
        torch.tensor([[-1.25, torch.nan]]),
        log_probs,
        torch.tensor([[0.5, 1.0]]),
        mask,
        lambda local: torch.cat([local, torch.full((5,), torch.nan)]),
    )
    assert list(found.values()) == [0.25, 0.25, 0.5, 0.75, 1.0]
    assert sampler_metrics(log_probs, log_probs, torch.ones(1, 2), torch.zeros(1, 2), lambda local: local) == {}


def test_the_weight_of_a_row_in_vespo_leaves_out_dummy_rows():
    """One rank has two rows, the other has none: TRL's mean has two dummy rows, whose weight is 1."""
    share = Share(first=0, micro_steps=1, passes=2, all_rows=4, all_tokens=100.0, kept_rows=2, kept_tokens=30)
    one = Pass(MicroBatch(((0, 1), ())), share, tokens=(30, 0))
    for per_token, mean in ((False, (0.4 + 0.6 + 1 + 1) / 4), (True, 0.5)):  # per token, TRL's mean has its mask
        metrics = PassMetrics(per_row=False)
        logged = {"vespo/phi_seq_mean": [mean]}
        metrics.take({**logged, "other": [0.25]}, one, 1.0, per_token=per_token)
        assert metrics.of_step([share]) == [{"vespo/phi_seq_mean": pytest.approx(0.5)}, {"other": 0.25}]
