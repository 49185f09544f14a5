"""Runs beside the usual settings, each compared with TRL's or with a run that has to end alike."""

import math
import threading
from collections import Counter
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from kernels import Mode
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers.integrations import hub_kernels
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, RewardRunner
from tests.doubles import Evaluates, SaveEarly, SeededRollouts, odd
from tests.tiny import (
    ScriptedReward,
    assert_same_update,
    load,
    on_varlen,
    packed_by_mask,
    parameters,
    prompts,
    refusal,
    refused,
    save_tiny_model,
    with_flash_stand_in,
)


def long(completion, completion_ids):
    return float(len(completion_ids))


@pytest.fixture
def small_model(tmp_path):
    return save_tiny_model(tmp_path / "small", num_hidden_layers=1)


class Rope(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple:
        return q.detach(), k.detach()


class Norm(torch.nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.detach()


def test_kernels_of_the_hub_without_a_backward_pass_do_not_train(tiny_model, train, monkeypatch):
    """That of RoPE, which is mapped for training, and those for inference, which the trial of a run takes."""
    rope, norm = (Mock(**{"load.return_value": kind}) for kind in (Rope, Norm))
    mapping = {"rotary_pos_emb": {"cpu": rope}, "RMSNorm": {"cpu": {Mode.INFERENCE: norm}}}
    monkeypatch.setattr(hub_kernels, "_KERNEL_MAPPING_CACHE", mapping)
    plain, fused = (train(loaded=load(tiny_model, use_kernels=use)) for use in (False, True))
    assert fused.model.use_kernels and fused.state.log_history[0]["packing/padding_free"] == 1
    assert all(one.equal(other) for one, other in zip(plain.model.parameters(), fused.model.parameters(), strict=True))


# ------------------------------------------------------------------------------------------- beside the same run of TRL


def one_sample_when_traced(*args, **settings):
    """Attention that keeps packed samples apart, but in a trace."""
    if torch.compiler.is_compiling() and "cu_seq_lens_q" in settings:
        settings["cu_seq_lens_q"] = settings["cu_seq_lens_k"] = settings["cu_seq_lens_q"][[0, -1]]
    return packed_by_mask(*args, **settings)


@pytest.mark.parametrize("backend", ["EAGER", pytest.param("INDUCTOR", marks=pytest.mark.exhaustive)])
def test_a_compiled_model(train, small_model, monkeypatch, backend):
    """By the variable that `accelerate launch --dynamo_backend` sets, as `torch_compile` does."""
    settings = {"gradient_accumulation_steps": 2}
    plain = train(GRPOTrainer, model=small_model, **settings)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    for attention, on_gpu in ((None, False), (None, True), (packed_by_mask, False), (one_sample_when_traced, False)):
        torch.compiler.reset()  # what the runs before have traced counts towards its limit
        loaded = attention and with_flash_stand_in(small_model, attention)  # `None`: SDPA
        with on_varlen(torch.float32) if on_gpu else nullcontext():
            compiled = train(model=small_model, loaded=loaded, max_tokens_per_microbatch=150, **settings)
        assert_same_update(small_model, plain, compiled)
        assert compiled.state.log_history[0]["packing/padding_free"] == (on_gpu or attention is packed_by_mask)


def test_the_model_that_is_given_is_the_reference(tiny_model, train):
    """Not the model that its config names; in its dtype, whatever `model_init_kwargs` says, and without dropout."""
    given = load(tiny_model, dtype="bfloat16").train()
    with torch.no_grad():
        given.lm_head.weight.neg_()
    before = parameters(given)
    settings = {"loaded": given, "beta": 0.1, "learning_rate": 0.0, "model_init_kwargs": {"dtype": "float32"}}
    trainer = train(**settings)
    assert trainer.state.log_history[0]["kl"] == 0.0 and not trainer.ref_model.training
    assert all(torch.equal(value, before[name]) for name, value in trainer.ref_model.named_parameters())


def test_the_adapter_that_training_began_with_is_the_reference(train, tiny_model, tmp_path):
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(load(tiny_model), adapter).save_pretrained(tmp_path / "adapter")

    def trained(kind, **own):
        base = load(tiny_model)
        model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)  # TRL copies it to "ref"
        before = parameters(model)
        settings = {"beta": 0.2, "max_steps": 2, "learning_rate": 0.3, **own}
        return before, parameters(train(kind, loaded=model, **settings))

    before, plain = trained(GRPOTrainer)
    _, ours = trained(DASHTrainer, gradient_filter_threshold=None)
    assert_same_update(before, plain, ours)
    saving = {"save_strategy": "steps", "save_steps": 1, "rollouts": SeededRollouts()}
    _, whole = trained(DASHTrainer, **saving)
    _, rest = trained(DASHTrainer, **saving, resume=tmp_path / "checkpoint-1")  # has a folder for "ref"
    assert_same_update(before, whole, rest)


# ---------------------------------------------------------------------------------------------- rewards that come later


class LaterTokensOfSomeGroups(DASHCallback):
    per_group = True

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        if rollouts.group[0] % 2:
            tokens = torch.arange(rollouts.completion_ids.shape[1])
            rollouts.advantages = rollouts.advantages.unsqueeze(1) * tokens / 10


@pytest.mark.parametrize(
    ("at", "settings"),
    [
        # Saved within the window's last step, whose rows it holds.
        (3, {"rollouts": SeededRollouts(), "callbacks": [SaveEarly(3)]}),
        # It holds four of the five groups, so that both kinds of credit are in it.
        (
            2,
            {
                "callbacks": [LaterTokensOfSomeGroups()],
                "gradient_filter_threshold": None,
                "steps_per_generation": 5,
                "max_steps": 5,
                "save_strategy": "steps",
                "save_steps": 2,
            },
        ),
    ],
)
def test_a_mini_run_is_resumed(start, train, tmp_path, at, settings):
    shape = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 4, "learning_rate": 0.1}
    settings = {**shape, "reward": RewardRunner(odd), "reward_pipeline": True, **settings}
    whole = train(**settings)
    rest = train(output=tmp_path / "rest", resume=tmp_path / f"checkpoint-{at}", **settings)
    assert_same_update(start, whole, rest)


def test_a_failure_while_a_checkpoint_waits_leaves_none(train, tmp_path):
    """Half of one would be what `resume_from_checkpoint=True` picks."""
    stepped = threading.Event()

    def late(completion, completion_ids, prompt):
        if not prompt.startswith("0"):  # all groups but the one that the first optimizer step takes
            stepped.wait(60)
        return odd(completion, completion_ids)

    class Steps(DASHCallback):
        per_group = True

        def on_optimizer_step(self, *args, **kwargs):
            stepped.set()

        def on_rewards(self, *args, **kwargs):
            if stepped.is_set():
                raise RuntimeError("a failure")

    refused(
        "a failure",
        train,
        error=RuntimeError,
        reward=RewardRunner(late),
        reward_pipeline=True,
        callbacks=[Steps()],
        shuffle_dataset=False,
        steps_per_generation=4,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    assert stepped.is_set() and not (tmp_path / "checkpoint-1").exists()


@pytest.mark.parametrize(("order", "piped"), [((1, 0), False), ((1,), True), ((1, 0, 1), True)])
def test_columns_and_weights_are_those_of_reward_funcs(start, train, order, piped):
    """What a trainer has of a runner is called once for each completion, whatever its place, and nothing else is."""
    calls = Counter()
    functions = [odd, long]

    def noted(number):
        def reward(completion, completion_ids):
            calls[number] += 1
            return functions[number](completion, completion_ids)

        return reward

    def trls(function):
        return lambda completion_ids, **_: [function(None, ids) for ids in completion_ids]

    settings = {"reward_weights": [0.25, 1.0, 0.5][: len(order)]}
    rewards = RewardRunner([noted(0), noted(1)]).rewards
    one = train(reward=[rewards[i] for i in order], reward_pipeline=piped, **settings)
    other = train(GRPOTrainer, reward=[trls(functions[i]) for i in order], **settings)
    assert_same_update(start, one, other)
    assert calls == dict.fromkeys(order, 16)


# ------------------------------------------------------------------------------- what the trainer asks of the libraries


def test_a_gradient_that_deepspeed_applied_though_it_is_not_finite(train, monkeypatch):
    trainer = train()
    monkeypatch.setattr(trainer.ranks, "steps_in_backward", True)
    refused(
        "DeepSpeed applied a gradient that is not finite",
        trainer._get_grad_norm,
        trainer.model,
        math.nan,
        error=RuntimeError,
    )


@pytest.mark.parametrize("event", ["on_advantages", "on_pre_optimizer_step", "on_step_end"])
def test_evaluations_within_a_step(train, event):
    """The figures of the step are logged, and those of the datasets by their names; each dataset is read by itself."""
    callback = Evaluates(event)
    seen = []

    def reward(prompts, log_metric, **_):
        log_metric("measured", len(prompts))
        seen.append({*prompts})
        return [float(len(one)) + row % 2 for row, one in enumerate(prompts)]

    easy = prompts(4)
    hard = prompts(64).select(range(20, 24))
    trainer = train(
        reward=reward,
        callbacks=[callback],
        prepare=callback.prepare,
        eval_dataset={"easy": easy, "hard": hard},
        max_steps=2,
        per_device_eval_batch_size=16,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )
    log = trainer.state.log_history
    assert [one["step"] for one in log if {"reward", "grad_norm", "measured"} <= one.keys()] == [1, 2]
    assert not any("eval_reward" in one for one in log)
    assert [one["eval_easy_reward"] for one in log if "eval_easy_reward" in one] == [len("0 + 0 = ") + 0.5] * 2
    assert [one["eval_hard_reward"] for one in log if "eval_hard_reward" in one] == [len("20 + 60 = ") + 0.5] * 2
    for dataset in (easy, hard):
        assert "test_reward" in trainer.evaluate(dataset, metric_key_prefix="test")
        assert seen[-1] == {*dataset["prompt"]}


def test_an_evaluation_without_a_scored_row_finds_no_best_model(train):
    trainer = train(
        reward=lambda prompts, **_: [None if one == "0 + 0 = " else row % 2 for row, one in enumerate(prompts)],
        dataset=prompts(64).select(range(1, 64)),
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="eval_reward",
        per_device_eval_batch_size=16,
    )
    assert trainer.state.log_history[1]["eval_reward"] is None and trainer.state.best_model_checkpoint is None


def test_what_cannot_be_saved_is_refused_before_the_first_step(train, tmp_path):
    for name, change in (
        (
            "model.generation_config",
            lambda trainer: trainer.model.generation_config.update(temperature=0.6, do_sample=False),
        ),
        ("model.config", lambda trainer: setattr(trainer.model.config, "own", print)),
        ("processing_class", lambda trainer: trainer.processing_class.init_kwargs.update(own=print)),
        ("args", lambda trainer: setattr(trainer.args, "own", lambda: None)),
    ):
        reward = ScriptedReward()
        found = refusal(train, reward=reward, prepare=change)
        assert f"{name} cannot be saved in output_dir='{tmp_path}'" in found and not reward.calls
