"""Log-probs and entropies of sampled tokens as they were seen while transformers' `generate` sampled them."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationConfig

from dash_trl import DASHCallback, DASHTrainer, RewardAgent
from dash_trl.process_rewards import CreditSettings, OutcomeValue, ProcessRewardCallback
from dash_trl.sampling import Witness
from dash_trl.seams import witnessed
from tests.tiny import EOS, VOCABULARY, run

PROMPTS = Dataset.from_dict({"prompt": ["1 + 1 = ", "the answer is the answer is 12 + ", "=", "46\n 12 + 34"] * 16})


def by_sum(completion, completion_ids):
    return float(sum(completion_ids) % 2)


def eager(model, prompt, ids, temperature):
    """(log-probs, entropies) of a row, alone, token by token: the definition."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    policy = torch.distributions.Categorical(logits=logits)
    return policy.log_prob(torch.tensor(ids)), policy.entropy()


class Asks(DASHCallback):
    """Notes how far what the trainer says is from the definition, by the weights that sampled, and counts passes."""

    per_group, needs_log_probs = True, True

    def __init__(self, temperature=1.0):
        self.temperature, self.weights = temperature, []
        self.far, self.passes, self.lengths, self.ends = [], 0, [], 0

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        trainer, rows = kwargs["trainer"], torch.arange(len(rollouts)) % 3 > 0
        model = trainer.accelerator.unwrap_model(trainer.model)
        hook = model.register_forward_hook(lambda *args: setattr(self, "passes", self.passes + 1))
        found = torch.stack(trainer.log_probs_and_entropies(rollouts, rows))
        hook.remove()
        expected, now = torch.zeros_like(found), deepcopy(model.state_dict())
        model.load_state_dict(self.weights[int(rollouts.policy_version[0, 0])])
        for row in rows.nonzero().flatten().tolist():
            prompt, ids = (
                getattr(rollouts, f"{name}_ids")[row][getattr(rollouts, f"{name}_mask")[row].bool()].tolist()
                for name in ("prompt", "completion")
            )
            if not ids:  # truncated, and so masked
                continue
            self.lengths.append(len(ids))
            self.ends += ids[-1] == EOS
            expected[:, row, : len(ids)] = torch.stack(eager(model, prompt, ids, self.temperature))
        model.load_state_dict(now)
        self.far.append((found - expected).abs().max().item())

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.weights.append(deepcopy(model.state_dict()))


# Of these a row may be made, the end among them, so that rows end early: by a processor behind which nothing is seen.
FEW = {"suppress_tokens": [0, *range(12, VOCABULARY)]}


def train(model, output, *callbacks, trainer_class=DASHTrainer, **settings):
    settings = {"reward": RewardAgent(by_sum), "dataset": PROMPTS, "in_process": True, **settings}
    return run(trainer_class, model, output, callbacks=list(callbacks), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3},
        {"generation_kwargs": {"min_new_tokens": 4, **FEW}},
        {"num_iterations": 2, "max_steps": 4},
        {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 6},
        {"mask_truncated_completions": True},
        {"bf16": True},
    ],
    ids=lambda settings: ", ".join(settings) or "plain",
)
def test_what_was_seen_is_what_a_pass_would_find(tiny_model, tmp_path, settings):
    """Without a pass, of rows of all lengths, behind prompts of several; the last token of each, too."""
    asks = Asks(settings.get("temperature", 1.0))
    settings = {"max_completion_length": 12, "max_steps": 2, "learning_rate": 0.3, "generation_kwargs": FEW, **settings}
    train(tiny_model, tmp_path, asks, **settings)
    assert asks.passes == 0 and len(asks.far) == 2
    assert max(asks.far) < (0.2 if "bf16" in settings else 1e-4)
    assert len(set(asks.lengths)) > 3 and asks.ends > 3


@pytest.mark.parametrize(
    "settings",
    [
        {"async_level": 1},
        {"reward_pipeline": True},
        {"reward_pipeline": True, "gradient_accumulation_steps": 1, "steps_per_generation": 4},
        {"reward_pipeline": True, "async_level": 1},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_of_windows_that_are_sampled_ahead_or_come_in_parts(tiny_model, tmp_path, settings):
    """By the weights that sampled them, from which training has moved on."""
    asks = Asks()
    settings = {"max_completion_length": 8, "max_steps": 3, "learning_rate": 0.5, "generation_kwargs": FEW, **settings}
    trainer = train(tiny_model, tmp_path, asks, **settings)
    assert asks.passes == 0 and max(asks.far) < 1e-4 and asks.ends > 3
    moved = [(asks.weights[0][name] - value).abs().max() for name, value in trainer.model.state_dict().items()]
    assert max(moved) > 1e-2


@pytest.mark.parametrize(
    "settings",
    [{"generation_kwargs": {"num_beams": 2}}, {"use_transformers_continuous_batching": True}],
    ids=lambda settings: ", ".join(settings),
)
def test_a_pass_where_steps_are_not_seen(tiny_model, tmp_path, settings):
    asks = Asks()
    train(tiny_model, tmp_path, asks, max_completion_length=8, **settings)
    assert asks.passes > 0 and max(asks.far) < 1e-4


def test_nothing_is_kept_where_no_callback_asks(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("dash_trl.trainer.Witness", None)  # cannot be made
    asks = Asks()
    asks.needs_log_probs = False
    train(tiny_model, tmp_path, asks, max_completion_length=8)
    assert asks.passes > 0 and max(asks.far) < 1e-4


def test_a_checkpoint_in_a_window_does_not_keep_them(tiny_model, tmp_path):
    """And the resumed run ends where the other does."""
    ends = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        value = OutcomeValue(num_windows=2, min_rollouts=2, min_problems=1)
        process = ProcessRewardCallback(value, settings=CreditSettings(), min_episode_tokens=1, max_episode_tokens=4)
        settings = {"steps_per_generation": 8, "max_steps": 4, "learning_rate": 0.3, "max_completion_length": 8}
        saving = {"save_strategy": "steps", "save_steps": 1, "resume": resume}
        trainer = train(tiny_model, tmp_path, process, generation_kwargs=FEW, **settings, **saving)
        ends.append(trainer.model.state_dict())
        features = value.state_dict()["windows"][0]["features"]
        assert features.shape[1] == 7, "with entropies"
    window = torch.load(tmp_path / "checkpoint-1" / "generation_window_0.pt", weights_only=True)["window"]
    assert "advantages" in window["rollouts"] and not any("witnessed" in name for name in window["rollouts"])
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_with_adapters(tiny_model, tmp_path):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    asks = Asks()
    train(tiny_model, tmp_path, asks, max_completion_length=8, peft_config=adapter, max_steps=2, learning_rate=0.3)
    assert asks.passes == 0 and max(asks.far) < 1e-4


STEPS = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[3, 5, 2], [4, 0, 0]])  # the second row has ended: it is padded


def scripted(steps):
    """A witness of so many steps, behind prompts of two tokens, that keeps nothing of what `generate` handed it."""
    witness, ids = Witness(1.0), torch.cat([torch.ones(2, 2, dtype=torch.long), IDS, torch.zeros_like(IDS)], dim=1)
    for step in range(steps):
        read, logits = ids[:, : 2 + step].clone(), STEPS[step].clone()
        witness(read, logits)
        read.zero_()
        logits.zero_()
    witness.end([IDS[0].tolist(), IDS[1, :1].tolist()])
    return witness


@pytest.mark.parametrize("steps", [3, 4], ids=["the last token is in the output", "a step too many, which is undone"])
def test_the_last_token_and_the_rows_that_have_ended(steps):
    log_probs, entropies = scripted(steps).found(IDS, IDS.sign())
    for row in range(2):
        for step in range(3):
            policy = torch.distributions.Categorical(logits=STEPS[step, row])
            expected = [policy.log_prob(IDS[row, step]).item(), policy.entropy().item()] if IDS[row, step] else [0, 0]
            assert [log_probs[row, step].item(), entropies[row, step].item()] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "ids"),
    [
        (2, IDS),  # it has not seen the last step
        (3, IDS + 1),
        (3, torch.cat([IDS, IDS])),
        (3, IDS[:1]),
        (0, IDS),
    ],
)
def test_other_rows_than_were_seen_are_not_known(steps, ids):
    assert scripted(steps).found(ids, ids.sign()) is None


def test_a_token_that_cannot_be_sampled_has_no_entropy():
    witness = Witness(1.0)
    witness(torch.ones(1, 2), torch.tensor([[0.0, 0.0, -torch.inf]]))
    witness.end([[1]])
    log_probs, entropies = witness.found(torch.tensor([[1]]), torch.tensor([[1]]))
    assert log_probs.item() == pytest.approx(-0.6931, abs=1e-4) and entropies.item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_logits_are_seen_before_a_processor_changes_them(tiny_model, compiled):
    """The seam: what `generate` calls first; after an error, too, the model is as it was."""
    model, seen = AutoModelForCausalLM.from_pretrained(tiny_model), []
    model = torch.compile(model, backend="eager") if compiled else model  # as unwrapped of FSDP with torch_compile
    ids, config = torch.tensor([[7, 8, 9]]), GenerationConfig(max_new_tokens=2, repetition_penalty=5.0, do_sample=False)
    with witnessed(model, lambda ids, logits: seen.append((ids, logits.clone()))):
        output = model.generate(ids, generation_config=config)
    plain = model.generate(ids, generation_config=config)
    assert torch.equal(output, plain) and len(seen) == 2
    with torch.no_grad():
        for read, logits in seen:
            assert torch.allclose(logits, model(read).logits[:, -1], atol=1e-5)
    with pytest.raises(ZeroDivisionError), witnessed(model, lambda ids, logits: 1 / 0):
        model.generate(ids, generation_config=config)
    assert torch.equal(model.generate(ids, generation_config=config), plain)
