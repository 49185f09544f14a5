"""A trainer that only records which prompts it is handed out."""

import torch

from dash_trl import DASHTrainer
from tests.tiny import run


class Walk(DASHTrainer):
    """A trainer that does not train, and records the prompts of micro-steps.

    `ends` contains (optimizer step, number of micro-steps at its end).
    """

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.append([row["prompt"] for row in inputs])
        self._step += 1
        return torch.zeros((), device=self.args.device)

    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        self.ends.append((self.state.global_step + 1, len(self.seen) + len(batches)))
        return batches, num_items

    def train(self, *args, **kwargs):
        self.seen = []
        self.ends = []
        return super().train(*args, **kwargs)


def walked(model, output, *, level=0, **settings):
    """Walk as if windows were sampled ahead; more than one are refused without servers."""
    ahead = {"in_process": True, "prepare": lambda trainer: setattr(trainer.args, "async_level", level)}
    return run(Walk, model, output, **{"num_generations": 2, **ahead, **settings})


def check(model, output, **settings):
    """A queue changes nothing in what is handed out."""
    walk = walked(model, output, **settings)
    seen = walk.seen
    ends = walk.ends
    walk.args.async_level = 2
    walk.train()
    assert walk.seen == seen and {*walk.ends} <= {*ends}, settings  # a stream that is over is tried again
