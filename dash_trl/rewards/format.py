r"""`FormatReward`: checks whether a completion has the wanted format.

The format is a closed thought followed by an answer, and optionally exactly one ``\boxed{}`` in the answer.
"""

import re
from collections.abc import Sequence
from typing import Any

from dash_trl.rewards.answers import _scan_boxes, final_text
from dash_trl.rewards.math import completion_text

OPEN, CLOSE = "<think>", "</think>"
PARSED = ("reasoning_content", "thinking")  # keys with the thought, if the response template took it out of the text


class FormatReward:
    r"""Reward function of TRL's form: 1.0 for a completion in the wanted format, 0.0 for any other.

    Example::

        reward_funcs=[MathAccuracyReward(), FormatReward(box=True)]  # for example with reward_weights=[1.0, 0.1]

    TRL's `think_format_reward` differs in these points: it takes conversations only; it gives 1.0 also if there is a
    second `</think>`, or if the thought or the answer is empty; and it gives 0.0 if white space precedes `<think>`, and
    to every completion if the chat template opens the thought.

    Args:
        think: True = the completion must begin with `<think>`, a thought and `</think>`, each tag once, and an answer
            must follow. False = thoughts are not checked.
        think_in_prompt: True = the chat template ends the prompt with `<think>`, as the templates of DeepSeek-R1 and
            QwQ do, so completions do not begin with this tag.
        box: True = the answer (the text after the thought) must have exactly one ``\boxed{}``, closed and not empty.
            With `think=False`, the box is always checked, even with `box=False`.
    """

    __name__ = "format"  # TRL's metrics get this name

    def __init__(self, *, think: bool = True, think_in_prompt: bool = False, box: bool = False):
        self._think, self._think_in_prompt, self._box = think, think_in_prompt, box

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """Scores a batch.

        Args:
            completions: [N] strings or conversations.
            kwargs: the other columns that TRL passes; not used.

        Returns:
            [N] rewards in the same order: 1.0 or 0.0.
        """
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
