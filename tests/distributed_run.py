"""One launch of `test_distributed.py`: every scenario with TRL and with DASH on 2 ranks; prints one JSON line.

accelerate launch --config_file tests/accelerate/ddp.yaml tests/distributed_run.py OUTPUT MODEL SLIDING [LARGER …]
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, RewardAgent
from dash_trl.monitoring import TimeLimitCallback
from dash_trl.sampling.weights.proof import model_log_probs
from tests.tiny import (
    ScriptedReward,
    ScriptedRollouts,
    leave,
    log_probs,
    pad,
    parameters,
    prompts,
    relative_difference,
    run,
)

RANK = int(os.environ.get("RANK", 0))


class RewardPerWindow(ScriptedReward):
    """Scripted rewards, constant in the calls (generation windows) and on the ranks where `silent` says so."""

    def __init__(self, silent: Any, constant: float = 0.3):
        super().__init__(constant=constant)
        self.silent, self.calls = silent, 0

    def __call__(self, **kwargs: Any) -> list[float]:
        call, self.calls = self.calls, self.calls + 1
        return [1.0] * len(kwargs["prompts"]) if self.silent(call, RANK) else super().__call__(**kwargs)


# name → (which windows and ranks have no signal, settings)
SCENARIOS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dapo": (lambda call, rank: False, {"loss_type": "dapo"}),
    "grpo, token budget": (
        lambda call, rank: False,
        {"loss_type": "grpo", "max_tokens_per_microbatch": 30, "max_steps": 2},
    ),
    "a rank keeps none": (lambda call, rank: rank == 1, {"loss_type": "grpo", "max_steps": 2}),
    "two iterations": (lambda call, rank: rank == 1, {"num_iterations": 2, "max_steps": 4, "learning_rate": 0.2}),
    "beta, all kept": (lambda call, rank: False, {"beta": 0.04, "max_steps": 2, "gradient_filter_threshold": None}),
    "window shorter than a step, last one silent": (
        lambda call, rank: call % 2 == 1,
        {"steps_per_generation": 2, "max_steps": 2},
    ),
    "window longer than a step": (lambda call, rank: rank == 0, {"steps_per_generation": 8, "max_steps": 2}),
}
ONLY_OURS = ("gradient_filter_threshold", "max_tokens_per_microbatch", "callbacks", "prepare")


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    """The parameters, gathered under ZeRO-3."""
    from contextlib import nullcontext

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    context: Any = nullcontext()
    if trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        import deepspeed

        context = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with context:
        return parameters(model)


def equal_on_all_ranks(values: dict[str, torch.Tensor]) -> bool:
    sums = [round(float(value.double().sum()), 9) for value in values.values()]
    return len({json.dumps(one) for one in gather_object([sums])}) == 1


class PlainPasses(DASHCallback):
    """Passes that call the LM head as a module, as V(prefix) and a user's own do."""

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        for _ in range(2):
            assert model_log_probs(kwargs["trainer"].model, [5, 6, 7, 8], 1.0).isfinite().all()


Ends = dict[str, torch.Tensor]


def verdict(start: Ends, trainer: Any, expected: Ends | None = None, **more: Any) -> dict[str, Any]:
    """How far a run moved the parameters, by how much it missed the expected ones, and whether all ranks have them."""
    end = whole(trainer)
    difference, update = relative_difference(start, end if expected is None else expected, end)
    return {"difference": difference, "update": update, "ranks_agree": equal_on_all_ranks(end), **more}


def trls(model: str, output: Path, silent: Any, **settings: Any) -> Ends:
    """The parameters after TRL's run."""
    known = {name: value for name, value in settings.items() if name not in ONLY_OURS}
    return whole(run(GRPOTrainer, model, output, reward=RewardPerWindow(silent), **known))


def compare(model: str, output: Path, start: Ends, silent: Any, **settings: Any) -> dict[str, Any]:
    expected = trls(model, output, silent, **settings)
    trainer = run(DASHTrainer, model, output, reward=RewardPerWindow(silent), **settings)
    return verdict(start, trainer, expected)


class Late:
    """As `RewardPerWindow`, for one completion at a time; each rank has its own order of arrival."""

    __name__ = "late"

    def __init__(self, silent: Any):
        self.silent, self.random = silent, random.Random(RANK)

    def compute_score(self, prompt: str, completion_ids: list[int]) -> float:
        time.sleep(self.random.random() / 20)
        silent = RewardPerWindow(lambda call, rank: self.silent(0, RANK))
        return silent(prompts=[prompt], completion_ids=[completion_ids])[0]


def pipeline(model: str, output: Path, start: Ends, silent: Any, **settings: Any) -> dict[str, Any]:
    """TRL's update, though the ranks begin on what is scored, in other orders."""
    expected = trls(model, output, silent, **settings)
    late = RewardAgent(Late(silent))
    return verdict(start, run(DASHTrainer, model, output, reward=late, reward_pipeline=True, **settings), expected)


def mini(model: str, output: Path, start: Ends) -> dict[str, Any]:
    """Optimizer steps are filled in the order of arrival, another one on each rank; a checkpoint cuts a window."""
    saved = "no" if os.environ.get("ACCELERATE_USE_DEEPSPEED") else "steps"  # where one takes seconds
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 4}
    late = RewardAgent(Late(lambda call, rank: rank == 1))
    settings |= {"reward_pipeline": True, "save_strategy": saved, "save_steps": 3}
    return verdict(start, run(DASHTrainer, model, output, reward=late, **settings))


class OtherRows(DASHTrainer):
    """On one rank rewards are asked of other rows than those for which they have begun: there they begin anew."""

    def _calculate_rewards(self, inputs: list, *args: Any) -> torch.Tensor:
        return super()._calculate_rewards([{**one, "rank": 1} for one in inputs] if RANK else inputs, *args)


def one_step(model: str, output: Path, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The next window is sampled in process while rewards are awaited; one rank has no signal."""
    settings = {"in_process": True, "async_level": 1, "loss_type": "aipo", "max_completion_length": 6, "max_steps": 3}
    late = RewardAgent(Late(lambda call, rank: rank == 1))
    trainer = run(OtherRows, model, output, reward=late, reward_pipeline=True, **settings)
    behind = [line["async/staleness_max"] for line in trainer.state.log_history if "async/staleness_max" in line]
    return verdict(start, trainer, behind=behind)


def beta_with_dropped_rows(model: str, output: Path, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """KL, two iterations, a rank without rows: not TRL's update, but one that ends and is the same on all ranks."""
    reward = RewardPerWindow(lambda call, rank: rank == 1)
    return verdict(start, run(DASHTrainer, model, output, reward=reward, beta=0.04, num_iterations=2, max_steps=4))


def process_rewards(model: str, output: Path, start: dict[str, torch.Tensor]) -> tuple[dict[str, Any], Any]:
    """Values and credit with other episodes, and other numbers of passes, on each rank; rank 1 values nothing.

    A model that attends to a sliding window is valued in a loop, which takes far more passes.
    """
    from dash_trl.process_rewards import AnswerLogProbValue, ProcessRewardCallback

    every = 3 + 2 * RANK
    callback = ProcessRewardCallback(
        AnswerLogProbValue(" = ", max_tokens_per_pass=60),
        markers=lambda text: range(0, len(text), every),
        min_episode_tokens=2,
        max_episode_tokens=8 + 4 * RANK,
    )
    trainer = run(
        DASHTrainer,
        model,
        output,
        reward=RewardPerWindow(lambda call, rank: rank == 1, constant=0.0),
        callbacks=[callback],
        max_steps=2,
    )
    end = whole(trainer)
    episodes = [len(boundaries) - 1 for boundaries, _ in callback.last]
    return {
        "update": relative_difference(start, end, end)[1],
        "ranks_agree": equal_on_all_ranks(end),
        "episodes": gather_object([sum(episodes)]),
    }, trainer


def outcome_value(model: str, output: Path, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Other episodes on each rank; in the second window one has no scored row, so that it runs dummies only.

    The weight is what V is worth, by what an earlier run has seen of a perfect one.
    """
    from dash_trl.process_rewards import CreditSettings, OutcomeValue, ProcessRewardCallback
    from dash_trl.process_rewards.worth import evidence_of

    class Reward(ScriptedReward):
        calls = 0

        def __call__(self, **kwargs: Any) -> list[float]:
            rewards, self.calls = super().__call__(**kwargs), self.calls + 1
            return [math.nan] * len(rewards) if RANK == 1 and self.calls == 2 else rewards

    every = 3 + 2 * RANK
    callback = ProcessRewardCallback(
        OutcomeValue(min_rollouts=4, min_problems=2),
        settings=CreditSettings(process_weight="auto"),
        markers=lambda text: range(0, len(text), every),
        min_episode_tokens=2,
        max_episode_tokens=8 + 4 * RANK,
    )
    saved = "no" if os.environ.get("ACCELERATE_USE_DEEPSPEED") else "steps"  # where one takes seconds
    settings: dict[str, Any] = {"max_steps": 3, "save_strategy": saved, "save_steps": 3}
    outcomes = torch.arange(64).double() % 2
    perfect = evidence_of(torch.tensor([[0, 1, 2]] * 64), outcomes.repeat(3, 1).T, outcomes, group_size=4)
    callback.load_state_dict(
        {"worth": {"of": "OutcomeValue", "space": "probability", "evidence": [vars(perfect)], "entropies": []}}
    )
    trainer = run(DASHTrainer, model, output / "outcome", reward=Reward(constant=0.2), callbacks=[callback], **settings)
    end, windows = whole(trainer), callback.value.state_dict()["windows"]
    return {
        "update": relative_difference(start, end, end)[1],
        "ranks_agree": equal_on_all_ranks(end),
        "learned": gather_object([[len(window["outcome"]) for window in windows]]),
        "buffers": gather_object([[{name: float(one.double().sum()) for name, one in w.items()} for w in windows]]),
        "valued": [line["process/valued_rows"] for line in trainer.state.log_history if "process/valued_rows" in line],
        "weights": gather_object([[line.get("process/weight") for line in trainer.state.log_history]]),
        "worth": gather_object([worth_of(callback)]),
    }


def worth_of(callback: Any) -> list[dict[str, list]]:
    """What a rank has seen of V, by window."""
    windows = callback.state_dict()["worth"]["evidence"]
    return [{name: value.tolist() for name, value in window.items()} for window in windows]


def own_rows(model: str, output: Path, **settings: Any) -> dict[str, Any]:
    """How many rows a rank computes the credit of, and by how much it differs from that among the rows of all."""
    from dash_trl.process_rewards import ESTIMATORS, AnswerLogProbValue, ProcessRewardCallback

    seen: dict[str, Any] = {"difference": 0.0}

    def compared(rewards: Any, chosen: Any) -> torch.Tensor:
        credit = ESTIMATORS["reinforce_plus_plus_baseline"](rewards, chosen)
        mine = {name: value for name, value in vars(rewards).items() if isinstance(value, torch.Tensor)}
        ranks = gather_object([mine]) if len(credit) == 16 else [mine]
        width = max(rank["mask"].shape[1] for rank in ranks)
        every = {
            name: torch.cat([pad_to(rank[name], width) if value.dim() == 2 else rank[name] for rank in ranks])
            for name, value in mine.items()
        }
        expected = ESTIMATORS["reinforce_plus_plus_baseline"](
            type(rewards)(**every, group_size=rewards.group_size), chosen
        )
        own = slice(16 * RANK, 16 * RANK + 16) if len(ranks) > 1 else slice(None)
        seen["difference"] = (credit - expected[own, : credit.shape[1]]).abs().max().item()
        seen["rows"], seen["valued"] = len(credit), int(rewards.valued.sum())
        return credit

    ESTIMATORS["compared"] = compared
    episodes: dict[str, Any] = {"markers": lambda text: range(0, len(text), 3), "min_episode_tokens": 2}
    callback = ProcessRewardCallback(AnswerLogProbValue(" = "), estimator="compared", **episodes)
    reward = RewardPerWindow(lambda call, rank: rank == 1, constant=0.0)
    trainer = run(DASHTrainer, model, output, reward=reward, callbacks=[callback], **settings)
    logged = {name: value for name, value in trainer.state.log_history[0].items() if name.startswith("advantage/")}
    agree = equal_on_all_ranks(whole(trainer))
    return {**seen, "logged": logged, "ranks_agree": agree, "worth": worth_of(callback)}


def pad_to(rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


def monte_carlo(trainer: Any) -> dict[str, Any]:
    """Of 7 prefixes rank 1 asks for one, but finishes half of them; each row gets the values of its own prefixes."""
    from dash_trl.process_rewards import MonteCarloValue, ValueRequest
    from dash_trl.rewards.failures import watch

    sample, rows = trainer._generate_single_turn, []

    def counting(prompt_ids: list, *others: Any) -> Any:
        rows.append(len(prompt_ids))
        return sample(prompt_ids, *others)

    trainer._generate_single_turn = counting
    trainer.reward_funcs = [watch(lambda number, **kwargs: number, "number")]
    asked = ([(1, 2, 3), (1,), (2, 3)], [(), (3,), ()])[RANK]
    requests = [
        ValueRequest((5, 6), (7, 8, 9), boundaries, example={"prompt": "= ", "number": 10.0 * RANK + row})
        for row, boundaries in enumerate(asked)
    ]
    values = MonteCarloValue(num_rollouts=8)(requests, trainer)
    expected = [[10.0 * RANK + row] * len(boundaries) for row, boundaries in enumerate(asked)]
    return {"rows": rows, "right": values == expected}


def silent_and_spoiled_steps(model: str, output: Path) -> dict[str, Any]:
    """How far each AdamW step after the first moves the parameters, and the count of skipped steps.

    The second has no signal anywhere, the fourth a loss of NaN on one rank: both change nothing on any, in spite of
    momentum and weight decay.
    """
    snapshots: list[Ends] = []

    class Snapshot(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            snapshots.append(whole(holder[0]))

    class SpoiledOnOneRank(DASHTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            return loss * float("nan") if RANK == 1 and self.state.global_step == 3 else loss

    holder: list[Any] = []
    settings = {"optimizer": "adamw_torch", "weight_decay": 0.1, "max_steps": 5, "max_grad_norm": 1.0}
    settings |= {"callbacks": [Snapshot()], "prepare": holder.append}
    reward = RewardPerWindow(lambda call, rank: call == 1, constant=0.0)
    trainer = run(SpoiledOnOneRank, model, output, reward=reward, **settings)
    far = [
        torch.stack([(after[name] - before[name]).abs().max() for name in before]).max().item()
        for before, after in itertools.pairwise(snapshots)
    ]
    counts = [log["skipped_steps"] for log in trainer.state.log_history if "skipped_steps" in log]
    return {"moved": far, "skipped": gather_object([counts])}


class PartlyUnknown(ScriptedRollouts):
    """Log-probs of the model, off by a little; on rank 0 some are NaN, or, `filled`, the model's own."""

    def __init__(self, filled: bool):
        super().__init__()
        self.filled = filled

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        chance = random.Random(RANK)

        def report(value: float) -> float:
            unknown, noise = RANK == 0 and chance.random() < 0.05, chance.gauss(0.0, 0.7)
            return (value if self.filled else float("nan")) if unknown else value + noise

        rows = zip(output["prompt_ids"], output["completion_ids"], strict=True)
        return {**output, "logprobs": [[report(one) for one in log_probs(trainer.model, *row)] for row in rows]}


def unknown_log_probs(model: str, output: Path, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """AIPO where some rows of rank 0 take a pass, for which rank 1 runs dummies: as if they had been known."""
    ends, logs = [], []
    for filled in (True, False):
        settings = {"loss_type": "aipo", "aipo_delta": 1.5, "max_tokens_per_microbatch": 30}
        trainer = run(DASHTrainer, model, output, rollouts=PartlyUnknown(filled), **settings)
        ends.append(whole(trainer))
        logs.append({name: value for name, value in trainer.state.log_history[0].items() if "off_policy" in name})
    return verdict(start, trainer, ends[0], off_policy=gather_object(logs))


def entropy_bonus(model: str, output: Path) -> dict[str, Any]:
    """What it adds to the logged loss, and the entropy: rank 1 has no row, and runs dummies."""
    logs = {}
    for coefficient in (0.0, 0.5):
        reward = RewardPerWindow(lambda call, rank: rank == 1)
        settings = {"entropy_coef": coefficient, "max_tokens_per_microbatch": 30}
        logs[coefficient] = run(DASHTrainer, model, output, reward=reward, **settings).state.log_history[0]
    return {"added": (logs[0.0]["loss"] - logs[0.5]["loss"]) / 0.5, "entropy": logs[0.5]["entropy"]}


def resumed(model: str, output: Path, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """From the middle of a window it is as if uninterrupted; where one rank lost its window, all refuse."""
    settings = {"steps_per_generation": 8, "max_steps": 2, "reward": ScriptedReward(constant=0.3), "learning_rate": 0.2}
    end = whole(run(DASHTrainer, model, output, save_strategy="steps", save_steps=1, **settings))
    checkpoint = str(output / "checkpoint-1")
    again = run(DASHTrainer, model, output, resume=checkpoint, **settings)
    if RANK == 1:
        (output / "checkpoint-1" / "generation_window_1.pt").unlink()
    try:
        run(DASHTrainer, model, output, resume=checkpoint, **settings)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return verdict(start, again, end, refused=gather_object([refused]))


def read_ahead(model: str, output: Path) -> list[Any]:
    """What is wrong with the prompts that each rank knows ahead, and how it goes on with them in its second epoch."""
    from tests.test_prompts import Walk, check

    shapes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    shapes |= {"num_generations": 2, "max_steps": 5}
    wrong, goes_on = [], []
    for dataset in (prompts(13), prompts(13).to_iterable_dataset()):
        try:
            check(model, output, dataset=dataset, **shapes)
        except AssertionError as error:  # of this rank; both have walked to the end
            wrong.append(str(error))
        settings = {"dataset": dataset, **shapes, "async_level": 2}
        whole = run(Walk, model, output, save_strategy="steps", save_steps=3, **settings)
        rest = run(Walk, model, output, resume=str(output / "checkpoint-3"), **settings)
        goes_on.append(rest.seen == whole.seen[-len(rest.seen) :] and whole.announced[-1] == rest.announced[-1] == [])
    return gather_object([[wrong, goes_on]])


def time_limit(model: str, output: Path) -> list[int]:
    """The step at which each rank stops: by the first one's clock it is the second, by the other's the first."""
    clock = itertools.count(0, 1 if RANK == 0 else 100)  # asked twice per step, and before
    timer = TimeLimitCallback(4, clock=lambda: next(clock))
    trainer = run(DASHTrainer, model, output, callbacks=[timer], max_steps=4)
    return gather_object([trainer.state.global_step])


def main() -> None:
    output, model, sliding, *larger = sys.argv[1:]
    # before ZeRO-3 makes it load partitions
    start, *starts = [parameters(AutoModelForCausalLM.from_pretrained(path)) for path in (model, *larger)]
    results: dict[str, Any] = {}
    for name, (silent, settings) in SCENARIOS.items():
        results[name] = compare(model, Path(output), start, silent, **settings)
    for path, weights, prepare in zip(larger, starts, (None, pad), strict=False):  # one packed, one padded
        settings = {"max_steps": 2, "callbacks": [PlainPasses()], "prepare": prepare}
        results[Path(path).name] = compare(path, Path(output), weights, lambda call, rank: False, **settings)
    results["pipeline"] = pipeline(model, Path(output), start, lambda call, rank: False)
    silent, shapes = (lambda call, rank: rank == 1), {"steps_per_generation": 2, "loss_type": "grpo"}
    results["pipeline, two windows, a rank keeps none"] = pipeline(model, Path(output), start, silent, **shapes)
    results["mini, by arrival"] = mini(model, Path(output), start)
    results["one step ahead"] = one_step(model, Path(output), start)
    results["ranks"] = int(os.environ.get("WORLD_SIZE", 1))
    results["beta with dropped rows"] = beta_with_dropped_rows(model, Path(output), start)
    results["process rewards"], _ = process_rewards(model, Path(output), start)
    results["process rewards, sliding window"], trainer = process_rewards(sliding, Path(output), start)
    results["outcome value"] = outcome_value(model, Path(output), start)
    results["own rows"] = gather_object([own_rows(model, Path(output))])
    results["rows of all"] = gather_object([own_rows(model, Path(output), num_generations=32)])
    results["Monte Carlo values"] = gather_object([monte_carlo(trainer)])
    results["unknown log-probs"] = unknown_log_probs(model, Path(output), start)
    results["entropy bonus"] = entropy_bonus(model, Path(output))
    results["silent and spoiled steps"] = silent_and_spoiled_steps(model, Path(output))
    if not os.environ.get("ACCELERATE_USE_DEEPSPEED"):  # the windows are the same, the checkpoints take seconds
        results["resumed"] = resumed(model, Path(output), start)
        results["time limit"] = time_limit(model, Path(output))
        results["read ahead"] = read_ahead(model, Path(output))
    if RANK == 0:
        print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
    leave()
