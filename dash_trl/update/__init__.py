"""Turns rewards into optimizer steps: advantages → filtering → schedule → packing → padding-free model passes."""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    # ESTIMATORS by way of `advantages`, which fills it.
    from dash_trl.update.advantages import (
        ESTIMATORS,
        Estimator,
        group_advantages,
        outcome_advantages,
        weighted_rewards,
    )

if TYPE_CHECKING:  # imported by other folders of the package, not public
    from dash_trl.update.advantages import checked_advantages, registered
    from dash_trl.update.arguments import check_tensor
    from dash_trl.update.filtering import Filtered, filter_rows
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
        aipo,
        importance_sampling_ratio,
        loss_scale,
        regularizer_weight,
        unknown_log_probs,
        with_token_loss,
    )
    from dash_trl.update.mixers import keep_rows_apart
    from dash_trl.update.packing import MicroBatch, fitted_bins, plan_share
    from dash_trl.update.padding_free import (
        MIN_SHARED,
        ModelPasses,
        PackedLayout,
        packed_log_probs,
        same_prompt,
        to_device,
    )
    from dash_trl.update.schedule import Pass, Schedule, Share
    from dash_trl.update.skipped_steps import SkippedSteps
    from dash_trl.update.trees import (
        VARLEN_DTYPES,
        TreeShape,
        forget_longest,
        has_dropout,
        packing_obstacle,
        tree_attention,
        varlen_arguments,
        varlen_flaw,
    )
    from dash_trl.update.zero3 import forget_plain_passes

__getattr__, __dir__, __all__ = lazy(__name__)
