"""Counts optimizer steps that are skipped because their gradient is not finite, and ends a run that skips too many in a
row.
"""

import math

# A single batch may overflow. After this number in a row, the weights or the rewards themselves must be broken.
MOST_IN_A_ROW = 5
# A loss scaler (fp16) starts at 2^16 and halves the scale with each step that it skips, until it has found one that
# fits.
LOSS_SCALE_HALVINGS = 16


class SkippedSteps:
    """Counts the optimizer steps of a run whose gradient was not finite.

    Args:
        loss_scaling: the loss is scaled (fp16). The first steps are then skipped until a scale is found that fits.
    Attributes:
        total: skipped steps since the run began, resumed runs included.
        in_a_row: skipped steps since the last one that was not skipped.
        most_in_a_row: the run ends at this number in a row.
    """

    def __init__(self, *, loss_scaling: bool):
        self.total = self.in_a_row = 0
        self.most_in_a_row = MOST_IN_A_ROW + (LOSS_SCALE_HALVINGS if loss_scaling else 0)

    def count(self, skipped: bool, step: int) -> None:
        """Count an optimizer step.

        Args:
            skipped: whether it was skipped.
            step: its number, from 1.
        Raises:
            RuntimeError: too many steps in a row were skipped.
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
        """Refuse to continue after DeepSpeed has applied a gradient that is not finite; its check can be turned off.

        Args:
            norm: DeepSpeed's gradient norm; −1 if it could not be computed, `None` if DeepSpeed computes none.
            skipped: DeepSpeed has skipped the step.
            step: number of the optimizer step, from 1.
        Raises:
            RuntimeError: the gradient was applied.
        """
        if norm is not None and not skipped and not 0 <= norm < math.inf:
            raise RuntimeError(
                f"DeepSpeed applied a gradient that is not finite (norm {norm}) in optimizer step {step}: the "
                'parameters are lost. Let it check gradients (`"bf16": {"check_grad_overflow": true}` in its '
                "configuration, which is the default), and resume from the last checkpoint."
            )
