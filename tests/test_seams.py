"""The contracts with TRL's internals: each seam on a plain `GRPOTrainer`, so that a new TRL fails here first."""

import inspect

import pytest
from trl import GRPOTrainer

from dash_trl.seams import (
    begin_anew,
    end_micro_step,
    with_settings,
)
from dash_trl.update import OFF_POLICY_LOSSES
from tests.tiny import run


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    return run(GRPOTrainer, tiny_model, tmp_path_factory.mktemp("trl"), max_steps=2)


def test_the_settings_of_our_losses_are_trls(trainer):
    """Attributes that its loss reads. `use_vllm`, which we set beside them, only turns its correction on."""
    source = "".join(map(inspect.getsource, (GRPOTrainer._compute_loss, GRPOTrainer._generate_and_score_completions)))
    correction = "self.use_vllm and self.vllm_importance_sampling_correction"
    assert source.count("self.use_vllm") == source.count(correction) > 0
    for settings in OFF_POLICY_LOSSES.values():
        assert all(f"self.{name}" in source and name in vars(trainer) for name in settings)
        before = {**vars(trainer)}
        with with_settings(trainer, {**settings, "log": None}):
            assert trainer.loss_type == "dapo" and trainer.log is None
        assert vars(trainer) == before


def test_counters_and_logs_of_a_run(trainer):
    """The last one that uses the trainer, which it changes."""
    assert trainer._step == 8
    known = {"_current_train_step_time", "_entropy_window_stats", "_pending_metrics", "_pending_extra_logs"}
    known |= {"_last_world_entropy", "entropy_coef"}
    assert known <= vars(trainer).keys()
    assert "self.state.global_step != self._last_loaded_step" in inspect.getsource(GRPOTrainer)  # set with vLLM only
    end_micro_step(trainer, 5.0, ends_step=False)
    assert trainer._step == 9 and trainer._current_train_step_time >= 5.0

    begin_anew(trainer)
    assert (trainer._step, trainer._current_train_step_time, trainer._last_loaded_step) == (0, 0.0, -1)
    assert not trainer._metrics["train"]
