"""How good is a model? Samples of it, what a reward says of them, accuracy and pass@k with their intervals.

    prompts ──► sampler ──► reward ──► records (one line per problem) ──► figures ──► table, plot

The command is `python -m dash_trl.evaluation` (docs/evaluation.md); in a program `evaluate` measures a loaded model.
"""

from typing import TYPE_CHECKING

from dash_trl._lazy import lazy

if TYPE_CHECKING:
    from dash_trl.evaluation.arguments import TaskArguments, command_parser
    from dash_trl.evaluation.checkpoint import Checkpoint
    from dash_trl.evaluation.estimates import CORRECT_ABOVE, bootstrap_interval, pass_at_k
    from dash_trl.evaluation.local import LocalSampler
    from dash_trl.evaluation.measure import Evaluation, accuracy, evaluate, sample_completions
    from dash_trl.evaluation.opening import open_sampler
    from dash_trl.evaluation.records import Records
    from dash_trl.evaluation.sampler import Draw, SampledCompletion, Sampler, prompt_ids
    from dash_trl.evaluation.servers import ServerSampler, check_shapes
    from dash_trl.evaluation.tasks import Reward, Task, hash_of, model_of

__getattr__, __dir__, __all__ = lazy(__name__)
