"""`benchmarks/compare_update.py`: an update is TRL's, and planted faults are found."""

import math
import os
import sys
from unittest import mock

import pytest

from dash_trl import DASHTrainer
from tests.launching import ROOT
from tests.tiny import refused

sys.path.append(str(ROOT / "benchmarks"))
with mock.patch.dict(os.environ):  # the harness sets variables
    import compare_update

OPTIONS = ["--prompt_tokens", "8", "--completion_tokens", "24"]


class TokenMasked(DASHTrainer):
    def _compute_loss(self, model, inputs):
        inputs["completion_mask"][:, 3] = 0
        return super()._compute_loss(model, inputs)


class GradientDropped(DASHTrainer):
    factor = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        weight = next(one for name, one in self.model.named_parameters() if "q_proj" in name)
        weight.register_hook(lambda gradient: gradient * self.factor)


class GradientLost(GradientDropped):
    factor = math.nan


@pytest.mark.parametrize(
    "options", [[], ["--dtype", "bfloat16"], ["--use_peft", "--lora_target_modules", "all-linear"]]
)
def test_an_update_is_trls(tiny_model, options):
    report = compare_update.main([tiny_model, *OPTIONS, *options])
    assert "without padding; shared prompts left out" in report


@pytest.mark.parametrize("trainer", [TokenMasked, GradientDropped, GradientLost])
def test_a_fault_is_found(tiny_model, trainer):
    for dtype in ("float32", "bfloat16"):
        refused("the update is not TRL's", compare_update.main, [tiny_model, *OPTIONS, "--dtype", dtype], trainer)


def test_a_mistake_is_one_line(python):
    refused("--rows 20 is not a multiple of 8", compare_update.main, ["no/model", "--rows", "20"])
    said = python(ROOT / "benchmarks" / "compare_update.py", "no/model", fails=True).stderr
    assert "OSError: " in said and "Traceback" not in said
