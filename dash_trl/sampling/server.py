"""One vLLM server as seen over HTTP: sample, score, load weights, report them. Every answer is checked.

What goes wrong becomes one of two errors. `ServerError`: this server failed, another may do better, and asking again is
safe. `ValueError`: the request itself is refused, and would be by any server.
"""

import asyncio
import errno
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from dash_trl.sampling.checksum import combine_workers
from dash_trl.sampling.key import key_file, key_header
from dash_trl.sampling.urls import API_KEY

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 10.0
MOST_BYTES = 1 << 30  # of an answer; a million sampled tokens with their log-probs are about 200 MiB
CONTROL_SECONDS = 60.0  # for what takes a healthy server no time but waits for the end of an engine step
BUSY = (408, 425, 429)  # of the 4xx, those that speak of the server and not of the request
UNAUTHORISED = (401, 403)
CONNECTION_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
NOT_FINITE = "not a finite number: do the weights hold NaN?"


class ServerError(RuntimeError):
    """A server failed a request. `gone`: the connection was refused or dropped, so that its process may have ended."""

    def __init__(self, message: str, *, gone: bool = False):
        super().__init__(message)
        self.gone = gone


@dataclass(frozen=True)
class Completion:
    """One sampled continuation: token ids, and the log-prob with which each was drawn."""

    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class WeightReport:
    """What a server's workers say of the weights that they hold.

    Attributes:
        checksum: see `checksum.py`; None if it cannot be compared with a trainer's (quantised weights, KV heads copied
            to several workers).
        dtype: e.g. "bfloat16".
        shape: of the model, see `vllm_plugin.model_shape`.
    """

    checksum: int | None
    dtype: str
    shape: dict[str, Any] = field(default_factory=dict)


class VLLMServer:
    """The endpoints of `vllm serve` with `VLLM_SERVER_DEV_MODE=1`.

    Args:
        session: of the event loop that awaits these methods.
        timeout: seconds for one answer.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout: float):
        self.url = url
        self.timeout = timeout
        self._session = session
        self.adapter: str | None = None  # that requests name, in place of the model
        self._headers = key_header(url)
        self._model: str | None = None

    # --------------------------------------------------------------------------------------- sampling and scoring

    async def complete(
        self, prompt_ids: Sequence[int], n: int, sampling: dict[str, Any], *, timeout: float | None = None
    ) -> list[Completion]:
        """`n` continuations of one prompt.

        Args:
            timeout: seconds, in place of the server's own.
        """
        choices = await self._choices(prompt_ids, n, {**sampling, "n": n, "logprobs": 0}, timeout)
        with _readable(choices):
            choices = sorted(choices, key=lambda choice: choice["index"])
            return [_completion(choice, sampling.get("max_tokens", math.inf)) for choice in choices]

    async def log_probs(self, ids: Sequence[int], *, timeout: float | None = None) -> list[float]:
        """log P(ids[t] | ids[:t]) for t = 1 … len(ids) − 1, at temperature 1."""
        choices = await self._choices(ids, 1, {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}, timeout)
        with _readable(choices):
            entries = choices[0]["prompt_logprobs"]
            if len(entries) != len(ids):
                raise ServerError(f"answered {len(entries)} prompt log-probs for {len(ids)} tokens")
            return _finite([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)])

    async def try_out(self) -> None:
        """Samples one token: a wedged engine answers everything but that."""
        await self.complete([0], 1, {"max_tokens": 1}, timeout=min(CONTROL_SECONDS, self.timeout))

    async def _choices(
        self, prompt_ids: Sequence[int], count: int, options: dict[str, Any], timeout: float | None
    ) -> list[Any]:
        if self._model is None:
            models = await self._request("GET", "/v1/models")
            with _readable(models):
                self._model = models["data"][0]["id"]
        request = {"model": self.adapter or self._model, "prompt": list(prompt_ids), "return_token_ids": True}
        body = await self._request("POST", "/v1/completions", timeout=timeout, json=request | options)
        with _readable(body):
            choices = body["choices"]
            if len(choices) != count:
                raise ServerError(f"answered {len(choices)} choices instead of {count}")
        return choices

    # ------------------------------------------------------------------------------------------ health and weights

    async def probe(self) -> None:
        """Raises unless the server says that it is well."""
        self._headers = key_header(self.url)  # it may have been started, and have made its key, meanwhile
        await self._request("GET", "/health", timeout=PROBE_SECONDS, parse=False)

    async def config(self) -> dict[str, Any]:
        """vLLM's own, as JSON."""
        info = await self._request("GET", "/server_info", params={"config_format": "json"})
        with _readable(info):
            return info["vllm_config"]

    async def weight_report(self) -> WeightReport:
        answer = await self._rpc("dash_weight_report")
        with _readable(answer):
            parts = answer["results"]
            comparable = all(part["comparable"] for part in parts)
            checksum = combine_workers([part["checksums"] for part in parts]) if comparable else None
            return WeightReport(checksum, parts[0]["dtype"], parts[0]["shape"])

    async def weight_tag(self) -> str:
        """The version that it was last told."""
        info = await self._request("GET", "/weight_info", timeout=PROBE_SECONDS)
        with _readable(info):
            return info["weight_version"]

    async def load_weights(self, path: str, tag: str) -> WeightReport:
        """Load a checkpoint directory in place; requests in flight wait and go on with the new weights."""
        await self.pause()
        try:
            await self._rpc("reload_weights", weights_path=path)
            await self.end_weight_update(tag)
            return await self.weight_report()
        finally:
            await self.resume()

    async def load_differences(
        self, parts: Iterator[dict[str, str]], dtype: str, tag: str, checksum: int
    ) -> WeightReport:
        """Change some elements of the weights; requests in flight wait and go on with the new weights.

        If the weights are not those of the checksum then, or if it fails, the server stays paused until it is given
        all weights: nobody samples from what is neither of two versions.

        Args:
            parts: see `changes.pack`.
        """
        await self.pause()
        while (part := await asyncio.to_thread(next, parts, None)) is not None:  # making one takes its time
            await self._rpc("dash_load_differences", dtype=dtype, **part)
        report = await self.weight_report()
        if report.checksum == checksum:
            await self.end_weight_update(tag)
            await self.resume()
        return report

    async def sees(self, folder: str) -> bool:
        """Whether all workers find this folder under its path."""
        answer = await self._rpc("dash_sees", folder=folder)
        with _readable(answer):
            return all(worker == "True" for worker in answer["results"])

    async def load_adapter(self, path: str, tag: str) -> int:
        """Load a LoRA adapter in the place of the last one; requests in flight wait and go on with the new one.

        Returns:
            The checksum of what the workers hold.
        """
        await self.pause()
        try:
            answer = await self._rpc("dash_load_adapter", path=path)
            await self.end_weight_update(tag)
            with _readable(answer):
                (checksum,) = {int(worker, 16) for worker in answer["results"]}  # each worker holds the whole adapter
                return checksum
        finally:
            await self.resume()

    async def pause(self) -> None:
        """Requests in flight wait."""
        await self._request("POST", "/pause", params={"mode": "keep"}, timeout=CONTROL_SECONDS, parse=False)

    async def resume(self) -> None:
        await self._request("POST", "/resume", timeout=CONTROL_SECONDS, parse=False)

    async def end_weight_update(self, tag: str) -> None:
        """After new weights, while it is paused: no prefix of the old ones may be reused, and the version is told.

        vLLM takes the KV of requests in flight away when it pauses, and computes it again with the new weights.
        """
        options = {"reset_running_requests": "true"}  # where a pause leaves them their KV
        done = await self._request("POST", "/reset_prefix_cache", params=options, timeout=CONTROL_SECONDS)
        if not done.get("success"):
            raise ServerError("did not forget the prefixes of the old weights")
        await self._request(
            "POST", "/update_weight_version", json={"new_version": tag}, timeout=CONTROL_SECONDS, parse=False
        )

    async def _rpc(self, method: str, **kwargs: str) -> Any:
        return await self._request("POST", "/collective_rpc", json={"method": method, "kwargs": kwargs})

    # -------------------------------------------------------------------------------------------------------- HTTP

    async def _request(
        self, method: str, path: str, *, timeout: float | None = None, parse: bool = True, **kwargs: Any
    ) -> Any:
        seconds = self.timeout if timeout is None else timeout
        limit = aiohttp.ClientTimeout(None if seconds == math.inf else seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self.url + path, timeout=limit, headers=self._headers, allow_redirects=False, **kwargs
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        raise ServerError(f"{method} {path}: answered more than {MOST_BYTES} bytes")
                text = body.decode(errors="replace")
                if response.status != 200:
                    raise self._refusal(method, path, response.status, text)
        except TimeoutError as error:
            raise ServerError(f"{method} {path} took longer than {seconds:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            here = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)  # too many open files
            gone = not here and isinstance(error, CONNECTION_LOST)
            raise ServerError(f"{method} {path}: {type(error).__name__}: {error}", gone=gone) from error
        if parse:
            with _readable(text):
                return json.loads(text)

    def _refusal(self, method: str, path: str, status: int, text: str) -> Exception:
        said = f"{self.url} answered {status} to {method} {path}: {' '.join(text.split())[:300]}"
        if status in UNAUTHORISED:
            return ValueError(
                f"{said}. Set the key with which it was started in the environment variable {API_KEY}. The key that "
                f"`python -m dash_trl.serve` makes is in {key_file()} of the user who started it."
            )
        if 300 <= status < 400:
            return ValueError(f"{said}. Redirects are not followed: name the server itself.")
        if status == 404 and not path.startswith("/v1"):
            return ValueError(
                f"{said}. The server was started without its weight endpoints: use `python -m dash_trl.serve`, or set "
                "VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if "has no attribute 'dash_" in text:  # a 500, as vLLM answers
            return ValueError(f"{said}. Start it with `python -m dash_trl.serve` of this version.")
        if self.adapter is not None and self.adapter in text:  # it has restarted, and waits for the adapter
            return ServerError(said, gone=True)
        if "not JSON compliant" in text:  # 400, as vLLM answers when it cannot write the NaN that it computed
            return ServerError(f"{said}. A log-prob is {NOT_FINITE}")
        if 400 <= status < 500 and status not in BUSY:
            return ValueError(said)
        return ServerError(said)


@contextmanager
def _readable(answer: Any) -> Iterator[None]:
    """An answer that lacks what is read of it within is the server's failure."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"answered what cannot be read ({type(error).__name__}: {error}): {str(answer)[:80]}"
        raise ServerError(said) from error


def _completion(choice: Any, max_tokens: float) -> Completion:
    ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ServerError(f"ended a completion with finish_reason={choice['finish_reason']!r}")
    if len(ids) != len(log_probs):
        raise ServerError(f"answered {len(ids)} tokens with {len(log_probs)} log-probs")
    if len(ids) > max_tokens:
        raise ServerError(f"answered {len(ids)} tokens where max_tokens={max_tokens}")
    return Completion(ids, _finite(log_probs))


def _finite(log_probs: list[float]) -> list[float]:
    if not all(math.isfinite(one) for one in log_probs):
        raise ServerError(f"answered a log-prob that is {NOT_FINITE}")
    return [float(one) for one in log_probs]
