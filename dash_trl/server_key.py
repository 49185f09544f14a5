"""Addresses of vLLM servers, and their API key. vLLM's own check of the key leaves out the paths for weights.

The key is the environment variable VLLM_API_KEY or, for servers on this machine, a file in the user's cache folder,
which `dash_trl serve` creates.
"""

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dash_trl._cache import cache_folder

MIDDLEWARE = f"{__name__}.RequireKey"
API_KEY = "VLLM_API_KEY"  # vLLM's own environment variable
ADDRESS = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^][/?#@:\s]+)(:[1-9]\d{0,4})?")


def check_urls(urls: str | Sequence[str]) -> list[str]:
    """Check server URLs; return them in order, each once, without trailing slashes.

    Args:
        urls: a list, or a string of URLs separated by commas or spaces, as YAML and shells produce.

    Raises:
        ValueError: if there is no URL, if a URL is not the address of a server, or if a server is on another machine
            and VLLM_API_KEY is not set.
    """
    listed = [urls] if isinstance(urls, str) else urls
    split = (url.rstrip("/") for text in listed for url in text.replace(",", " ").split())
    cleaned = list(dict.fromkeys(split))  # a server that is named twice counts once
    if not cleaned:
        raise ValueError("vllm_server_urls is empty: name at least one server, e.g. http://127.0.0.1:8000.")
    for url in cleaned:
        if not ADDRESS.fullmatch(url):
            raise ValueError(
                f"vllm_server_urls has {without_user(url)!r}, which is not the address of a server. Write "
                "http://HOST:PORT, e.g. http://127.0.0.1:8000, without a path, a user or a password."
            )
        if not is_here(url) and not os.environ.get(API_KEY):
            raise ValueError(
                f"vllm_server_urls has {url!r}, which is not on this machine, and there is no key for it. Without a "
                "key anyone who reaches that port could read or replace the model. Set the environment variable "
                f"{API_KEY} to the same value for the trainer and for `dash_trl serve`, or open a tunnel and "
                "name its local end here."
            )
    return cleaned


def without_user(url: str) -> str:
    """Hide user and password of a URL, or of any other text, for messages and logs."""
    return re.sub(r"(?s)^([^:/?#]*://)?.*@", r"\1***@", url)


def is_here(url: str) -> bool:
    """Return whether a URL leads to this machine. 0.0.0.0 and `::` do: a client connects to its own machine by them."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def key_file() -> Path:
    """Return the path of the file with this user's key."""
    return cache_folder() / "vllm_key"


def key_header(url: str) -> dict[str, str]:
    """Return the header with the key; empty if there is none. Only servers on this machine get the key of the file."""
    key = os.environ.get(API_KEY)
    if not key and is_here(url):
        with suppress(OSError):  # no server has created the file
            key = key_file().read_text().strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def own_key() -> str:
    """Return the key for servers that this process starts; create the key file if it is missing."""
    if key := os.environ.get(API_KEY):
        return key
    path = key_file()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # If another process creates the file at the same time, the first key is kept. The mode is 0600.
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file, suppress(FileExistsError):
            file.write(secrets.token_urlsafe(32))
            file.flush()
            os.link(file.name, path)  # the file appears with its content complete
    return path.read_text().strip()


class RequireKey:
    """ASGI middleware (`vllm serve --middleware`) that rejects every request without the key in VLLM_API_KEY.

    Raises:
        ValueError: if VLLM_API_KEY is not set.
    """

    def __init__(self, app: Any):
        key = os.environ.get(API_KEY)
        if not key:
            raise ValueError(f"--middleware {MIDDLEWARE} needs a key: set the environment variable {API_KEY}.")
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_lifespan = scope["type"] == "lifespan"  # start and end of the server itself
        if is_lifespan or secrets.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
