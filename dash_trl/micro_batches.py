"""`MicroBatches` makes the inputs of model passes from the rows of a window.

Letters: R ranks, M rows of a rank.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dash_trl.host import Host
from dash_trl.monitoring import packing_metrics
from dash_trl.rollout import Part
from dash_trl.update import MicroBatch, ModelPasses, Pass, loss_scale, plan_share, regularizer_weight


class MicroBatches:
    """Makes the inputs of model passes from the rows of a window.

    Args:
        host: the trainer.
        passes: builds the inputs, padding-free or padded.
    """

    def __init__(self, host: Host, passes: ModelPasses):
        self._args, self._rank, self._recorder, self.passes = host.args, host.ranks.rank, host.recorder, passes
        self._pad_token_id = host.processing_class.pad_token_id

    def plan(
        self, lengths: Tensor, width: int, micro_steps: int, last_must_run: bool = False
    ) -> list[list[MicroBatch]]:
        """Plan the micro-batches of each micro-step; see `plan_share`.

        Args:
            lengths: [R, M, 4], see `RolloutBatch.lengths`. Rows with completion length 0 are left out.
            width: see `Part.width`.
            micro_steps: number of micro-steps.
            last_must_run: True = the last micro-step runs a pass even if there is no survivor.
        """
        return plan_share(
            lengths,
            micro_steps,
            last_must_run,
            max_rows=self._args.per_device_train_batch_size,
            max_tokens=self._args.max_tokens_per_microbatch,
            width=width,
            padding_free=self.passes.padding_free,
            min_shared=self.passes.min_shared,
        )

    def without_gradient(self, part: Part, lengths: Tensor) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Make the inputs of passes without gradient, over the rows whose length in `lengths` is not 0.

        Args:
            part: the window of the rows, or a part of it.
            lengths: [R, M, 4].
        Yields:
            For each pass, the indices of this rank's rows in `part.rollouts`, and the inputs on the CPU.
        """
        for micro_batch in self.plan(lengths, part.width, 1)[0]:
            yield self._of(part, micro_batch)

    def with_gradient(
        self, part: Part, passes: list[Pass], planned: list[MicroBatch], *, are_last: bool
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Make the inputs of training passes on the CPU, including the weights of their losses in the optimizer step.

        Args:
            part: the window of the rows, or a part of it.
            passes: the passes.
            planned: micro-batches that were planned just now, whose figures are logged.
            are_last: True = no other pass follows in the micro-step.
        Yields:
            The inputs of a pass, and a bool, True = the pass is the last one of the micro-step.
        """
        if planned:
            padding_free, min_shared = self.passes.padding_free, self.passes.min_shared
            self._recorder.log(packing_metrics(planned, part.lengths, padding_free=padding_free, min_shared=min_shared))
        for one in passes:
            tokens, share = one.tokens[self._rank], one.share
            rows, loss_type, denominator = one.micro_batch.size, self._args.loss_type, self._args.filter_denominator
            inputs = {
                **self._of(part, one.micro_batch)[1],
                "loss_scale": loss_scale(loss_type, denominator, rows=rows, tokens=tokens, share=share),
                "regularizer_scale": regularizer_weight(tokens, share),
                "num_items_in_batch": part.num_items_in_batch,
                "pass": one,
            }
            yield inputs, are_last and one is passes[-1]

    def _of(self, part: Part, micro_batch: MicroBatch) -> tuple[list[int], dict[str, Any]]:
        """Return this rank's rows of a micro-batch, as indices in `part.rollouts`, and the inputs of their pass."""
        # The survivors of this rank are those rows of its lengths that are not 0, in the same order.
        indices = (part.lengths[self._rank, :, 1] > 0).cumsum(dim=0) - 1
        rows = indices[list(micro_batch.rows[self._rank])].tolist()
        return rows, self.passes.inputs(part.rollouts, rows, size=micro_batch.size, pad_token_id=self._pad_token_id)
