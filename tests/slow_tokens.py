"""Within a vLLM server of the tests: tokens that take their time or wait, while a file exists.

vllm serve … --logits-processors tests.slow_tokens:SlowTokens
"""

import os
import time

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

FOLDER = "DASH_TRL_SERVER_FOLDER"  # the environment variable that names the folder of these files
SECONDS = 0.2  # without work: a server is not starved of its core, and hears of a pause at once


class SlowTokens(LogitsProcessor):
    """While the file `slow` exists, a token takes as long as one of a larger model; while `hold` exists, none comes."""

    def __init__(self, *args) -> None:
        self.slow, self.hold = (os.path.join(os.environ[FOLDER], name) for name in ("slow", "hold"))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        if os.path.exists(self.slow):
            time.sleep(SECONDS)
        while os.path.exists(self.hold):
            time.sleep(SECONDS)
        return logits
