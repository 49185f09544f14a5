"""Random runs: settings are drawn, and a run is compared with one that has to end alike.

    trl         the update is TRL's, whatever the filter drops
    resumed     a run that goes on from a checkpoint ends as one that was never interrupted
    evaluated   evaluations and checkpoints in between change nothing
    pipeline    rewards that are awaited group by group change nothing
    ahead       a run that samples one window ahead trains on the same prompts, also when it is resumed

The suite runs a fixed number of cases with a fixed seed. Others run until a time is over, on any number of ranks:

    python tests/fuzz.py --minutes 30
    torchrun --nproc_per_node 2 tests/fuzz.py --minutes 30 --only trl resumed

Hypothesis shrinks a case that fails to a few settings, and prints them.
"""

import argparse
import contextlib
import io
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, RewardAgent
from tests.tiny import (
    EOS,
    ScriptedReward,
    ScriptedRollouts,
    leave,
    log_probs,
    parameters,
    prompts,
    relative_difference,
    run,
    save_tiny_model,
)

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CASES = 4  # of each kind, in the suite
SAME_UPDATE = 1e-4  # relative to its largest entry: passes over other rows round differently, in each of some steps
MEASURABLE = 1e-3, 10.0  # sizes of an update; beyond, the run has diverged, and rounding grows with it
OFF_POLICY = ("aipo", "decoupled_ppo")
Settings = dict[str, Any]


class RolloutsByPrompt:
    """Completions that depend on prompt, row and micro-step only; with log-probs near the model's, if asked for."""

    def __init__(self, with_log_probs: bool):
        self.with_log_probs = with_log_probs

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        completions = []
        for row, prompt in enumerate(prompts):
            drawn = random.Random(f"{prompt} {row} {trainer._step} {trainer.model.training}")
            ids = [drawn.randrange(4, 260) for _ in range(drawn.randint(0, 20))]
            completions.append([*ids, EOS if drawn.random() < 0.7 else 77])
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        logps = None
        if self.with_log_probs:
            logps = [
                [
                    value + random.Random(f"{prompt}{ids}").gauss(0, 0.2)
                    for value in log_probs(trainer.model, prompt, ids)
                ]
                for prompt, ids in zip(prompt_ids, completions, strict=True)
            ]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}


def reward(completion_ids: list[int], completion: str, prompt: str) -> float | None:
    """0 or 1; now and then it fails or does not apply. A prompt in ten is solved by all."""
    total = sum(completion_ids)
    if total % 11 == 0:
        raise ValueError("a failure")
    if total % 7 == 0:
        return None
    return 1.0 if prompt.startswith("1") else float(total % 2)


def slow_reward(completion_ids: list[int], completion: str, prompt: str) -> float | None:
    """As `reward`, after a time that puts groups out of order."""
    time.sleep(random.Random(f"{prompt}{completion_ids}").random() / 60)
    return reward(completion_ids, completion, prompt)


# ------------------------------------------------------------------------------------------------------ settings


@st.composite
def settings(draw: Any, piped: bool = False, **own: Any) -> Settings:
    """Of a run whose batch shapes fit.

    Args:
        piped: optimizer steps take whole windows, or windows whole optimizer steps, of whole groups.
        own: strategies of other settings.
    """
    shape = {
        "num_generations": draw(st.sampled_from([2, 4])),
        "per_device_train_batch_size": draw(st.sampled_from([2, 4])),
        "steps_per_generation": draw(st.sampled_from([1, 2, 3, 4, 6])),
        "gradient_accumulation_steps": draw(st.sampled_from([1, 2, 3, 4, 6])),
        "num_iterations": 1 if piped else draw(st.sampled_from([1, 1, 2, 3])),
    }
    group, rows, per_window, per_step, _ = shape.values()
    hypothesis.assume(rows * per_window % group == 0)
    if piped:
        hypothesis.assume(per_step % per_window == 0 or per_window % per_step == 0)
        hypothesis.assume(rows * min(per_step, per_window) % group == 0)
    window = RANKS * rows * per_window // group
    return {
        **shape,
        "prompts": draw(st.integers(window, 4 * window + 1)),
        "max_steps": draw(st.integers(2, 6)),
        "shuffle_dataset": draw(st.booleans()),
        "mask_truncated_completions": draw(st.booleans()),
        **{name: draw(strategy) for name, strategy in own.items()},
    }


def with_data(case: Settings, stream: bool = False) -> Settings:
    """The arguments of `run`."""
    case = dict(case)
    data = prompts(case.pop("prompts"))
    window = case["steps_per_generation"] * case["num_iterations"]
    whole = len(data) * case["num_generations"] // (RANKS * case["per_device_train_batch_size"]) // window * window
    hypothesis.assume(not stream or whole >= case["gradient_accumulation_steps"])  # else it ends before the first step
    return {**case, "dataset": data.to_iterable_dataset() if stream else data}


def trained(kind: Any, model: str, folder: Path, **arguments: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        return run(kind, model, folder, **arguments)


def figures(trainer: Any) -> list[dict[str, Any]]:
    """What was logged of training, but for times and what depends on the packing."""
    other = ("time", "per_second", "eval", "packing")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [
        {
            name: math.nan if value is None else value
            for name, value in log.items()
            if not any(one in name for one in other)
        }
        for log in logs
    ]


def assert_same_update(model: str, one: Any, other: Any, tolerance: float) -> None:
    start = parameters(AutoModelForCausalLM.from_pretrained(model))
    difference, update = relative_difference(start, parameters(one.model), parameters(other.model))
    assert difference <= tolerance or update <= MEASURABLE[0] or update >= MEASURABLE[1], (difference, update)


# --------------------------------------------------------------------------------------------------------- kinds

TRL = settings(
    loss_type=st.sampled_from(["dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]),
    scale_rewards=st.sampled_from(["group", "batch", "none"]),
    delta=st.sampled_from([None, 1.3]),
    pad_to_multiple_of=st.sampled_from([None, 8]),
    beta=st.sampled_from([0.0, 0.0, 0.2]),
    stream=st.booleans(),
    gradient_filter_threshold=st.sampled_from([0.0, None]),
    max_tokens_per_microbatch=st.sampled_from([None, 40, 400]),
)


def trl(case: Settings, model: str, folder: Path) -> None:
    arguments = with_data(case, case.pop("stream"))
    own = {name: arguments.pop(name) for name in ("gradient_filter_threshold", "max_tokens_per_microbatch")}
    if arguments["beta"]:  # a dropped row has lost its KL term
        own["gradient_filter_threshold"] = None
    if arguments["loss_type"] == "luspo":
        arguments["importance_sampling_level"] = "sequence"
    if arguments["loss_type"] == "cispo":
        arguments["epsilon_high"] = 2.0
    arguments |= {"reward": ScriptedReward(constant=0.3), "learning_rate": 0.02}
    one = trained(GRPOTrainer, model, folder, rollouts=ScriptedRollouts(3), **arguments)
    other = trained(DASHTrainer, model, folder, rollouts=ScriptedRollouts(3), **arguments, **own)
    assert_same_update(model, one, other, SAME_UPDATE)


RESUMED = settings(
    loss_type=st.sampled_from(["dapo", "grpo", "bnpo", "sapo", "cispo"]),
    beta=st.sampled_from([0.0, 0.1]),
    stream=st.booleans(),
    filter_denominator=st.sampled_from(["all", "kept"]),
    max_tokens_per_microbatch=st.sampled_from([None, 60]),
    async_level=st.sampled_from([0, 1, 2]),
    at=st.integers(1, 5),
)


def resumed(case: Settings, model: str, folder: Path) -> None:
    at, stream = case.pop("at"), case.pop("stream")
    hypothesis.assume(at < case["max_steps"])
    arguments = {**with_data(case, stream), "optimizer": "adamw_torch", "reward": ScriptedReward(constant=0.4)}
    rollouts = RolloutsByPrompt(False)
    saving = {"save_strategy": "steps", "save_steps": at}
    whole = trained(DASHTrainer, model, folder / "whole", rollouts=rollouts, **arguments, **saving)
    checkpoint = str(folder / "whole" / f"checkpoint-{at}")
    rest = trained(DASHTrainer, model, folder / "rest", rollouts=rollouts, **arguments, resume=checkpoint)
    assert rest.state.global_step == whole.state.global_step
    assert_same_update(model, whole, rest, 0.0)


EVALUATED = settings(
    loss_type=st.sampled_from(["dapo", "grpo", "bnpo", *OFF_POLICY]),
    beta=st.sampled_from([0.0, 0.1]),
    max_tokens_per_microbatch=st.sampled_from([None, 60]),
    save_strategy=st.sampled_from(["no", "steps"]),
)


class WithoutDraws(DASHTrainer):
    """Its evaluations draw no random numbers."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        state = torch.get_rng_state()
        found = super().evaluate(*args, **kwargs)
        torch.set_rng_state(state)
        return found


def evaluated(case: Settings, model: str, folder: Path) -> None:
    arguments = with_data(case)
    if arguments["loss_type"] == "aipo":
        arguments["beta"] = 0.0
    between = {"save_strategy": arguments.pop("save_strategy"), "save_steps": 1, "eval_strategy": "steps"}
    between |= {"eval_steps": 1, "eval_dataset": prompts(4 * RANKS), "per_device_eval_batch_size": 4}
    arguments |= {
        "rollouts": RolloutsByPrompt(arguments["loss_type"] in OFF_POLICY),
        "reward": RewardAgent(reward),
        "learning_rate": 0.1,
        "num_generations_eval": arguments["num_generations"],
    }
    plain = trained(WithoutDraws, model, folder, **arguments)
    other = trained(WithoutDraws, model, folder, **arguments, **between)
    assert_same_update(model, plain, other, 0.0)
    for one, another in zip(figures(plain), figures(other), strict=True):
        assert another == pytest.approx(one, abs=0.0, rel=0.0, nan_ok=True)


PIPELINE = settings(
    piped=True,
    loss_type=st.sampled_from(["dapo", "grpo", "bnpo", "dr_grpo", "sapo", "cispo", *OFF_POLICY]),
    beta=st.sampled_from([0.0, 0.1]),
    gradient_filter_threshold=st.sampled_from([0.1, 0.0, None]),
    max_tokens_per_microbatch=st.sampled_from([None, 40]),
    advantage_estimator=st.sampled_from(["grpo", "rloo", "opo"]),
    masked=st.booleans(),
)


class EveryThirdTokenMasked(DASHCallback):
    def on_rollouts_sampled(self, args: Any, state: Any, control: Any, rollouts: Any, **kwargs: Any) -> None:
        rollouts.tool_mask = torch.ones_like(rollouts.completion_mask)
        rollouts.tool_mask[:, ::3] = 0


def pipeline(case: Settings, model: str, folder: Path) -> None:
    callbacks = [EveryThirdTokenMasked()] if case.pop("masked") else []
    arguments = with_data(case)
    # In Mini the order of arrival decides which optimizer step takes a row.
    hypothesis.assume(arguments["gradient_accumulation_steps"] >= arguments["steps_per_generation"])
    if arguments["loss_type"] == "aipo":
        arguments["beta"] = 0.0
    arguments |= {"learning_rate": 0.1, "callbacks": callbacks}
    arguments["rollouts"] = RolloutsByPrompt(arguments["loss_type"] in OFF_POLICY)
    together, by_group = (
        trained(DASHTrainer, model, folder, **arguments, reward=RewardAgent(slow_reward), reward_pipeline=piped)
        for piped in (False, True)
    )
    assert_same_update(model, together, by_group, 1e-4)
    for one, other in zip(figures(together), figures(by_group), strict=True):
        assert one.keys() == other.keys()
        assert other == pytest.approx(one, rel=1e-3, abs=1e-3, nan_ok=True)


AHEAD = settings(
    piped=True,
    loss_type=st.sampled_from(["dapo", "grpo", *OFF_POLICY]),
    max_completion_length=st.sampled_from([1, 3, 6]),
    reward_pipeline=st.booleans(),
    evaluates=st.booleans(),
    ends_epoch_at=st.sampled_from([None, None, 1, 2]),
    at=st.integers(1, 5),
)


class Watch(DASHCallback):
    """The prompts of each window; ends the epoch after one optimizer step."""

    per_group = True

    def __init__(self, ends_epoch_at: int | None):
        self.windows: list[list[str]] = []
        self.ends_epoch_at = ends_epoch_at

    def on_rollouts_sampled(self, args: Any, state: Any, control: Any, rollouts: Any, **kwargs: Any) -> None:
        self.windows.append([row["prompt"] for row in rollouts.examples])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == self.ends_epoch_at


def ahead(case: Settings, model: str, folder: Path) -> None:
    ends, evaluates, at = (case.pop(name) for name in ("ends_epoch_at", "evaluates", "at"))
    hypothesis.assume(at < case["max_steps"])
    arguments = {**with_data(case), "in_process": True, "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 1}
    arguments["num_generations_eval"] = arguments["num_generations"]
    if evaluates:
        arguments |= {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4 * RANKS)}
        arguments |= {"per_device_eval_batch_size": 4}
    on_policy = {**arguments, "reward_pipeline": False}
    on_policy |= {"loss_type": "dapo"} if arguments["loss_type"] in OFF_POLICY else {}

    def windows(folder: Path, **others: Any) -> list[list[str]]:
        watch = Watch(ends)
        done = trained(DASHTrainer, model, folder, reward=RewardAgent(reward), callbacks=[watch], **others)
        assert all(weights.isfinite().all() for weights in done.model.parameters())
        return watch.windows

    seen = windows(folder / "ahead", async_level=1, **arguments)
    assert seen == windows(folder / "plain", **on_policy)
    if ends is None:
        rest = windows(folder / "rest", async_level=1, resume=str(folder / "ahead" / f"checkpoint-{at}"), **arguments)
        assert rest == seen[len(seen) - len(rest) :]


KINDS: dict[str, tuple[Any, Callable[[Settings, str, Path], None]]] = {
    "trl": (TRL, trl),
    "resumed": (RESUMED, resumed),
    "evaluated": (EVALUATED, evaluated),
    "pipeline": (PIPELINE, pipeline),
    "ahead": (AHEAD, ahead),
}


def check(kind: str, cases: int, seed: int, model: str, folder: Path) -> None:
    """Some cases of a kind; raises what the smallest that fails raises."""
    strategy, compare = KINDS[kind]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(strategy)
    def compared(case: Settings) -> None:
        try:
            compare(dict(case), model, folder)
        finally:
            if RANK == 0:
                shutil.rmtree(folder, ignore_errors=True)

    compared()


@pytest.mark.parametrize("kind", KINDS)
def test_random_runs(kind, tiny_model, tmp_path):
    check(kind, CASES, 0, tiny_model, tmp_path / "runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first round of cases")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/fuzz"), help="folder of the runs, the same on all ranks"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = save_tiny_model(args.output / f"model-{RANK}")
    end, seed = time.monotonic() + 60 * args.minutes, args.seed
    go_on = True
    while go_on:
        for kind in args.only:
            check(kind, 10, seed, model, args.output / "runs")
        if RANK == 0:
            print(f"seed {seed}: 10 cases of each of {', '.join(args.only)} passed", flush=True)
        seed += 1
        over = torch.tensor(float(time.monotonic() > end))
        if RANKS > 1:
            torch.distributed.all_reduce(over, torch.distributed.ReduceOp.MAX)
        go_on = not over


if __name__ == "__main__":
    main()
    leave()
