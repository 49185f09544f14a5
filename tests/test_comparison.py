"""`dash_trl doctor MODEL --update`: an update is TRL's, and planted faults are found."""

import pytest
import torch
from trl import ModelConfig

from dash_trl import DASHTrainer, command, comparison
from tests.tiny import refused

SCRIPT = comparison.Scripted(constant=0.5, rows=16, longest=24, prompt_tokens=8)


class TokenMasked(DASHTrainer):
    def _compute_loss(self, model, inputs):
        inputs["completion_mask"][:, 3] = 0
        return super()._compute_loss(model, inputs)


class GradientDropped(DASHTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        next(one for name, one in self.model.named_parameters() if "q_proj" in name).register_hook(torch.zeros_like)


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"use_peft": True, "lora_target_modules": "all-linear"}]
)
def test_an_update_is_trls(tiny_model, settings):
    report = comparison.compare_update(ModelConfig(tiny_model, **settings), SCRIPT, DASHTrainer)
    assert "without padding; shared prompts left out" in report


@pytest.mark.parametrize("trainer", [TokenMasked, GradientDropped])
def test_a_fault_is_found(tiny_model, trainer):
    for dtype in ("float32", "bfloat16"):
        refused(
            "the update is not TRL's", comparison.compare_update, ModelConfig(tiny_model, dtype=dtype), SCRIPT, trainer
        )


def test_the_command(tiny_model, capsys):
    options = ["--update", "--rows", "16", "--prompt_tokens", "8", "--completion_tokens", "24"]
    assert command.main(["doctor", tiny_model, *options, "--use_peft"]) == 0
    assert "the gradients differ by" in capsys.readouterr().out
    assert command.main(["doctor", "no/model", *options]) == 1
    assert "no   an update of no/model" in capsys.readouterr().out
