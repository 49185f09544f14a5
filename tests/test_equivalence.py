"""DASH's update is TRL's: SGD with learning rate 1, no clipping, float32, random lengths and survivors.

The largest parameter difference has to be within 1e-5 of the largest update. A random model of large weights is used
(`initializer_range=0.2`): with tiny updates one unit in the last place of a norm weight would already be 1e-5.
"""

import math
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig

from dash_trl.log_probs import CorrectionInPass
from dash_trl.update import MicroBatch
from tests.doubles import NotingPasses
from tests.tiny import (
    ScriptedReward,
    ScriptedRollouts,
    assert_same_update,
    compare,
    corrects,
    load,
    pad,
    parameters,
    prompts,
    relative_difference,
    tiny_tokenizer,
)

END_OF_PROMPT = tiny_tokenizer()("= ")["input_ids"][-1:]


ALL = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
WITH_POLICY_LOSS = {"entropy_coef": 1e-9}  # TRL logs it if the coefficient is not 0


def one_token(trainer) -> None:
    trainer.rollout_func = ScriptedRollouts(0, longest=1)


TWO = [ScriptedReward(constant=0.7), ScriptedReward(seed=1, constant=0.7)]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "loss_type": "dapo",
            "learning_rate": 1.0,
            "share_prompts": False,
            "reward": TWO,
            "reward_weights": [1.0, 0.3],
            "multi_objective_aggregation": "normalize_then_sum",
        },
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "num_iterations": 2,
            "max_steps": 2,
            "reward": TWO,
            "reward_weights": [1.0, 0.3],
            "scale_rewards": "batch",
        },
        {
            "loss_type": "grpo",
            "num_iterations": 2,
            "max_steps": 2,
            **WITH_POLICY_LOSS,
            "max_tokens_per_microbatch": 4000,
        },
        {"loss_type": "dr_grpo", "steps_per_generation": 8, "max_steps": 4, "scale_rewards": "none", "prepare": pad},
        {"loss_type": "dapo", "num_iterations": 2, "max_steps": 4, "off_policy_mask_threshold": 0.01},
        {"loss_type": "cispo", "steps_per_generation": 2, "max_tokens_per_microbatch": 60, "learning_rate": 10.0},
        {"loss_type": "sapo", "steps_per_generation": 3, "num_generations": 3, "max_steps": 3},
        {
            "loss_type": "luspo",
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 4,
            "max_steps": 6,
            "learning_rate": 0.01,
        },  # Mini
        {"loss_type": "vespo", "gradient_checkpointing": True, "max_steps": 2, "mask_truncated_completions": True},
        {"prompts": 6, "steps_per_generation": 1, "max_steps": 6},  # an epoch ends within an optimizer step
        {
            "delta": 1.5,
            "epsilon_high": 0.3,
            "num_iterations": 3,
            "max_steps": 3,
            **WITH_POLICY_LOSS,
            "max_tokens_per_microbatch": 30,
        },
        # Two steps: on the first one the KL gradient is zero, and a wrong reference would not show.
        {"beta": 0.04, "max_steps": 2, "gradient_filter_threshold": None},
        {
            "beta": 0.1,
            "num_iterations": 2,
            "max_steps": 2,
            "prepare": one_token,
            "constant": 0.0,
            "gradient_filter_threshold": None,
        },
    ],
)
def test_the_update_and_the_log(train, settings):
    """Every loss that is exact, every shape of windows and steps, both layouts, and KL if no row is dropped."""
    settings = {"learning_rate": 0.3, **settings}
    is_padded = settings.get("prepare") is pad
    is_filtered = settings.get("gradient_filter_threshold", 0) is not None
    settings["dataset"] = prompts(settings.pop("prompts", 64))
    steps, trl, dash = compare(train, **settings)
    assert steps[-1][1] > 1e-4 and steps[-1][0] <= 1e-5
    logs = [log for log in dash.state.log_history if "filter/kept_rows" in log]
    assert (min(log["filter/kept_rows"] for log in logs) < 1) == is_filtered, "it means something if rows were dropped"
    assert (max(log.get("packing/padding_share", 0) for log in logs) > 0) == is_padded, "padded rows are not equal"
    one = trl.state.log_history[0]
    other = dash.state.log_history[0]
    names = ("loss", "reward", "reward_std", "completions/mean_length", "frac_reward_zero_std")
    for name in names[:-1] if "reward" in settings else names:  # of groups; TRL's is of what it divides by
        assert other[name] == pytest.approx(one[name], abs=1e-5)
    assert ("policy_loss" in one) == ("entropy_coef" in settings)
    for one, other in zip(trl.state.log_history, dash.state.log_history, strict=True):
        assert other.get("policy_loss") == pytest.approx(one.get("policy_loss"), abs=1e-5)


def test_by_default_rows_of_small_advantages_are_trained_on(train):
    """The paper's threshold, 0.1, would drop all of these."""

    def graded(completions, **kwargs):
        return [0.45, 0.55] * (len(completions) // 2)

    settings = {"reward": graded, "scale_rewards": "none", "learning_rate": 10.0}  # advantages of ±0.05
    ((difference, update),), _, dash = compare(train, **settings)
    assert update > 1e-3 and difference <= 1e-5
    assert dash.state.log_history[0]["filter/kept_rows"] == 1


@pytest.mark.parametrize("silent", [range(0), range(6, 10)])  # the second: no signal in the step after it
def test_the_rest_of_a_stream_joins_the_next_step(train, silent):
    """A stream of 6 windows in steps of 4: Transformers makes no step of the last two, and keeps their gradients."""
    reward = ScriptedReward(constant=0.3, silent=[*silent, *(10 + call for call in silent)])  # TRL's run, then ours
    settings = {"dataset": prompts(6).to_iterable_dataset(), "max_steps": 2, "steps_per_generation": 1}
    steps, *trainers = compare(train, reward=reward, **settings, **WITH_POLICY_LOSS)
    assert steps[1][1] > 1e-3 and steps[1][0] <= 1e-5
    trl, ours = (trainer.state.log_history[1] for trainer in trainers)
    assert trl["grad_norm"] > 1e-3, "the second step was one"
    assert ours["policy_loss"] == pytest.approx(trl["policy_loss"], abs=1e-6)


def test_kl_with_dropped_rows_is_the_stated_approximation(train):
    """Exact on the first step; from the second on the KL gradient of the dropped rows is missing, and only that."""
    (first, _), (second, _) = compare(train, beta=0.5, max_steps=2, learning_rate=0.3)[0]
    assert first <= 1e-5
    assert 1e-4 < second < 0.5


@pytest.mark.parametrize(
    ("settings", "near"),
    [({"loss_type": "bnpo"}, 0.6), ({"top_entropy_quantile": 0.5}, 0.6), ({"bf16": True}, 0.05)],
    ids=str,
)
def test_the_approximate_ones_work(train, settings, near):
    """The first two normalise over the local batch; close, and no error."""
    ((difference, update),), *_ = compare(train, **settings)
    assert update > 1e-3 and difference < near


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "vespo", "luspo"])
def test_packing_and_the_denominator(start, train, loss_type):
    """The update does not depend on packing; the average over survivors is the exact one times all / kept."""

    def ended(**settings) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        trainer = train(loss_type=loss_type, **settings)
        return parameters(trainer), trainer.state.log_history[0]

    exact, log = ended()
    kept, _ = ended(filter_denominator="kept", max_tokens_per_microbatch=4000)
    share = log["filter/kept_rows" if loss_type in ("grpo", "luspo") else "filter/kept_tokens"]
    scaled = {name: start[name] + (value - start[name]) / share for name, value in exact.items()}
    assert relative_difference(start, kept, scaled)[0] <= 1e-4 and share < 1
    assert_same_update(start, exact, ended(max_tokens_per_microbatch=40)[0])


CORRECTED = {
    "logprobs": True,
    "prepare": corrects,
    "constant": 0.3,
    "vllm_importance_sampling_clip_min": 0.95,
    "vllm_importance_sampling_clip_max": 1.05,
}


@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [("vespo", "token_truncate"), ("dapo", "sequence_mask"), ("grpo", "token_mask"), ("grpo", "sequence_truncate")],
)
def test_importance_sampling_correction(train, loss_type, mode):
    settings = {"vllm_importance_sampling_mode": mode, "loss_type": loss_type, "max_steps": 2}
    steps, _, dash = compare(train, **CORRECTED, **settings)
    assert steps[1][1] > 1e-4 and steps[1][0] <= 1e-5
    assert "sampling/importance_sampling_ratio/mean" in dash.state.log_history[0]


def may_draw(trainer) -> None:
    """A `prepare` for a model whose passes may differ, as far as the trainer knows. The module is never called."""
    corrects(trainer)
    trainer.model.dropout = torch.nn.Dropout(0.1)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate"])
def test_a_window_of_one_step_is_corrected_without_a_pass_of_its_own(tiny_model, train, mode):
    """Two windows per optimizer step: the update and the figures are those of a pass before training."""
    settings = {
        **CORRECTED,
        "vllm_importance_sampling_mode": mode,
        "max_steps": 2,
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 4,
    }
    found = train(NotingPasses, **settings)
    before = train(NotingPasses, **{**settings, "prepare": may_draw})
    assert found.rows[True] and before.rows[False] and not found.rows[False]
    assert_same_update(tiny_model, before, found, least=1e-4)
    for log, other in zip(found.state.log_history, before.state.log_history, strict=True):
        figures = {name: value for name, value in other.items() if name.startswith(("sampling/", "off_policy/"))}
        assert log == log | {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in figures.items()}
    assert "sampling/importance_sampling_ratio/mean" in before.state.log_history[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 2},  # Mini
        {"neftune_noise_alpha": 5.0},  # another pass draws other noise
        {"num_iterations": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 4},  # a cut may part the two
    ],
)
def test_the_sampler_is_corrected_by_a_pass_of_its_own(train, settings):
    """Where a training pass may find other log-probs than those of the weights that began the window."""
    assert train(NotingPasses, **CORRECTED, **settings).rows[False]


def test_what_a_training_pass_corrects():
    """The figures are of its own rows, not of dummy rows."""
    correction = {"mode": "sequence_mask", "clip_min": None, "clip_max": None}
    rows = SimpleNamespace(micro_batch=MicroBatch(((0, 1), (0,))), share=SimpleNamespace(first=0))
    in_pass = CorrectionInPass(correction, rank=1)
    inputs = {"sampling_per_token_logps": torch.zeros(2, 2), "pass": rows}
    log_probs = torch.tensor([[0.5, 7.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 0], [0, 0]])
    in_pass.corrected(inputs, log_probs, mask)
    ((old, _, _, ratio),) = in_pass.of_step()
    assert old.tolist() == [[0.5, 7.0]] and ratio.tolist() == [[pytest.approx(math.exp(0.5))]]


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "gaussian", "modules_to_save": ["embed_tokens"]},
        {"alora_invocation_tokens": END_OF_PROMPT},
    ],
)
def test_adapters(train, options):
    """Reference log-probs come from the base model, with the adapter switched off. Prompts differ in length."""
    padding_free = "alora_invocation_tokens" not in options
    peft_config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options)
    settings = {"max_steps": 3, "beta": 0.1, "learning_rate": 0.3 if padding_free else 3.0, "peft_config": peft_config}
    steps, _, dash = compare(train, gradient_filter_threshold=None, **settings)
    assert dash.state.log_history[0]["packing/padding_free"] == padding_free
    assert steps[2][1] > 1e-3 and steps[2][0] <= 1e-5


@pytest.mark.parametrize(
    ("adapter", "gets"),
    [
        (LoraConfig(**ALL, init_lora_weights="gaussian"), {torch.bfloat16}),
        (LoraConfig(**ALL, init_lora_weights="gaussian", use_dora=True), {torch.float32}),
        (IA3Config(**ALL, feedforward_modules=[]), set()),
    ],
)
def test_an_adapter_gets_its_inputs_uncast(adapter, gets, tiny_model, train, monkeypatch):
    """Weights and autocast in bf16, an adapter in float32: the update is the one with PEFT's casts, to the bit."""
    dtypes: set[torch.dtype] = set()

    def trained() -> dict[str, torch.Tensor]:
        def note(layer, inputs):
            if layer.training:
                dtypes.add(inputs[0].dtype)

        def prepare(trainer):
            for name, module in trainer.model.named_modules():
                if name.endswith("lora_A.default"):
                    module.register_forward_pre_hook(note)

        torch.manual_seed(0)
        more = {"loaded": load(tiny_model).bfloat16(), "bf16": True, "gradient_checkpointing": True}
        trainer = train(prepare=prepare, peft_config=deepcopy(adapter), **more)
        return parameters(trainer)

    found = trained()
    assert dtypes == gets
    monkeypatch.setattr("peft.helpers.disable_input_dtype_casting", nullcontext)
    cast = trained()
    assert (torch.float32 in dtypes) == bool(gets)
    assert all(torch.equal(value, cast[name]) for name, value in found.items())
