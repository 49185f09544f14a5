"""Random runs: draws settings, and compares a run with another run that must have the same result.

    trl         the update is TRL's, whatever the filter drops
    resumed     a run that is resumed from a checkpoint ends like one that was never interrupted
    evaluated   evaluations and checkpoints in between change nothing
    pipeline    rewards that are awaited group by group change nothing
    ahead       a run that samples one window ahead trains on the same prompts, also when it is resumed

A case is vacuous if its runs have nothing to compare, for instance because no row had signal. The test suite runs a
fixed number of cases with a fixed seed. As a script, this file runs cases until its time is over, on any number of
ranks, and prints how many there were of each kind:

    python tests/fuzz.py --minutes 30
    torchrun --nproc_per_node 2 tests/fuzz.py --minutes 30 --only trl resumed

Hypothesis shrinks a failing case to a few settings and prints them. It runs on rank 0, which sends the cases to the
other ranks. A case fails if it fails on any rank.
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
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hypothesis
import pytest
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, RewardRunner
from dash_trl.distributed import RankFailed, Ranks
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
CASES = 4  # number of cases of each kind in the test suite
SAME_UPDATE = 1e-4  # tolerance relative to the largest update: rounding depends on the rows of a pass, in each step
ROUNDED = 4 * torch.finfo(torch.float32).eps  # rounding of norm weights, which are about 1, after some steps
MEASURABLE = 1e-3, 10.0  # range of an update's size; above, the run has diverged, and rounding errors with it
OFF_POLICY = ("aipo", "decoupled_ppo")
PATIENCE = 120  # seconds that a rank waits for the others, in a collective too
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4 * RANKS)}
EVALUATION |= {"per_device_eval_batch_size": 4}
Settings = dict[str, Any]
Compare = Callable[[Settings, str, Path], str]
KINDS: dict[str, tuple[Any, Compare]] = {}


class RolloutsByPrompt:
    """A `rollout_func` whose completions depend only on prompt, row and micro-step; optionally with log-probs."""

    def __init__(self, with_log_probs: bool):
        self.with_log_probs = with_log_probs
        self.steps: set[int] = set()  # the optimizer steps in which it was called

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.steps.add(trainer.state.global_step)
        completions, logps = [], None
        for row, prompt in enumerate(prompts):
            drawn = random.Random(f"{prompt} {row} {trainer._step} {trainer.model.training}")
            ids = [drawn.randrange(4, 260) for _ in range(drawn.randint(0, 20))]
            completions.append([*ids, EOS if drawn.random() < 0.7 else 77])
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        if self.with_log_probs:
            noise, rows = random.Random(f"{completions}"), zip(prompt_ids, completions, strict=True)
            logps = [[value + noise.gauss(0, 0.2) for value in log_probs(trainer.model, *row)] for row in rows]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}


def reward(completion_ids: list[int], completion: str, prompt: str) -> float | None:
    """Returns 0 or 1, or None (not applicable), or fails. Some prompts are solved by all completions."""
    total = sum(completion_ids)
    if total % 11 == 0:
        raise ValueError("a failure")
    if total % 7 == 0:
        return None
    return 1.0 if prompt.startswith("1") else float(total % 2)


def slow_reward(completion_ids: list[int], completion: str, prompt: str) -> float | None:
    """Returns `reward` after a random delay, so that groups are not scored in order."""
    time.sleep(random.Random(f"{prompt}{completion_ids}").random() / 20)
    return reward(completion_ids, completion, prompt)


# ------------------------------------------------------------------------------------------------------ settings


@st.composite
def settings(draw: Any, piped: bool | None = False, mini: bool = True, **own: Any) -> Settings:
    """Draws the settings of a run of at least two windows, with valid batch shapes.

    Args:
        draw: Hypothesis's function.
        piped: value of `reward_pipeline`, which restricts the batch shapes; None = drawn.
        mini: True = several optimizer steps may share a window.
        own: strategies of other settings.
    """
    piped = draw(st.booleans()) if piped is None else piped
    shape = {
        "num_generations": draw(st.sampled_from([2, 4])),
        "per_device_train_batch_size": draw(st.sampled_from([4, 2])),
        "steps_per_generation": draw(st.sampled_from([2, 1, 3, 4, 6])),
        "gradient_accumulation_steps": draw(st.sampled_from([2, 1, 3, 4, 6])),
        "num_iterations": 1 if piped else draw(st.sampled_from([1, 1, 2, 3])),
    }
    group, rows, per_window, per_step, uses = shape.values()
    every = per_window * uses  # micro-steps of a window
    hypothesis.assume(rows * per_window % group == 0 and rows * per_window > group and (mini or per_step >= per_window))
    if piped:
        hypothesis.assume(per_step % per_window == 0 or per_window % per_step == 0)
        hypothesis.assume(rows * min(per_step, per_window) % group == 0)
    window = RANKS * rows * per_window // group
    count = draw(st.integers(window, 4 * window + 1))
    max_steps = every // per_step + draw(st.integers(2, 4))
    epoch, last = count // window * every, per_step * max_steps - 1  # micro-steps of an epoch; the last one of all
    # Each may cost an epoch.
    cuts = draw(st.lists(st.integers(1, max_steps - 1), max_size=last // epoch, unique=True))
    case = {
        **shape,
        "num_generations_eval": group,
        "prompts": count,
        "max_steps": max_steps + len(cuts) * -(-epoch // per_step),
        "reward_pipeline": piped,
        "cuts": sorted(cuts),
        "shuffle_dataset": draw(st.booleans()),
        "mask_truncated_completions": draw(st.booleans()),
        **{name: draw(strategy) for name, strategy in own.items()},
    }
    if case["loss_type"] == "aipo":
        case["beta"] = 0.0
    if "at" in case:  # a window begins after it
        case["at"] = 1 + case["at"] % (last // every * every // per_step)
    hypothesis.assume(not case.get("stream") or epoch >= per_step)  # else it ends before the first step
    return case


class Between(TrainerCallback):
    """Ends the epoch after some optimizer steps, and saves a checkpoint within an optimizer step."""

    trainer: Any

    def __init__(self, cuts: Sequence[int], saves: Callable[[int], bool]):
        self.cuts, self.saves = cuts, saves
        self.ended: list[int] = []  # the optimizer steps after which an epoch was ended

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saves(state.global_step):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step in self.cuts
        self.ended += [state.global_step] * control.should_epoch_stop

    def last_within_an_epoch(self, step: int) -> int:
        """Returns the last optimizer step up to `step` that did not end an epoch, so that a run resumes within one."""
        return max({*range(min(step + 1, self.trainer.state.global_step))} - set(self.ended))


def trained(kind: Any, model: str, folder: Path, **arguments: Any) -> Any:
    """Trains and returns the trainer, with its callback as the attribute `between`."""
    data = prompts(arguments.pop("prompts"))
    between = Between(arguments.pop("cuts"), arguments.pop("saves", lambda step: False))
    arguments["dataset"] = data.to_iterable_dataset() if arguments.pop("stream", False) else data
    arguments |= {"callbacks": [*arguments.get("callbacks", []), between], "ddp_timeout": PATIENCE}
    prepare = lambda trainer: vars(trainer).update(between=between) or setattr(between, "trainer", trainer)  # noqa: E731
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        return run(kind, model, folder, prepare=prepare, **arguments)


def figures(trainer: Any) -> list[dict[str, Any]]:
    """Returns the training logs, without times and without metrics that depend on which rows share a pass."""
    other = ("time", "per_second", "eval", "packing", "clip_ratio/low_min", "clip_ratio/high_max")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    logs = [{name: log[name] for name in log if not any(one in name for one in other)} for log in logs]
    return [{name: math.nan if value is None else value for name, value in log.items()} for log in logs]


def same_update(model: str, one: Any, other: Any, tolerance: float, after: int = 0) -> str:
    """Asserts that two trainers have made the same update.

    Returns:
        Why the case is vacuous, such as no gradient in the steps after step `after`; "" if it is not.
    """
    start = parameters(AutoModelForCausalLM.from_pretrained(model))
    difference, update = relative_difference(start, parameters(one.model), parameters(other.model))
    (least, most), logs = MEASURABLE, [log for log in other.state.log_history if "loss" in log and log["step"] > after]
    allowed = tolerance and tolerance + ROUNDED / max(update, least)
    assert difference <= allowed or tolerance and not least < update < most, (difference, update)
    if update <= least or not any(log["grad_norm"] > 0 for log in logs):
        return "no update"
    return "" if update < most else "diverged"


# --------------------------------------------------------------------------------------------------------- kinds


def kind(**strategies: Any) -> Callable[[Compare], Compare]:
    """Registers a function that compares the runs of a case. It returns why the case is vacuous, "" if it is not."""
    return lambda compare: KINDS.setdefault(compare.__name__, (settings(**strategies), compare))[1]


@kind(
    loss_type=st.sampled_from(["dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]),
    scale_rewards=st.sampled_from(["group", "batch", "none"]),
    delta=st.sampled_from([None, 1.3]),
    pad_to_multiple_of=st.sampled_from([None, 8]),
    beta=st.sampled_from([0.0, 0.0, 0.2]),
    stream=st.booleans(),
    gradient_filter_threshold=st.sampled_from([0.0, None]),
    max_tokens_per_microbatch=st.sampled_from([None, 40, 400]),
    share_prompts=st.booleans(),
)
def trl(arguments: Settings, model: str, folder: Path) -> str:
    names = "gradient_filter_threshold", "max_tokens_per_microbatch", "share_prompts", "reward_pipeline"
    own = {name: arguments.pop(name) for name in names}
    if arguments["beta"]:  # a dropped row has lost its KL term
        own["gradient_filter_threshold"] = None
    if arguments["loss_type"] == "luspo":
        arguments["importance_sampling_level"] = "sequence"
    if arguments["loss_type"] == "cispo":
        arguments["epsilon_high"] = 2.0
    arguments |= {"reward": ScriptedReward(constant=0.3), "learning_rate": 0.02}

    def run(kind: Any, **others: Any) -> Any:
        # In float64: rounding grows with each step, with luspo from 1e-6 to 1.3e-4 of the update in 11 steps.
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        return trained(kind, model, folder, rollouts=ScriptedRollouts(3), loaded=policy, **arguments, **others)

    return same_update(model, run(GRPOTrainer), run(DASHTrainer, **own), SAME_UPDATE)


@kind(
    piped=None,
    loss_type=st.sampled_from(["dapo", "grpo", "bnpo", "sapo", "cispo"]),
    beta=st.sampled_from([0.0, 0.1]),
    stream=st.booleans(),
    filter_denominator=st.sampled_from(["all", "kept"]),
    max_tokens_per_microbatch=st.sampled_from([None, 60]),
    at=st.integers(0, 29),
    within=st.booleans(),
)
def resumed(arguments: Settings, model: str, folder: Path) -> str:
    at, within, piped = arguments.pop("at"), arguments.pop("within"), arguments["reward_pipeline"]
    arguments |= {"rollouts": RolloutsByPrompt(False), "reward": ScriptedReward(constant=0.2)}
    # A step that is repeated draws other random numbers for a window, and after a cut for an epoch, that begins in it.
    within, sampled = within and not arguments["cuts"], arguments["rollouts"].steps
    saving = {"saves": lambda step: within and step == at and step not in sampled}
    saving |= {"save_strategy": "steps", "save_steps": 1}
    if piped:
        own = {"reward": RewardRunner(reward, max_concurrency=1), "filter_denominator": "all", "learning_rate": 0.1}
    else:  # with the pipeline, sums round by what came when, which Adam would magnify
        own = {"optimizer": "adamw_torch"}
    arguments |= own
    whole = trained(DASHTrainer, model, folder / "whole", **arguments, **saving)
    if not (at := whole.between.last_within_an_epoch(at)):
        return "no checkpoint"
    rest = trained(DASHTrainer, model, folder / "rest", **arguments, resume=f"{folder}/whole/checkpoint-{at}")
    assert rest.state.global_step == whole.state.global_step
    return same_update(model, whole, rest, SAME_UPDATE if piped else 0.0, after=at)


class WithoutDraws(DASHTrainer):
    """Its evaluations draw no random numbers."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        state = torch.get_rng_state()
        found = super().evaluate(*args, **kwargs)
        torch.set_rng_state(state)
        return found


@kind(
    piped=None,
    loss_type=st.sampled_from(["dapo", "grpo", "bnpo", *OFF_POLICY]),
    beta=st.sampled_from([0.0, 0.1]),
    max_tokens_per_microbatch=st.sampled_from([None, 60]),
    save_strategy=st.sampled_from(["no", "steps"]),
)
def evaluated(arguments: Settings, model: str, folder: Path) -> str:
    between = {**EVALUATION, "save_strategy": arguments.pop("save_strategy"), "save_steps": 1}
    arguments |= {
        "rollouts": RolloutsByPrompt(arguments["loss_type"] in OFF_POLICY),
        "reward": RewardRunner(reward, max_concurrency=1),
        "learning_rate": 0.1,
    }
    plain, other = (trained(WithoutDraws, model, folder, **arguments, **others) for others in ({}, between))
    same, close = (SAME_UPDATE, 1e-3) if arguments["reward_pipeline"] else (0.0, 0.0)
    vacuous = same_update(model, plain, other, same, after=1)
    if close and between["save_strategy"] == "steps":  # a checkpoint waits for a window: its figures are logged sooner
        return vacuous
    for one, another in zip(figures(plain), figures(other), strict=True):
        assert another == pytest.approx(one, abs=close, rel=close, nan_ok=True)
    return vacuous


class Watch(DASHCallback):
    """Of each window, the optimizer steps before it and its prompts; counts parts, and masks every third token."""

    per_group = True

    def __init__(self, masked: bool):
        self.masked, self.parts, self.windows = masked, 0, list[tuple[int, list[str]]]()

    def on_rollouts_sampled(self, args: Any, state: Any, control: Any, rollouts: Any, **kwargs: Any) -> None:
        self.windows.append((state.global_step, [row["prompt"] for row in rollouts.examples]))
        if self.masked:
            rollouts.tool_mask = torch.ones_like(rollouts.completion_mask)
            rollouts.tool_mask[:, ::3] = 0

    def on_rewards(self, *args: Any, **kwargs: Any) -> None:
        self.parts += 1


@kind(
    piped=True,
    mini=False,  # in Mini the order of arrival decides which optimizer step takes a row
    loss_type=st.sampled_from(["dapo", "grpo", "bnpo", "dr_grpo", "sapo", "cispo", *OFF_POLICY]),
    beta=st.sampled_from([0.0, 0.1]),
    gradient_filter_threshold=st.sampled_from([0.1, 0.0, None]),
    max_tokens_per_microbatch=st.sampled_from([None, 40]),
    advantage_estimator=st.sampled_from(["grpo", "rloo", "grpo_passk"]),
    masked=st.booleans(),
)
def pipeline(arguments: Settings, model: str, folder: Path) -> str:
    watch = Watch(arguments.pop("masked"))
    arguments |= {"learning_rate": 0.1, "callbacks": [watch]}
    arguments["rollouts"] = RolloutsByPrompt(arguments["loss_type"] in OFF_POLICY)
    arguments["reward"] = RewardRunner(slow_reward)
    together = trained(DASHTrainer, model, folder, **{**arguments, "reward_pipeline": False})
    by_group = trained(DASHTrainer, model, folder, **arguments)
    vacuous = same_update(model, together, by_group, SAME_UPDATE)
    for one, other in zip(figures(together), figures(by_group), strict=True):
        assert one.keys() == other.keys()
        assert other == pytest.approx(one, rel=1e-3, abs=1e-3, nan_ok=True)
    return vacuous or ("" if watch.parts > len(watch.windows) else "all came at once")


@kind(
    piped=None,
    loss_type=st.sampled_from(["dapo", "grpo", *OFF_POLICY]),
    max_completion_length=st.sampled_from([3, 1, 6]),
    evaluates=st.booleans(),
    at=st.integers(0, 29),
)
def ahead(arguments: Settings, model: str, folder: Path) -> str:
    at, arguments["cuts"] = arguments.pop("at"), []  # a queue goes on with the rest of an epoch that was cut
    if arguments.pop("evaluates"):
        arguments |= EVALUATION
    arguments |= {"in_process": True, "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 1}
    on_policy = {**arguments, "reward_pipeline": False}
    on_policy |= {"loss_type": "dapo"} if arguments["loss_type"] in OFF_POLICY else {}

    def windows(folder: Path, **others: Any) -> tuple[list[tuple[int, list[str]]], Any]:
        watch = Watch(masked=False)
        done = trained(DASHTrainer, model, folder, reward=RewardRunner(reward), callbacks=[watch], **others)
        assert all(weights.isfinite().all() for weights in done.model.parameters())
        return watch.windows, done

    seen, done = windows(folder / "ahead", async_level=1, **arguments)
    assert seen == windows(folder / "plain", **on_policy)[0]
    if not (at := done.between.last_within_an_epoch(at)):
        return "no checkpoint"
    rest, _ = windows(folder / "rest", async_level=1, resume=f"{folder}/ahead/checkpoint-{at}", **arguments)
    assert rest == [window for window in seen if window[0] >= at]
    return "" if len(seen) > 1 and rest else "no window"


def on_all_ranks(kind: str, case: Settings, model: str, folder: Path) -> str:
    """Compare; what fails on one rank fails on each. It ends the process if others hang in a collective meanwhile."""
    error, vacuous = None, ""
    try:
        vacuous = Ranks(PartialState(cpu=True), PATIENCE).agree(lambda: KINDS[kind][1](dict(case), model, folder))
    except Exception as caught:  # whatever it is
        error = caught
    said = "" if error is None else f"Rank {RANK}: {''.join(traceback.format_exception(error))}"
    if RANKS > 1:
        try:
            Ranks(PartialState(cpu=True), PATIENCE / 4).agree(lambda: None)
        except RankFailed:
            print(f"{said}\nRank {RANK} ends, since others hang; not shrunk: {kind} {case}", flush=True)
            leave(1)
        said = "\n".join(gather_object([said]))
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)
    if error is None:
        return vacuous
    if RANKS > 1:
        error.add_note(said)
    print(f"Rank {RANK}: {error!r:.200}: {kind} {case}", file=sys.stderr)
    raise error


def check(kind: str, cases: int, seed: int, model: str, folder: Path, counts: Counter[tuple[str, str]]) -> None:
    """Some cases of a kind, counted by why they were vacuous; raises what the smallest that fails raises."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(KINDS[kind][0])
    def compared(case: Settings) -> None:
        if RANKS > 1:
            broadcast_object_list([(kind, case)])
        counts[kind, on_all_ranks(kind, case, model, folder)] += 1

    compared()


def follow(model: str, folder: Path) -> int:
    """The cases that rank 0 draws, until it ends; its exit status."""
    while True:
        (order,) = broadcast_object_list([None])
        if isinstance(order, int):
            return order
        with contextlib.suppress(Exception):  # rank 0 reports it
            on_all_ranks(*order, model, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_random_runs(kind, tiny_model, tmp_path):
    check(kind, CASES, 0, tiny_model, tmp_path / "runs", Counter())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first round of cases")
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("outputs/fuzz"), help="a folder that all ranks share")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, folder = save_tiny_model(args.output / f"model-{RANK}"), args.output / "runs"
    PartialState(cpu=True, timeout=timedelta(seconds=PATIENCE))  # then only rank 0 could save it
    if RANK > 0:
        return follow(model, folder)
    end, seed, failed, counts = time.monotonic() + 60 * args.minutes, args.seed, 0, Counter[tuple[str, str]]()
    while not failed and (seed == args.seed or time.monotonic() < end):
        for kind in args.only:
            try:
                check(kind, 10, seed, model, folder, counts)
            except Exception:  # Hypothesis has added the settings to it
                failed = 1
                traceback.print_exc()
        print(f"After seed {seed}:", flush=True)
        for kind in args.only:
            vacuous = {reason: count for (one, reason), count in counts.items() if one == kind and reason}
            print(f"  {kind:<9} {counts[kind, '']:>5} cases, and {sum(vacuous.values())} vacuous {vacuous}", flush=True)
        seed += 1
    if RANKS > 1:
        broadcast_object_list([failed])
    return failed


if __name__ == "__main__":
    leave(main())
