"""Defines `Snapshot`, one version of the weights with its checksum. `FileWeights` and its subclasses use it.

The version that a server reports is only a tag: it does not depend on the server's weights. So every weight sync
compares the checksum of the weights that the server's workers hold with the trainer's. Even if the workers hold the
right weights, they may compute with a second copy that was not updated. So the first weight sync of a run sends weights
that are changed in a known way, and checks that the servers' log-probs change accordingly (`proof.py`).
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dash_trl.sampling.server import VLLMServer, WeightReport

logger = logging.getLogger(__name__)

FRESH = "default"  # the tag of a server that was given no weights since it started
NamedTensors = Iterable[tuple[str, Tensor]]
OnEach = Callable[[Callable[[VLLMServer], Awaitable[Any]]], dict[str, Any]]  # `ServerPool.on_each` for some servers


class WeightMismatch(RuntimeError):
    """Raised if a server holds other weights than it was given, or computes with other weights."""


@dataclass(frozen=True)
class Snapshot:
    """One version of the weights, as sent to the servers.

    Attributes:
        version: weight version.
        tag: name of the version, unique over all runs. A server stores the tag after it has loaded the weights.
        checksum: checksum of the weights.
        path: folder with the files; empty if there are no files.
    """

    version: int
    tag: str
    checksum: int
    path: str = ""

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


async def held_tag(server: VLLMServer) -> str:
    """Return the version tag of a server's weights. Warn if another run has given it weights after this run's.

    Args:
        server: the server.
    """
    tag, given = await server.weight_tag(), server.given
    if given is not None and tag != FRESH and tag.rpartition("-")[0] != given.rpartition("-")[0]:
        logger.warning(
            f"{server.url} was given weights by another run (version {tag!r}) after this run's ({given!r}). In the "
            "meantime it may have sampled rows of this run from the other run's policy. Give each run, and each "
            "evaluation beside a run, servers of its own (vllm_server_urls)."
        )
    return tag


async def holds(server: VLLMServer, snapshot: Snapshot) -> bool:
    """Return whether a server holds a version. If so, resume the server, which may still be paused.

    Only the tag is compared, not the checksum. The tag is enough to tell whether the server has loaded this version: it
    is set only after loading, and a restart of the server resets it.

    Args:
        server: the server.
        snapshot: the version.
    """
    if await held_tag(server) != snapshot.tag:
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
        WeightMismatch: if a server holds other weights than it was given.
        ValueError: if a server refused a request. Both errors end the run.
    """
    for result in outcome.values():
        if isinstance(result, WeightMismatch | ValueError):
            raise result
    return {url: str(result) if isinstance(result, BaseException) else None for url, result in outcome.items()}
