"""`MicroBatches` makes the inputs of model passes from the rows of a window.

Letters: R ranks, M rows of a rank.
"""

from collections.abc import Iterator
from typing import Any

import torch

from dash_trl.host import Host
from dash_trl.monitoring import packing_metrics
from dash_trl.rollout import COMPLETION, Part
from dash_trl.update import MicroBatch, ModelPasses, Pass, loss_scale, plan_share

Inputs = dict[str, Any]  # the inputs of a model pass


class MicroBatches:
    """Makes the inputs of model passes from the rows of a window."""

    def __init__(self, host: Host, passes: ModelPasses):
        self._args = host.args
        self._rank = host.ranks.rank
        self._recorder = host.recorder
        self.passes = passes
        self._pad_token_id = host._tokenizer.pad_token_id

    def plan(self, part: Part) -> list[MicroBatch]:
        """Distribute the survivors of a part over micro-batches; see `plan_share`.

        The plan depends only on the part, so that all passes over it round in the same way: those of the old policy and
        of the reference model, and the training passes.
        """
        lengths = part.lengths
        if self.passes.full_width:  # each row of a pass is as wide as the window
            lengths = (lengths > 0) * torch.tensor([0, part.width, 0, 0])
        columns = torch.arange(lengths.shape[1])
        groups = columns // self._args.num_generations if part.by_group else columns * 0
        planned: list[MicroBatch] = []
        for group in groups.unique():
            planned += plan_share(
                lengths * (groups == group).unsqueeze(1),
                max_rows=self._args.per_device_train_batch_size,
                max_tokens=self._args.max_tokens_per_microbatch,
                width=part.width,
                padding_free=self.passes.padding_free,
                min_shared=self.passes.min_shared,
            )
        return planned

    def without_gradient(self, part: Part) -> Iterator[tuple[list[int], Inputs]]:
        """For each pass, yield this rank's rows, as indices in `part.rollouts`, and its inputs on the CPU."""
        for micro_batch in self.plan(part):
            yield self._of(part, micro_batch)

    def with_gradient(self, part: Part, passes: list[Pass]) -> Iterator[tuple[Inputs, bool]]:
        """Make the inputs of training passes on the CPU, with the weights of their losses in the optimizer step.

        Yields:
            The inputs of a pass, and whether it is the last pass of the micro-step.
        """
        if planned := [one.micro_batch for one in passes]:
            self._recorder.log(
                packing_metrics(
                    planned,
                    part.lengths,
                    padding_free=self.passes.padding_free,
                    min_shared=self.passes.min_shared,
                    width=part.width if self.passes.full_width else 0,
                )
            )
        for one in passes:
            tokens = one.tokens[self._rank]
            share = one.share
            inputs = {
                **self._of(part, one.micro_batch)[1],
                "loss_scale": loss_scale(
                    self._args.loss_type,
                    self._args.filter_denominator,
                    rows=one.micro_batch.size,
                    tokens=tokens,
                    share=share,
                ),
                # Of the entropy bonus and the router loss, before the mean over micro-steps and ranks. TRL has 1 in
                # each micro-batch, and these have the same sum. They count survivors only, so filtering changes them.
                "regularizer_scale": tokens * share.passes / max(share.kept_tokens, 1),
                "num_items_in_batch": part.num_items_in_batch,
                "pass": one,
            }
            yield inputs, part.ends_step and one is passes[-1]

    def _of(self, part: Part, micro_batch: MicroBatch) -> tuple[list[int], Inputs]:
        # The survivors of this rank are those rows of its lengths that are not 0, in the same order.
        indices = (part.lengths[self._rank, :, COMPLETION] > 0).cumsum(dim=0) - 1
        rows = indices[list(micro_batch.rows[self._rank])].tolist()
        return rows, self.passes.inputs(part.rollouts, rows, size=micro_batch.size, pad_token_id=self._pad_token_id)
