"""Measures a model: accuracy and pass@k with their intervals, from samples that a reward function scores::

    prompts ──► sampler ──► reward ──► samples (one line per problem) ──► figures ──► table, plot

The command is `dash_trl eval` (docs/howto/evaluate.md); in a program, `evaluate` measures a loaded model.
"""

from dash_trl.evaluation.command import (
    TOY_LENGTH,
    EvaluationArguments,
    Task,
    command_parser,
    evaluate,
    evaluate_models,
    main,
)
from dash_trl.evaluation.figures import (
    CORRECT_ABOVE,
    bootstrap_interval,
    differences,
    figures_of,
    pass_at_k,
)
from dash_trl.evaluation.reward import Reward
from dash_trl.evaluation.samplers import (
    TOY,
    Checkpoint,
    LocalSampler,
    SampledCompletion,
    Sampler,
    open_sampler,
)
