"""Measures a model: accuracy and pass@k with their intervals, from samples that a reward function scores::

    prompts ──► sampler ──► reward ──► samples (one line per problem) ──► figures ──► table, plot

The command is `dash_trl eval` (docs/howto/evaluate.md); in a program, `evaluate` measures a loaded model.
"""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.evaluation.command import EvaluationArguments, Task, evaluate_models
    from dash_trl.evaluation.figures import bootstrap_interval, figures_of, pass_at_k
    from dash_trl.evaluation.reward import Reward, evaluate
    from dash_trl.evaluation.samplers import LocalSampler, SampledCompletion, Sampler, ServerSampler, open_sampler

if TYPE_CHECKING:  # imported by other folders of the package and by tests, not public
    from dash_trl.evaluation.command import TOY_LENGTH, command_parser, main
    from dash_trl.evaluation.figures import CORRECT_ABOVE, differences, metrics_of
    from dash_trl.evaluation.samplers import TOY, Checkpoint

__getattr__, __dir__, __all__ = lazy(__name__)
