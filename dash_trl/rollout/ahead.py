"""How far sampling may run ahead of training: a pure state machine, without a clock and without I/O.

    window        n          n + 1    …    n + k       n + k + 1
              trained on   being sampled, in order     waits for the weights that window n + 1 begins with

PRIME-RL's rule: window n is trained on rollouts of π_max(0, n − k) or newer. Windows are counted from the beginning of
the run, or from where it was resumed; weights by the optimizer step that made them.
"""

from collections import deque


class StaleRollouts(RuntimeError):
    """Rollouts of weights that are older than `async_level` permits came to be trained on."""


class RunAhead:
    """
    Args:
        level: k, windows.
    Attributes:
        window: that is trained on; −1 before the first. submitted: windows that were.
    """

    def __init__(self, level: int):
        self.level = level
        self.window = -1
        self.submitted = 0
        self._begun: deque[int] = deque(maxlen=level + 1)  # the optimizer steps at which the last windows began

    def begin(self, step: int, known: int, *, anew: bool = False) -> range:
        """The next window begins.

        Args:
            step: optimizer steps taken; the servers have, or are given now, the weights that these made.
            known: the windows after it whose prompts are known.
            anew: what was submitted is thrown away, and submitted again.
        Returns:
            The windows that are to be submitted now, in this order.
        """
        self.window += 1
        self._begun.append(step)
        first = self.window if anew else self.submitted
        self.submitted = max(first, self.window + min(known, self.level) + 1)
        return range(first, self.submitted)

    def check(self, oldest: int) -> None:
        """
        Args:
            oldest: the step of the oldest weights that sampled a row of the window.
        Raises:
            StaleRollouts: they are too old, which the order of submission excludes.
        """
        permitted = self._begun[0]  # with which window n − k began
        if oldest < permitted:
            raise StaleRollouts(
                f"Window {self.window} begins at optimizer step {self._begun[-1]} with rollouts of the weights of step "
                f"{oldest}, but async_level={self.level} permits those of step {permitted} at the oldest "
                f"(the last windows began at the steps {list(self._begun)}). This is a defect of dash_trl: report it."
            )
