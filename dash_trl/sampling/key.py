"""API key of vLLM servers. It protects all paths of a server; vLLM's own key check leaves out the paths for weights.

The key is the environment variable VLLM_API_KEY or, for servers on this machine, a file in the user's cache folder,
which `dash_trl serve` creates.
"""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dash_trl._cache import cache_folder
from dash_trl.sampling.urls import API_KEY, is_here

MIDDLEWARE = f"{__name__}.RequireKey"


def key_file() -> Path:
    """Return the path of the file with this user's key."""
    return cache_folder() / "vllm_key"


def key_header(url: str) -> dict[str, str]:
    """Return the header that authenticates requests to a server; empty if there is no key.

    Args:
        url: address of the server. Only servers on this machine get the key from the file.
    """
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
    if path.exists():
        return path.read_text().strip()
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
        if scope["type"] == "lifespan":  # start and end of the server itself
            await self.app(scope, receive, send)
        elif secrets.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
