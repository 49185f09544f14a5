"""A row's result does not depend on its pass: old, reference and training passes agree, and padded ones with TRL's."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributions import Categorical
from transformers import (
    CamembertConfig,
    CamembertForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForCausalLM,
)
from trl import GRPOTrainer

from dash_trl import DASHTrainer, RewardRunner
from dash_trl.process_rewards import AnswerLogProbValue
from dash_trl.update import padding_effect
from tests.doubles import Delayed, NotingPasses
from tests.models import SIZES
from tests.prefix_values import random_requests
from tests.tiny import assert_same_update, load, pad, prompts, run, save_tiny_model

WITHOUT_DROPOUT = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ORIGINAL = 24  # tokens; some rows are longer
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
MODELS = {
    "dynamic": (Qwen2ForCausalLM, None, {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC}),
    "longrope": (Phi3ForCausalLM, Phi3Config(**SIZES, max_position_embeddings=96, rope_parameters=LONG), {}),
    "xlm-roberta": (XLMRobertaForCausalLM, XLMRobertaConfig(**SIZES, **WITHOUT_DROPOUT), {}),
    "other padding id": (CamembertForCausalLM, CamembertConfig(**{**SIZES, "pad_token_id": 1}, **WITHOUT_DROPOUT), {}),
}
MINI = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 8}


def saved(name: str, folder) -> str:
    kind, config, settings = MODELS[name]
    return save_tiny_model(folder / "model", kind, config, **settings)


class Noting(NotingPasses):
    """Notes the distances of the log-probs of training passes to the old ones, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.far: list[float] = []

    def per_token_loss(self, log_probs, old_log_probs, advantages, mask):
        self.far.append(((log_probs.detach() - old_log_probs).abs() * mask).max().item())


@pytest.mark.parametrize("name", [None, "dynamic", "longrope"])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (None, MINI),
        (None, {"steps_per_generation": 4, "gradient_accumulation_steps": 3, "max_steps": 4}),
        (None, {**MINI, "reward_pipeline": True}),
        (torch.bfloat16, {"num_iterations": 2, "max_steps": 4}),
        (torch.bfloat16, {**MINI, "reward_pipeline": True}),
    ],
)
def test_without_learning_every_ratio_is_one(train, name, dtype, settings, tiny_model, tmp_path):
    """In bf16, exactly: by autocast, or of weights. One row in 7 has no reward, so some groups are not kept whole.

    A GPU may round by the number of rows. So the training passes are some of the passes for the old log-probs.
    """
    model = tiny_model if name is None else saved(name, tmp_path)
    loaded = load(model, dtype=dtype or torch.float32)
    settings = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.1, **settings}
    reward = RewardRunner(Delayed(fails=True))
    settings |= {"learning_rate": 0.0, "bf16": dtype is None, "loaded": loaded, "reward": reward}
    trainer = train(Noting, model=model, **settings)
    logs = [log for log in trainer.state.log_history if "kl" in log]
    assert len(trainer.far) >= 4 and not any(trainer.far)
    assert all(rows in trainer.rows[False] for rows in trainer.rows[True])
    assert not any(log[key] for log in logs for key in log if key == "kl" or key.startswith("clip_ratio"))


@pytest.mark.parametrize("settings", [{}, {**MINI, "max_steps": 4, "max_tokens_per_microbatch": 90}])
@pytest.mark.parametrize("name", MODELS)
def test_models_whose_results_depend_on_padding_are_padded_as_in_trl(name, settings, tmp_path, caplog):
    model = saved(name, tmp_path)
    data = prompts(40).map(lambda row, i: {"prompt": "1 + " * ((i + 2) % 4) + row["prompt"]}, with_indices=True)
    settings = {"learning_rate": 0.1, "dataset": data, **settings}
    ours = run(DASHTrainer, model, tmp_path, **settings)
    most = settings.pop("max_tokens_per_microbatch", 4 * 60)
    assert all(log.get("packing/max_tokens", 0) <= most for log in ours.state.log_history)
    trls = run(GRPOTrainer, model, tmp_path, **settings)
    assert_same_update(model, trls, ours, tolerance=1e-4)
    assert caplog.text.count("passes are padded") == 1


def test_noise_of_embeddings_has_the_width_of_the_window(train):
    widths: list[int] = []

    def note(trainer) -> None:
        embeddings = trainer.model.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[1]))

    trainer = train(neftune_noise_alpha=5.0, prepare=note, max_tokens_per_microbatch=60)
    longest = trainer.state.log_history[0]["completions/max_length"]
    assert len({*widths[-4:]}) == 1 and widths[-1] > longest


class Changes(DASHTrainer):
    """Calls TRL's method with tensors of its own: without a token, with halves of the rows, with other prompts."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        compute = partial(super()._get_per_token_logps_and_entropies, model)
        shown = attention_mask.clone()
        half = max(len(input_ids) // 2, 1)
        shown[torch.arange(len(shown)), shown.argmax(dim=1)] = 0
        other = input_ids.clone()
        other[:half, :-logits_to_keep] += attention_mask[:half, :-logits_to_keep]  # shared prompts differ now
        for ids, mask in (
            (input_ids, shown),
            (input_ids, attention_mask * 0),  # as if all were dummy rows
            (other, attention_mask),
            (input_ids[:half], attention_mask[:half]),
            (input_ids[half:], attention_mask[half:]),
        ):
            if len(ids) and self.model.training:
                with torch.no_grad():
                    found = compute(ids, mask, logits_to_keep)[0]
                    plain = Categorical(logits=model(input_ids=ids, attention_mask=mask).logits[:, :-1])
                own = mask.bool()[:, -logits_to_keep:]
                due = plain.log_prob(ids[:, 1:])[:, -logits_to_keep:]
                torch.testing.assert_close(found * own, due.where(own, 0.0), atol=1e-4, rtol=1e-4)
                self.compared = getattr(self, "compared", 0) + 1
        return compute(input_ids, attention_mask, logits_to_keep, **kwargs)


@pytest.mark.parametrize("prepare", [None, pad])
def test_an_override_gets_log_probs_of_its_own_tensors(prepare, train):
    assert train(Changes, prepare=prepare, max_tokens_per_microbatch=200).compared >= 4


def test_values_do_not_depend_on_their_neighbours_if_rope_depends_on_the_width(tokenizer, tmp_path):
    model = load(saved("dynamic", tmp_path))
    value = AnswerLogProbValue()
    requests = random_requests()
    requests = [replace(one, prompt_ids=tuple(range(4, 4 + 2 * ORIGINAL))) for one in requests]
    together = value.score(requests, model, tokenizer)
    assert together == [row for one in reversed(requests) for row in value.score([one], model, tokenizer)][::-1]


def test_right_position_ids_are_taken_whichever_rounding_is_smaller():
    """Otherwise the weights decide, and a resumed run may take the other passes."""
    base = torch.randn(1, 64)
    model = torch.nn.Linear(2, 2)
    model.dtype = torch.float32

    def near(noise: float):
        return lambda ids, mask, keep: (base[:, -keep:] + noise * (mask == 0).any(),)

    trial = {"vocabulary": 64, "pad_token_id": 0, "device": torch.device("cpu")}
    for plain, placed in ((0.0, 1e-7), (1e-7, 0.0), (1.0, 1e-7)):
        assert padding_effect(near(plain), near(placed), model, **trial) == 1
    assert padding_effect(near(0.0), near(1.0), model, **trial) == 0
    assert padding_effect(near(1.0), near(1.0), model, **trial) == 2
