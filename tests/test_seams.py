"""The contracts with TRL's internals: each seam on a plain `GRPOTrainer`, so that a new TRL fails here first."""

import inspect

from trl import GRPOTrainer

from dash_trl.seams import with_settings
from dash_trl.update import OFF_POLICY_LOSSES


def test_the_settings_of_our_losses_are_trls(train):
    """Attributes that its loss reads. `use_vllm`, which we set beside them, only turns its correction on."""
    trainer = train(GRPOTrainer)
    source = "".join(map(inspect.getsource, (GRPOTrainer._compute_loss, GRPOTrainer._generate_and_score_completions)))
    correction = "self.use_vllm and self.vllm_importance_sampling_correction"
    assert source.count("self.use_vllm") == source.count(correction) > 0
    for settings in OFF_POLICY_LOSSES.values():
        assert all(f"self.{name}" in source and name in vars(trainer) for name in settings)
        before = {**vars(trainer)}
        with with_settings(trainer, {**settings, "log": None}):
            assert trainer.loss_type == "dapo" and trainer.log is None
        assert vars(trainer) == before
