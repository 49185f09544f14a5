"""Sends a model's weights to all servers of a pool, and checks that the servers compute with them.

In training::

    gather ──► FileWeights ──► servers load the files      in every weight sync
    perturbed weights, then plain weights ──► compare log-probs      in the first weight sync

An evaluation gives one checkpoint to all servers, as the first weight sync does, or only compares (`load_checkpoint`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dash_trl.distributed import Ranks
from dash_trl.sampling.pool import ServerPool
from dash_trl.sampling.proof import PROBE_TOKENS, ScaledLayers, check_probe, model_log_probs
from dash_trl.sampling.vllm import ServedModel, ServerError, VLLMServer
from dash_trl.sampling.weights import FileWeights, NamedTensors
from dash_trl.vllm_plugin import model_shape

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_servers(pool: ServerPool, config: PreTrainedConfig, name: str) -> ServedModel:
    """Check that the weights of a model fit into the servers' models.

    Args:
        config: the model's config.
        name: the model's name, for error messages.

    Returns:
        The first server's description, with the smallest limits of all servers.

    Raises:
        ValueError: if a server holds a model of another shape, or has a prefix cache that the engine does not empty.
        PoolError: if a server does not answer.
    """
    pool.wait_until_ready()
    models = pool.ask_all(VLLMServer.describe)
    own = model_shape(config)
    for url, model in models.items():
        different = {key: (model.shape.get(key), value) for key, value in own.items() if model.shape.get(key) != value}
        if different:
            raise ValueError(
                f"{url} serves a model of another shape than {name!r} (there, here): {different}. Only weights of the "
                "same shape can be loaded in place. A multimodal checkpoint is served whole: load it by its name, not "
                f"with AutoModelForCausalLM. Or start servers for this model: dash_trl serve {name}"
                + (f" --servers {len(pool.urls)}" if len(pool.urls) > 1 else "")
            )
    every = list(models.values())
    least = ("context", "adapter_rank", "log_probs_as_sampled")  # False is less than True
    return replace(every[0], **{name: min(getattr(model, name) for model in every) for name in least})


@dataclass(eq=False)
class WeightSync:
    """Sends the weights of a model to all servers of a pool.

    All ranks gather the weights, and the main process sends them. The ranks agree after each stage, so that an error on
    one rank is raised on all.

    Attributes:
        pool: this rank's pool, which also gives the weights to a server that comes back later.
        vocabulary: number of token ids of the tokenizer.
        gather: function that returns (name on the servers, value) of each parameter. All ranks call it once for each
            weight version.
        perturbation: change of the weights that checks the first weight sync.
        mixed_precision: accelerate's name of the dtype in which the model computes; "no": the dtype of its weights.
    """

    pool: ServerPool
    ranks: Ranks
    weights: FileWeights
    model: nn.Module
    vocabulary: int
    gather: Callable[[], NamedTensors]
    perturbation: ScaledLayers
    mixed_precision: str = "no"

    def __post_init__(self) -> None:
        self.dtypes = {self.weights.dtype, MIXED.get(self.mixed_precision, next(self.model.parameters()).dtype)}
        most = min(self.model.config.get_text_config().vocab_size, self.vocabulary)  # type: ignore[union-attr, operator]
        self.probe = [(7919 * (i + 1)) % most for i in range(PROBE_TOKENS)]  # spread over the vocabulary
        self._proven = False  # True = the first weight sync is over, with its comparison of log-probs

    def send(self) -> None:
        """Send the model's weights to all servers. In the first sync, compare log-probs.

        Raises:
            WeightMismatch: if a server computes with other weights.
            PoolError: if a server did not load the weights in the first sync.
        """
        if self._proven:
            self._send()
            return
        self.ranks.agree(self.pool.wait_until_ready)
        plain = model_log_probs(self.model, self.probe)
        with self.perturbation.outputs():
            perturbed = model_log_probs(self.model, self.probe)
        for expected in (perturbed, plain):
            if errors := self._send(perturbed=expected is perturbed):
                raise self.pool.error(f"In the first weight sync {len(errors)} servers failed")
            self.ranks.agree(self.check, expected, main_only=True)
        self._proven = True

    def check(self, expected: Tensor) -> None:
        """Check all servers by `check_probe`."""
        check_probe(expected, self.pool.ask_all(lambda server: server.log_probs(self.probe)), self.dtypes)

    def _send(self, *, perturbed: bool = False) -> dict[str, str]:
        """Send gathered weights; return, on all ranks, URL → error of each server that did not load them."""
        version = self.pool.fleet.version + 1
        parameters = self.perturbation.parameters(self.gather()) if perturbed else self.gather()
        errors: dict[str, str | None] = {}
        waiting: list[str] = []

        def write() -> Any:
            try:
                if self.ranks.rank == 0:
                    return self.weights.write(parameters, version)
            finally:  # gathering is a collective: every rank has to take part to the end, even after an error
                for _ in parameters:
                    pass

        async def load(server: VLLMServer) -> str | None:
            try:
                await refit(server)
            except ServerError as error:
                return str(error)
            return None

        try:
            waiting = self.ranks.agree(self.pool.new_version, version)
            refit = partial(self.weights.refit, self.ranks.agree(write, from_main=True))
            self.pool.refit = refit
            errors = self.ranks.agree(self.pool.ask_all, load, waiting, main_only=True)
        finally:
            missing = "the main process failed, or considers the server dead"
            self.pool.weights_sent({url: errors.get(url, missing) for url in waiting})
        return {url: error for url, error in errors.items() if error is not None}


def load_checkpoint(pool: ServerPool, model: nn.Module, vocabulary: int, weight_dir: str | Path | None) -> None:
    """Make all servers sample from a model.

    Args:
        model: the model on any device, in the servers' dtype (`check_servers`).
        vocabulary: number of token ids of the tokenizer.
        weight_dir: folder for the weights; servers see it under the same path. A server that restarts gets them again.
            `None`: they have been started with the model, so their log-probs are only compared.

    Raises:
        WeightMismatch: if a server computes with other weights.
        PoolError: if a server did not load the weights.
    """
    weights = FileWeights(weight_dir or "", next(model.parameters()).dtype)
    gather = model.named_parameters
    sync = WeightSync(pool, Ranks(PartialState()), weights, model, vocabulary, gather, ScaledLayers(model))
    if weight_dir is None:
        sync.check(model_log_probs(model, sync.probe))
    else:
        sync.send()
