"""`Host`: what the objects of a run ask of the trainer, which is the host.

The objects get it as their first argument, and use no other attribute of it.

Letters: B rows of this rank, N rows of all ranks, F reward functions, S rows of a pass, T completion tokens.
"""

from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_callback import CallbackHandler
from trl.generation.vllm_generation import VLLMGeneration

from dash_trl.config import DASHConfig
from dash_trl.distributed import Ranks
from dash_trl.monitoring import Recorder
from dash_trl.rollout import RolloutBatch


class Host(Protocol):
    """The trainer, as the objects of a run see it.

    Attributes:
        _tokenizer: the tokenizer, even if TRL has a multimodal model's processor.
        eos_token_ids: token ids that end a completion.
        reward_weights: [F], the current weights of the reward functions.
        vllm_generation: TRL's sampler; a `ServerGeneration` if vLLM servers sample.
        rollout_func: the user's function that samples. `None`: there is none.
    """

    args: DASHConfig
    state: TrainerState
    model: PreTrainedModel
    _tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]
    reward_weights: Tensor
    ranks: Ranks
    recorder: Recorder
    callback_handler: CallbackHandler
    vllm_generation: VLLMGeneration
    rollout_func: Any

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple:
        """Tokenize prompts as TRL does. The first field of the result has the token ids, the others belong to TRL."""

    def _generate_single_turn(self, *tokenized_and_count: Any) -> tuple[list[list[int]], Any]:
        """Sample completions of tokenized prompts, as TRL does; return token ids, and log-probs or `None`."""

    def _calculate_rewards(self, *rows: object) -> Tensor:
        """Call all reward functions on B rows, as TRL does; return [N, F]."""

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages by outcome, [N], of rewards [N, F]."""

    def dispatch(self, event: str, rollouts: RolloutBatch) -> None:
        """Call an event of the callbacks, which may change the rollouts."""

    def run_pass(self, inputs: dict[str, Any], *, reference: bool) -> tuple:
        """Run a pass of the policy or the reference model; return log-probs [S, T], and entropies [S, T] or `None`."""


def on_servers(host: Host) -> bool:
    return host.args.names_servers and host.rollout_func is None


def rows_come_early(host: Host) -> bool:
    """Whether a window's rows are sampled one after the other, or before training needs the window.

    Servers return each group when it is done, even with `async_level=0`. Without servers, with `async_level=1`, this
    process samples the next window while it waits for rewards.
    """
    return on_servers(host) or host.args.async_level > 0
