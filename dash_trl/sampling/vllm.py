"""HTTP client of one vLLM server: it samples, computes log-probs and loads weights, and checks every answer.

After a `ServerError`, repeating the request is safe, and another server may succeed. A `ValueError` means that the
request or the set-up is wrong.
"""

import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import aiohttp
import torch

from dash_trl.server_key import API_KEY, key_file, key_header
from dash_trl.vllm_plugin import ADAPTER

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 10.0
CONTROL_SECONDS = 60.0  # for requests that a healthy server answers as soon as its engine step ends
# What a server would otherwise take from its model's `generation_config`.
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# KV connectors whose cache belongs to one server, and is emptied with its prefix cache (`/reset_prefix_cache`, vLLM
# 0.31). Without a connector, the name is None.
EMPTIED = (None, "OffloadingConnector", "SimpleCPUOffloadConnector")

Options = dict[str, Any]  # of a request for completions, under vLLM's names


class ServerError(RuntimeError):
    """A server failed a request. The message leaves out the server's address."""


class ServerGone(ServerError):
    """The connection was refused or dropped, or broken HTTP came, so the server's process may have ended."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt, with the sampler's log-prob of each token."""

    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class ServedModel:
    """A server's description of its model.

    Attributes:
        context: largest number of tokens of a prompt and its completion.
        adapter_rank: largest rank of a LoRA adapter; 0 = the server takes none.
        log_probs_as_sampled: False = reported log-probs leave out temperature and truncation, such as `top_p`.
    """

    dtype: torch.dtype
    shape: dict[str, Any]
    context: int
    adapter_rank: int
    log_probs_as_sampled: bool


@dataclass(eq=False)
class VLLMServer:
    """Client for `vllm serve` with `VLLM_SERVER_DEV_MODE=1`. All methods raise `ServerError` or `ValueError`.

    Attributes:
        session: HTTP session of the event loop that awaits these methods.
        timeout: seconds for one answer, unless a method has its own timeout.
        uses_adapter: True = requests use the LoRA adapter that the server was given.
    """

    url: str
    session: aiohttp.ClientSession
    timeout: float
    uses_adapter: bool = False

    # --------------------------------------------------------------------------------------- sampling and scoring

    async def complete(
        self, prompt_ids: Sequence[int], n: int, sampling: Options, *, timeout: float | None = None
    ) -> list[Completion]:
        """Sample `n` continuations of one prompt.

        Args:
            sampling: parameters of `/v1/completions`, under vLLM's names. Those that are left out are neutral.
            timeout: seconds; 0 = no limit; None: the client's own limit.
        """
        choices = await self._choices(prompt_ids, n, {**NEUTRAL, **sampling, "n": n, "logprobs": 0}, timeout)
        with _readable(choices):
            return list(map(_completion, sorted(choices, key=itemgetter("index"))))

    async def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Compute log P(ids[t] | ids[:t]) for t = 1 … len(ids) − 1, at temperature 1."""
        choices = await self._choices(ids, 1, {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0})
        with _readable(choices):
            entries = choices[0]["prompt_logprobs"]
            return _finite([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)])

    async def _choices(
        self, prompt_ids: Sequence[int], count: int, options: Options, timeout: float | None = None
    ) -> list[Any]:
        request = {
            "model": ADAPTER if self.uses_adapter else None,
            "prompt": list(prompt_ids),
            "return_token_ids": True,
        }
        choices = await self._request("POST", "/v1/completions", "choices", timeout=timeout, json=request | options)
        with _readable(choices):
            if len(choices) != count:
                raise ServerError(f"answered {len(choices)} choices instead of {count}")
        return choices

    # ------------------------------------------------------------------------------------------ health and weights

    async def probe(self) -> None:
        """Raise unless the server reports that it is healthy."""
        await self._request("GET", "/health", timeout=PROBE_SECONDS)

    async def describe(self) -> ServedModel:
        """Return the server's description of its model. A `ValueError`: it does not suit training."""
        config = await self._request("GET", "/server_info", "vllm_config", params={"config_format": "json"})
        workers = await self._rpc("dash_model")
        with _readable((config, workers)):
            model = config["model_config"]
            adapters = config.get("lora_config") or {}
            connector = (config.get("kv_transfer_config") or {}).get("kv_connector")
            described = ServedModel(
                dtype=getattr(torch, workers[0]["dtype"]),
                shape=workers[0]["shape"],
                context=model["max_model_len"],
                adapter_rank=adapters.get("max_lora_rank", 0),
                log_probs_as_sampled=model["logprobs_mode"] == "processed_logprobs",
            )
        if connector not in EMPTIED:
            raise ValueError(
                f"{self.url} uses the KV connector {connector}, whose cache may keep prefixes of old weights after a "
                "weight sync. Start the server without --kv-transfer-config. --kv-offloading-size can be used with "
                "vLLM's own backend."
            )
        return described

    async def weight_tag(self) -> str:
        """Return the tag of the server's weights, see `Snapshot`."""
        return await self._request("GET", "/weight_info", "weight_version", timeout=PROBE_SECONDS)

    async def load_weights(self, path: str, tag: str) -> None:
        """Load a checkpoint's directory in place. Requests in flight wait for it."""
        async with self._update(tag):
            await self._rpc("reload_weights", weights_path=path)

    async def load_adapter(self, path: str, tag: str) -> None:
        """Load a LoRA adapter (PEFT's format) like `load_weights`."""
        async with self._update(tag):
            await self._rpc("dash_load_adapter", path=path)

    async def resume(self) -> None:
        """Resume sampling, which a weight update has paused."""
        await self._request("POST", "/resume", timeout=CONTROL_SECONDS)

    @asynccontextmanager
    async def _update(self, tag: str) -> AsyncIterator[None]:
        """`async with` block that loads weights, while requests wait. At its end, the server has the tag."""
        await self._request("POST", "/pause", params={"mode": "keep"}, timeout=CONTROL_SECONDS)
        try:
            await self._set_tag(f"{tag}.unfinished")  # the old tag would hold for weights that are loaded in part
            yield
            # The prefix cache holds prefixes of the old weights. Without the first option, paused requests hold KV
            # cache, and the reset fails. The second one empties the cache of `--kv-offloading-size`.
            options = {"reset_running_requests": "true", "reset_external": "true"}
            path = "/reset_prefix_cache"
            if not await self._request("POST", path, "success", params=options, timeout=CONTROL_SECONDS):
                raise ServerError("did not reset its prefix cache, which holds prefixes of the old weights")
            await self._set_tag(tag)
        finally:
            await self.resume()

    async def _set_tag(self, tag: str) -> None:
        await self._request("POST", "/update_weight_version", json={"new_version": tag}, timeout=CONTROL_SECONDS)

    async def _rpc(self, method: str, **kwargs: str) -> Any:
        return await self._request("POST", "/collective_rpc", "results", json={"method": method, "kwargs": kwargs})

    # -------------------------------------------------------------------------------------------------------- HTTP

    async def _request(
        self,
        method: str,
        path: str,
        field: str | None = None,
        *,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Send a request; return a field of the answer's JSON, or None if no field is named."""
        seconds = self.timeout if timeout is None else timeout
        headers = key_header(self.url)  # read again, because a server that starts may create the key
        limit = aiohttp.ClientTimeout(seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self.session.request(
                method, self.url + path, timeout=limit, headers=headers, allow_redirects=False, **kwargs
            ) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise self._refusal(method, path, response.status, text)
        except TimeoutError as error:
            raise ServerError(f"{method} {path} took longer than {seconds:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGone(f"{method} {path}: {type(error).__name__}: {error}") from error
        if field is not None:
            with _readable(text):
                return json.loads(text)[field]

    def _refusal(self, method: str, path: str, status: int, text: str) -> Exception:
        said = f"{self.url} answered {status} to {method} {path}: {' '.join(text.split())[:300]}"
        if status in (401, 403):
            return ValueError(
                f"{said}. Set the environment variable {API_KEY} to the key with which the server was started. The key "
                f"that `dash_trl serve` creates is in {key_file()} of the user who started it."
            )
        if status == 404 and not path.startswith("/v1"):
            return ValueError(
                f"{said}. The server was started without its weight endpoints. Start it with `dash_trl serve`, "
                "or set VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if "has no attribute 'dash_" in text:  # vLLM answers 500
            return ValueError(f"{said}. Start the server with `dash_trl serve` of this version of dash_trl.")
        if "meta tensors" in text:  # vLLM's loader has removed the old weights, and has not loaded all new ones
            return ValueError(f"{said}. The server holds only part of its weights, because a load failed. Restart it.")
        if self.uses_adapter and ADAPTER in text:  # the server has restarted and has no adapter yet
            return ServerGone(said)
        if 300 <= status < 500 and status not in (408, 425, 429):  # a redirect is not followed: it would get the key
            return ValueError(said)
        return ServerError(said)


@contextmanager
def _readable(answer: object) -> Iterator[None]:
    """Turn errors in reading a server's answer into `ServerError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"gave an answer that cannot be read ({type(error).__name__}: {error}): {str(answer)[:80]}"
        raise ServerError(said) from error


def _completion(choice: Any) -> Completion:
    ids = choice["token_ids"]
    log_probs = choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] not in ("stop", "length", "repetition"):  # the last one by `repetition_detection`
        raise ServerError(f"ended a completion with finish_reason={choice['finish_reason']!r}")
    if len(ids) != len(log_probs):
        raise ServerError(f"answered {len(ids)} tokens with {len(log_probs)} log-probs")
    return Completion(ids, _finite(log_probs))


def _finite(log_probs: list[float]) -> list[float]:
    if not all(map(math.isfinite, log_probs)):
        raise ServerError("answered a log-prob that is not a finite number. Do the weights contain NaN?")
    return list(map(float, log_probs))
