"""`Segmenter` cuts completions into episodes. V(prefix) is estimated at the boundaries of the episodes::

    token ids ──► bytes ──► text ──► markers, sentence ends, final answer ──► token positions b_0 = 0 < b_1 < … < b_n

Episode i consists of the tokens b_{i−1} … b_i − 1. The tokens from b_n on are the final answer. Positions in the text
are mapped to tokens by the bytes of each token. So every boundary lies between two tokens, even if several tokens form
one character or a marker begins within a token.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from dash_trl.process_rewards.arguments import check_escapes
from dash_trl.rewards import ANSWER_BEGINS

# Words with which a model begins a new thought: those that "Training-Free Process Rewards for LLM RL" prints, with
# their commas and spaces, so that "Waiting" begins none. The post's own list goes on.
EPISODE_MARKERS = ("Wait,", "Alternatively,", "Actually,", "Hmm,", "Let me ", "I need to ", "So ", "But ")

# Regular expression for the beginning of the final answer: what `MathAccuracyReward` reads. The last value, V_n,
# belongs to the prefix before the final answer, because in the final answer the policy only repeats its result.
FINAL_ANSWER = ANSWER_BEGINS

_BOXED_AS_BOUNDARY = re.compile(r"(?<!\\)(?:\\\\)*\\boxed")
_WORD = re.compile(r"\w")
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+|[。！？][\"'”’」)\]]*\s*|\n+")

Markers = Sequence[str] | Callable[[str], Iterable[int]]


@dataclass(frozen=True)
class Episodes:
    """The boundaries of the episodes of one completion.

    Args:
        boundaries: token positions 0 = b_0 < b_1 < … < b_n <= length. If n = 0, the whole completion is the final
            answer.
        length: number of tokens of the completion.
    """

    boundaries: tuple[int, ...]
    length: int

    def slices(self) -> list[slice]:
        """Return one slice of tokens per episode, and one for the final answer.

        The n + 1 slices cover the completion without gaps. If no final answer was found, the last slice has only the
        special tokens at the end of the completion, such as the end-of-sequence token, and is empty without them.
        """
        ends = [*self.boundaries[1:], self.length]
        return [slice(start, end) for start, end in zip(self.boundaries, ends, strict=True)]


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Maps each token id of a fast tokenizer to the bytes of its text.

    Args:
        tokenizer: a fast tokenizer, byte-level BPE (Qwen, Llama 3) or SentencePiece.
    Raises:
        ValueError: if the tokenizer is not fast.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so the bytes of its tokens are unknown. Process "
            "rewards need a fast one: AutoTokenizer.from_pretrained loads it if the model has one."
        )
    byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    added = set(tokenizer.get_added_vocab())
    table = {}
    for token, index in tokenizer.get_vocab().items():
        if token in added:
            table[index] = token.encode()
        elif byte_level:
            table[index] = bytes(byte_of[character] for character in token)
        elif found := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            table[index] = bytes.fromhex(found[1])
        else:
            table[index] = token.replace("▁", " ").encode()
    return table


class Segmenter:
    """Cuts completions into episodes.

    A new episode starts with the token that contains the first byte of a marker. If no marker follows within
    `max_episode_tokens` tokens, the episode ends at the last sentence end within this length. If this length contains
    no sentence end, the episode has exactly this length. Either cut comes earlier if otherwise fewer than
    `min_episode_tokens` tokens would be left for the next episode. The last boundary is the beginning of the final
    answer. If no final answer is found in a completion that has ended, it begins with the last episode or with the last
    sentence that has a number, whichever is later, so that credit does not depend on how the answer is phrased. If the
    completion is truncated, the last boundary is its end, and V there measures the progress of the whole completion.

    In a completion of several turns, each turn of the policy begins an episode, even if the previous episode is shorter
    than `min_episode_tokens`. So the call of a tool and the tool's answer belong to one episode. Markers and sentence
    ends are searched only in text that the policy wrote, and the final answer only in the policy's last turn.

    Args:
        tokenizer: a fast tokenizer.
        markers: list of texts, or a function that takes a text and returns the character positions at which episodes
            begin. A text of the list begins an episode only if it stands at the beginning of a word.
        max_episode_tokens: the largest number of tokens of an episode. A longer episode is cut as described above.
        min_episode_tokens: number of tokens. A boundary within a turn is left out if fewer tokens than this number lie
            between it and the previous boundary, or between it and the final answer or the end of the turn.
        final_answer: regular expression for the beginning of the final answer. The last match counts, with one
            exception: if no word or fewer than `min_episode_tokens` tokens separate two matches, the earlier match
            counts. So the final answer ``The answer is $\\boxed{72}$`` begins at "The", not at "\\boxed". A match that
            is followed by a marker, or by more than `max_episode_tokens` tokens, does not count, because it stands
            within a thought.
    Raises:
        ValueError: if the settings contradict each other, or the tokenizer is not fast.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        markers: Markers = EPISODE_MARKERS,
        max_episode_tokens: int = 256,
        min_episode_tokens: int = 1,
        final_answer: str = FINAL_ANSWER,
    ):
        if isinstance(markers, str) or not (callable(markers) or (markers and all(markers))):
            raise ValueError(
                f"markers={markers!r} cannot begin an episode: pass a list of non-empty texts, or a function that "
                "takes a text and returns character positions, or leave it out to use "
                "dash_trl.process_rewards.EPISODE_MARKERS."
            )
        if not 1 <= min_episode_tokens <= max_episode_tokens // 2:
            raise ValueError(
                f"min_episode_tokens={min_episode_tokens} and max_episode_tokens={max_episode_tokens} cannot both "
                "hold: an episode that is too long is split into two that are long enough, so 1 <= min <= max / 2 is "
                "needed."
            )
        check_escapes("final_answer", final_answer)
        if _BOXED_AS_BOUNDARY.search(final_answer) or re.search(final_answer, ""):
            raise ValueError(
                f"final_answer={final_answer!r} matches an empty text, or looks for 'oxed' at the beginning of a word, "
                "since \\b means the edge of a word in a regular expression. Give an expression for the text before "
                "your model's answers, such as r'\\\\boxed', or r'(?!)', which matches nothing: then the last boundary "
                "of each completion is its end."
            )
        self._bytes = token_bytes(tokenizer)
        self._special = set(tokenizer.all_special_ids)
        self._markers = markers
        self._longest, self._shortest = max_episode_tokens, min_episode_tokens
        self._final_answer = re.compile(final_answer)
        if not callable(markers):
            words = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
            self._marker = re.compile(rf"(?<!\w)(?:{words})")

    def __call__(self, token_ids: Sequence[int], own: Sequence[int] | None = None) -> Episodes:
        """Return the episodes of one completion.

        Args:
            token_ids: token ids of the completion, without padding. They may end with the end-of-sequence token.
            own: one number per token, 1 = the policy wrote it, 0 = a tool or an environment wrote it. None = the policy
                wrote all tokens.
        """
        turns = _turns([1] * len(token_ids) if own is None else own)
        boundaries = []
        for turn in turns:
            is_last = turn == turns[-1]
            found = self._of_turn(token_ids[turn], is_last=is_last)
            if not is_last and len(found) > 1:
                found = found[:-1]  # the episode goes on to the next turn
            boundaries += [turn.start + at for at in found]
        # b_0 = 0, even if the text of an environment comes before the policy's first turn.
        return Episodes((0, *boundaries[1:]), len(token_ids))

    def _of_turn(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[int, ...]:
        """Return the boundaries of a turn from 0 to its end or, in the policy's last turn, to the final answer."""
        written = len(token_ids)
        while written and token_ids[written - 1] in self._special:
            written -= 1
        # A model may have more embeddings than its tokenizer has tokens (Qwen2.5: 271 more). The additional token ids
        # have no text.
        pieces = [self._bytes.get(token, b"") for token in token_ids[:written]]
        starts = [0, *accumulate(map(len, pieces))]  # the first byte of each token; the last entry is the end
        # A byte that is not valid UTF-8, such as half a character at a truncated end, becomes a character of its own.
        text = b"".join(pieces).decode("utf-8", "surrogateescape")

        def token_at(character: int) -> int:
            byte = len(text[:character].encode("utf-8", "surrogateescape"))
            return bisect_right(starts, byte, hi=written) - 1 if byte < starts[-1] else written

        if callable(self._markers):
            cuts = [position for position in self._markers(text) if 0 <= position <= len(text)]
        else:
            cuts = [match.start() for match in self._marker.finditer(text)]
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        last_cut = max(cuts, default=0)
        answers = [one for one in self._final_answer.finditer(text) if is_last and one.start() >= last_cut]
        begins = [token_at(answer.start()) for answer in answers]
        while len(begins) > 1:
            last, before = answers.pop(), answers[-1]
            if begins[-1] - begins[-2] >= self._shortest and _WORD.search(text, before.end(), last.start()):
                break
            begins.pop()
        if is_last and not begins and written < len(token_ids):  # it has ended
            signs = [*re.finditer(r"\d", text)] or [*_WORD.finditer(text)]
            last_sign = signs[-1].start() if signs else 0
            sentence = len(text[: max(at for at in [0, *ends] if at <= last_sign)].rstrip())
            begins = [max(token_at(sentence - 1) + 1 if sentence else 0, token_at(last_cut))]
        end = begins[-1] if begins and written - begins[-1] <= self._longest else written
        sentences = list(map(token_at, ends))
        return self._boundaries(sorted({token_at(cut) for cut in cuts}), sentences, end)

    def _boundaries(self, cuts: list[int], sentences: list[int], end: int) -> tuple[int, ...]:
        boundaries = [0]
        for cut in [*(cut for cut in cuts if cut <= end - self._shortest), end]:
            if cut < end and cut - boundaries[-1] < self._shortest:
                continue
            while cut - boundaries[-1] > self._longest:
                start = boundaries[-1]
                # The tokens that are left after the cut must also be at least `min_episode_tokens`.
                latest = min(start + self._longest, cut - self._shortest)
                at = bisect_right(sentences, latest) - 1
                first = bisect_left(sentences, start + self._shortest)
                boundaries.append(sentences[at] if at >= first else latest)
            boundaries.append(cut)
        return tuple(dict.fromkeys(boundaries))


def _turns(own: Sequence[int]) -> list[slice]:
    """Return the turns of the policy as slices of tokens; after a tool's last answer, an empty one follows."""
    turns = [slice(*run.span()) for run in re.finditer(b"\x01+", bytes(own))]
    if not turns or turns[-1].stop < len(own):
        turns.append(slice(len(own), len(own)))
    return turns


def line_starts(text: str) -> list[int]:
    """Return the character positions at which lines begin.

    With `Segmenter(markers=line_starts)`, each line becomes an episode.
    """
    return [match.end() for match in re.finditer(r"\n+", text)]
