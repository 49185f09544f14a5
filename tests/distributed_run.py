"""The checks that `test_distributed.py` launches on two ranks; in each check both ranks end with the same result.

accelerate launch --config_file accelerate_configs/cpu.yaml tests/distributed_run.py OUTPUT [options of pytest]

-k chooses checks.
"""

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, RewardRunner
from dash_trl.distributed import RankFailed, Ranks
from dash_trl.monitoring import TimeLimitCallback
from dash_trl.multimodal import freeze_towers
from dash_trl.process_rewards import (
    ESTIMATORS,
    AnswerLogProbValue,
    Estimator,
    MonteCarloValue,
    ProcessRewardCallback,
    ValueRequest,
)
from dash_trl.rewards import watch
from dash_trl.sampling import model_log_probs
from tests.by_prompt import ByPrompt, expected_windows
from tests.contract import SCENARIOS, check_contract
from tests.fake_server import Varied, Watch, factory
from tests.models import config_of
from tests.scripted_turns import LONGEST, TOOLS, RandomTurns, check_tools_contract, plays, problems, save_tool_model
from tests.tiny import (
    ScriptedReward,
    ScriptedRollouts,
    assert_same_update,
    fsdp_on_cpu,
    leave,
    noting,
    pad,
    parameters,
    prompts,
    refused,
    run,
    save_tiny_model,
    with_flash_stand_in,
    without_compiled_ops,
)

RANK = int(os.environ.get("RANK", 0))
DEEPSPEED = bool(os.environ.get("ACCELERATE_USE_DEEPSPEED"))
ZERO3 = DEEPSPEED and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
FSDP = bool(os.environ.get("ACCELERATE_USE_FSDP"))
WITH_DDP = pytest.mark.skipif(DEEPSPEED or FSDP, reason="what DDP does")
ON_DDP = pytest.mark.skipif(DEEPSPEED, reason="as without DeepSpeed, where a checkpoint takes seconds")
SHARDED = pytest.mark.skipif(not (FSDP or ZERO3), reason="a head that is shared out")
ONCE = pytest.mark.skipif(FSDP, reason="accelerate cannot train a model again that FSDP2 has sharded")
# PyTorch cannot load the optimizer of an FSDP2 run if it has no state.
WITH_STATE = {"optimizer": "adamw_torch", "learning_rate": 1e-3} if FSDP else {}
SAVED = {"save_strategy": "no" if DEEPSPEED else "steps", "save_steps": 3}
Ends = dict[str, torch.Tensor]
if DEEPSPEED:
    without_compiled_ops()
if FSDP:
    fsdp_on_cpu()


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """Return a folder that the ranks share."""
    return tmp_path_factory.getbasetemp().parent


@pytest.fixture(scope="module", autouse=True)
def models(tiny_model, tmp_path_factory) -> dict[str, tuple[str, Ends]]:
    """Return the folder and the weights of each model. They are loaded before ZeRO-3 would shard them.

    The larger models have an LM head that ZeRO-3 shards. Parameters of fewer than 1e5 elements stay whole on all ranks.
    """
    settings = {
        "tied head": {"vocab_size": 4000, "tie_word_embeddings": True},
        "one layer": {"num_hidden_layers": 1},
        "longrope": {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 20,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        },
        "untied head": {"vocab_size": 4000, "tie_word_embeddings": False},
    }
    paths = {name: save_tiny_model(tmp_path_factory.mktemp("model"), **own) for name, own in settings.items()}
    paths["multimodal"] = save_tiny_model(tmp_path_factory.mktemp("model"), config=config_of("qwen3_5"))
    paths |= {"tiny": tiny_model, "tools": save_tool_model(tmp_path_factory.mktemp("model"))}
    return {name: (path, parameters(path)) for name, path in paths.items()}


def whole(trainer: Any) -> Ends:
    """Return the whole parameters, gathered under ZeRO-3 and FSDP."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    context: Any = nullcontext()
    if trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        import deepspeed

        context = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with context:
        return parameters(model)


def agreed(value: Any) -> bool:
    """Whether all ranks have the same value."""
    return len({json.dumps(one) for one in gather_object([value])}) == 1


def equal_on_all_ranks(values: Ends) -> bool:
    return agreed([round(float(value.double().sum()), 9) for value in values.values()])


@pytest.fixture
def train(models, output) -> Callable[..., Any]:
    """Return a function that trains, and checks that both ranks end with the same, and the expected, parameters."""

    def train(name: str = "tiny", trainer_class: Any = DASHTrainer, *, expected: Ends | None = None, **settings) -> Any:
        path, start = models[name]
        trainer = run(trainer_class, path, settings.pop("output", output), **settings)
        end = whole(trainer)
        assert trainer.accelerator.num_processes == 2 and equal_on_all_ranks(end)
        assert trainer.accelerator.is_fsdp2 == FSDP
        assert_same_update(start, end if expected is None else expected, end)
        return trainer

    return train


class Late:
    """`ScriptedReward` for one completion at a time, after a delay; so rewards arrive in another order on each rank."""

    __name__ = "late"

    def __init__(self, silent: Sequence[int]):
        self.reward = ScriptedReward(constant=0.3, silent=silent)
        self.random = random.Random(RANK)

    def compute_score(self, prompt: str, completion_ids: list[int]) -> float:
        time.sleep(self.random.random() / 20)
        return self.reward(prompts=[prompt], completion_ids=[completion_ids])[0]


server = factory(Varied)
ALWAYS = range(1000)  # numbers of the calls whose rewards have no signal: all
ON_RANK_1 = ALWAYS if RANK == 1 else ()
NONE_ON_RANK_1 = ScriptedReward(constant=0.3, silent=ON_RANK_1)


class PlainPasses(DASHCallback):
    """Runs passes that call the LM head as a module, like the passes of V(prefix) and those of users."""

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        for _ in range(2):
            assert model_log_probs(kwargs["trainer"].model, [5, 6, 7, 8]).isfinite().all()


# name → (which of this rank's windows have no signal, settings of both trainers, settings of ours)
TRLS = {
    "dapo": ((), {}, {"share_prompts": False}),
    "grpo, token budget": ((), {"loss_type": "grpo", "max_steps": 2}, {"max_tokens_per_microbatch": 30}),
    "smoke: a rank keeps none": (ON_RANK_1, {"loss_type": "grpo", "max_steps": 2}, {}),
    "two iterations": (ON_RANK_1, {"num_iterations": 2, "max_steps": 4, "learning_rate": 0.5}, {}),
    "beta, all kept": ((), {"beta": 0.04, "max_steps": 2}, {"gradient_filter_threshold": None}),
    "window shorter than a step, last one silent": (range(1, 1000, 2), {"steps_per_generation": 2, "max_steps": 2}, {}),
    "window longer than a step": (ALWAYS if RANK == 0 else (), {"steps_per_generation": 8, "max_steps": 2}, {}),
    # the ranks begin on what is scored, in other orders
    "pipeline, two windows, a rank keeps none": (
        ON_RANK_1,
        {"steps_per_generation": 2, "loss_type": "grpo"},
        {"reward_pipeline": True},
    ),
    "multimodal": (
        (),
        # TRL does not freeze the tower, for whose gradients DDP then waits.
        {"gradient_checkpointing": True, "prepare": lambda trainer: freeze_towers(trainer.model)},
        {"prepare": None},
    ),
    "tied head": ((), {"max_steps": 2}, {"callbacks": [PlainPasses()]}),
    "untied head": ((), {"max_steps": 2}, {"callbacks": [PlainPasses()], "prepare": pad}),
}


@pytest.mark.parametrize("name", [pytest.param(one, marks=SHARDED if one == "tied head" else ()) for one in TRLS])
def test_the_update_is_trls(train, models, output, name):
    silent, settings, ours = TRLS[name]
    model = name if name in models else "tiny"
    scripted = [ScriptedReward(constant=0.3, silent=silent) for _ in range(2)]
    expected = whole(train(model, GRPOTrainer, reward=scripted[0], **settings))
    reward = RewardRunner(Late(silent)) if "reward_pipeline" in ours else scripted[1]
    trainer = train(model, expected=expected, reward=reward, **settings | ours)
    if name == "untied head":
        trainer.save_model(str(output / "saved"))


@WITH_DDP
def test_each_rank_has_frequencies_of_its_own(train):
    """As in TRL, if DDP does not copy those of rank 0, whose rows are longer."""
    rollouts = [ScriptedRollouts(longest=24 - 20 * RANK) for _ in range(2)]
    trls = train("longrope", GRPOTrainer, rollouts=rollouts[0], max_steps=3, ddp_broadcast_buffers=False)
    train("longrope", expected=whole(trls), rollouts=rollouts[1], max_steps=3)


@pytest.mark.parametrize("turns", [3 * RANK, 2 + RANK])  # a rank calls no tool; other numbers of turns
def test_the_update_with_tools_is_trls(train, turns):
    settings = {"in_process": True, "dataset": problems(64), "max_completion_length": LONGEST}
    settings |= {"more": {"tools": TOOLS}, "prepare": plays(RandomTurns(turns)), "loss_type": "dapo"}
    trl = train("tools", GRPOTrainer, **settings)
    dash = train("tools", expected=whole(trl), **settings)
    name = "tools/failure_frequency"
    assert dash.state.log_history[0][name] == pytest.approx(trl.state.log_history[0][name], rel=1e-5) != 0


@ON_DDP
def test_everything_that_trl_logs_of_tools(models, output):
    check_tools_contract(models["tools"][0], output / "environments", "environments")


@pytest.mark.skipif(DEEPSPEED, reason="it cannot stream")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_update_is_that_of_streamed_groups(train, models, server, loss_type):
    """Each rank gets its groups in another order."""
    fake = server()
    watches = (Watch(), Watch())
    fake.before = lambda number: time.sleep(random.Random(f"{RANK} {number}").random() / 20)
    settings = {"vllm_server_urls": gather_object([fake.url]), "vllm_importance_sampling_correction": False}
    settings |= {"loss_type": loss_type, "max_steps": 2, "prepare": lambda trainer: fake.serve(models["tiny"][0])}
    settings["reward"] = RewardRunner(Late(()))
    plain = train(callbacks=[watches[0]], **settings)
    train(callbacks=[watches[1]], expected=whole(plain), reward_pipeline=True, **settings)
    assert len(watches[0].windows) == 2 < len(watches[1].windows)


class FailsOnRank1:
    """Every row of rank 1 fails before its first turn, so that this rank has nothing to sample."""

    def reset(self, **columns: Any) -> None:
        fail_on_rank_1()


def test_a_rank_that_samples_nothing(train, models):
    """The model itself samples, which under ZeRO-3 takes both ranks."""
    settings = {"in_process": True, "dataset": problems(64), "max_completion_length": 8, "max_steps": 2}
    trainer = train("tools", more={"environment_factory": FailsOnRank1}, **settings)
    assert [log["tools/failed_rows"] for log in trainer.state.log_history[:2]] == [0.5, 0.5]


@ON_DDP
def test_everything_that_trl_logs(tiny_model, output):
    check_contract(tiny_model, output / "clipped", SCENARIOS["clipped, with a reference"])


@WITH_DDP
def test_a_compiled_model(train, models, monkeypatch):
    """Packed passes of several samples; rank 1 runs dummies. (Under ZeRO-3 TRL's fused LM head cannot be compiled.)"""
    waits = []
    no_sync = DistributedDataParallel.no_sync
    settings = {"gradient_accumulation_steps": 2, "reward": NONE_ON_RANK_1}
    expected = whole(train("one layer", GRPOTrainer, **settings))
    monkeypatch.setattr(DistributedDataParallel, "no_sync", lambda model: waits.append(model) or no_sync(model))
    settings |= {"loaded": with_flash_stand_in(models["one layer"][0]), "max_tokens_per_microbatch": 100}
    settings |= {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = train("one layer", expected=expected, **settings)
    assert trainer.state.log_history[0]["packing/padding_free"] == 1 and waits


@pytest.mark.parametrize(
    "settings",
    [
        # KL of a rank without rows, where dropped rows leave it out
        {"reward": NONE_ON_RANK_1, "beta": 0.04, "num_iterations": 2},
        # Optimizer steps are filled in the order of arrival, another one on each rank; a checkpoint cuts a window.
        {
            "reward": RewardRunner(Late(ON_RANK_1)),
            "reward_pipeline": True,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
            **SAVED,
        },
    ],
)
def test_the_update_is_that_of_all_ranks(train, settings):
    """Not TRL's, but one that ends."""
    train(max_steps=4, **settings)


@pytest.mark.parametrize("pipeline", [True, False])
def test_one_step_ahead(train, pipeline):
    """The next window is sampled in process while rewards are awaited; one rank has no signal."""
    settings = {"in_process": True, "async_level": 1, "loss_type": "aipo", "max_completion_length": 6, "max_steps": 3}
    trainer = train(reward=RewardRunner(Late(ON_RANK_1)), reward_pipeline=pipeline, **settings)
    behind = [line["async/staleness_max"] for line in trainer.state.log_history if "async/staleness_max" in line]
    assert behind == [0, 1, 1]


@pytest.mark.parametrize("name", ["tiny", "longrope"])
def test_process_rewards(train, monkeypatch, name):
    """Values and credit with other episodes, and other numbers of passes, on each rank; rank 1 values nothing.

    A model whose RoPE depends on the longest position is valued in a loop, which takes far more passes. An estimator
    gets the rows of its rank, with sums over all ranks; `test_credit.py` compares them with the sums over all rows.
    """
    seen: list[tuple[int, float]] = []

    def noted(rewards: Any, chosen: Any) -> torch.Tensor:
        seen.append((len(rewards.valued), rewards.sum_over_ranks(torch.ones(1)).item()))
        return ESTIMATORS["grpo_process"](rewards, chosen)

    monkeypatch.setitem(ESTIMATORS, "noted", Estimator(credit=noted))
    callback = ProcessRewardCallback(
        AnswerLogProbValue(" = ", max_tokens_per_pass=60),
        estimator="noted",
        markers=lambda text: range(0, len(text), 3 + 2 * RANK),
        max_episode_tokens=8 + 4 * RANK,
    )
    settings = {"reward": ScriptedReward(constant=0.0, silent=ON_RANK_1), "callbacks": [callback], "max_steps": 2}
    trainer = train(name, **settings)
    episodes = sum(len(boundaries) - 1 for boundaries, _ in callback.last)
    assert episodes == 0 if RANK == 1 else episodes > 16
    assert seen == [(16, 2.0)] * 2
    logged = {name: value for name, value in trainer.state.log_history[0].items() if name.startswith("process/")}
    assert agreed(logged) and logged["process/episodes"] > 0
    refused("16 completions .* not a multiple of num_generations=32", train, name, num_generations=32, **settings)


def test_monte_carlo_values(train):
    """Of 7 prefixes rank 1 asks for one, but finishes half of them; each row gets the values of its own prefixes."""
    trainer = train()
    sample = trainer._generate_single_turn
    rows = []

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
    assert rows == [16, 16]
    assert values == [[10.0 * RANK + row] * len(boundaries) for row, boundaries in enumerate(asked)]


def test_unknown_log_probs(train):
    """AIPO where some rows of rank 0 take a pass, for which rank 1 runs dummies: as if they had been known."""
    settings = {"loss_type": "aipo", "aipo_delta": 1.5, "max_tokens_per_microbatch": 30}
    expected = None
    for filled in (True, False):
        rollouts = ScriptedRollouts(noise=0.7, unknown=0.0 if RANK == 1 else 0.05, filled=filled)
        trainer = train(expected=expected, rollouts=rollouts, **settings)
        expected = whole(trainer)
        assert agreed({name: value for name, value in trainer.state.log_history[0].items() if "off_policy" in name})


def test_the_entropy_bonus(train):
    """What it adds to the logged loss: rank 1 has no row, and runs dummies."""
    logs = {}
    for coefficient in (0.0, 0.5):
        settings = {"entropy_coef": coefficient, "max_tokens_per_microbatch": 30}
        logs[coefficient] = train(reward=NONE_ON_RANK_1, **settings).state.log_history[0]
    entropy = logs[0.5]["entropy"]
    assert (logs[0.0]["loss"] - logs[0.5]["loss"]) / 0.5 == pytest.approx(entropy, rel=1e-3) and entropy > 1.0


def test_silent_and_spoiled_steps(train):
    """Of AdamW's steps the second and fourth have no signal anywhere, the third a loss of NaN on one rank.

    They change nothing on any, in spite of momentum and weight decay; only the third counts as skipped. The fourth
    moves the learning-rate schedule, though DeepSpeed has held it in the third.
    """
    trainers: list[Any] = []
    snapshots: list[Ends] = []

    class Snapshot(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            snapshots.append(whole(trainers[0]))

    class SpoiledOnOneRank(DASHTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            return loss * float("nan") if RANK == 1 and self.state.global_step == 2 else loss

    settings = {"optimizer": "adamw_torch", "weight_decay": 0.1, "max_steps": 5, "max_grad_norm": 1.0}
    settings |= {"callbacks": [Snapshot()], "prepare": trainers.append, "lr_scheduler_type": "linear"}
    trainer = train("tiny", SpoiledOnOneRank, reward=ScriptedReward(constant=0.0, silent=[1, 3]), **settings)
    moved = [
        torch.stack([(after[name] - before[name]).abs().max() for name in before]).max().item()
        for before, after in itertools.pairwise(snapshots)
    ]
    assert moved[:3] == [0.0] * 3 and 0.0 < moved[3] < 1.0
    logs = trainer.state.log_history[:5]
    assert [log.get("skipped_steps") for log in logs] == [0, None, 1, None, 1], "a step without signal logs none"
    rates = [log["learning_rate"] for log in logs]
    assert rates[0] > rates[1] > rates[2] >= rates[3] > rates[4]


@pytest.mark.skipif(not DEEPSPEED, reason="a schedule of DeepSpeed's configuration")
def test_a_step_without_signal_moves_deepspeed_s_own_schedule(train):
    def configure(trainer: Any) -> None:
        plugin = trainer.accelerator.state.deepspeed_plugin
        own = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}
        plugin.hf_ds_config.config["scheduler"] = {"type": "WarmupLR", "params": own}

    settings = {"warmup_steps": 4, "max_steps": 3, "prepare": configure}
    logs = train(reward=ScriptedReward(constant=0.0, silent=[1]), **settings).state.log_history
    assert [log["learning_rate"] for log in logs[:3]] == pytest.approx([0.0, 0.25, 0.5])


@ON_DDP
def test_an_evaluation_counts_each_problem_once(train):
    """Each rank has one problem at a time, so the first of the three fills up the second batch."""
    trainer = train(
        reward=lambda prompts, completion_ids, answer, **_: [
            float(prompt.startswith("0 ") if mark < 0 else sum(ids) % 2)
            for prompt, ids, mark in zip(prompts, completion_ids, answer, strict=True)
        ],
        eval_dataset=prompts(3).remove_columns("answer").add_column("answer", [-1] * 3),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    found = next(log for log in trainer.state.log_history if "eval_loss" in log)
    names = ("eval_reward", "eval_rewards/<lambda>/mean")
    assert [found[name] for name in names] == pytest.approx([1 / 3] * 2) and agreed([found[name] for name in names])


@ON_DDP
def test_a_run_is_resumed_from_the_middle_of_a_window(train, output):
    """As if uninterrupted; where one rank lost its window, all refuse."""
    settings = {"steps_per_generation": 8, "max_steps": 2, "reward": ScriptedReward(constant=0.3), "learning_rate": 0.2}
    settings |= WITH_STATE
    end = whole(train(save_strategy="steps", save_steps=1, **settings))
    settings |= {"resume": str(output / "checkpoint-1")}
    train(expected=end, **settings)
    (output / "checkpoint-1" / "generation_window_1.pt").unlink(missing_ok=True)
    with pytest.raises((ValueError, RankFailed), match="generation_window_1.pt is missing"):
        train(**settings)


@ON_DDP
def test_the_time_limit_is_that_of_the_first_rank_s_clock(train):
    """By it the first step is the last, or none is; by the other's the opposite."""
    for limits, steps in (((0, 1e9), 1), ((1e9, 0), 2)):
        assert train(callbacks=[TimeLimitCallback(limits[RANK])], max_steps=2).state.global_step == steps


@ONCE
@ON_DDP
@pytest.mark.parametrize("is_stream", [False, True])
def test_prompts_that_are_read_ahead(tiny_model, output, is_stream):
    """Of each rank, also from a checkpoint in the second epoch."""
    from tests.walks import check, walked

    dataset = prompts(13).to_iterable_dataset() if is_stream else prompts(13)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    settings |= {"num_generations": 2, "max_steps": 5, "dataset": dataset}
    if not is_stream:
        check(tiny_model, output, **settings)
    ended = walked(tiny_model, output, save_strategy="steps", save_steps=3, level=2, **settings)
    rest = walked(tiny_model, output, resume=str(output / "checkpoint-3"), level=2, **settings)
    assert rest.seen == ended.seen[-len(rest.seen) :]


# ---------------------------------------------------------------------- dynamic sampling


class SignalOnRank0(ScriptedReward):
    """The prompts that rank 1 samples have no signal, where they are not shuffled."""

    def __call__(self, prompts: list[str], **kwargs: Any) -> list[float]:
        rewards = super().__call__(prompts, **kwargs)
        ranks = [int(prompt.split()[0]) // 4 % 2 for prompt in prompts]
        return [1.0 if rank else reward for rank, reward in zip(ranks, rewards, strict=True)]


@pytest.mark.parametrize(
    ("reward", "most", "settings"),
    [
        pytest.param(ScriptedReward(constant=0.6), 8, {"loss_type": "dapo"}, marks=ON_DDP),  # other verdicts
        (SignalOnRank0(constant=0.2), 8, {"loss_type": "grpo"}),  # all signal on a rank
        pytest.param(SignalOnRank0(constant=0.7), 2, {"loss_type": "dapo"}, marks=ON_DDP),  # not filled
    ],
)
def test_dynamic_sampling_has_trls_update(train, reward, most, settings):
    """On the groups of the window, which TRL's trainer gets as its dataset."""
    (rows,) = expected_windows(prompts(64), reward, most, 1, ranks=2)
    settings = {"shuffle_dataset": False, "reward": reward, **settings}
    trl = train(trainer_class=GRPOTrainer, rollouts=ByPrompt(), dataset=prompts(64).select(rows), **settings)
    dash = train(expected=whole(trl), rollouts=ByPrompt(), max_num_gen_batches=most, **settings)
    log = dash.state.log_history[0]
    assert agreed(log["dynamic_sampling/sampled"]) and log["dynamic_sampling/rounds"] > 1
    assert (log["dynamic_sampling/filled"] >= 1.0) == (most == 8)


@ON_DDP
@pytest.mark.parametrize(
    ("dataset", "settings", "epochs"),
    [
        (prompts(37), {"steps_per_generation": 8, "max_steps": 5}, 1),  # a queue, within a window
        (prompts(21).to_iterable_dataset(), {}, 0),  # a stream, which both ranks read together
    ],
)
def test_rounds_of_prompts(train, output, dataset, settings, epochs):
    """A run goes on as uninterrupted. A rank may have more rows of a window than the other."""
    settings = {"max_num_gen_batches": 3, "max_steps": 4, "dataset": dataset, **settings}
    settings |= {"reward": ScriptedReward(constant=0.6), "learning_rate": 0.2, **WITH_STATE}
    trainer = train(rollouts=ByPrompt(), output=output / f"rounds {epochs}", **settings, **SAVED)
    assert max(log.get("prompts/epoch", 0) for log in trainer.state.log_history) > epochs
    checkpoint = str(output / f"rounds {epochs}" / "checkpoint-3")
    train(expected=whole(trainer), rollouts=ByPrompt(), resume=checkpoint, **settings)


# ---------------------------------------------------------------------- what one rank does alone fails on both


def fail_on_rank_1(*args: Any, **kwargs: Any) -> None:
    if RANK == 1:
        raise KeyError("of rank 1")


def generating(trainer: Any) -> None:
    trainer.model.generate = fail_on_rank_1 if RANK == 1 else trainer.model.generate


def decoding(trainer: Any) -> None:
    trainer._tokenizer.batch_decode = fail_on_rank_1 if RANK == 1 else trainer._tokenizer.batch_decode


OF_RANK_1 = "KeyError: 'of rank 1'"
ALONE = [  # settings, error
    # events
    ({"callbacks": [noting("on_rollouts_sampled", fail_on_rank_1)]}, OF_RANK_1),
    # too few rewards
    (
        {"reward": lambda prompts, **kwargs: [1.0] * (len(prompts) - RANK)},
        "RewardError: The reward function",
    ),
    # rollout_func
    ({"rollouts": lambda *arguments: fail_on_rank_1() or ScriptedRollouts()(*arguments)}, OF_RANK_1),
    # generation
    ({"in_process": True, "prepare": generating}, OF_RANK_1),
    # decoding
    ({"prepare": decoding}, OF_RANK_1),
    # markers
    (
        {
            "callbacks": [ProcessRewardCallback(MonteCarloValue(1), markers=lambda text: None if RANK else [0])],
            "reward": ScriptedReward(constant=0.0),
        },
        "TypeError: 'NoneType'",
    ),
]


@ON_DDP
@pytest.mark.parametrize(("settings", "expected"), ALONE)
def test_what_one_rank_does_alone_fails_on_both(train, settings, expected):
    with pytest.raises((KeyError, ValueError, TypeError) if RANK else RankFailed) as raised:
        train(**settings)
    assert f"{raised.typename}: {raised.value}".startswith(
        expected if RANK else f"RankFailed: Rank 1 failed with {expected}"
    )


@ON_DDP
def test_a_failure_before_a_nested_agreement():
    """The other rank waits in that agreement; afterwards the ranks still meet."""
    ranks = Ranks(Accelerator())
    for _ in range(2):
        with pytest.raises(KeyError if RANK else RankFailed):
            ranks.agree(lambda: fail_on_rank_1() or ranks.agree(lambda: ranks.agree(int)))
        assert ranks.agree(lambda: ranks.agree(lambda: RANK, from_main=True)) == 0


if __name__ == "__main__":
    output, *options = sys.argv[1:]
    ended = pytest.main([__file__, "-x", "-p", "no:cacheprovider", f"--basetemp={output}/rank{RANK}", *options])
    leave(ended)
