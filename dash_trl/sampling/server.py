"""What a server answers, and its errors; `vllm.VLLMServer` is its client.

A failure becomes one of two errors. `ServerError` means that this server failed. Repeating the request is safe, and
another server may succeed. `ValueError` means that the request or the set-up is wrong. Repeating it does not help.
"""

from dataclasses import dataclass
from typing import Any

import torch


class ServerError(RuntimeError):
    """A server failed a request. The message leaves out the server's address."""


class ServerGone(ServerError):
    """The connection was refused or dropped, so the server's process may have ended."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: ids of the sampled tokens.
        log_probs: the sampler's log-prob of each token.
    """

    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class ServedModel:
    """What a server says of its model.

    Attributes:
        dtype: dtype of the weights.
        shape: fields of the model's config, see `model_shape`.
        context: largest number of tokens of a prompt and its completion.
        adapter_rank: largest rank of a LoRA adapter; 0 = the server takes no adapter.
        comparable: False = a trainer cannot compute the checksum of the server's weights, because weights are quantised
            or KV heads are copied to several workers.
        log_probs_as_sampled: False = reported log-probs leave out temperature and truncation, such as `top_p`.
    """

    dtype: torch.dtype
    shape: dict[str, Any]
    context: int
    adapter_rank: int
    comparable: bool
    log_probs_as_sampled: bool


def model_shape(config: Any) -> dict[str, Any]:
    """Return the fields of a config that two models must share if the weights of one are to fit the other.

    Args:
        config: a model's config.

    Returns:
        Field name of the text config → value; None for a missing field. And "multimodal": the names of the weights of a
        multimodal model are not those of its language model alone.
    """
    text = config.get_text_config()
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {"multimodal": text is not config, **{name: getattr(text, name, None) for name in names}}
