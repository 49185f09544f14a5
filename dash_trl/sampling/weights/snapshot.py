"""What every way from the trainer to the servers has in common: a version of the weights, and its checksum.

    gathered parameters ──► FileWeights: a directory per version ──► every server loads it in place
                       └──► NCCLWeights: buckets ──► a thread per server broadcasts them

A version number is only what a server was told. So every sync compares a checksum of the weights that a server's
workers hold with the trainer's, and the first sync of a run sends weights that are wrong in a known way, which the
server's log-probs must follow (`proof.py`): workers may hold one copy and compute with another.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dash_trl.sampling.server import VLLMServer, WeightReport

NamedTensors = Iterable[tuple[str, Tensor]]
OnEach = Callable[[Callable[[VLLMServer], Awaitable[Any]]], dict[str, Any]]  # `ServerPool.on_each`, of some servers


class WeightMismatch(RuntimeError):
    """A server holds, or computes with, other weights than it was given."""


@dataclass(frozen=True)
class Snapshot:
    """One version of the weights, as sent.

    Attributes:
        tag: what the servers are told; unique over runs. path: the checkpoint directory, None if it was broadcast.
    """

    version: int
    tag: str
    checksum: int
    path: str | None = None

    def verify(self, report: WeightReport, url: str) -> None:
        """Raises `WeightMismatch` if a server reports other weights."""
        if report.checksum not in (None, self.checksum):
            raise WeightMismatch(
                f"{url} was given the weights of version {self.version} (checksum {self.checksum:x}) but holds others "
                f"({report.checksum:x}). Does a second run use it? On a CPU build of vLLM, is dash_trl with "
                "its plugin in the server's environment? Its samples would not be the policy's."
            )


async def holds(server: VLLMServer, snapshot: Snapshot) -> bool:
    """Whether it was given these weights: a tag is told after they are loaded, and a restarted server has another."""
    if await server.weight_tag() != snapshot.tag:
        return False
    await server.resume()  # one whose last `resume` was lost would wait for ever
    return True


def errors_of(outcome: dict[str, Any]) -> dict[str, str | None]:
    """Per server its error or None; a mismatch is not an error of a server but of the run."""
    for result in outcome.values():
        if isinstance(result, WeightMismatch | ValueError):
            raise result
    return {url: str(result) if isinstance(result, BaseException) else None for url, result in outcome.items()}
