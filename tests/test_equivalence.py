"""DASH's update is TRL's: SGD with learning rate 1, no clipping, float32, random lengths and survivors.

The largest parameter difference has to be within 1e-5 of the largest update. A random model of large weights is used
(`initializer_range=0.2`): with tiny updates one unit in the last place of a norm weight would already be 1e-5.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from tests.tiny import ScriptedReward, ScriptedRollouts, pad, parameters, prompts, relative_difference, run

TOLERANCE = 1e-5
LOSSES = ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def compare(model: str, output, **settings) -> tuple[float, float, GRPOTrainer, DASHTrainer]:
    start = parameters(AutoModelForCausalLM.from_pretrained(model))
    own = {key: settings.pop(key) for key in list(settings) if key in OWN}
    trl = run(GRPOTrainer, model, output, **settings)
    dash = run(DASHTrainer, model, output, **settings, **own)
    difference, update = relative_difference(start, parameters(trl.model), parameters(dash.model))
    return difference, update, trl, dash


OWN = ("gradient_filter_threshold", "filter_denominator", "max_tokens_per_microbatch")


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_one_step(tiny_model, tmp_path, loss_type, seed):
    difference, update, trl, dash = compare(tiny_model, tmp_path, loss_type=loss_type, rollout_seed=seed)
    assert update > 1e-3
    assert difference <= TOLERANCE
    kept = dash.state.log_history[0]["filter/kept_rows"]
    assert 0 < kept < 1, "the test means something only if rows were dropped"
    assert dash.state.log_history[0]["loss"] == pytest.approx(trl.state.log_history[0]["loss"], abs=1e-5)
    for name in ("reward", "reward_std", "completions/mean_length", "frac_reward_zero_std"):
        assert dash.state.log_history[0][name] == pytest.approx(trl.state.log_history[0][name], abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 8, "max_steps": 4},
        {"steps_per_generation": 2, "max_steps": 3},
        {"steps_per_generation": 3, "num_generations": 3, "per_device_train_batch_size": 4, "max_steps": 3},
        {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 6},  # the paper's Mini
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2, "max_steps": 2},
        {"max_tokens_per_microbatch": 60, "max_steps": 2},
        {"mask_truncated_completions": True, "max_steps": 2},
        {"scale_rewards": "none", "gradient_filter_threshold": 0.0, "max_steps": 2},
        {"gradient_checkpointing": True, "max_steps": 1},
        {"max_steps": 6, "dataset": "short"},  # an epoch that ends within an optimizer step
        {"off_policy_mask_threshold": 0.01, "num_iterations": 2, "max_steps": 2},
        {"delta": 1.5, "epsilon_high": 0.3, "num_iterations": 3, "max_steps": 3},
    ],
    ids=str,
)
def test_settings(tiny_model, tmp_path, settings):
    if settings.get("dataset") == "short":
        settings = {**settings, "dataset": prompts(6), "steps_per_generation": 1, "gradient_accumulation_steps": 4}
    difference, update, _, dash = compare(tiny_model, tmp_path, **{"learning_rate": 0.3, **settings})
    assert update > 1e-4
    assert difference <= TOLERANCE
    assert min(log.get("filter/kept_rows", 1) for log in dash.state.log_history) < 1


@pytest.mark.parametrize("silent", [range(0), range(6, 10)], ids=["signal", "none in the step after it"])
def test_the_rest_of_a_stream_joins_the_next_step(tiny_model, tmp_path, silent):
    """A stream of 6 windows in steps of 4: Transformers makes no step of the last two, and keeps their gradients."""

    class Reward(ScriptedReward):
        calls = 0

        def __call__(self, **kwargs):
            self.calls += 1
            constant = self.calls - 1 in silent
            return [1.0] * len(kwargs["prompts"]) if constant else super().__call__(**kwargs)

    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    settings = {"dataset": prompts(6).to_iterable_dataset(), "max_steps": 2, "steps_per_generation": 1}
    ends = []
    for trainer_class in (GRPOTrainer, DASHTrainer):
        for max_steps in (1, 2):
            settings |= {"reward": Reward(constant=0.3), "max_steps": max_steps}
            ends.append(parameters(run(trainer_class, tiny_model, tmp_path, **settings).model))
    difference, update = relative_difference(start, ends[1], ends[3])
    assert update > 1e-3 and difference <= TOLERANCE
    assert relative_difference(ends[0], ends[1], ends[0])[1] > 1e-3  # the second step was one


def test_padded_layout(tiny_model, tmp_path):
    """A model that cannot run padding-free: rows sorted and trimmed, the same update."""
    settings = {"model_init_kwargs": None, "max_steps": 2}
    trl = run(GRPOTrainer, tiny_model, tmp_path, **settings)
    dash = run(DASHTrainer, tiny_model, tmp_path, **settings, prepare=pad)
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    difference, update = relative_difference(start, parameters(trl.model), parameters(dash.model))
    assert update > 1e-3 and difference <= TOLERANCE
    shares = [log["packing/padding_share"] for log in dash.state.log_history if "packing/padding_share" in log]
    assert max(shares) > 0


@pytest.mark.parametrize("beta", [0.04])
def test_kl_without_dropped_rows_is_exact(tiny_model, tmp_path, beta):
    """Two steps: on the first one the KL gradient is zero, and a wrong reference would not show."""
    difference, update, *_ = compare(
        tiny_model, tmp_path, beta=beta, max_steps=2, gradient_filter_threshold=None, learning_rate=0.3
    )
    assert update > 1e-3 and difference <= TOLERANCE


def test_completions_of_one_token(tiny_model, tmp_path):
    def one_token(trainer):
        trainer.rollout_func = ScriptedRollouts(0, longest=1)

    ends = []
    for trainer_class, own in ((GRPOTrainer, {}), (DASHTrainer, {"gradient_filter_threshold": None})):
        settings = {"beta": 0.1, "max_steps": 2, "num_iterations": 2, "learning_rate": 0.3, "constant": 0.0, **own}
        ends.append(run(trainer_class, tiny_model, tmp_path, prepare=one_token, **settings))
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    difference, update = relative_difference(start, *(parameters(one.model) for one in ends))
    assert update > 1e-3 and difference <= TOLERANCE


def test_kl_with_dropped_rows_is_the_stated_approximation(tiny_model, tmp_path):
    """Exact on the first step; from the second on the KL gradient of the dropped rows is missing, and only that."""
    one = compare(tiny_model, tmp_path, beta=0.5, max_steps=1, learning_rate=0.3)
    two = compare(tiny_model, tmp_path, beta=0.5, max_steps=2, learning_rate=0.3)
    assert one[0] <= TOLERANCE
    assert 1e-4 < two[0] < 0.5


def test_the_approximate_ones_work(tiny_model, tmp_path):
    """bnpo, entropy quantile, entropy bonus: they normalise over the local batch; close, and no error."""
    for settings in (
        {"loss_type": "bnpo"},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_target": 1.0},
    ):
        difference, update, *_ = compare(tiny_model, tmp_path, **settings)
        assert update > 1e-3 and difference < 0.6, settings


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_the_update_does_not_depend_on_packing(tiny_model, tmp_path, loss_type):
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    ends = [
        parameters(run(DASHTrainer, tiny_model, tmp_path, loss_type=loss_type, **settings).model)
        for settings in ({}, {"max_tokens_per_microbatch": 40}, {"max_tokens_per_microbatch": 4000})
        for settings in ({**settings, "filter_denominator": "kept"}, settings)
    ]
    for kept in (0, 1):
        for other in ends[kept + 2 :: 2]:
            difference, update = relative_difference(start, ends[kept], other)
            assert update > 1e-3 and difference <= TOLERANCE


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_kept_denominator_scales_the_update(tiny_model, tmp_path, loss_type):
    """The average over survivors is the exact update times all / kept (rows, or tokens for dapo)."""
    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    exact = run(DASHTrainer, tiny_model, tmp_path, loss_type=loss_type)
    kept = run(DASHTrainer, tiny_model, tmp_path, loss_type=loss_type, filter_denominator="kept")
    share = exact.state.log_history[0]["filter/kept_rows" if loss_type == "grpo" else "filter/kept_tokens"]
    scaled = {name: start[name] + (value - start[name]) / share for name, value in parameters(exact.model).items()}
    difference, _ = relative_difference(start, parameters(kept.model), scaled)
    assert difference <= 1e-4 and share < 1


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_importance_sampling_correction(tiny_model, tmp_path, mode, loss_type):
    """What `use_vllm` switches on, with the log-probs of scripted rollouts in place of a sampler's."""
    if loss_type == "vespo" and mode == "sequence_mask":
        pytest.skip("TRL refuses it")

    def prepare(trainer):
        trainer.use_vllm = True
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1

    difference, update, trl, dash = compare(
        tiny_model,
        tmp_path,
        logprobs=True,
        prepare=prepare,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.05,
        loss_type=loss_type,
        max_steps=2,
        constant=0.3,
    )
    assert update > 1e-4 and difference <= TOLERANCE
    assert "sampling/importance_sampling_ratio/mean" in dash.state.log_history[0]


ADAPTERS: dict = {  # (kind, settings, whether passes are padding-free)
    "lora": (LoraConfig, {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}, True),
    "lora and whole modules": (LoraConfig, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True),
    "ia3": (IA3Config, {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}, True),
    "prompt tuning": (PromptTuningConfig, {"num_virtual_tokens": 4}, False),
    "prefix tuning": (PrefixTuningConfig, {"num_virtual_tokens": 4}, False),
    "p-tuning": (PromptEncoderConfig, {"num_virtual_tokens": 4, "encoder_hidden_size": 16}, False),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(tiny_model, tmp_path, kind):
    """Reference log-probs come from the base model, with the adapter switched off. Prompts differ in length."""
    config, options, padding_free = ADAPTERS[kind]
    settings = {"max_steps": 3, "beta": 0.1, "learning_rate": 0.3 if padding_free else 3.0}
    start: dict[str, torch.Tensor] = {}
    ends = []
    for trainer_class, own in ((GRPOTrainer, {}), (DASHTrainer, {"gradient_filter_threshold": None})):
        trainer = run(
            trainer_class,
            tiny_model,
            tmp_path,
            peft_config=config(task_type="CAUSAL_LM", **options),
            prepare=lambda trainer: start.update(parameters(trainer.model)),
            **settings,
            **own,
        )
        ends.append(parameters(trainer.model))
    difference, update = relative_difference(start, *ends)
    assert trainer.state.log_history[0]["packing/padding_free"] == padding_free
    assert update > 1e-3 and difference <= TOLERANCE


def test_per_token_advantages_reach_the_loss(tiny_model, tmp_path):
    """Advantages of shape (B, T) that repeat the outcome give the outcome's update."""
    from dash_trl import DASHCallback

    class Spread(DASHCallback):
        def on_advantages(self, args, state, control, rollouts, **kwargs):
            rollouts.advantages = rollouts.advantages.unsqueeze(1).expand(rollouts.completion_ids.shape).contiguous()

    start = parameters(AutoModelForCausalLM.from_pretrained(tiny_model))
    outcome = run(DASHTrainer, tiny_model, tmp_path)
    spread = run(DASHTrainer, tiny_model, tmp_path, callbacks=[Spread()])
    difference, update = relative_difference(start, parameters(outcome.model), parameters(spread.model))
    assert update > 1e-3 and difference <= 1e-6


def test_bf16(tiny_model, tmp_path):
    difference, update, *_ = compare(tiny_model, tmp_path, bf16=True)
    assert update > 1e-3 and difference < 0.05


def test_a_step_without_signal_changes_nothing(tiny_model, tmp_path):
    """AdamW with momentum from the first step and weight decay: the silent second step leaves the weights alone."""
    from transformers import TrainerCallback

    snapshots = []

    class Snapshot(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            snapshots.append(parameters(model))

    class SilentSecond(ScriptedReward):
        calls = 0

        def __call__(self, **kwargs):
            self.calls += 1
            return [1.0] * len(kwargs["prompts"]) if self.calls == 2 else super().__call__(**kwargs)

    trainer = run(
        DASHTrainer,
        tiny_model,
        tmp_path,
        reward=SilentSecond(constant=0.2),
        optimizer="adamw_torch",
        weight_decay=0.1,
        max_steps=3,
        max_grad_norm=1.0,
        callbacks=[Snapshot()],
    )
    first, second, third = snapshots
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)
    assert trainer.state.log_history[1]["grad_norm"] == 0.0
    assert trainer.state.log_history[1]["filter/kept_rows"] == 0.0
