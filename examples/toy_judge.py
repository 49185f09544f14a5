"""The judge of the toy run: an OpenAI-compatible server with a rule in place of a language model.

    POST /v1/chat/completions ──► the problem and the marked completion in the message ──► marks for each right step

The run calls it like a real judge: over HTTP, with the same form of the message and the same JSON schema.
"""

import json
import re
from collections.abc import Sequence

from aiohttp import web

from dash_trl.toy.problems import ANSWER
from dash_trl.workers import EventLoop

JUDGE_NAME = "arithmetic-judge"
_MARKED = re.compile(r"<completion (\w+)>\n(.*)\n</completion \1>", re.DOTALL)
_PROBLEM = re.compile(r"^\d+(?:[+-]\d+)+$", re.MULTILINE)
_STEP = re.compile(r"(?<![\d+-])(\d+)([+-]\d+)=(\d+)$", re.MULTILINE)


def mark(problem: str, solution: str) -> tuple[float, str]:
    """Return a mark from 0 to 1, and its reason. Half of the mark is the share of right steps, half is for the answer.

    A step is right only if it begins with the right total. If a step is repeated ("Wait, …"), its last version counts.
    """
    first, *operations = re.findall(r"[+-]?\d+", problem)
    written = {(total, operation): result for total, operation, result in _STEP.findall(solution)}
    total = first
    right = 0
    for operation in operations:
        result = str(int(total) + int(operation))
        right += written.get((total, operation)) == result
        total = result
    ends_right = ANSWER.findall(solution)[-1:] == [total]
    why = f"{right} of {len(operations)} steps are right, and the answer is {'right' if ends_right else 'wrong'}."
    return (right / len(operations) + ends_right) / 2, why


class ToyJudge:
    """The judge's server. It runs at `url`, on a free port of 127.0.0.1, until `close` is called."""

    def __init__(self) -> None:
        self._loop = EventLoop()
        self.url = f"http://127.0.0.1:{self._loop.run(self._start())}/v1"

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.Response:
        asked = await request.json()
        message = asked["messages"][-1]["content"]
        scores: Sequence[int] = asked["response_format"]["json_schema"]["schema"]["properties"]["score"]["enum"]
        marked = _MARKED.search(message)
        problem = marked and _PROBLEM.search(message, 0, marked.start())
        assert marked and problem, "the message has no toy problem before a marked completion"
        share, why = mark(problem[0], marked[2])
        text = json.dumps({"explanation": why, "score": scores[round(share * (len(scores) - 1))]})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        body = {"id": JUDGE_NAME, "object": "chat.completion", "created": 0, "model": JUDGE_NAME, "choices": [choice]}
        return web.json_response(body)

    def close(self) -> None:
        self._loop.close(self._runner.cleanup)
