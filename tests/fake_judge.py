"""A fake chat server: it gives the answers of a test, and records the requests."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from toy_judge import ToyJudge


def chat(content, *, refusal=None, finish_reason: str = "stop", choices: int = 1) -> dict[str, Any]:
    """Return the body of a chat completion."""
    message = {"role": "assistant", "content": content, "refusal": refusal}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}] * choices,
    }


def says(score, explanation="because") -> dict[str, Any]:
    return chat(json.dumps({"explanation": explanation, "score": score}))


class FakeJudge(ToyJudge):
    """The server, on a free port of 127.0.0.1.

    Args:
        answer: takes the body of a request; returns a body (with status 200), (status, body), "hangs" or "hangs up".
    """

    def __init__(self, *answer: Callable[[dict], Any]):
        self.reset(*answer)
        super().__init__()

    def reset(self, answer: Callable[[dict], Any] = lambda request: says(7)) -> None:
        """As a new server, at the same address."""
        self.answer = answer
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.sent: set[str] = set()  # names of all headers
        self.given_up = 0  # number of requests whose client has disconnected
        self.headers: dict[str, str] = {}  # headers of all answers
        self.hold = False  # True = no request is answered

    async def _serve(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.sent |= {name.lower() for name in request.headers}
        answer = self.answer(body)
        try:
            while self.hold or answer == "hangs":
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if answer == "hangs up":
            request.transport.close()
            raise asyncio.CancelledError
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(content, str):
            return web.Response(status=status, text=content, content_type="text/html", headers=self.headers)
        return web.json_response(content, status=status, headers=self.headers)
