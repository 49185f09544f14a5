r"""`FormatReward`: whether a completion has the asked form, a closed thought and then an answer, in one \boxed{}."""

import re
from collections.abc import Sequence
from typing import Any

from dash_trl.rewards.answers import _scan_boxes, final_text
from dash_trl.rewards.math import completion_text

OPEN, CLOSE = "<think>", "</think>"
PARSED = ("reasoning_content", "thinking")  # where TRL puts a thought that the tokenizer's response template takes out


class FormatReward:
    r"""Reward function for TRL: 1.0 for a completion of the asked form, 0.0 for any other.

        reward_funcs=[MathAccuracyReward(), FormatReward(box=True)]         # with reward_weights=[1.0, 0.1], say

    TRL's `think_format_reward` differs: it takes conversations only, gives 1.0 for a second `</think>` and for no
    answer, and 0.0 to every model whose chat template opens the thought.

    Args:
        think: the completion begins with `<think>`, a thought and `</think>`, each tag once; an answer follows. False:
            only the box counts.
        think_in_prompt: the chat template ends the prompt with `<think>` (DeepSeek-R1's, QwQ's), so that no completion
            has it.
        box: its answer (what stands behind the thought) has exactly one \boxed{}, closed and not empty.
    """

    __name__ = "format"  # TRL names its metrics after it

    def __init__(self, *, think: bool = True, think_in_prompt: bool = False, box: bool = False):
        self._think, self._think_in_prompt, self._box = think, think_in_prompt, box

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """One of 1.0 and 0.0 per completion, a string or a conversation."""
        return [float(self._has_form(completion)) for completion in completions]

    def _has_form(self, completion: Any) -> bool:
        text = completion_text(completion)
        if not isinstance(completion, str) and completion and any(completion[-1].get(name) for name in PARSED):
            text = f"{'' if self._think_in_prompt else OPEN}…{CLOSE}{text}"
        if not self._think:
            return _has_one_box(final_text(text))
        parts = re.split(f"({OPEN}|{CLOSE})", OPEN + text if self._think_in_prompt else text)
        if parts[1::2] != [OPEN, CLOSE]:
            return False
        before, thought, answer = map(str.strip, parts[::2])
        return not before and bool(thought and answer) and (not self._box or _has_one_box(answer))


def _has_one_box(text: str) -> bool:
    boxes, is_cut_off = _scan_boxes(text)
    return len(boxes) == 1 and bool(boxes[0][2]) and not is_cut_off
