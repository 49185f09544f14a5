"""`ModelPasses`: how the model passes of a run lay out their rows, end to end or padded, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dash_trl.rollout import Survivors
from dash_trl.update.padding_free import (
    PackedLayout,
    enable_padding_free,
    packed_log_probs,
    real_rows_only,
    to_device,
)

logger = logging.getLogger(__name__)


class ModelPasses:
    """Makes the inputs of passes, and runs them in TRL's method for log-probs.

    Args:
        models: transformers models, the policy first, without wrappers and adapters.
        virtual_tokens: prompt tuning puts some before each prompt. Padding lies between them and the prompt, so that
            its width is part of the input.
        continuous_batching: samples with paged variants of the attention that a model came with.
    Attributes:
        padded_because: why passes are padded; `None`: they are padding-free.
    """

    def __init__(self, models: Sequence[Any], *, virtual_tokens: bool, continuous_batching: bool):
        self.padded_because: str | None = None
        if continuous_batching:
            self.padded_because = "continuous batching brings its own attention"
        elif virtual_tokens:
            self.padded_because = "every sample has virtual tokens before it"
        else:
            self.padded_because = next(filter(None, map(enable_padding_free, models)), None)
        self.flash = "flash" in (models[0].config.get_text_config()._attn_implementation or "")
        self._name = type(models[0]).__name__
        self._trim_prompts = not virtual_tokens
        self._layout: PackedLayout | int | None = None  # of the pass that is running; `None`: found from its mask

    @property
    def padding_free(self) -> bool:
        return self.padded_because is None

    def say(self) -> None:
        """Log which it is."""
        if self.padding_free:
            logger.info(f"{self._name}: model passes are padding-free.")
        else:
            logger.warning(
                f"{self._name}: model passes are padded, not padding-free, because {self.padded_because}. The update "
                "is the same; it takes longer."
            )

    def inputs(self, survivors: Survivors, rows: list[int], *, size: int, pad_token_id: int) -> dict[str, Any]:
        """The inputs of a pass over `rows`, and its `layout`, on the CPU; arguments as in `Survivors.micro_batch`."""
        inputs = survivors.micro_batch(rows, size=size, pad_token_id=pad_token_id, trim_prompts=self._trim_prompts)
        layout: PackedLayout | int = max(len(rows), 1)  # the rows that have a token
        if self.padding_free:
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            layout = PackedLayout.of(mask, inputs["completion_mask"].shape[1])
        return {**inputs, "layout": layout}

    def to_device(self, inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The same inputs on the device, copied while it computes."""
        moved = {name: to_device(value, device) for name, value in inputs.items() if isinstance(value, Tensor)}
        layout = inputs["layout"]
        return {**inputs, **moved, "layout": layout.to(device) if isinstance(layout, PackedLayout) else layout}

    @contextmanager
    def laid_out(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Within it, `log_probs` knows the layout of `inputs`, of which TRL hands on the masks only."""
        self._layout = inputs["layout"]
        try:
            yield
        finally:
            self._layout = None

    def log_probs(self, padded: Callable[..., Any], *batch: Any, **kwargs: Any) -> Any:
        """By one pass on real rows and tokens only; arguments and results of TRL's method, which is `padded`."""
        if self.padding_free:
            layout = self._layout if isinstance(self._layout, PackedLayout) else None
            return packed_log_probs(*batch, flash=self.flash, layout=layout, **kwargs)
        real = self._layout if isinstance(self._layout, int) else None
        return real_rows_only(padded, *batch, real=real, **kwargs)
