"""The entropy bonus and the router loss of a mixture of experts: terms of the loss that do not carry the advantage.

TRL adds each of them to every micro-batch at 1 / accumulation steps, so that an optimizer step has it once. DASH runs
fewer or more passes than there are micro-steps, each on another share of the survivors; here every pass gets the term
in proportion to its tokens, so that a step has it once again. What is averaged stays an approximation: survivors in
place of all rows, and a router loss that is not linear in the batch.
"""

from __future__ import annotations

from typing import Any

from dash_trl.update.schedule import Segment


def regularizer_weight(tokens: int, segment: Segment) -> float:
    """The weight of a pass relative to a micro-batch of TRL's; its sum over a segment's passes is `segment.passes`.

    tokens · passes / kept_tokens, where `passes` counts micro-steps × ranks.

    Args:
        tokens: loss tokens of the pass on this rank; 0 for a dummy, which has no say.
    """
    return tokens * segment.passes / max(segment.kept_tokens, 1)


class ScaledCoefficient(float):
    """A coefficient of TRL's that is `scale` times itself as a factor, and itself in sums, comparisons and logs.

    TRL multiplies by the coefficient, logs it, and adapts it (`use_adaptive_entropy`), all within one method.
    """

    scale: float

    def __new__(cls, value: float, scale: float) -> ScaledCoefficient:
        coefficient = super().__new__(cls, value)
        coefficient.scale = scale
        return coefficient

    def __mul__(self, other: Any) -> Any:
        return float(self) * self.scale * other
