"""Random runs: draws settings, and compares a run with another run that must have the same result.

    trl         the update is TRL's, whatever the filter drops
    law         with learning rate 0, a window's first use finds the log-probs of the passes before it
    resumed     a run that is resumed from a checkpoint ends like one that was never interrupted
    changed     the same with one other setting, or the run says that it is another one
    evaluated   evaluations and checkpoints in between change nothing
    pipeline    rewards that are awaited group by group change nothing
    streamed    groups that are trained on while servers sample the others change nothing
    ahead       a run that samples one window ahead trains on the same prompts, also when it is resumed

A case is vacuous if its runs have nothing to compare, for instance because no row had signal. The test suite runs a
fixed number of cases with a fixed seed. As a script, this file runs cases until its time is over, on any number of
ranks, and prints how many there were of each kind:

    python tests/fuzz.py --minutes 30
    torchrun --nproc_per_node 2 tests/fuzz.py --minutes 30 --only trl resumed

A failing case is shrunk, to the first values of as many options as possible, and printed. All ranks draw the same
cases. A case fails if it fails on any rank.
"""

import argparse
import contextlib
import io
import itertools
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dash_trl import DASHConfig, DASHTrainer, RewardRunner
from dash_trl.distributed import RankFailed, Ranks
from tests.fake_server import Varied, Watch, loaded
from tests.models import DELTA
from tests.tiny import ScriptedRollouts, corrects, leave, parameters, relative_difference, run, save_tiny_model

RANK = int(os.environ.get("RANK", 0))
RANKS = int(os.environ.get("WORLD_SIZE", 1))
CASES = 2  # number of cases of each kind in the test suite
SAME_UPDATE = 1e-4  # tolerance relative to the largest update: rounding depends on the rows of a pass, in each step
IN_FLOAT32 = 1e-3  # the same for what computes in float32 in a float64 model, after some steps
ROUNDED = 4 * torch.finfo(torch.float32).eps  # rounding of log-probs, and of norm weights, which are about 1
MEASURABLE = 1e-4, 10.0  # range of an update's size; above, the run has diverged, and rounding errors with it
OFF_POLICY = ("decoupled_ppo", "aipo")
LOSSES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo", "bnpo", *OFF_POLICY)
PATIENCE = 120  # seconds that a rank waits for the others, in a collective too
KINDS: dict[str, Any] = {}  # name → its options, and a function that compares the runs of a case
SAID = io.StringIO()  # the warnings of the package
logging.getLogger("dash_trl").addHandler(logging.StreamHandler(SAID))


# ------------------------------------------------------------------------------------------------------- rollouts


def problems(count: int) -> Dataset:
    """Prompts of several tokens, of one token, and with an end token."""
    rows = [[f"{i} + {3 * i} = ", chr(33 + i % 90), f"{i}<|im_end|>{i} = "][i % 3] for i in range(count)]
    return Dataset.from_dict({"prompt": rows})


class Rollouts(ScriptedRollouts):
    """Rollouts that depend only on the micro-step and the prompts; the environment may have written some tokens."""

    masked = False

    def __call__(self, prompts, trainer):
        self.steps.add(trainer.state.global_step)
        self.random.seed(f"{trainer._step} {trainer.model.training} {prompts}")
        output = super().__call__(prompts, trainer)
        if self.masked:
            output["env_mask"] = [
                [int(place % 4 != 1) for place in range(len(ids))] for ids in output["completion_ids"]
            ]
        return output


def right(completion_ids: list[int], prompt: str) -> float:
    """0 or 1. Some prompts are solved by all completions."""
    return 1.0 if prompt.startswith("1") else float(sum(completion_ids) % 2)


def at_times(completion_ids: list[int], prompt: str) -> float | None:
    return None if sum(completion_ids) % 7 == 0 else sum(completion_ids) % 5 / 4


def failing(completion_ids: list[int], prompt: str) -> float:
    return 1 / (sum(completion_ids) % 11)


def slow(prompt: str) -> float:
    """0 after a random delay, so that groups are not scored in order."""
    time.sleep(random.SystemRandom().random() / 20)
    return 0.0


FUNCTIONS = [(right,), (right, at_times), (right, at_times, failing)]


# ------------------------------------------------------------------------------------------------------- settings

# Option → its values, in all kinds. It keeps the first if `DASHConfig` refuses the drawn one beside those before.
OPTIONS: dict = dict(
    reward_pipeline=(False, True),
    per_device_train_batch_size=(4, 2, 3, 6),
    num_generations=(2, 4, 3),
    steps_per_generation=(2, 1, 3, 4, 6),
    gradient_accumulation_steps=(2, 1, 3, 4, 6),
    num_iterations=(1, 1, 2, 3),
    max_num_gen_batches=(1, 3),
    shuffle_dataset=(False, True),
    stream=(False, True),
    cuts=((), (), (2,), (3,), (1, 3)),  # the optimizer steps after which an epoch is ended
    windows=(1, 4, 1.5, 2.7),  # of an epoch
    steps=(2, 3, 4),  # after those of the first window
    at=range(30),  # the optimizer step whose checkpoint is resumed
    # the model
    family=(
        {},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"model_type": "qwen3_5_text", "head_dim": 32, **DELTA},
        {
            "model_type": "gemma2",
            "head_dim": 8,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    rope=("default", "linear", "yarn", "llama3", "dynamic", "longrope"),
    context=(512, 16),
    attention=("sdpa", "eager"),
    dtype=(torch.float32,),
    lora=(None, "lora", "dora"),
    attention_dropout=(0.0, 0.3),
    neftune_noise_alpha=(None, 5.0),
    # rewards and advantages
    functions=FUNCTIONS,
    advantage_estimator=("grpo", "grpo", "rloo", "grpo_passk"),
    scale_rewards=("group", "batch", "none"),
    multi_objective_aggregation=("sum_then_normalize", "normalize_then_sum"),
    gradient_filter_threshold=(0.0, 0.1, None),
    filter_denominator=("all", "kept"),
    mask_truncated_completions=(False, True),
    masked=(False, True),
    # the loss
    loss_type=LOSSES,
    beta=(0.0, 0.1),
    importance_sampling_level=("token", "sequence"),
    epsilon=(0.2, 3e-4),
    epsilon_high=(None, 4e-4, 2.0),
    delta=(None, 1.3),
    off_policy_mask_threshold=(None, 0.01),
    corrected=(False, True),
    vllm_importance_sampling_mode=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    vllm_importance_sampling_clip_max=(1.05,),
    temperature=(1.0, 0.7, 1.4),
    # passes and steps
    max_tokens_per_microbatch=(None, 40, 400),
    share_prompts=(True, False),
    pad_to_multiple_of=(None, 8),
    optim=("sgd", "adamw_torch"),
    learning_rate=(0.1, 0.02),
    lr_scheduler_type=("constant", "linear", "cosine"),
    max_grad_norm=(0.0, 1.0),
    # between steps
    save_strategy=("no",),
    eval_strategy=("no",),
    within=(False,),  # True = a checkpoint is saved within a step
)
# With these, the order of passes matters for rounding only, which Adam and large steps would magnify.
ANY_ORDER: dict = dict(attention_dropout=(0.0,), neftune_noise_alpha=(None,), optim=("sgd",), learning_rate=(0.02,))
ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 1.7, 1.4, 1.1]}
CHANGES = [
    {name: OPTIONS[name][-1]}
    for name in (
        "num_generations",
        "steps_per_generation",
        "gradient_accumulation_steps",
        "num_iterations",
        "shuffle_dataset",
        "loss_type",
        "beta",
        "max_tokens_per_microbatch",
        "share_prompts",
    )
]


def case_of(drawn: dict, options: dict) -> dict:
    """Return the settings of a run of at least two windows."""
    case = {name: values[0] for name, values in options.items()}
    for name, value in drawn.items():
        other = case | {name: value}
        known = {one: other[one] for one in other if one in DASHConfig.__dataclass_fields__}
        with contextlib.suppress(ValueError):
            DASHConfig("", use_cpu=True, max_steps=1, **known)
            case = other
    if case["reward_pipeline"] or case["within"]:
        case |= {name: value for name, (value,) in ANY_ORDER.items() if value in options[name]}
    if case["reward_pipeline"] and len(options["dtype"]) == 1 and "in_process" not in options:
        # Rounding grows with each step. Eager attention computes its softmax in float32, where the least number of
        # float64 is -inf: NaN for padding.
        case |= {"dtype": torch.float64, "attention": "sdpa"}
    if case["loss_type"] == "vespo":  # needs a ratio for each token
        case["vllm_importance_sampling_mode"] = "token_mask"
    if case["loss_type"] == "luspo":  # sums tokens: after a large step, rounding grows 20 times with each step
        case["learning_rate"] /= 10
    if "linear_num_key_heads" in case["family"]:  # this rule's rounding grows up to 60 times with each step
        case["steps"] = min(case["steps"], 2)
    per_window = case["steps_per_generation"]
    per_step = case["gradient_accumulation_steps"]
    every = per_window * case["num_iterations"]  # micro-steps of a window
    window = RANKS * case["per_device_train_batch_size"] * per_window // case["num_generations"]
    count = int(window * case["windows"])
    steps = every // per_step + case["steps"]
    epoch = count // window * every  # micro-steps
    last = per_step * steps - 1
    cuts = [step for step in case["cuts"] if step < steps][: last // epoch]  # each may cost an epoch
    at = 1 + case["at"] % (last // every * every // per_step)  # a window begins after it
    return case | {
        "prompts": count,
        "stream": case["stream"] and epoch >= per_step,  # else it ends before the first step
        "max_steps": steps + len(cuts) * -(-epoch // per_step),
        "cuts": cuts,
        "at": max({*range(at + 1)} - {*cuts}),
        "within": case["within"] and not cuts,  # after a cut, a step that is repeated draws another epoch
    }


class Between(TrainerCallback):
    """Ends the epoch after some optimizer steps, and saves a checkpoint within an optimizer step."""

    def __init__(self, case, rollouts):
        self.case = case
        self.rollouts = rollouts

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        step = state.global_step
        if self.case["within"] and self.case["at"] == step and step not in self.rollouts.steps:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step in self.case["cuts"]


class Diverged(Exception):
    """The first run of a case has ended, because its gradients are not finite any more."""


def trained(kind: Any, case: dict, folder: Path, **others: Any) -> Any:
    """Trains and returns the trainer, with the weights of before as the attribute `start`."""
    own = case | others
    rollouts = Rollouts(noise=0.2 if own["corrected"] or own["loss_type"] in OFF_POLICY else None)
    rollouts.masked = own["masked"]
    rollouts.steps = set()
    rewards = RewardRunner([*own["functions"]], max_concurrency=256 if slow in own["functions"] else 1)
    adapter = LoraConfig(
        target_modules=["q_proj"], lora_dropout=own["attention_dropout"], use_dora=own["lora"] == "dora"
    )
    between = Between(own, rollouts)
    data = problems(own["prompts"])
    known = {*(GRPOConfig if kind is GRPOTrainer else DASHConfig).__dataclass_fields__, "resume", "in_process"}

    def prepare(trainer):
        trainer.start = parameters(trainer.model)
        between.trainer = trainer
        if own["corrected"]:
            corrects(trainer)
        if "server" in own:
            loaded.cache_clear()  # other cases have other models in this folder
            own["server"].serve(model)

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model = save_tiny_model(
                folder / "model",  # rank 0 alone saves it
                rope_parameters=ROPE | {"rope_type": own["rope"]},
                max_position_embeddings=own["context"],
                attention_dropout=own["attention_dropout"],
                **own["family"],
            )
            PartialState().wait_for_everyone()
            torch.manual_seed(0)
            done = run(
                kind,
                model,
                folder,
                loaded=model,
                model_init_kwargs={"dtype": own["dtype"], "attn_implementation": own["attention"]},
                peft_config=adapter if own["lora"] else None,
                rollouts=None if {"in_process", "server"} & {*own} else rollouts,
                reward=rewards.rewards if kind is GRPOTrainer else rewards,
                dataset=data.to_iterable_dataset() if own["stream"] else data,
                eval_dataset=problems(3 * RANKS),
                callbacks=[between, *own.get("callbacks", ())],
                prepare=prepare,
                ddp_timeout=PATIENCE,
                save_steps=1,
                eval_steps=1,
                per_device_eval_batch_size=12,
                **{name: own[name] for name in own if name in known},
            )
    except RuntimeError as error:
        if "nothing is learned any more" in str(error) and not case.get("trained"):
            raise Diverged from error
        if "'failing' failed on every completion of the first batch" in str(error):  # two rows; of a resumed run, too
            raise Diverged from error
        raise
    case["trained"] = True
    return done


def tolerance(case: dict) -> float:
    """Return the tolerance for `same_update` if rows may share other passes. A delta rule computes in float32."""
    is_rounded = case["attention"] == "eager" or "linear_num_key_heads" in case["family"]
    return IN_FLOAT32 if is_rounded else SAME_UPDATE


def same_update(one: Any, other: Any, allowed: float, after: int = 0) -> str:
    """Asserts that two trainers have made the same update.

    Returns:
        Why the case is vacuous, such as no gradient in the steps after step `after`; "" if it is not.
    """
    difference, update = relative_difference(one.start, parameters(one.model), parameters(other.model))
    least, most = MEASURABLE
    logs = [log for log in other.state.log_history if "loss" in log and log["step"] > after]
    if allowed:
        allowed += ROUNDED / max(update, least)
    assert difference <= allowed or allowed and not least < update < most, (difference, update)
    if update <= least or not any(log["grad_norm"] > 0 for log in logs):
        return "no update"
    return "" if update < most else "diverged"


def same_figures(one: Any, other: Any, close: float) -> None:
    """Asserts that two trainers have logged the same, but for times and what depends on which rows share a pass."""
    left_out = ("time", "per_second", "eval", "packing", "clip_ratio/low_min", "clip_ratio/high_max")
    logs = [
        {name: value for name, value in log.items() if not any(part in name for part in left_out)}
        for trainer in (one, other)
        for log in trainer.state.log_history
        if "loss" in log
    ]
    half = len(logs) // 2
    assert logs[half:] == [pytest.approx(log, rel=close, abs=close, nan_ok=True) for log in logs[:half]]


# --------------------------------------------------------------------------------------------------------- kinds

# Without dynamic RoPE, whose passes depend on the longest one before, also of an evaluation or before a checkpoint.
FORGETFUL = tuple(one for one in OPTIONS["rope"] if one != "dynamic")


def kind(name: str, **options: Any) -> Any:
    """Registers a function that compares the runs of a case. It returns why the case is vacuous, "" if it is not."""
    return lambda compare: KINDS.setdefault(name, (OPTIONS | options, compare))[1]


@kind(
    "trl",
    **ANY_ORDER,
    reward_pipeline=(False,),
    max_num_gen_batches=(1,),
    rope=OPTIONS["rope"][: 4 if RANKS > 1 else 6],  # the last two depend on the width, in TRL on each rank's own
    dtype=(torch.float64,),  # rounding grows with each step, with luspo from 1e-6 to 1.3e-4 of the update in 11 steps
    functions=FUNCTIONS[:2],  # TRL counts a failure as "not applicable"
    advantage_estimator=("grpo",),
    gradient_filter_threshold=(0.0, None),
    filter_denominator=("all",),
    loss_type=LOSSES[:-3],
)
def trl(case: dict, folder: Path) -> str:
    # A dropped row has lost its KL term, and dynamic RoPE does not remember it.
    if case["beta"] or case["rope"] == "dynamic":
        case["gradient_filter_threshold"] = None
    if case["attention"] == "eager":  # in float64, its softmax of padding is NaN
        case["dtype"] = torch.float32
    # Log-probs are float32, whose rounding moves ratios over the bounds of a narrower range.
    least = 0.2 if tolerance(case) == IN_FLOAT32 else 0.02
    case["epsilon"] = max(case["epsilon"], least)
    if (case["epsilon_high"] or 0) < least:
        case["epsilon_high"] = None
    both = (trained(kind, case, folder) for kind in (GRPOTrainer, DASHTrainer))
    return same_update(*both, tolerance(case))


@kind(
    "law",
    **ANY_ORDER | {"learning_rate": (0.0,)},
    dtype=(torch.float32, torch.bfloat16),
    bf16=(False, True),
    loss_type=LOSSES[:-2],
    corrected=(False,),  # log-probs for it take passes of their own, of which dynamic RoPE remembers the longest
    # Where an epoch or a stream ends within a window, a later step of the window is shorter than planned.
    stream=(False,),
    cuts=((),),
)
def law(case: dict, folder: Path) -> str:
    if case["lora"] == "dora":  # its magnitudes round what the reference computes without it
        case["beta"] = 0.0
    found: list[float] = []

    class Noting(DASHTrainer):
        def _compute_loss(self, model, inputs):
            self.known = [inputs[name] for name in ("old_per_token_logps", "ref_per_token_logps") if name in inputs]
            return super()._compute_loss(model, inputs)

        def per_token_loss(self, log_probs, old_log_probs, advantages, mask):
            if self._step % self.args.window_batches < self.args.steps_per_generation:
                found.extend(((log_probs - one) * mask).abs().max().item() for one in self.known)

    logs = trained(Noting, case, folder).state.log_history
    if case["num_iterations"] == 1:
        found += [log[name] for log in logs for name in ("kl", "clip_ratio/region_mean") if name in log]
    assert not any(found), max(found)
    return "" if found else "nothing to compare"


@kind(
    "changed",
    **ANY_ORDER,
    save_strategy=("steps",),
    change=CHANGES,
    rope=FORGETFUL,
)
@kind("resumed", save_strategy=("steps",), within=(False, True), change=({},), rope=FORGETFUL)
def resumed(case: dict, folder: Path) -> str:
    at = case["at"]
    change = case["change"]
    if not at:
        return "no checkpoint"
    whole = trained(DASHTrainer, case, folder / "whole")
    said = SAID.tell()
    checkpoint = folder / "whole" / f"checkpoint-{at}"
    step = torch.load(checkpoint / f"generation_window_{RANK}.pt", weights_only=True)["step"]
    if change and step % (case["steps_per_generation"] * case["num_iterations"]) == 0:
        return "between windows"  # where settings may change
    try:
        rest = trained(DASHTrainer, case | change, folder / "rest", resume=str(checkpoint))
    except (ValueError, RankFailed) as error:
        assert any(name.replace("shuffle_dataset", "shuffle_seed") in str(error) for name in change)
        return ""
    if RANK or any(text in SAID.getvalue()[said:] for text in (*change, "was saved with")):
        return ""
    assert rest.state.global_step == whole.state.global_step
    return same_update(whole, rest, tolerance(case) if change or case["reward_pipeline"] else 0.0, after=at)


class WithoutDraws(DASHTrainer):
    """Its evaluations draw no random numbers."""

    def evaluate(self, *args, **kwargs):
        with torch.random.fork_rng():
            return super().evaluate(*args, **kwargs)


@kind("evaluated", saves=("no", "steps"), stream=(False,), cuts=((),), rope=FORGETFUL)
def evaluated(case: dict, folder: Path) -> str:
    others = {"eval_strategy": "steps", "save_strategy": case["saves"]}
    plain, other = (trained(WithoutDraws, case, folder, **one) for one in ({}, others))
    same, close = (tolerance(case), 1e-3) if case["reward_pipeline"] else (0.0, 0.0)
    vacuous = same_update(plain, other, same, after=1)
    if close and case["saves"] == "steps":  # a checkpoint waits for a window: its figures are logged sooner
        return vacuous
    same_figures(plain, other, close)
    return vacuous


class Parts(Watch):
    """Counts the parts of windows, too."""

    parts = 0

    def on_rewards(self, *args, **kwargs):
        self.parts += 1


@kind(
    "pipeline",
    **ANY_ORDER,
    reward_pipeline=(True,),
    steps_per_generation=(2, 1, 3, 6),
    gradient_accumulation_steps=(6,),  # in Mini the order of arrival decides which optimizer step takes a row
    functions=[(*one, slow) for one in FUNCTIONS],
    stream=(False,),
)
def pipeline(case: dict, folder: Path, **others: Any) -> str:
    watches = Parts(), Parts()
    together, by_group = (
        trained(DASHTrainer, case, folder, callbacks=[watch], reward_pipeline=piped, **others)
        for piped, watch in enumerate(watches)
    )
    vacuous = same_update(together, by_group, tolerance(case))
    same_figures(together, by_group, 1e-3)
    return vacuous or ("" if watches[1].parts > watches[0].parts else "all came at once")


@kind(
    "streamed",
    **ANY_ORDER | {"learning_rate": (0.1,)},
    reward_pipeline=(True,),
    steps_per_generation=(2, 1, 3, 6),
    gradient_accumulation_steps=(6,),
    max_num_gen_batches=(1,),
    family=OPTIONS["family"][:2],
    lora=(None,),
    off_policy_mask_threshold=(None,),  # the server's log-probs are made up
    vllm_importance_sampling_correction=(True, False),
    corrected=(False,),
    masked=(False,),
    stream=(False,),
)
def streamed(case: dict, folder: Path) -> str:
    server = Varied()
    server.log_prob = -5.5
    server.before = lambda number: slow("")  # groups are not sampled in order
    try:
        return pipeline(case, folder, server=server, vllm_server_urls=gather_object([server.url]))
    finally:
        server.stop()


@kind(
    "ahead",
    async_level=(1,),
    max_num_gen_batches=(1,),
    stream=(False,),
    cuts=((),),  # a queue goes on with the rest of an epoch that was cut
    max_completion_length=(3, 1, 6),
    corrected=(False,),
    masked=(False,),
    save_strategy=("steps",),
    eval_strategy=("no", "steps"),
    in_process=(True,),
)
def ahead(case: dict, folder: Path) -> str:
    on_policy = {"async_level": 0, "reward_pipeline": False}
    on_policy |= {"loss_type": "dapo"} if case["loss_type"] in OFF_POLICY else {}

    def windows(folder, **others):
        watch = Watch()
        done = trained(DASHTrainer, case, folder, callbacks=[watch], **others)
        assert all(weights.isfinite().all() for weights in done.model.parameters())
        return [(window.step, window.prompts) for window in watch.windows]

    seen = windows(folder / "ahead")
    at = case["at"]
    assert seen == windows(folder / "plain", **on_policy)
    rest = windows(folder / "rest", resume=f"{folder}/ahead/checkpoint-{at}")
    assert rest == [window for window in seen if window[0] >= at]
    return "" if len(seen) > 1 and rest else "no window"


def outcome(kind: str, case: dict, folder: Path) -> tuple[str, str]:
    """Return why a case is vacuous, and what it raises on any rank; it ends the process if others hang."""
    ranks = Ranks(PartialState(cpu=True), PATIENCE)
    vacuous = ""
    said = ""
    try:
        vacuous = ranks.agree(lambda: KINDS[kind][1](dict(case), folder))
    except Diverged:
        vacuous = "diverged"
    except Exception:  # whatever it is
        said = f"Rank {RANK}: {traceback.format_exc()}"
    try:
        ranks.gather_object("")
    except Exception:  # such as an UnpicklingError
        print(f"{said}\nRank {RANK} ends, since the ranks are not in step; not shrunk: {kind} {case}", flush=True)
        leave(1)
    shutil.rmtree(folder, ignore_errors=True)
    return vacuous, said


def check(kind: str, count: int, seed: int, folder: Path, counts: Counter[tuple[str, str]]) -> str:
    """Runs cases of a kind, and counts them by why they were vacuous; returns what the first failure says, shrunk."""
    options, _ = KINDS[kind]
    chance = random.Random(f"{kind} {seed}")
    for number in range(count):
        drawn = {name: chance.choice(values) for name, values in options.items()}
        vacuous, said = outcome(kind, case_of(drawn, options), folder / f"{kind} {number}")
        counts[kind, vacuous] += 1
        for name, values in options.items() if said else ():
            smaller = drawn | {name: values[0]}
            _, found = outcome(kind, case_of(smaller, options), folder / name) if smaller != drawn else ("", "")
            drawn, said = (smaller, found) if found else (drawn, said)
        if said:
            unusual = {name: value for name, value in drawn.items() if value != options[name][0]}
            return f"{said}\n{kind}: {unusual}"
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_random_runs(kind, tiny_model, tmp_path):
    said = check(kind, CASES, 0, tmp_path, Counter())
    assert not said, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks(PartialState(cpu=True, timeout=timedelta(seconds=PATIENCE)), PATIENCE)
    folder = Path(ranks.agree(tempfile.mkdtemp, main_only=True))
    end = time.monotonic() + 60 * args.minutes
    counts = Counter[tuple[str, str]]()
    for seed in itertools.count(args.seed):
        failures = [check(kind, 10, seed, folder, counts) for kind in args.only]
        print(*failures, f"Rank {RANK}, after seed {seed}: {dict(sorted(counts.items()))}", sep="\n", flush=True)
        if any(failures) or not ranks.agree(lambda: time.monotonic() < end, main_only=True):
            break
    return any(failures)


if __name__ == "__main__":
    leave(main())
