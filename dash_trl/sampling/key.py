"""`RequireKey`: the API key of a vLLM server guards all of its paths; vLLM's own check leaves some out."""

import os
import secrets
from typing import Any

API_KEY = "VLLM_API_KEY"  # vLLM's own variable
MIDDLEWARE = f"{__name__}.RequireKey"


def key_header() -> dict[str, str]:
    """With the key of the environment, if there is one."""
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


class RequireKey:
    """ASGI middleware of a server (`vllm serve --middleware`): it answers to nobody without the environment's key."""

    def __init__(self, app: Any):
        self.app = app
        self.expected = key_header()["Authorization"].encode()

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
