"""Sampling from several vLLM servers: every rank sends its own prompts, and every prompt is answered exactly once.

    prompts of this rank ──► jobs ──► the server with the fewest outstanding tokens ──► completions, in prompt order
                              ▲                        │ failed, hung, died
                              └────────────────────────┘

`ServerPool` is the work: jobs over servers, by the rules of `health.Fleet`. `VLLMPool` is the same with TRL's face
(`generate`, `sync_weights`), to be installed as `trainer.vllm_generation`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import aiohttp
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

from dash_trl.sampling.health import Fleet, State
from dash_trl.sampling.server import Completion, ServerError, VLLMServer
from dash_trl.sampling.urls import check_urls
from dash_trl.sampling.vllm_plugin import model_shape
from dash_trl.sampling.weights.file import (
    FileWeights,
    NCCLWeights,
    Snapshot,
    Weights,
    check_probe,
    model_log_probs,
    probe_tokens,
    scale_linear,
)
from dash_trl.workers.processes import EventLoop

logger = logging.getLogger(__name__)

ATTEMPTS = 6  # of one job, before it is given up with the run
TICK = 0.25  # seconds between looks at who may be tried again
START_TOGETHER = 1.0  # seconds at most that a batch waits for all servers to be recognised
KEEP_ALIVE = 4.0  # seconds; uvicorn closes an idle connection after 5, and a request sent into that would be lost
API_KEY = "VLLM_API_KEY"  # vLLM's own variable
WEIGHT_DIR = "_vllm_weights"  # in output_dir; push_to_hub leaves out what begins with an underscore
PERTURBATION = 0.5  # exact in every dtype, and it moves log-probs towards uniform, where they are stable


class PoolError(RuntimeError):
    """The servers could not do the work; the message names each of them and its last error."""


@dataclass(eq=False)
class Job:
    """Something any server can do; equal to no other.

    Attributes:
        ask: what to await of a server. tokens, sequences: the load that it is.
    """

    ask: Callable[[VLLMServer], Awaitable[Any]]
    tokens: int
    sequences: int = 1
    failed_on: list[str] = field(default_factory=list)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Lets a task's error wait for the next batch, where it is raised; asyncio prints what nobody has looked at."""
    if not task.cancelled():
        task.exception()


class ServerPool:
    """Work for several servers, balanced by outstanding tokens; what a failed server had is done by the others.

    Args:
        urls: e.g. ["http://127.0.0.1:8000", "http://127.0.0.1:8001"].
        server_timeout: seconds without any usable server until a `PoolError`.
        request_timeout: seconds for one answer; after that the server is suspected and the job goes elsewhere.
    Raises:
        ValueError: no URL, not a URL, or one twice.
    """

    def __init__(self, urls: Sequence[str], *, server_timeout: float = 240.0, request_timeout: float = 600.0):
        self.urls = check_urls(urls)
        self.server_timeout = server_timeout
        self.request_timeout = request_timeout
        self.fleet = Fleet(self.urls)
        self.refit: Callable[[VLLMServer], Awaitable[int | None]] = self._without_weights
        self._recognising: dict[str, asyncio.Task[None]] = {}  # they outlive a batch: a large model is long in loading
        self._loop = EventLoop()
        session = self._loop.run(self._connect())
        self._servers = {url: VLLMServer(url, session, request_timeout) for url in self.urls}
        weakref.finalize(self, self._loop.close, session.close)

    async def _connect(self) -> aiohttp.ClientSession:
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        )

    async def _without_weights(self, server: VLLMServer) -> int | None:
        """A pool that never sent weights takes the servers as they are."""
        return self.fleet.version

    def wait_until_ready(self) -> None:
        """Every server answers: at the start of a run a missing one is a mistake.

        Raises:
            PoolError: after `server_timeout`.
        """

        async def wait(server: VLLMServer) -> str | None:
            deadline = time.monotonic() + self.server_timeout
            while True:
                try:
                    await server.probe()
                    await self._recognise(server.url)
                    return None
                except ServerError as error:
                    if time.monotonic() > deadline:
                        return f"  {server.url}: {error}"
                    await asyncio.sleep(1.0)

        async def wait_for_all() -> list[str | None]:
            return await asyncio.gather(*map(wait, self._servers.values()))

        missing = [line for line in self._loop.run(wait_for_all()) if line]
        if missing:
            raise PoolError(
                f"{len(missing)} of {len(self.urls)} vLLM servers did not answer within vllm_server_timeout="
                f"{self.server_timeout:g} s. Start them (`python -m dash_trl.serve MODEL --servers {len(self.urls)}`) "
                "or correct vllm_server_urls.\n" + "\n".join(missing)
            )

    def complete(
        self,
        prompts: Sequence[tuple[Sequence[int], int] | tuple[Sequence[int], int, int | None]],
        sampling: dict[str, Any],
    ) -> list[list[Completion]]:
        """Sample continuations.

        Args:
            prompts: (token ids, how many continuations) each, and, if it differs from that of `sampling`, `max_tokens`.
            sampling: vLLM's sampling parameters, as in the body of `/v1/completions`.
        Returns:
            Per prompt, in order, its continuations.
        Raises:
            PoolError: no server could be used for `server_timeout`, or a prompt failed `ATTEMPTS` times.
            ValueError: a server refused a request as invalid.
        """

        def job(ids: Sequence[int], n: int, max_tokens: int | None = None) -> Job:
            own = sampling if max_tokens is None else {**sampling, "max_tokens": max_tokens}
            tokens = n * (len(ids) + int(own.get("max_tokens") or 16))
            return Job(lambda server: server.complete(ids, n, own), tokens, n)

        return self._collect([job(*prompt) for prompt in prompts])

    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of every token but the first, at temperature 1; raises as `complete`."""

        def job(ids: Sequence[int]) -> Job:
            return Job(lambda server: server.log_probs(ids), len(ids))

        return self._collect([job(ids) for ids in sequences])

    def on_each(self, ask: Callable[[VLLMServer], Awaitable[Any]], urls: Sequence[str] | None = None) -> dict[str, Any]:
        """`ask` of these servers (`None`: all) at once: url → its answer, or the exception that it raised."""
        urls = self.urls if urls is None else urls

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*[ask(self._servers[url]) for url in urls], return_exceptions=True)

        return dict(zip(urls, self._loop.run(ask_all()), strict=True))

    def _collect(self, jobs: list[Job]) -> list[Any]:
        async def collect() -> list[Any]:
            results: list[Any] = [None] * len(jobs)
            async for i, result in self._as_completed(jobs):
                results[i] = result
            return results

        return self._loop.run(collect())

    async def _as_completed(self, jobs: list[Job]) -> AsyncIterator[tuple[int, Any]]:
        """(number of the job, result), each exactly once, as they finish."""
        pending = deque(range(len(jobs)))
        running: dict[asyncio.Task[Any], tuple[int, str]] = {}
        fleet = self.fleet
        began = time.monotonic()
        fleet.begin(began)
        suspects = self._look_at([url for url in fleet.to_probe(began) if fleet.servers[url].state == State.SUSPECT])
        if suspects:  # the first to answer would be given all the work
            await asyncio.wait(suspects, timeout=START_TOGETHER)
        try:
            while pending or running:
                now = time.monotonic()
                for number in list(pending):
                    job = jobs[number]
                    url = fleet.choose(job.sequences, avoid=job.failed_on)
                    if url is not None:
                        pending.remove(number)
                        fleet.started(url, job, job.tokens, job.sequences)
                        running[asyncio.ensure_future(job.ask(self._servers[url]))] = (number, url)
                    elif not job.failed_on:
                        break  # nobody has room
                self._look_at(fleet.to_probe(now))
                if fleet.lost(began, now, self.server_timeout) and not running:
                    raise PoolError(self.message(f"No vLLM server could be used for {self.server_timeout:g} s"))
                tasks = [*running, *self._recognising.values()] or [asyncio.ensure_future(asyncio.sleep(TICK))]
                done, _ = await asyncio.wait(tasks, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                for task in done & running.keys():
                    number, url = running.pop(task)
                    error = task.exception()
                    if error is None:
                        fleet.served(url, jobs[number])
                        yield number, task.result()
                    elif isinstance(error, ServerError):
                        fleet.failed(url, jobs[number], str(error), time.monotonic(), gone=error.gone)
                        logger.warning(f"vLLM server {url} failed a request, which goes to another: {error}")
                        self._count_failure(jobs[number], url, str(error))
                        pending.appendleft(number)
                    else:
                        raise error
                lost = [task for task, (_, url) in running.items() if fleet.servers[url].state == State.DEAD]
                if lost:
                    logger.warning(f"{len(lost)} requests of vLLM servers that are taken for dead go to others.")
                for task in lost:
                    number, url = running.pop(task)
                    task.cancel()
                    fleet.abandoned(url, jobs[number])
                    self._count_failure(jobs[number], url, fleet.servers[url].last_error)
                    pending.appendleft(number)
        finally:
            for task, (number, url) in running.items():
                fleet.abandoned(url, jobs[number])
                task.cancel()

    def _count_failure(self, job: Job, url: str, error: str) -> None:
        """Of those that a server had when it died, too: one of them may be what kills servers."""
        job.failed_on.append(url)
        if len(job.failed_on) >= ATTEMPTS:
            raise PoolError(self.message(f"A request failed {ATTEMPTS} times, at last with {url}: {error}"))

    def settle(self) -> None:
        """Wait for servers that are being given weights: before newer ones are sent, lest the old ones come last."""

        async def wait() -> None:
            if self._recognising:
                await asyncio.wait(self._recognising.values())

        self._loop.run(wait())

    def _look_at(self, urls: Sequence[str]) -> list[asyncio.Task[None]]:
        """Starts to recognise servers, and raises what earlier looks raised."""
        for url in [url for url, task in self._recognising.items() if task.done()]:
            self._recognising.pop(url).result()
        for url in urls:
            if url not in self._recognising:
                self._recognising[url] = asyncio.ensure_future(self._recognise(url))
                self._recognising[url].add_done_callback(_retrieve)  # though this batch may end before it
        return [self._recognising[url] for url in urls]

    async def _recognise(self, url: str) -> None:
        """Look at a server that is not trusted; it gets the current weights, if it has others, before any prompt."""
        server, known = self._servers[url], self.fleet.servers[url]
        try:
            await server.probe()
            doubtful = known.version is None or known.failures > 0
            self.fleet.answered(url)
            version = await self.refit(server)
            if version is None:
                return  # it waits for the next weights
            if doubtful:
                await server.try_out()
            self.fleet.refitted(url, version, time.monotonic())
            if doubtful:
                logger.info(f"vLLM server {url} has the weights of version {version}.")
        except ServerError as error:
            self.fleet.refit_failed(url, str(error), time.monotonic())

    def message(self, what: str) -> str:
        """An error's text, with what is known of every server."""
        return f"{what}. The servers, as this process saw them:\n{self.fleet.describe()}"


class VLLMPool(VLLMGeneration):
    """TRL's sampler over several servers: what a `GRPOTrainer` calls `vllm_generation`.

    Every rank has a pool of its own and sends its own prompts. Weights are gathered by all ranks and sent by the main
    one; after each of both, the ranks agree on whether it worked before any other collective, so that a failure of one
    is the same error on all.

    Args:
        urls: of the servers. request_timeout, server_timeout: see `ServerPool`.
        weight_sync: "file" or "nccl". weight_dir: where "file" writes; seen by trainer and servers under the same path.
        others: the arguments of TRL's `VLLMGeneration`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        request_timeout: float = 600.0,
        weight_sync: str = "file",
        weight_dir: str = WEIGHT_DIR,
        **others: Any,
    ):
        self.urls = urls
        self.request_timeout = request_timeout
        self.weight_sync = weight_sync
        self.weight_dir = weight_dir
        super().__init__(mode="server", **others)

    def _init_vllm(self) -> None:
        """In place of TRL's client, which needs CUDA."""
        first = self.accelerator.process_index % max(1, len(self.urls))  # ranks begin with different servers
        urls = [*self.urls[first:], *self.urls[:first]]
        self.pool = ServerPool(urls, server_timeout=self.server_timeout, request_timeout=self.request_timeout)
        self.pool.refit = self._refit
        self._weights: Weights | None = None
        self._proven = False  # that servers which say that they have the weights compute with them
        self._snapshot: Snapshot | None = None
        self._agree(self.pool.wait_until_ready)

    # ------------------------------------------------------------------------------------------------ sampling

    def generate(
        self,
        prompts: list,
        images: list | None,
        num_generations: int,
        profiler: Any = None,
        max_tokens: Sequence[int] | None = None,
    ) -> tuple:
        """TRL's: (prompt ids, completion ids, log-probs [[…], …], their token ids), a row per prompt given.

        Args:
            max_tokens: for each prompt, in place of `max_completion_length`.
        """
        limits = [None] * len(prompts) if max_tokens is None else max_tokens
        runs = [(ids, len(list(rows)), most) for (ids, most), rows in groupby(zip(prompts, limits, strict=True))]
        sampling = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "max_tokens": self.max_completion_length,
        }
        if self.structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": self.structured_outputs_regex}
        sampling.update(self.generation_kwargs)
        groups = self._agree(lambda: self.pool.complete(runs, sampling))
        rows = [completion for group in groups for completion in group]
        log_probs = [[[value] for value in row.log_probs] for row in rows]
        token_ids = [[[token] for token in row.token_ids] for row in rows]
        return prompts, [row.token_ids for row in rows], log_probs, token_ids

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log P of every token but the first under the servers' weights; called by all ranks, each with its own."""
        return self._agree(lambda: self.pool.log_probs(sequences))

    # ------------------------------------------------------------------------------------------------- weights

    def sync_weights(self) -> None:
        """Give all servers the model's weights, and see that they have them. The first time, prove that it can be seen.

        Raises:
            WeightMismatch: a server holds other weights than it was given, or computes with others.
            PoolError: a server cannot be reached at the start of the run.
        """
        if self._proven:
            self._send_weights()
            return
        if self._weights is None:
            dtype = self._agree(self._check_servers, main_only=True)
            if self.weight_sync == "file":
                self._weights = FileWeights(self.weight_dir, dtype)
            else:
                self._weights = NCCLWeights(
                    self.pool.urls, self.group_port, self.accelerator.device, self.request_timeout, dtype
                )
        self._agree(self.pool.wait_until_ready)
        ids = probe_tokens(min(self.model.config.get_text_config().vocab_size, len(self.processing_class)))
        plain = model_log_probs(self.model, ids, 1.0)
        perturbed = model_log_probs(self.model, ids, PERTURBATION)
        for scale, expected in ((PERTURBATION, perturbed), (1.0, plain)):
            errors = self._send_weights(scale)
            if errors:
                raise PoolError(self.pool.message(f"At the start {len(errors)} servers did not take the weights"))
            self._agree(partial(self._check, ids, expected, plain), main_only=True)
        self._proven = True

    def _check_servers(self) -> torch.dtype:
        """Whether they can be this trainer's; returns the dtype of their weights."""
        reports = self._ask(lambda server: server.weight_report())
        own = model_shape(self.model.config.get_text_config())
        for url, report in reports.items():
            if report.shape != own:
                raise ValueError(
                    f"{url} serves another model than the trainer's: {report.shape} is not {own}. Start the servers "
                    "with the model that is trained."
                )
        dtypes = {url: report.dtype for url, report in reports.items()}
        if len(set(dtypes.values())) > 1:
            raise ValueError(
                f"The servers run in different dtypes ({dtypes}), as different policies: start them alike."
            )
        if any(report.checksum is None for report in reports.values()):
            logger.warning(
                "The servers' weights are quantised or copied between workers, so that no checksum can be compared "
                "with the trainer's: after the first sync, which log-probs prove, a lost update would go unnoticed."
            )
        configs = self._ask(lambda server: server.config())
        modes = {config["model_config"]["logprobs_mode"] for config in configs.values()}
        if modes != {"processed_logprobs"}:
            logger.warning(
                f"The servers' --logprobs-mode is {modes}, so that the log-probs of samples ignore temperature and "
                "top_p, and the importance-sampling correction is biased. Start them with "
                "--logprobs-mode processed_logprobs."
            )
        if self.weight_sync == "nccl":
            self._check_nccl(configs)
        return getattr(torch, next(iter(dtypes.values())))

    def _check_nccl(self, configs: dict[str, Any]) -> None:
        device = self.accelerator.device
        if device.type != "cuda" or not all(config.get("weight_transfer_config") for config in configs.values()):
            raise ValueError(
                f"vllm_weight_sync='nccl' needs the trainer on CUDA (it is on {device}) and servers started with "
                '--weight-transfer-config \'{"backend": "nccl"}\', as `python -m dash_trl.serve` does on a GPU. Use '
                "vllm_weight_sync='file'."
            )
        if os.environ.get(API_KEY):
            raise ValueError(
                f"vllm_weight_sync='nccl' goes through TRL's client, which sends no API key, and {API_KEY} is set. Use "
                "vllm_weight_sync='file', or servers without a key."
            )

    def _send_weights(self, scale: float = 1.0) -> dict[str, str]:
        """Gather on all ranks, send from the main process, and tell all ranks which servers have them.

        Returns:
            url → error of those that have not.
        """
        self._agree(self.pool.settle)
        fleet, version = self.pool.fleet, self.pool.fleet.version + 1
        fleet.new_version(version, time.monotonic())
        waiting = fleet.waiting()  # the dead get them when they answer again
        weights = self._weights
        assert weights is not None
        parameters = scale_linear(self.model, self._iter_named_params(), scale, self._plain_name)

        def send() -> Any:
            try:
                if self.accelerator.is_main_process:
                    return weights.send(parameters, version, partial(self.pool.on_each, urls=waiting))
            finally:  # gathering is a collective: every rank takes part to the end, whatever fails on the way
                for _ in parameters:
                    pass

        self._snapshot, errors = self._agree(send, from_main=True)
        for url in waiting:
            error = errors.get(url, "the main process takes it for dead")
            if error is None:
                fleet.refitted(url, version, time.monotonic())
            else:
                logger.warning(f"vLLM server {url} did not take the weights of version {version}: {error}")
                fleet.refit_failed(url, error, time.monotonic())
        return {url: error for url, error in errors.items() if error is not None}

    def _plain_name(self, name: str) -> str:
        """The name of a parameter for a server, as TRL makes it of the name in a wrapped model."""
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        return self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default.", "_fsdp_wrapped_module."])

    def _check(self, ids: list[int], expected: Tensor, plain: Tensor) -> None:
        served = self._ask(lambda server: server.log_probs(ids))
        assert self._weights is not None
        check_probe(expected, plain, served, self._weights.dtype)

    def _ask(self, ask: Callable[[VLLMServer], Awaitable[Any]]) -> dict[str, Any]:
        """Of all servers, which have to answer."""
        answers = self.pool.on_each(ask)
        for url, answer in answers.items():
            if isinstance(answer, ServerError):
                raise PoolError(f"{url}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def _refit(self, server: VLLMServer) -> int | None:
        if self._weights is None or self._snapshot is None:
            return None
        return await self._weights.refit(server, self._snapshot)

    # ------------------------------------------------------------------------------------------- ranks together

    def _agree(self, work: Callable[[], Any], *, main_only: bool = False, from_main: bool = False) -> Any:
        """Do it on every rank, or on the main one; if it fails on any, raise on all before any other collective.

        Args:
            main_only: only the main process works. from_main: all work, and get the main process's value.
        """
        value, error = None, None
        if self.accelerator.is_main_process or not main_only:
            try:
                value = work()
            except Exception as caught:  # relayed to all ranks
                error = caught
        failed = torch.tensor([float(error is not None)], device=self.accelerator.device)
        if self.accelerator.reduce(failed, "sum").item() > 0:
            messages = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
            if error is not None:
                raise error
            rank, message = next((i, message) for i, message in enumerate(messages) if message)
            raise PoolError(f"Rank {rank} failed with {message}")
        if main_only or from_main:
            value = broadcast_object_list([value])[0]
        return value


@contextmanager
def without_client(args: Any) -> Iterator[bool]:
    """Within it a trainer is built as if without vLLM servers (TRL's client needs CUDA); yields whether it has any."""
    servers = args.use_vllm and args.vllm_mode == "server"
    args.use_vllm = args.use_vllm and not servers
    try:
        yield servers
    finally:  # when that fails, too: the next attempt may use the same arguments
        args.use_vllm = args.use_vllm or servers


def install(trainer: Any) -> None:
    """Make a `GRPOTrainer` that was built `without_client` sample from the servers that its `args` name."""
    args = trainer.args
    host = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    trainer.vllm_generation = VLLMPool(
        args.vllm_server_urls or [host],
        request_timeout=args.vllm_request_timeout,
        weight_sync=args.vllm_weight_sync,
        weight_dir=args.vllm_weight_dir or os.path.join(args.output_dir, WEIGHT_DIR),
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        server_timeout=args.vllm_server_timeout,
        group_port=args.vllm_group_port,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        generation_kwargs=args.generation_kwargs,
    )
    trainer.use_vllm = True
    trainer.add_callback(_NewWeights(trainer))


class _NewWeights(TrainerCallback):
    """Where weights change without a step, the servers need them: the best model's, at the end of a run."""

    def __init__(self, trainer: Any):
        self.trainer: Any = weakref.proxy(trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._last_loaded_step = -1  # TRL's: the step whose weights the servers have
