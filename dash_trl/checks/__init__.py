"""Checks what users pass to the trainer, so that a mistake ends a run early, with an error that names a remedy."""

from dash_trl.checks.arguments import (
    check_arguments,
    check_callbacks,
    check_called,
    check_generate,
    check_groups_apart,
    check_losses,
    check_rewards,
    check_rounding,
    check_subclass,
)
from dash_trl.checks.models import (
    check_model,
    check_saving,
    check_served_adapter,
    check_tokenizer,
    check_trainable,
    context_of,
)
from dash_trl.checks.prompts import (
    check_first_step,
    check_prompt_ids,
    check_tokens,
    checked_rollouts,
    plain_prompt,
)
