"""Defines one version of the weights and its checksum, which all ways of sending weights share.

Ways of sending weights::

    gathered parameters ──► FileWeights: a directory per version ──► every server loads it in place
                       └──► NCCLWeights: buckets ──► a thread per server broadcasts them

The version that a server reports is only the tag that it was told. Therefore every weight sync compares the checksum
of the weights that the server's workers hold with the trainer's. Workers may also hold one copy of the weights and
compute with another copy. Therefore the first weight sync of a run sends weights that are changed in a known way, and
the servers' log-probs have to follow (`proof.py`).
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dash_trl.sampling.server import VLLMServer, WeightReport

NamedTensors = Iterable[tuple[str, Tensor]]
OnEach = Callable[[Callable[[VLLMServer], Awaitable[Any]]], dict[str, Any]]  # `ServerPool.on_each` for some servers


class WeightMismatch(RuntimeError):
    """A server holds other weights than it was given, or computes with others."""


@dataclass(frozen=True)
class Snapshot:
    """One version of the weights, as sent to the servers.

    Attributes:
        version: weight version.
        tag: version tag that the servers are told; unique over runs.
        checksum: checksum of the weights.
        path: folder with the files; None if the weights were broadcast.
    """

    version: int
    tag: str
    checksum: int
    path: str | None = None

    def verify(self, report: WeightReport, url: str) -> None:
        """Check that a server reports these weights.

        Args:
            report: the server's report. A report without a checksum passes, because it cannot be compared.
            url: address of the server, for the error.

        Raises:
            WeightMismatch: if the server reports other weights.
        """
        if report.checksum not in (None, self.checksum):
            raise WeightMismatch(
                f"{url} was given the weights of version {self.version} (checksum {self.checksum:x}) but holds others "
                f"({report.checksum:x}). It would not sample from the current policy. Does another run use the same "
                "server? On a CPU build of vLLM, is dash_trl with its plugin installed in the server's environment?"
            )


async def holds(server: VLLMServer, snapshot: Snapshot) -> bool:
    """Return whether a server holds a version, and resume it if so.

    The version tag shows this: a server is told the tag after it has loaded the weights, and loses it in a restart.

    Args:
        server: the server.
        snapshot: the version.
    """
    if await server.weight_tag() != snapshot.tag:
        return False
    await server.resume()  # if the last `resume` was lost, the server would stay paused
    return True


def errors_of(outcome: dict[str, Any]) -> dict[str, str | None]:
    """Convert the outcome of a weight sync to error messages.

    Args:
        outcome: URL → return value or exception, as `ServerPool.on_each` returns it.

    Returns:
        URL → error message; None if the server has the weights.

    Raises:
        WeightMismatch: if a server holds other weights. Like a refused request, this ends the run.
        ValueError: if a server refused a request.
    """
    for result in outcome.values():
        if isinstance(result, WeightMismatch | ValueError):
            raise result
    return {url: str(result) if isinstance(result, BaseException) else None for url, result in outcome.items()}
