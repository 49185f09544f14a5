"""The contracts with TRL's internals: each seam on a plain `GRPOTrainer`, so that a new TRL fails here first."""

import inspect

import pytest
from huggingface_hub import constants
from transformers import TrainerCallback
from transformers.integrations import TrackioCallback
from trl import GRPOTrainer

from dash_trl.seams import (
    begin_anew,
    begin_trackio,
    count_pass_time,
    with_settings,
)
from dash_trl.update import OFF_POLICY_LOSSES, trl_settings
from tests.tiny import run


@pytest.fixture(scope="module")
def trainer(tiny_model, tmp_path_factory):
    return run(GRPOTrainer, tiny_model, tmp_path_factory.mktemp("trl"), max_steps=2)


def test_the_settings_of_our_losses_are_trls(trainer):
    """Attributes that its loss reads. `use_vllm`, which we set beside them, only turns its correction on."""
    methods = (GRPOTrainer._compute_loss, GRPOTrainer._generate_and_score_completions)
    source = "".join(map(inspect.getsource, methods))
    correction = "self.use_vllm and self.vllm_importance_sampling_correction"
    assert source.count("self.use_vllm") == source.count(correction) > 0
    for loss_type in OFF_POLICY_LOSSES:
        settings = trl_settings(loss_type, delta=8.0)
        for name in settings:
            place = "args.delta" if name == "delta" else name
            assert f"self.{place}" in source and hasattr(trainer.args if name == "delta" else trainer, name)
        before = {**vars(trainer)}, {**vars(trainer.args)}
        with with_settings(trainer, settings):
            assert trainer.loss_type == "dapo" and trainer.args.delta == settings.get("delta")
        assert (vars(trainer), vars(trainer.args)) == before
    assert trl_settings("dapo", delta=8.0) == {}


def test_the_ratio_is_read_behind_the_forward_pass():
    """Within which `give_late_ratio` may still set it."""
    before, behind = inspect.getsource(GRPOTrainer._compute_loss).split("self._get_per_token_logps_and_entropies(")
    assert "importance_sampling_ratio" in behind and "importance_sampling_ratio" not in before


@pytest.mark.parametrize(("space", "asks"), [(None, False), ("me/space", True)])
def test_a_run_of_trackio_on_this_machine_asks_the_hub_nothing(trainer, monkeypatch, space, asks):
    may_ask = []

    class Callback(TrackioCallback):
        __init__ = object.__init__

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            may_ask.append(not constants.HF_HUB_OFFLINE)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(trainer.callback_handler, "callbacks", [TrainerCallback(), Callback()])
    monkeypatch.setattr(trainer.args, "trackio_space_id", space)
    begin_trackio(trainer)
    assert may_ask == [asks] and not constants.HF_HUB_OFFLINE


def test_counters_and_logs_of_a_run(trainer):
    """The last one that uses the trainer, which it changes."""
    assert trainer._step == 8
    known = {"_current_train_step_time", "_entropy_window_stats", "_pending_metrics", "_pending_extra_logs"}
    known |= {"_last_world_entropy", "entropy_coef"}
    assert known <= vars(trainer).keys()
    assert "self.state.global_step != self._last_loaded_step" in inspect.getsource(GRPOTrainer)  # set with vLLM only
    count_pass_time(trainer, 5.0)
    assert trainer._current_train_step_time >= 5.0

    begin_anew(trainer)
    assert (trainer._step, trainer._current_train_step_time, trainer._last_loaded_step) == (0, 0.0, -1)
    assert not trainer._metrics["train"]
