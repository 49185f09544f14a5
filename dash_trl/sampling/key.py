"""The API key of vLLM servers. It guards all of their paths; vLLM's own check leaves those for weights out.

VLLM_API_KEY of the environment; without it, for servers of this machine, a file of the user, made by `dash_trl.serve`
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
    return cache_folder() / "vllm_key"


def key_header(url: str) -> dict[str, str]:
    """For a request to this server; empty without a key. The file's key is for servers of this machine only."""
    key = os.environ.get(API_KEY)
    if not key and is_here(url):
        with suppress(OSError):  # no server has made one
            key = key_file().read_text().strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def own_key() -> str:
    """For servers that this process starts; the file is made if it is missing.

    Raises:
        ValueError: the file cannot be made, or others may know its key.
    """
    key = os.environ.get(API_KEY)
    if key:
        return key
    path = key_file()
    try:
        if not path.exists():
            _make(path)
        with path.open() as file:
            status, key = os.fstat(file.fileno()), file.read().strip()
    except OSError as error:
        raise ValueError(
            f"The servers' key cannot be kept in {path} ({error}). Set the environment variable {API_KEY} for the "
            "servers and the trainer."
        ) from error
    if not key or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{path} holds no key, or others can read it or own it (mode {status.st_mode & 0o777:o}, user "
            f"{status.st_uid}). Delete it, and a new key is made; or set the environment variable {API_KEY} for the "
            "servers and the trainer."
        )
    return key


def _make(path: Path) -> None:
    """A new key, of mode 0600; another process may do the same meanwhile, and the first one's key counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file, suppress(FileExistsError):
        file.write(secrets.token_urlsafe(32))
        file.flush()
        os.link(file.name, path)  # complete when it appears


class RequireKey:
    """ASGI middleware of a server (`vllm serve --middleware`): it answers to nobody without the environment's key."""

    def __init__(self, app: Any):
        key = os.environ.get(API_KEY)
        if not key:
            raise ValueError(f"--middleware {MIDDLEWARE} needs a key: set the environment variable {API_KEY}.")
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":  # the server's own start and end
            await self.app(scope, receive, send)
        elif secrets.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
