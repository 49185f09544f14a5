"""One launch of `test_ranks.py`: what one rank does alone fails on rank 1; prints a JSON line per rank.

accelerate launch --config_file accelerate_configs/cpu.yaml tests/failing_run.py OUTPUT MODEL KIND …
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.process_rewards import ProcessRewardCallback
from tests.tiny import ScriptedRollouts, leave, run

RANK = int(os.environ["RANK"])


def fail(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("of rank 1")


class Failing(DASHCallback):
    """Fails on rank 1, alone or where the other rank goes on into a collective of the callback's own."""

    def __init__(self, event: str, *, communicates: bool = False):
        setattr(self, event, self._communicate if communicates else self._alone)

    def _alone(self, *args: Any, **kwargs: Any) -> None:
        if RANK == 1:
            fail()

    def _communicate(self, *args: Any, **kwargs: Any) -> None:
        self._alone()
        kwargs["trainer"].accelerator.gather(torch.ones(1))


class Sampler(ScriptedRollouts):
    def __call__(self, prompts: list[str], trainer: Any) -> Any:
        return fail() if RANK == 1 else super().__call__(prompts, trainer)


class Sampling(DASHTrainer):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "rollout_func": Sampler()})


class Generating(DASHTrainer):
    """Samples itself; generation fails on rank 1."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "rollout_func": None})
        self.model.generate = fail if RANK == 1 else self.model.generate


KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"callbacks": [Failing("on_rollouts_sampled")]},
    "rewards": {"callbacks": [Failing("on_rewards")]},
    "advantages": {"callbacks": [Failing("on_advantages")]},
    "too few rewards": {"reward": lambda prompts, **kwargs: [1.0] * (len(prompts) - RANK)},
    "rollout_func": {"class": Sampling},
    "generation": {"class": Generating},
    "markers": {
        "callbacks": [ProcessRewardCallback(markers=lambda text: [0] if RANK == 0 or "2 + 2" in text else None)]
    },
    "communicates": {"callbacks": [Failing("on_advantages", communicates=True)]},
}


def main(output: str, model: str, *kinds: str) -> None:
    for kind in kinds:
        settings = dict(KINDS[kind])
        try:
            run(settings.pop("class", DASHTrainer), model, Path(output), **settings)
            failure = "nothing failed"
        except Exception as error:
            chain = [error, *([error.__cause__] if error.__cause__ else [])]
            failure = " <- ".join(f"{type(one).__name__}: {one}" for one in chain)
            if kind == "communicates":
                raise
        print("\nFAILED " + json.dumps([RANK, kind, failure]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
