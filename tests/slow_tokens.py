"""Within a vLLM server of the tests: each token takes as long as one of a larger model, while a file exists.

vllm serve … --logits-processors tests.slow_tokens:SlowTokens
"""

import os
import time
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

FILE = "DASH_TRL_SLOW_TOKENS"  # the environment variable that names it
SECONDS = 0.2  # without work: a server is not starved of its core, and hears of a pause at once


class SlowTokens(LogitsProcessor):
    def __init__(self, *args: Any) -> None:
        self.file = os.environ[FILE]

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        if os.path.exists(self.file):
            time.sleep(SECONDS)
        return logits
