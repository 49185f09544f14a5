"""Optimizer steps that are left out because their gradient is not finite: counted, and no endless row of them."""

import math

# A lone batch may overflow. So many in a row do not pass: the weights or the rewards themselves are broken.
MOST_IN_A_ROW = 5
# A loss scaler (fp16) starts at 2^16 and halves the scale with each step that it skips: that many are its search.
LOSS_SCALE_HALVINGS = 16


class SkippedSteps:
    """Counts the optimizer steps of a run whose gradient was not finite.

    Args:
        loss_scaling: with fp16, where the loss is scaled up and the first steps find out how far.

    Attributes:
        total: since the run began, over all resumptions. in_a_row: up to the last step that had a gradient.
    """

    def __init__(self, *, loss_scaling: bool):
        self.total = self.in_a_row = 0
        self.most_in_a_row = MOST_IN_A_ROW + (LOSS_SCALE_HALVINGS if loss_scaling else 0)

    def count(self, skipped: bool, step: int) -> None:
        """Optimizer step `step` (from 1) was skipped, or not.

        Raises:
            RuntimeError: it is the last of too many in a row.
        """
        self.total += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.most_in_a_row:
            raise RuntimeError(
                f"The gradient of optimizer step {step} is not finite, as in the {self.in_a_row - 1} steps before it: "
                "nothing is learned any more. Probable causes: weights that are NaN or infinite already (in the "
                "model that was loaded, or after a learning_rate that is too high), rewards or advantages of a huge "
                "scale (`advantage/abs_mean` in the log), or an overflow in fp16 (use bf16). The skipped steps changed "
                "no parameter; the last checkpoint can be resumed with other settings."
            )

    @staticmethod
    def check_applied(norm: float | None, skipped: bool, step: int) -> None:
        """Refuse to go on where DeepSpeed has applied a gradient that is not finite: its check can be turned off.

        Args:
            norm: DeepSpeed's, -1 where it could not be computed; None where DeepSpeed computes none.
        """
        if norm is not None and not skipped and not 0 <= norm < math.inf:
            raise RuntimeError(
                f"DeepSpeed applied a gradient that is not finite (norm {norm}) in optimizer step {step}: the "
                'parameters are lost. Let it check gradients (`"bf16": {"check_grad_overflow": true}` in its '
                "configuration, which is the default), and resume from the last checkpoint."
            )
