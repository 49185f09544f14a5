"""Within a vLLM server of the tests: tokens that take their time or wait, while a file exists, and a record of calls.

vllm serve … --logits-processors tests.slow_tokens:SlowTokens --middleware tests.slow_tokens.CallRecorder
"""

import os
import re
import time
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

FOLDER = "DASH_TRL_SERVER_FOLDER"  # the environment variable that names the folder of these files
SECONDS = 0.2  # without work: a server is not starved of its core, and hears of a pause at once


class SlowTokens(LogitsProcessor):
    """While the file `slow` exists, a token takes as long as one of a larger model; while `hold` exists, none comes."""

    def __init__(self, *args: Any) -> None:
        self.slow, self.hold = (os.path.join(os.environ[FOLDER], name) for name in ("slow", "hold"))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        if os.path.exists(self.slow):
            time.sleep(SECONDS)
        while os.path.exists(self.hold):
            time.sleep(SECONDS)
        return logits


class CallRecorder:
    """Writes the methods of the workers that are called into the file `calls-<port>`, a line each."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def recorded() -> Any:
            message = await receive()
            method = re.match(rb'{"method": "(\w+)"', message.get("body", b""))
            if method:
                with open(os.path.join(os.environ[FOLDER], f"calls-{scope['server'][1]}"), "ab") as file:
                    file.write(method[1] + b"\n")
            return message

        await self.app(scope, recorded if scope.get("path") == "/collective_rpc" else receive, send)
