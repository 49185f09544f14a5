"""`RunAhead` decides which windows are sampled before training needs them. It reads no clock and does no I/O.

With `async_level=k`, up to k windows are sampled ahead. While window n is trained on::

    window        n          n + 1    …    n + k       n + k + 1
              trained on   being sampled, in order     waits for the weights that window n + 1 begins with

As in PRIME-RL, window n is trained on rollouts of the policy π_max(0, n − k) or a newer one, where window i begins with
policy π_i. Windows are counted from where the run began or was resumed.
"""

from collections import deque
from dataclasses import dataclass


class StaleRollouts(RuntimeError):
    """Raised if the current window has rows sampled by weights older than `async_level` allows."""


@dataclass
class RunAhead:
    """Decides which windows are submitted to the sampler, and checks that no window is too old to be trained on.

    Attributes:
        level: k, the number of windows that may be sampled ahead.
        window: the window that is trained on; −1 before the first.
    """

    level: int
    window: int = -1
    submitted: int = 0

    def __post_init__(self) -> None:
        self._begun: deque[int] = deque(maxlen=self.level + 1)  # optimizer steps at which the last k + 1 windows began

    def begin(self, global_step: int, known: int) -> range:
        """Begin the next window.

        Args:
            global_step: number of optimizer steps so far. It identifies the current weights.
            known: number of later windows whose prompts are known.
        Returns:
            The windows to submit now, in this order; 0 is the window that begins.
        """
        self.window += 1
        self._begun.append(global_step)
        first = self.submitted
        self.submitted = max(first, self.window + min(known, self.level) + 1)
        return range(first - self.window, self.submitted - self.window)

    def check(self, oldest: int) -> None:
        """Check that no row of the current window is too old. An error always means a defect of dash_trl.

        Args:
            oldest: the optimizer step of the oldest weights that sampled a row.
        Raises:
            StaleRollouts: if they are older than the weights with which window n − k began.
        """
        permitted = self._begun[0]  # the weights with which window n − k began
        if oldest < permitted:
            raise StaleRollouts(
                f"Window {self.window} begins at optimizer step {self._begun[-1]} with rollouts of the weights of step "
                f"{oldest}, but async_level={self.level} allows no weights older than those of step {permitted} "
                f"(the last windows began at the steps {list(self._begun)}). This is a defect of dash_trl: report it."
            )
