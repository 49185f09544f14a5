"""`Segmenter` cuts completions into episodes, at whose boundaries V(prefix) is estimated::

    token ids ──► bytes ──► text ──► markers, sentence ends, final answer ──► token positions b_0 = 0 < b_1 < … < b_n

Episode i is the tokens b_{i−1} … b_i − 1, the final answer those from b_n on. Positions are mapped by bytes, so that
several tokens may form one character, and a marker may begin within one.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dash_trl.rewards import ANSWER_BEGINS

# Words with which a model begins a new thought: those that "Training-Free Process Rewards for LLM RL" prints, with
# their commas and spaces, so that "Waiting" begins none. The post's own list goes on.
EPISODE_MARKERS = ("Wait,", "Alternatively,", "Actually,", "Hmm,", "Let me ", "I need to ", "So ", "But ")

# Regular expression for the beginning of the final answer: what `MathAccuracyReward` reads. The last value, V_n,
# belongs to the prefix before the final answer, because in the final answer the policy only repeats its result.
FINAL_ANSWER = ANSWER_BEGINS

_BOXED_AS_BOUNDARY = re.compile(r"(?<!\\)(?:\\\\)*\\boxed")
# In a plain Python string, "\boxed" begins with a backspace and "\frac" with a form feed. No model writes these control
# characters, so an argument that contains one is a mistake.
_ESCAPED = re.compile("[\a\b\v\f]")
_WORD = re.compile(r"\w")
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+|[。！？][\"'”’」)\]]*\s*|\n+")

Markers = Collection[str] | Callable[[str], Iterable[int]]


def check_escapes(name: str, text: str) -> None:
    """Raise a `ValueError` if a text holds a control character that Python made from a backslash and a letter."""
    if _ESCAPED.search(text):
        raise ValueError(
            f"{name}={text!r} holds a control character: Python reads a backslash and a letter as an escape, as in "
            f"'\\boxed'. Write it as a raw string, r'\\boxed{{', or with two backslashes."
        )


@dataclass(frozen=True)
class Episodes:
    """The boundaries of the episodes of one completion.

    Args:
        boundaries: token positions 0 = b_0 < b_1 < … < b_n <= length. n = 0: all is the final answer.
        length: number of tokens of the completion.
    """

    boundaries: tuple[int, ...]
    length: int

    def slices(self) -> list[slice]:
        """Return one slice of tokens per episode, and one for the final answer. Together they are the completion.

        Without a final answer, the last one has only special tokens at the end, or none.
        """
        ends = [*self.boundaries[1:], self.length]
        return [slice(start, end) for start, end in zip(self.boundaries, ends, strict=True)]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return token id → bytes of its text, for a fast tokenizer: byte-level BPE (Qwen, Llama 3) or SentencePiece."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so the bytes of its tokens are unknown. Process "
            "rewards need a fast one: AutoTokenizer.from_pretrained loads it if the model has one."
        )
    byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    added = tokenizer.get_added_vocab()

    def text_of(token: str) -> bytes:
        if token in added:
            return token.encode()
        if byte_level:
            return bytes(byte_of[character] for character in token)
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(found[1])
        return token.replace("▁", " ").encode()

    return {index: text_of(token) for token, index in tokenizer.get_vocab().items()}


class Segmenter:
    """Cuts completions into episodes.

    An episode starts with the token that contains the first byte of a marker. If none follows within
    `max_episode_tokens` tokens, it ends at the last sentence end within them, or after them.

    The last boundary is the beginning of the final answer. If a completion has ended without one, it is the last
    episode, or the last sentence with a number if that is later, so that credit does not depend on the answer's phrase.
    In a truncated completion it is the end.

    Each turn of the policy begins an episode, so a tool's call and answer are in one. Only the policy's text is
    searched, its last turn for the final answer.

    Args:
        tokenizer: a fast tokenizer.
        markers: texts that begin an episode, but not within a word, or a function (text) → character positions at
            which episodes begin.
        max_episode_tokens: the largest length of an episode.
        final_answer: regular expression for the beginning of the final answer. The last match counts, or the one before
            if no word separates them: ``The answer is $\\boxed{72}$`` begins at "The". A match before a marker, or
            before more than `max_episode_tokens` tokens, is within a thought and does not count.
    Raises:
        ValueError: if a setting cannot be used, or the tokenizer is not fast.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        markers: Markers = EPISODE_MARKERS,
        max_episode_tokens: int = 256,
        final_answer: str = FINAL_ANSWER,
    ):
        texts = isinstance(markers, Collection) and markers and all(one and isinstance(one, str) for one in markers)
        if isinstance(markers, str) or not (texts or callable(markers)):
            raise ValueError(
                f"markers={markers!r} cannot begin an episode: pass a list of non-empty texts, or a function that "
                "takes a text and returns character positions, or leave it out to use "
                "dash_trl.process_rewards.EPISODE_MARKERS."
            )
        if not isinstance(max_episode_tokens, int) or max_episode_tokens < 1:
            raise ValueError(f"max_episode_tokens={max_episode_tokens}: an episode has 1 token or more.")
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
        self._longest = max_episode_tokens
        self._final_answer = re.compile(final_answer)
        self._markers = markers if callable(markers) else _starts(markers)

    def __call__(self, token_ids: Sequence[int], own: Sequence[int] | None = None) -> Episodes:
        """Return the episodes of one completion.

        Args:
            token_ids: its token ids without padding; they may end with special tokens.
            own: per token, 1 = the policy wrote it, 0 = a tool or an environment. None = all 1.
        """
        *turns, last = _turns([1] * len(token_ids) if own is None else own)
        boundaries = []
        for turn in turns:
            found = self._of_turn(token_ids[turn], is_last=False)
            boundaries += [turn.start + at for at in found[:-1] or found]  # the episode goes on to the next turn
        boundaries += [last.start + at for at in self._of_turn(token_ids[last], is_last=True)]
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

        cuts = [position for position in self._markers(text) if 0 <= position <= len(text)]
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        last_cut = max(cuts, default=0)
        answers = [one for one in self._final_answer.finditer(text) if is_last and one.start() >= last_cut]
        while len(answers) > 1 and not _WORD.search(text, answers[-2].end(), answers[-1].start()):
            answers.pop()
        end = written
        if answers:
            end = token_at(answers[-1].start())
        elif is_last and written < len(token_ids):  # it has ended
            signs = [*re.finditer(r"\d", text)] or [*_WORD.finditer(text)]
            last_sign = signs[-1].start() if signs else 0
            sentence = len(text[: max(at for at in [0, *ends] if at <= last_sign)].rstrip())
            end = max(token_at(sentence - 1) + 1 if sentence else 0, token_at(last_cut))
        if written - end > self._longest:  # within a thought
            end = written
        sentences = list(map(token_at, ends))
        return self._boundaries(sorted({token_at(cut) for cut in cuts}), sentences, end)

    def _boundaries(self, cuts: list[int], sentences: list[int], end: int) -> tuple[int, ...]:
        boundaries = [0]
        for cut in [*(cut for cut in cuts if cut < end), end]:
            while cut - boundaries[-1] > self._longest:
                start = boundaries[-1]
                latest = start + self._longest
                boundaries.append(max((at for at in sentences if start < at <= latest), default=latest))
            boundaries.append(cut)
        return tuple(dict.fromkeys(boundaries))


def _turns(own: Sequence[int]) -> list[slice]:
    """Return the turns of the policy as slices of tokens; after a tool's last answer, an empty one follows."""
    turns = [slice(*run.span()) for run in re.finditer(b"\x01+", bytes(own))]
    if not turns or turns[-1].stop < len(own):
        turns.append(slice(len(own), len(own)))
    return turns


def _starts(markers: Collection[str]) -> Callable[[str], Iterable[int]]:
    """Return a function that finds markers in a text, but not within words."""
    words = "|".join(map(re.escape, sorted(markers, key=len, reverse=True)))
    pattern = re.compile(rf"(?:(?<!\w)|(?!\w))(?:{words})")
    return lambda text: [match.start() for match in pattern.finditer(text)]


def line_starts(text: str) -> list[int]:
    """Return the positions at which lines begin. With `Segmenter(markers=line_starts)`, a line is an episode."""
    return [match.end() for match in re.finditer(r"\n+", text)]
