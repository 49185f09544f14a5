"""`Witness`: what the policy says of each token while transformers' `generate` samples it.

    logits of a step ──► log-probs [B, V] ──► entropy [B]
                              └── until the next step, or the output, shows which token was sampled ──► its log-prob [B]

Letters: B rows of this rank, T completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Witness:
    """Sees the logits of each step before a processor changes them: of the distribution that training differentiates,
    without top-k, top-p and penalties. What it keeps is what a forward pass over the samples finds, up to rounding.

    On the device it has [B, V] of one step, and three numbers per token, until the generation ends.

    Args:
        temperature: of the policy.
    """

    def __init__(self, temperature: float):
        self._temperature = temperature
        self._columns = 0  # that were read or written when the last step began
        self._last: Tensor | None = None  # its log-probs, until its tokens are known
        self._in_step = True  # every step was the next one of the same number of rows
        self._steps: list[list[Tensor]] = [[], [], []]  # tokens, log-probs, entropies, [B] each
        self._kept: Tensor | None = None  # the last two, [2, B, steps]
        self._tokens: Tensor | None = None  # [B, steps]

    def __call__(self, ids: Tensor, logits: Tensor) -> None:
        """A step begins.

        Args:
            ids: [B, columns], all that was read and written so far. logits: [B, V] of what comes next.
        """
        if self._last is not None:
            self._in_step &= ids.shape[1] == self._columns + 1 and len(ids) == len(self._last)
            if self._in_step:
                self._sampled(ids[:, -1].clone())  # a view would keep all that was read, of every step
        self._columns = ids.shape[1]
        self._last = None  # so that there are never two
        self._last = torch.log_softmax(logits.float() / self._temperature, dim=-1)

    def end(self, completion_ids: Sequence[Sequence[int]]) -> None:
        """The generation is over: what it has returned shows the tokens of the last step."""
        tokens, log_probs, entropies = self._steps
        if self._last is not None and len(completion_ids) == len(self._last) and self._in_step:
            column = [row[len(tokens)] if len(row) > len(tokens) else 0 for row in completion_ids]
            self._sampled(torch.tensor(column, device=self._last.device))
            self._tokens = torch.stack(tokens, dim=1).cpu()
            self._kept = torch.stack([torch.stack(log_probs, dim=1), torch.stack(entropies, dim=1)]).cpu()
        self._last, self._steps = None, [[], [], []]

    def found(self, completion_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor] | None:
        """(log-probs, entropies), [B, T] float32 on the CPU, 0 where no token is; None if it has seen other rows.

        So it is with beam search and assisted decoding, and where what was sampled has been changed since.

        Args:
            completion_ids, mask: [B, T] on the CPU, right-padded; mask 1 = token, 0 = padding.
        """
        used = int(mask.any(dim=0).sum())  # columns
        if self._kept is None or self._tokens is None or len(self._tokens) != len(mask) or self._tokens.shape[1] < used:
            return None
        mask = mask[:, :used].bool()
        if (self._tokens[:, :used] != completion_ids[:, :used])[mask].any():
            return None
        kept = self._kept[..., :used].where(mask, 0.0)
        log_probs, entropies = torch.nn.functional.pad(kept, (0, completion_ids.shape[1] - used))
        return log_probs, entropies

    def _sampled(self, tokens: Tensor) -> None:
        """The last step's, [B]."""
        assert self._last is not None, "a step has begun"
        probs = self._last.exp()
        entropy = torch.special.entr(probs, out=probs).sum(dim=-1)  # a token of log-prob -inf has none
        log_probs = self._last.gather(1, tokens.unsqueeze(1)).squeeze(1)
        for kept, one in zip(self._steps, (tokens, log_probs, entropy), strict=True):
            kept.append(one)
