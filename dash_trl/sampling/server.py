"""HTTP client of one vLLM server. It requests samples, log-probs and weight loads, and checks every answer.

A failure becomes one of two errors. `ServerError` means that this server failed. Repeating the request is safe, and
another server may succeed. `ValueError` means that the request or the set-up is wrong. Repeating it does not help.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from dash_trl.sampling.checksum import combine_workers
from dash_trl.sampling.key import key_file, key_header
from dash_trl.sampling.urls import API_KEY

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 10.0
CONTROL_SECONDS = 60.0  # for requests that a healthy server answers as soon as its engine step ends
BUSY = (408, 425, 429)  # the 4xx codes that are caused by the server's state, not by the request
UNAUTHORISED = (401, 403)
CONNECTION_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
NOT_FINITE = "not a finite number. Do the weights contain NaN?"


class ServerError(RuntimeError):
    """A server failed a request.

    Args:
        message: the error, without the server's address.
        gone: True = the connection was refused or dropped, so the server's process may have ended.
    """

    def __init__(self, message: str, *, gone: bool = False):
        super().__init__(message)
        self.gone = gone


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
class WeightReport:
    """Report of a server's workers on the weights that they hold.

    Attributes:
        checksum: checksum of all weights, see `checksum.py`. None if a trainer cannot compute the same checksum,
            because weights are quantised or KV heads are copied to several workers.
        dtype: dtype of the weights, such as "bfloat16".
        shape: shape of the model, see `vllm_plugin.model_shape`.
    """

    checksum: int | None
    dtype: str
    shape: dict[str, Any] = field(default_factory=dict)


class VLLMServer:
    """Client for the endpoints of `vllm serve` with `VLLM_SERVER_DEV_MODE=1`.

    All methods raise `ServerError` or `ValueError`, as the module's docstring describes.

    Args:
        url: address of the server.
        session: HTTP session of the event loop that awaits these methods.
        timeout: seconds for one answer, unless a method has its own timeout.

    Attributes:
        adapter: name of the LoRA adapter that requests use; None: requests use the model itself.
        given: the version tag that this client set last; None: it has given the server no weights.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout: float):
        self.url = url
        self.timeout = timeout
        self._session = session
        self.adapter: str | None = None
        self.given: str | None = None
        self._headers = key_header(url)
        self._model: str | None = None

    # --------------------------------------------------------------------------------------- sampling and scoring

    async def complete(
        self, prompt_ids: Sequence[int], n: int, sampling: dict[str, Any], *, timeout: float | None = None
    ) -> list[Completion]:
        """Sample `n` continuations of one prompt.

        Args:
            prompt_ids: token ids of the prompt.
            n: number of continuations.
            sampling: vLLM's sampling parameters, as in the body of `/v1/completions`.
            timeout: seconds, in place of the client's `timeout`.

        Returns:
            `n` continuations.
        """
        choices = await self._choices(prompt_ids, n, {**sampling, "n": n, "logprobs": 0}, timeout)
        with _readable(choices):
            choices = sorted(choices, key=lambda choice: choice["index"])
            return [_completion(choice, sampling.get("max_tokens", math.inf)) for choice in choices]

    async def log_probs(self, ids: Sequence[int], *, timeout: float | None = None) -> list[float]:
        """Compute log P(ids[t] | ids[:t]) for t = 1 … len(ids) − 1, at temperature 1.

        Args:
            ids: token ids of a sequence.
            timeout: seconds, in place of the client's `timeout`.

        Returns:
            len(ids) − 1 log-probs.
        """
        choices = await self._choices(ids, 1, {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}, timeout)
        with _readable(choices):
            entries = choices[0]["prompt_logprobs"]
            return _finite([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)])

    async def try_out(self) -> None:
        """Sample one token to test the engine. A server whose engine hangs still answers other requests."""
        await self.complete([0], 1, {"max_tokens": 1}, timeout=min(CONTROL_SECONDS, self.timeout))

    async def _choices(
        self, prompt_ids: Sequence[int], count: int, options: dict[str, Any], timeout: float | None
    ) -> list[Any]:
        """Request completions and check that there are `count` choices."""
        if self._model is None:
            self._model = await self._request("GET", "/v1/models", lambda answer: answer["data"][0]["id"])
        request = {"model": self.adapter or self._model, "prompt": list(prompt_ids), "return_token_ids": True}
        choices = await self._request(
            "POST", "/v1/completions", lambda answer: list(answer["choices"]), timeout=timeout, json=request | options
        )
        if len(choices) != count:
            raise ServerError(f"answered {len(choices)} choices instead of {count}")
        return choices

    # ------------------------------------------------------------------------------------------ health and weights

    async def probe(self) -> None:
        """Raise unless the server reports that it is healthy."""
        self._headers = key_header(self.url)  # the server may have started, and created the key, since the last look
        await self._request("GET", "/health", timeout=PROBE_SECONDS)

    async def config(self) -> dict[str, Any]:
        """Return vLLM's configuration of the server, as JSON."""
        options = {"config_format": "json"}
        return await self._request("GET", "/server_info", lambda answer: answer["vllm_config"], params=options)

    async def weight_report(self) -> WeightReport:
        """Return the report of the server's workers on their weights."""
        parts = await self._rpc("dash_weight_report")
        with _readable(parts):
            comparable = all(part["comparable"] for part in parts)
            checksum = combine_workers([part["checksums"] for part in parts]) if comparable else None
            return WeightReport(checksum, parts[0]["dtype"], parts[0]["shape"])

    async def weight_tag(self) -> str:
        """Return the version tag that the server was given last, see `Snapshot`."""
        return await self._request(
            "GET", "/weight_info", lambda answer: answer["weight_version"], timeout=PROBE_SECONDS
        )

    async def load_weights(self, path: str, tag: str) -> WeightReport:
        """Load a checkpoint in place. Requests in flight wait and continue with the new weights.

        Args:
            path: checkpoint directory; the server sees it under this path.
            tag: version tag of the new weights.

        Returns:
            Report on the loaded weights.
        """
        await self.pause()
        try:
            await self._rpc("reload_weights", weights_path=path)
            await self.end_weight_update(tag)
            return await self.weight_report()
        finally:
            await self.resume()

    async def load_adapter(self, path: str, tag: str) -> int:
        """Load a LoRA adapter in place of the last one. Requests in flight wait and continue with the new adapter.

        Args:
            path: folder with the adapter in PEFT's format; the server sees it under this path.
            tag: version tag of the new adapter.

        Returns:
            Checksum of the adapter as the workers hold it.
        """
        await self.pause()
        try:
            workers = await self._rpc("dash_load_adapter", path=path)
            await self.end_weight_update(tag)
            with _readable(workers):
                (checksum,) = {int(worker, 16) for worker in workers}  # each worker holds the whole adapter
                return checksum
        finally:
            await self.resume()

    async def pause(self) -> None:
        """Pause sampling; requests in flight wait."""
        await self._request("POST", "/pause", params={"mode": "keep"}, timeout=CONTROL_SECONDS)

    async def resume(self) -> None:
        """Resume sampling after `pause`."""
        await self._request("POST", "/resume", timeout=CONTROL_SECONDS)

    async def end_weight_update(self, tag: str) -> None:
        """Reset the prefix cache and set the server's version tag. Call it after a weight update, before `resume`.

        No cached prefix of the old weights may be reused. The KV cache of requests in flight is dropped, too, and vLLM
        computes it again with the new weights.

        Args:
            tag: version tag of the new weights.
        """
        # Without the first option, paused requests hold KV cache, and the reset fails. The second one empties the cache
        # of `--kv-offloading-size`.
        options = {"reset_running_requests": "true", "reset_external": "true"}
        done = await self._request(
            "POST", "/reset_prefix_cache", lambda answer: answer["success"], params=options, timeout=CONTROL_SECONDS
        )
        if not done:
            raise ServerError("did not reset its prefix cache, which holds prefixes of the old weights")
        self.given = tag
        await self._request("POST", "/update_weight_version", json={"new_version": tag}, timeout=CONTROL_SECONDS)

    async def _rpc(self, method: str, **kwargs: str) -> Any:
        """Call a method of all workers; return the result of each."""
        call = {"method": method, "kwargs": kwargs}
        return await self._request("POST", "/collective_rpc", lambda answer: answer["results"], json=call)

    # -------------------------------------------------------------------------------------------------------- HTTP

    async def _request(
        self,
        method: str,
        path: str,
        read: Callable[[Any], Any] | None = None,
        *,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Send a request; return what `read` returns for the JSON of the answer, or None if there is no `read`."""
        seconds = self.timeout if timeout is None else timeout
        limit = aiohttp.ClientTimeout(None if seconds == math.inf else seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self.url + path, timeout=limit, headers=self._headers, allow_redirects=False, **kwargs
            ) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    raise self._refusal(method, path, response.status, text)
        except TimeoutError as error:
            raise ServerError(f"{method} {path} took longer than {seconds:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            gone = isinstance(error, CONNECTION_LOST)
            raise ServerError(f"{method} {path}: {type(error).__name__}: {error}", gone=gone) from error
        if read is not None:
            with _readable(text):
                return read(json.loads(text))

    def _refusal(self, method: str, path: str, status: int, text: str) -> Exception:
        """Build the error for an answer whose status is not 200."""
        said = f"{self.url} answered {status} to {method} {path}: {' '.join(text.split())[:300]}"
        if status in UNAUTHORISED:
            return ValueError(
                f"{said}. Set the environment variable {API_KEY} to the key with which the server was started. The key "
                f"that `python -m dash_trl.serve` creates is in {key_file()} of the user who started it."
            )
        if status == 404 and not path.startswith("/v1"):
            return ValueError(
                f"{said}. The server was started without its weight endpoints. Start it with `python -m "
                "dash_trl.serve`, or set VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if "has no attribute 'dash_" in text:  # vLLM answers 500
            return ValueError(f"{said}. Start the server with `python -m dash_trl.serve` of this version of dash_trl.")
        if "meta tensors" in text:  # vLLM's loader has removed the old weights, and has not loaded all new ones
            return ValueError(f"{said}. The server holds only part of its weights, because a load failed. Restart it.")
        if self.adapter is not None and self.adapter in text:  # the server has restarted and has no adapter yet
            return ServerError(said, gone=True)
        if "not JSON compliant" in text:  # vLLM answers 400 if it computed NaN, which it cannot write as JSON
            return ServerError(f"{said}. A log-prob is {NOT_FINITE}")
        if 300 <= status < 500 and status not in BUSY:  # no redirect is followed, because it would get the key
            return ValueError(said)
        return ServerError(said)


@contextmanager
def _readable(answer: Any) -> Iterator[None]:
    """Context that turns errors in reading an answer into `ServerError`, because the server has sent a bad answer."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"gave an answer that cannot be read ({type(error).__name__}: {error}): {str(answer)[:80]}"
        raise ServerError(said) from error


def _completion(choice: Any, max_tokens: float) -> Completion:
    """Read one choice of an answer and check its lengths and values."""
    ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] not in ("stop", "length", "repetition"):  # the last one by `repetition_detection`
        raise ServerError(f"ended a completion with finish_reason={choice['finish_reason']!r}")
    if len(ids) != len(log_probs):
        raise ServerError(f"answered {len(ids)} tokens with {len(log_probs)} log-probs")
    if len(ids) > max_tokens:
        raise ServerError(f"answered {len(ids)} tokens, more than max_tokens={max_tokens}")
    return Completion(ids, _finite(log_probs))


def _finite(log_probs: list[float]) -> list[float]:
    """Check that all log-probs are finite."""
    if not all(math.isfinite(one) for one in log_probs):
        raise ServerError(f"answered a log-prob that is {NOT_FINITE}")
    return [float(one) for one in log_probs]
