"""Counts optimizer steps that are skipped because their gradient is not finite."""

import math

# A single batch may overflow. After this number of skipped steps in a row, the weights or the rewards are probably
# broken, and the run ends.
MOST_IN_A_ROW = 5
# A loss scaler (fp16) starts with the scale 2^16 and halves it with each skipped step, until gradients are finite.
LOSS_SCALE_HALVINGS = 16


class SkippedSteps:
    """Counts skipped optimizer steps, and ends a run after too many in a row, because it has stopped learning.

    Args:
        loss_scaling: True = a loss scaler (fp16) skips the first steps until gradients are finite, so more skipped
            steps are allowed.
    Attributes:
        total: number of skipped steps. A resumed run begins with its checkpoint's number.
        in_a_row: number of skipped steps since the last step that was not skipped.
        most_in_a_row: the run ends when `in_a_row` reaches this number.
    """

    def __init__(self, *, loss_scaling: bool):
        self.total = self.in_a_row = 0
        self.most_in_a_row = MOST_IN_A_ROW + (LOSS_SCALE_HALVINGS if loss_scaling else 0)

    def count(self, norm: float | None, step: int, *, by_deepspeed: bool | None = None) -> None:
        """Count an optimizer step as skipped or not.

        Args:
            norm: the gradient norm. DeepSpeed's is −1 if it could not be computed, and `None` if it computes none.
            step: number of the optimizer step, from 1.
            by_deepspeed: whether DeepSpeed has skipped the step. `None`: without DeepSpeed, the norm decides.
        Raises:
            RuntimeError: if too many steps in a row were skipped, or if DeepSpeed, without its check of gradients, has
                applied a gradient that is not finite.
        """
        finite = norm is None or 0 <= norm < math.inf
        if by_deepspeed is False and not finite:
            raise RuntimeError(
                f"DeepSpeed applied a gradient that is not finite (norm {norm}) in optimizer step {step}: the "
                'parameters are lost. Turn DeepSpeed\'s check of gradients on (`"bf16": {"check_grad_overflow": '
                "true}` in its configuration, which is the default), and resume from the last checkpoint."
            )
        skipped = not finite if by_deepspeed is None else by_deepspeed
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
