"""Turns rewards into optimizer steps: advantages → filtering → schedule → packing → padding-free model passes."""

from dash_trl.update.advantages import (
    ESTIMATORS,
    Estimator,
    checked_advantages,
    group_advantages,
    outcome_advantages,
    registered,
    weighted_rewards,
)
from dash_trl.update.arguments import check_tensor
from dash_trl.update.filtering import KEPT, filter_rows
from dash_trl.update.isolation import (
    computing_dtype,
    evaluating,
    isolation_flaw,
    packing_flaw,
    padding_effect,
    short_windows,
)
from dash_trl.update.losses import (
    NO_LOG_PROB,
    OFF_POLICY_LOSSES,
    ROW_MEAN_LOSSES,
    aipo,
    importance_sampling_ratio,
    loss_scale,
    unknown_log_probs,
    with_token_loss,
)
from dash_trl.update.mixers import keep_rows_apart
from dash_trl.update.packing import MicroBatch, fitted_bins, plan_share
from dash_trl.update.padding_free import ModelPasses, packed_log_probs, to_device
from dash_trl.update.schedule import Pass, Schedule, Share
from dash_trl.update.skipped_steps import SkippedSteps
from dash_trl.update.trees import (
    VARLEN_DTYPES,
    TreeShape,
    first_reason,
    forget_longest,
    has_dropout,
    packing_obstacle,
    tree_attention,
    varlen_arguments,
    varlen_flaw,
)
