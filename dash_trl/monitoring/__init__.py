"""Monitoring: computes the figures of a run, logs them, and draws them."""

from dash_trl.monitoring.callbacks import MetricsFileCallback, RewardProgressCallback, TimeLimitCallback, monitor
from dash_trl.monitoring.metrics import (
    EmptyWindows,
    OffPolicyMetrics,
    PassMetrics,
    corrected_share,
    filter_metrics,
    packing_metrics,
    sampler_metrics,
    staleness_metrics,
)
from dash_trl.monitoring.plots import plot_pass_at_k, plot_run, read_metrics, smooth
from dash_trl.monitoring.recorder import Recorder
