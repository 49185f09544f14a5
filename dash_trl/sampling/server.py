"""What a server answers, and its errors; `vllm.VLLMServer` is its client.

After a `ServerError`, repeating the request is safe, and another server may succeed. A `ValueError` means that the
request or the set-up is wrong.
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
    """A server's description of its model.

    Attributes:
        context: largest number of tokens of a prompt and its completion.
        adapter_rank: largest rank of a LoRA adapter; 0 = the server takes none.
        comparable: False = the trainer cannot compute the checksum of the weights, because they are quantised or KV
            heads are copied to several workers.
        log_probs_as_sampled: False = reported log-probs leave out temperature and truncation, such as `top_p`.
    """

    dtype: torch.dtype
    shape: dict[str, Any]
    context: int
    adapter_rank: int
    comparable: bool
    log_probs_as_sampled: bool


def model_shape(config: Any) -> dict[str, Any]:
    """Return the fields of a config that must be equal if the weights of one model are to fit another.

    "multimodal" is among them, because a multimodal model names its weights differently from its language model alone.
    A missing field is None.
    """
    text = config.get_text_config()
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {"multimodal": text is not config, **{name: getattr(text, name, None) for name in names}}
