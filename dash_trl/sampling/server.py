"""What `ServerPool` and the weight syncs ask of a server, whatever engine runs there.

`vllm.VLLMServer` is the client of vLLM. Another engine needs a class with the same methods, which `ServerPool` creates.

A failure becomes one of two errors. `ServerError` means that this server failed. Repeating the request is safe, and
another server may succeed. `ValueError` means that the request or the set-up is wrong. Repeating it does not help.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    """Return the fields of a text config that two models must share if the weights of one are to fit the other.

    Args:
        config: a model's text config.

    Returns:
        Field name → value; None for a missing field.
    """
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    return {name: getattr(config, name, None) for name in names}


class Server(Protocol):
    """Client of one server. All methods raise `ServerError` or `ValueError`.

    Attributes:
        url: address of the server.
        uses_adapter: True = requests use the LoRA adapter that the server was given, and not the model itself.
        given: the version tag that this client set last; None: it has given the server no weights.
    """

    url: str
    uses_adapter: bool
    given: str | None

    async def complete(
        self, prompt_ids: Sequence[int], n: int, sampling: dict[str, Any], *, timeout: float | None = None
    ) -> list[Completion]:
        """Sample `n` continuations of one prompt.

        Args:
            prompt_ids: token ids of the prompt.
            n: number of continuations.
            sampling: sampling parameters, under vLLM's names (as in the body of `/v1/completions`).
            timeout: seconds; None: the client's own limit.

        Returns:
            `n` continuations.
        """

    async def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Compute log P(ids[t] | ids[:t]) for t = 1 … len(ids) − 1, at temperature 1.

        Args:
            ids: token ids of a sequence.

        Returns:
            len(ids) − 1 log-probs.
        """

    async def probe(self) -> None:
        """Raise unless the server reports that it is healthy."""

    async def describe(self) -> ServedModel:
        """Return what the server says of its model. Raise a `ValueError` if the server cannot be used in training."""

    async def weight_checksum(self) -> int | None:
        """Return the checksum of all weights that the server holds; None if it cannot be compared."""

    async def weight_tag(self) -> str:
        """Return the version tag that the server was given last, see `Snapshot`."""

    async def load_weights(self, path: str, tag: str) -> int | None:
        """Load a checkpoint in place. Requests in flight wait and continue with the new weights.

        Args:
            path: checkpoint directory; the server sees it under this path.
            tag: version tag of the new weights.

        Returns:
            `weight_checksum` after loading.
        """

    async def load_adapter(self, path: str, tag: str) -> int:
        """Load a LoRA adapter in place of the last one. Requests in flight wait and continue with the new adapter.

        Args:
            path: folder with the adapter in PEFT's format; the server sees it under this path.
            tag: version tag of the new adapter.

        Returns:
            Checksum of the adapter as the workers hold it.
        """

    async def resume(self) -> None:
        """Resume sampling, which a weight update has paused."""
