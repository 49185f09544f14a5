"""One launch of `test_agent.py`: every fault by every backend in one run; writes what became of each row.

torchrun --nproc_per_node=RANKS tests/agent_run.py OUTPUT MODEL BACKEND …
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TIMEOUT = 5.0  # seconds: one row on each rank hangs until then


def picked(completion_ids: list[int], one_in: int = 4) -> bool:
    """Of these rows the fault befalls; by what was sampled, which no bookkeeping can mix up."""
    return sum(completion_ids) % one_in == 1


def value(completion_ids: list[int]) -> float:
    return sum(completion_ids) + len(completion_ids) / 64


class Fault:
    """A per-sample reward that is right but where its fault befalls it."""

    def __init__(self, kind: str, backend: str):
        self.kind = kind
        self.__name__ = f"{backend} {kind}"

    def compute_score(self, completion_ids: list[int]) -> Any:
        return self._fault() if picked(completion_ids) else value(completion_ids)

    def _fault(self) -> Any:
        if self.kind == "raise":
            raise ConnectionError("away")
        if self.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"NaN": math.nan, "inf": -math.inf, "None": None, "wrong type": (1.0, 2.0)}[self.kind]


class Hang(Fault):
    """The first row on each rank."""

    def compute_score(self, completion_ids: list[int], first: bool) -> Any:
        while first:
            time.sleep(0.1)
        return value(completion_ids)


class Slow(Fault):
    """Some rows wait, the more the earlier they came, so that they end in another order."""

    def compute_score(self, completion_ids: list[int], row: int) -> Any:
        time.sleep(0.1 * picked(completion_ids) + (0.05 - 0.01 * min(row, 5)))
        return value(completion_ids)


class AsyncFault(Fault):
    async def compute_score(self, completion_ids: list[int]) -> Any:
        await asyncio.sleep(0)
        return super().compute_score(completion_ids)


class AsyncHang(Fault):
    async def compute_score(self, completion_ids: list[int], first: bool) -> Any:
        while first:
            await asyncio.sleep(0.1)
        return value(completion_ids)


class AsyncSlow(Fault):
    async def compute_score(self, completion_ids: list[int], row: int) -> Any:
        await asyncio.sleep(0.1 * picked(completion_ids) + (0.05 - 0.01 * min(row, 5)))
        return value(completion_ids)


KINDS = ("raise", "NaN", "inf", "None", "wrong type")


def faults(backend: str) -> list[Fault]:
    fault, hang, slow = (AsyncFault, AsyncHang, AsyncSlow) if backend == "asyncio" else (Fault, Hang, Slow)
    dies = ["die"] if backend in ("process", "ray") else []
    return [*(fault(kind, backend) for kind in (*KINDS, *dies)), hang("hang", backend), slow("slow", backend)]


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
            inputs = [{**example, "row": row, "first": row == 0} for row, example in enumerate(inputs)]
            return super()._calculate_rewards(inputs, *args)

    data = prompts(64).add_column("row", [0] * 64).add_column("first", [False] * 64)
    trainer = run(Numbered, model, Path(output), reward=agents, dataset=data, per_device_train_batch_size=8)
    Path(output, f"seen_{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
    from tests.tiny import leave

    leave()
