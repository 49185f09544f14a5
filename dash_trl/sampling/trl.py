"""`ServerGeneration`: several servers behind the interface of TRL's sampler, installed as `trainer.vllm_generation`.

Overview::

    prompts of this rank ──► ServerPool ──► completions, in prompt order
    model's weights      ──► WeightSync ──► all servers, which are checked
"""

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from dash_trl.distributed import TIMEOUT, Ranks
from dash_trl.sampling.pool import ServerPool
from dash_trl.sampling.proof import ScaledLayers, ShiftedAdapter, is_adapter
from dash_trl.sampling.sync import WeightSync, check_servers
from dash_trl.sampling.vllm import Options, ServedModel, VLLMServer
from dash_trl.sampling.weights import (
    TRAINED,
    WEIGHT_DIR,
    AdapterWeights,
    FileWeights,
    NamedTensors,
    obstacle,
    weights_version,
)
from dash_trl.update import NO_LOG_PROB

logger = logging.getLogger(__name__)


class ExactMerges(VLLMGeneration):
    """TRL's sampler, whose weight syncs leave the base weights of an adapter as they are, to the bit.

    TRL merges the adapter in place and subtracts it again, so weights in bf16 drift (huggingface/trl#6688).
    """

    def _iter_named_params(self) -> NamedTensors:
        """Yield the parameters of the merged model, without TRL's copies of `modules_to_save` for the adapter "ref"."""
        layers = [layer for layer in self.model.modules() if is_adapter(layer)]
        kept = [(weight, weight.detach().clone()) for layer in layers for weight in layer.get_base_layer().parameters()]
        try:
            yield from (one for one in super()._iter_named_params() if ".modules_to_save." not in one[0])
        finally:  # also after an error or an interrupt, which TRL leaves merged
            for layer in layers:
                if layer.merged:
                    layer.unmerge()
            with torch.no_grad():
                for weight, before in kept:
                    weight.copy_(before)


class ServerGeneration(ExactMerges):
    """TRL's sampler (`GRPOTrainer.vllm_generation`) over several servers. Every rank has its own pool and prompts.

    Args:
        urls, request_timeout: see `ServerPool`.
        weight_dir: folder for the weights; trainer and servers see it under the same path.
        rank_timeout: seconds for which ranks wait for each other.
        end_ids: token ids that end a completion, including `stop_token_ids` of `generation_kwargs`.
        step: function that returns the optimizer step that made the current weights.
        others: arguments of TRL's `VLLMGeneration`, such as `server_timeout` (see `ServerPool`).

    Attributes:
        context: the smallest context length of the servers in tokens; infinite before the first weight sync.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        request_timeout: float = 600.0,
        weight_dir: str = WEIGHT_DIR,
        rank_timeout: float = TIMEOUT,
        end_ids: Sequence[int] = (),
        step: Callable[[], int] = lambda: 0,
        **others: Any,
    ):
        super().__init__(mode="server", **others)
        if self.generation_kwargs.get("seed") is not None:
            raise ValueError(
                f"generation_kwargs has seed={self.generation_kwargs['seed']}, but timing decides which rows share a "
                "batch on a server: no seed makes samples reproducible, and requests with the same seed and prompt "
                "would sample the same rows. Leave it out."
            )
        self.weight_dir = weight_dir
        self.end_ids = end_ids
        self.step = step
        self.ranks = Ranks(self.accelerator, timeout=rank_timeout)
        first = self.ranks.rank % max(1, len(urls))  # ranks start with different servers
        self.pool = ServerPool(
            [*urls[first:], *urls[:first]],
            server_timeout=self.server_timeout,
            request_timeout=request_timeout,
            ranks=self.ranks.count,
        )
        self.pool.refit = _waits_for_weights
        self._steps: dict[int, int] = {}  # weight version → optimizer step that made these weights
        self.context = math.inf
        self.ranks.agree(self.pool.wait_until_ready)

    def _init_vllm(self) -> None:
        """Make no client of TRL's, because it needs CUDA."""

    # ------------------------------------------------------------------------------------------------ sampling

    def generate(
        self,
        prompts: list,
        images: list | None,
        num_generations: int,
        profiler: object = None,
    ) -> tuple:
        """Sample completions before all windows, with the interface of TRL's method. `images` are not used.

        Returns:
            Four lists with an entry per row: prompt ids, completion ids, the sampler's log-probs (`None` = unknown),
            and the token ids of these. Each log-prob and each of its token ids is in a list of its own.
        """
        works = (self.pool.complete(*request) for request in self.requests(prompts, num_generations))
        rows = [completion for group, _ in self.ranks.agree(self.pool.run, works) for completion in group]
        log_probs = [[[value if value > NO_LOG_PROB else None] for value in row.log_probs] for row in rows]
        token_ids = [[[token] for token in row.token_ids] for row in rows]
        return prompts, [row.token_ids for row in rows], log_probs, token_ids

    def steps(self, versions: Sequence[int]) -> list[int]:
        """Return the optimizer steps that made these weight versions."""
        return [self._steps[version] for version in versions]

    def requests(self, prompts: list[list[int]], num_generations: int) -> Iterator[tuple[list[int], int, Options]]:
        """Yield the first three arguments of `ServerPool.complete` for each group.

        A group is up to `num_generations` adjacent rows with equal prompts.
        """
        for ids, rows in groupby(prompts):
            sampling = self.sampling()
            room = self.context - len(ids)
            if 0 < room < sampling["max_tokens"]:  # without room, the server refuses the prompt
                sampling["max_tokens"] = room
            count = len(list(rows))
            for done in range(0, count, num_generations):
                yield ids, min(num_generations, count - done), sampling

    def sampling(self) -> Options:
        """Return the sampling parameters of all requests, under vLLM's names."""
        sampling = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "max_tokens": self.max_completion_length,
        }
        if self.structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": self.structured_outputs_regex}
        sampling |= self.generation_kwargs
        if not sampling.get("ignore_eos"):  # the end tokens of the server's model may be others
            sampling["stop_token_ids"] = list(self.end_ids)
        return sampling

    # ------------------------------------------------------------------------------------------------- weights

    def sync_weights(self) -> None:
        """Send the model's weights to all servers; see `WeightSync.send`."""
        self._sync.send()
        self._steps[self.pool.fleet.version] = self.step()

    @cached_property
    def _sync(self) -> WeightSync:
        """Check the servers, and choose how they get weights: an adapter alone if that works, otherwise all weights."""
        served = self.ranks.agree(self._check_servers, main_only=True)
        self.context = served.context
        sends_adapter = is_peft_model(self.model)
        if sends_adapter:
            sharded = "the adapter alone cannot be sent under FSDP" if self._dist.is_fsdp else None
            why_merged = sharded or obstacle(self.model, served.adapter_rank)
            sends_adapter = why_merged is None
            if not sends_adapter and self.accelerator.is_main_process:
                logger.warning(f"The adapter is merged into its model before it is sent to the servers: {why_merged}.")
        if not sends_adapter:
            weights = FileWeights(self.weight_dir, served.dtype)
            gather = self._gather
            perturbation = ScaledLayers(self.model, self._plain_name)
        else:
            self.pool.use_adapter()
            self._base = self._base_version()
            weights = AdapterWeights(self.weight_dir, served.dtype, self.model.peft_config[TRAINED])
            gather = self._gather_adapter
            perturbation = ShiftedAdapter(self.model)
        return WeightSync(
            self.pool,
            self.ranks,
            weights,
            self.model,
            len(self.processing_class),
            gather,
            perturbation,
            self.accelerator.mixed_precision,
        )

    def _check_servers(self) -> ServedModel:
        """Check that the servers fit this trainer, and return their common description."""
        served = check_servers(self.pool, self.model.config, self.model.name_or_path)
        logger.info("Sending the weights to the servers for the first time, twice with a comparison of log-probs …")
        if not served.log_probs_as_sampled:
            logger.warning(
                "The servers' log-probs ignore temperature and top_p, and every ratio that uses them (importance "
                "sampling correction, loss_type='aipo') is biased. Start the servers with --logprobs-mode "
                "processed_logprobs."
            )
        if self.max_completion_length >= served.context:
            logger.warning(
                f"max_completion_length={self.max_completion_length}, but the servers' context is {served.context} "
                "tokens, prompt included: a completion gets at most the tokens that its prompt leaves. Lower "
                "max_completion_length, or start the servers with a larger --max-model-len."
            )
        return served

    def _gather_adapter(self) -> NamedTensors:
        """Iterate over the adapter's unsharded matrices."""
        if self._base != self._base_version():
            raise ValueError(
                "The weights of the adapter's base model have changed, but the servers get the adapter alone. Start "
                "them without --enable-lora, so that they get the merged weights."
            )
        return self._adapter_parameters()

    def _base_version(self) -> list[int]:
        return weights_version(one for one in self.model.parameters() if not one.requires_grad)

    def _adapter_parameters(self) -> NamedTensors:
        """Yield the adapter's unsharded matrices. This is a collective under ZeRO-3."""
        for name, parameter in self.model.named_parameters():
            if f".{TRAINED}." in name:
                with self._dist.gather_params([parameter]):
                    yield name.replace(f".{TRAINED}.", "."), parameter.data

    def _gather(self) -> NamedTensors:
        """Iterate over the unsharded, merged parameters."""
        # TRL assumes that all parameters are sharded. But after a pass without gradient, FSDP2's root module keeps its
        # own parameters unsharded.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return self._iter_named_params()

    def _plain_name(self, name: str) -> str:
        """Convert a parameter's name in a wrapped model to its name on a server, as TRL does."""
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        return self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default.", "_fsdp_wrapped_module."])


async def _waits_for_weights(server: VLLMServer) -> None:
    """`ServerPool.refit` before the first sync. No token is tested: a killed run may have left the server paused."""


def install(trainer: GRPOTrainer) -> None:
    """Give a trainer whose `args` are a `DASHConfig` a `ServerGeneration`; if vLLM is colocated, `ExactMerges`.

    With servers, the trainer was built with `use_vllm=False`, because TRL's client needs CUDA.
    """
    args = trainer.args
    if args.vllm_mode == "colocate":
        trainer.vllm_generation.__class__ = ExactMerges
        return
    this = weakref.proxy(trainer)
    trainer.vllm_generation = ServerGeneration(
        args.vllm_server_urls
        or [args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"],
        request_timeout=args.vllm_request_timeout,
        rank_timeout=args.ddp_timeout,
        end_ids=trainer.eos_token_ids,
        step=lambda: this.state.global_step,
        weight_dir=args.vllm_weight_dir or os.path.join(args.output_dir, WEIGHT_DIR),
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer._tokenizer,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        server_timeout=args.vllm_server_timeout,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        generation_kwargs=args.generation_kwargs,
    )
    trainer.use_vllm = True
