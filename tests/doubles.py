"""Rollouts, rewards, callbacks and subclasses of trainers, for several files of tests."""

import random
import re
import threading

import torch
from transformers import TrainerCallback

from dash_trl import DASHCallback, DASHTrainer, RolloutBatch
from tests.tiny import noting, prompts, rows_of

# Other shapes than the default ones of `tiny.run`
WIDER = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4}


class SeededRollouts:
    """Completions that depend on torch's random state, as sampling does: a resumed run has to restore it."""

    def __call__(self, prompts, trainer):
        ids = [torch.randint(4, 260, (int(torch.randint(1, 20, ())),)).tolist() for _ in prompts]
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": ids,
            "logprobs": None,
        }


class SaveEarly(DASHCallback):
    """As `enable_jit_checkpoint` saves, before the optimizer steps: checkpoint 5 is from within step 6."""

    per_group = True

    def __init__(self, at=5):
        self.at = at

    def on_rollouts_sampled(self, args, state, control, rollouts, trainer, **kwargs):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.optimizer.param_groups[0]["d_hat"] = 1.0  # as Prodigy's steps add settings
        if state.global_step == self.at:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


class Evaluates(DASHCallback):
    """At an event; of logs, at those of training."""

    def __init__(self, event):
        setattr(self, event, self.evaluate)

    def prepare(self, trainer):
        self.trainer = trainer

    def evaluate(self, *_, logs=("loss",), **__):
        if "loss" in logs:
            self.trainer.evaluate()


class EndsTheEpoch(TrainerCallback):
    """After the first optimizer step of the run."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 1


def same(whole, resumed):
    """Parameters, and what was logged on the way, but times, and `loss`, Transformers' mean since the checkpoint."""
    logs = [[log for log in one.state.log_history if "reward" in log] for one in (whole, resumed)]
    figures = [[{name: log[name] for name in log if not re.search("time|loss", name)} for log in one] for one in logs]
    assert figures[0] == figures[1] and whole.state.epoch == resumed.state.epoch
    assert whole._step == resumed._step and whole.state.global_step == resumed.state.global_step
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def recorded(train, resume=None, **settings):
    """The prompts of each round of a run by the fixture `train`, and the trainer."""
    watch = noting("on_rollouts_sampled", lambda rollouts: [row["prompt"] for row in rollouts.examples[::4]])
    defaults = {"rollouts": SeededRollouts(), "optimizer": "adamw_torch", "dataset": prompts(64), **settings}
    callbacks = [watch, *defaults.pop("callbacks", [])]
    return watch.noted, train(resume=resume, callbacks=callbacks, **defaults)


def odd(completion, completion_ids):
    return float(sum(completion_ids) % 2)


class Delayed:
    """Half of the groups have signal; their scores come in another order with each seed."""

    __name__ = "delayed"

    def __init__(self, seed: int = 0, fails: bool = False):
        self.random = random.Random(seed)
        self.fails = fails

    def compute_score(self, completion_ids, prompt):
        threading.Event().wait(self.random.random() / 20)
        if self.fails and sum(completion_ids) % 7 == 3:
            raise ConnectionError("away")
        if prompt.startswith("1"):
            return 1.0
        return float(sum(completion_ids) % 2), {"length": len(completion_ids), "end": str(completion_ids[-1])}


def grad_scaler(trainer):
    """Loss scaling as with fp16, which accelerate offers on GPUs only."""
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(trainer.optimizer.optimizer)


class SavesBetween(TrainerCallback):
    """Saves a checkpoint after the second micro-step. Then all rewards are awaited."""

    def on_substep_end(self, args, state, control, **kwargs):
        if self.trainer._step == 2:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


def token_log_probs(trainer, model, inputs) -> torch.Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].shape[1]
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, length)[0] * inputs["completion_mask"]


class Penalised(DASHTrainer):
    """Adds the mean of −log π over the tokens that are trained on."""

    @torch.enable_grad()  # or another decorator, as TRL's methods have
    def _compute_loss(self, model, inputs):
        mean = -token_log_probs(self, model, inputs).sum() / inputs["completion_mask"].sum().clamp(min=1)
        term = inputs["regularizer_scale"] * mean / self.current_gradient_accumulation_steps
        return super()._compute_loss(model, inputs) + term


class NotingPasses(DASHTrainer):
    """`rows`: those of each pass of a model, by whether it has a gradient."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows: dict[bool, list[list[list[int]]]] = {True: [], False: []}

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        self.rows[torch.is_grad_enabled()].append(input_ids.tolist())
        return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)


class Replaced(DASHTrainer):
    def _compute_loss(self, model, inputs):
        return token_log_probs(self, model, inputs).sum()


def rollouts() -> RolloutBatch:
    batch = rows_of([[2, 3], [5, 6, 7], [8, 9, 10, 11]], [[0, 1, 2], [5], [10, 11, 12, 13, 14]])
    batch.policy_version = torch.zeros(3, 2, dtype=torch.long)
    batch.rewards = torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")], [float("inf"), 1.0]])
    batch.advantages = torch.tensor([0.5, -0.5, 1.0])
    batch.importance_sampling_ratio = torch.ones(3, 1)
    return batch
