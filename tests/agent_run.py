"""One launch of `test_backends.py`: every fault by every backend in one run; writes what became of each row.

torchrun --nproc_per_node=RANKS tests/agent_run.py OUTPUT MODEL BACKEND …
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TIMEOUT = 5.0  # seconds: one row on each rank hangs until then


def picked(completion_ids: list[int], one_in: int = 4) -> bool:
    """Of these rows the fault befalls; by what was sampled, which no bookkeeping can mix up."""
    return sum(completion_ids) % one_in == 1


def value(completion_ids: list[int]) -> float:
    return sum(completion_ids) + len(completion_ids) / 64


KINDS = ("raise", "NaN", "inf", "None", "wrong type")


class Fault:
    """A per-sample reward that is right but where its fault befalls it."""

    def __init__(self, kind: str, backend: str):
        self.kind = kind
        self.__name__ = f"{backend} {kind}"

    def pauses(self, completion_ids: list[int], row: int) -> Iterable[float]:
        """Seconds. The first row on each rank hangs; slow rows wait, the more the earlier they came."""
        if self.kind == "hang" and row == 0:
            return itertools.repeat(0.1)
        return [0.1 * picked(completion_ids) + 0.05 - 0.01 * min(row, 5)] if self.kind == "slow" else [0.0]

    def outcome(self, completion_ids: list[int]) -> Any:
        if self.kind in ("hang", "slow") or not picked(completion_ids):
            return value(completion_ids)
        if self.kind == "raise":
            raise ConnectionError("away")
        if self.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"NaN": math.nan, "inf": -math.inf, "None": None, "wrong type": (1.0, 2.0)}[self.kind]

    def compute_score(self, completion_ids: list[int], row: int) -> Any:
        for seconds in self.pauses(completion_ids, row):
            time.sleep(seconds)
        return self.outcome(completion_ids)


class AsyncFault(Fault):
    async def compute_score(self, completion_ids: list[int], row: int) -> Any:
        for seconds in self.pauses(completion_ids, row):
            await asyncio.sleep(seconds)
        return self.outcome(completion_ids)


def faults(backend: str) -> list[Fault]:
    fault = AsyncFault if backend == "asyncio" else Fault
    dies = ["die"] if backend in ("process", "ray") else []
    return [fault(kind, backend) for kind in (*KINDS, *dies, "hang", "slow")]


def main(output: str, model: str, *backends: str) -> None:
    from dash_trl import DASHTrainer, RewardAgent
    from dash_trl.rewards import AgentReward
    from tests.tiny import prompts, run

    agents = [RewardAgent(faults(one), backend=one, timeout=TIMEOUT) for one in backends]
    seen: dict[str, Any] = {}
    call = AgentReward.__call__

    def watched(self: AgentReward, **batch: Any) -> Any:
        returned = call(self, **batch)
        what = [ids for ids in batch["completion_ids"]], returned, self.failed, self.raised, self.failure
        assert seen.setdefault(self.name, what) is what, "each function is called once"
        return returned

    AgentReward.__call__ = watched  # type: ignore[method-assign]

    class Numbered(DASHTrainer):
        """Rows know where they are in the batch of their rank."""

        def _calculate_rewards(self, inputs: Any, *args: Any) -> Any:
            inputs = [{**example, "row": row} for row, example in enumerate(inputs)]
            return super()._calculate_rewards(inputs, *args)

    data = prompts(64).add_column("row", [0] * 64)
    trainer = run(Numbered, model, Path(output), reward=agents, dataset=data, per_device_train_batch_size=8)
    Path(output, f"seen_{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
    from tests.tiny import leave

    leave()
