"""Episodes: boundaries are token positions, whatever the text; nothing is lost and nothing comes twice."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from dash_trl.process_rewards import EPISODE_MARKERS, Segmenter, line_starts
from tests.tiny import refused


def byte_level() -> PreTrainedTokenizerFast:
    """Merges that straddle markers (". W", "So x"), spaces before words, and characters of several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        ["so we add. Wait, no. So x is 4.\n\nThe answer is 4 Hmm"] * 3,
        trainers.BpeTrainer(
            vocab_size=270, special_tokens=["<|end|>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")


TOKENIZER = byte_level()
END = TOKENIZER.eos_token_id
PARTS = [
    "Wait, ",
    "So ",
    "x is 4. ",
    "no\n",
    "…and 7 🙂 ",
    "é",
    "The answer is 4",
    "\\boxed{4}",
    "Sofia ",
    " ",
    "add. Wait",
]
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PARTS), max_size=25).map("".join))


def cut(*turns: str | None, end: bool = True, **arguments) -> tuple[list[str], list[int]]:
    """(episodes and final answer as text, boundaries) of turns of the policy's and of a tool, one after the other."""
    ids = []
    own = []
    for number, text in enumerate(turns):
        is_own = number % 2 == 0
        tokens = [] if text is None else TOKENIZER(text)["input_ids"] + [END] * (is_own and end)
        ids += tokens
        own += [int(is_own)] * len(tokens)
    episodes = Segmenter(TOKENIZER, **arguments)(ids, own if len(turns) > 1 else None)
    assert episodes.length == len(ids)
    pieces = [TOKENIZER.decode(ids[part], skip_special_tokens=True) for part in episodes.slices()]
    return pieces, list(episodes.boundaries)


def read(tokenizer, ids: list[int]) -> str:
    """The text in which markers are searched."""
    seen = []
    Segmenter(tokenizer, markers=lambda text: seen.append(text) or [])(ids)
    return seen[0]


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_markers_are_searched_in_the_text_that_the_tokens_stand_for(text):
    assert read(TOKENIZER, TOKENIZER(text)["input_ids"]) == text


def test_sentencepiece_tokens():
    vocab = {"▁a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3, "<s>": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True)), bos_token="<s>"
    )
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    assert read(tokenizer, [0, 1, 2, 3, 4]) == " abé"


def test_episodes_as_text():
    for text, arguments, episodes in [
        ("Sofia xSo y", {"markers": ["So"], "end": False}, ["Sofia xSo y", ""]),  # within a word it is none
        ("é🙂é🙂 Wait 🙂é So é🙂", {"markers": ["Wait", "So"]}, ["é🙂é🙂", "Wait 🙂é", "So é🙂"]),
        # Without markers sentences end episodes, and then length does.
        (
            "one two three. four five six. seven eight",
            {"markers": ["Wait"], "max_episode_tokens": 20, "end": False},
            ["one two three.", "four five six.", "seven eight", ""],
        ),
        ("a\nb\nc", {"markers": line_starts}, ["a", "b", "c"]),
        ("Waiting, Nowadays. Wait, so So we", {}, ["Waiting, Nowadays.", "Wait, so", "So we"]),
        ("1=2\n\n3=x", {"markers": ["\n\n", "x"]}, ["1=2", "3=", "x"]),
        ("ab", {"markers": lambda text: [-1, 0, 1, 99]}, ["a", "b"]),
        # A heading, an early answer or a denied one is not the final answer.
        ("We add.\n#### Step 2\nSo 8. But why?", {}, ["We add.\n#### Step 2", "So 8.", "But why?"]),
        ("The answer is 12. Wait, no. So 9", {}, ["The answer is 12.", "Wait, no.", "So 9"]),
        ("先算。再加。", {"max_episode_tokens": 11, "end": False}, ["先算。", "再加。", ""]),
        ("", {}, [""]),
    ]:
        assert [piece.strip() for piece in cut(text, **arguments)[0]] == episodes, text
    assert cut("abcdefghij" * 5, markers=["Wait"], max_episode_tokens=16, end=False)[1][1] == 16


def test_the_final_answer_is_no_episode():
    plain = ("The answer is 4", "the final answer is 4.", "\\boxed{4}", "#### 4")
    announced = ("The final answer is $\\boxed{72}$.", "The answer is: **\\boxed{72}**", "The answer is\n\n#### 72")
    for before, answers in [
        ("The answer is unclear. So x is 4.", plain),
        ("So x is 4. The answer is 5? No.", announced),
    ]:
        for answer in answers:
            assert cut(f"{before} {answer}")[0][-1].strip() == answer
    assert cut("The answer is 4") == (["The answer is 4"], [0])


def test_an_answer_within_a_thought_is_not_the_final_one():
    """Truncated in the thought, or with an answer that no expression finds: the rest is cut into episodes, too."""
    for doubt in ("But wait, ", ""):  # a marker, or length alone
        thought = f"So the answer is 12. {doubt}I forgot one. " + 20 * "Then we add 3 and 4. "
        pieces, bounds = cut(thought, max_episode_tokens=64, end=False)
        assert bounds[-1] == len(TOKENIZER(thought)["input_ids"]) and len(bounds) > 4 and pieces[-1] == ""
        assert max(after - before for before, after in itertools.pairwise(bounds)) <= 64
        assert cut(f"{thought}The answer is 7.", max_episode_tokens=64)[0][-1] == "The answer is 7."


def test_ids_without_a_token_have_no_text():
    ids = TOKENIZER("add. Wait, no")["input_ids"]
    more = [*ids[:1], 9999, *ids[1:], 9999]
    before, after = (Segmenter(TOKENIZER)(one).boundaries for one in (ids, more))
    assert after == (0, before[1] + 1, before[2] + 2)


TURNS = {
    "only what the policy wrote is looked at": (
        ["we add. Wait, no", "no. So x. The answer is 7", "x is 4. So the answer is 4"],
        ["we add. ", "Wait, nono. So x. The answer is 7", "x is 4. ", "So the answer is 4"],
    ),
    "turns that are shorter than an episode": (["x", "7", "y", "8", "z"], ["x7", "y8", "z"]),
    "an answer before a call of a tool is not the final one": (
        ["x. The answer is 4. Wait, no", "7", "it is 7"],
        ["x. The answer is 4. ", "Wait, no7", "it is 7"],
    ),
    "a tool has the last word": (["x", "7<|end|>"], ["x7", ""]),
    "turns without a word": (["", "7", ""], ["7", ""]),
    "an environment begins": ([None, "7", "x"], ["7x"]),
}


@pytest.mark.parametrize(
    "answer",
    [
        "The answer is 9.",
        "Answer: 9",
        "**Final Answer:** 9",
        "<answer>9</answer>",
        "#### 9",
        "12-3 = 9.",
        "So \\boxed{9}.",
        "答案是9。",
    ],
)
def test_boundaries_do_not_depend_on_the_phrase_of_the_answer(answer):
    assert cut(f"7+5=12. So 12-3 is left. {answer}")[1] == cut("7+5=12. So 12-3 is left. The answer is 8.")[1]


def test_an_episode_ends_where_the_policy_s_next_turn_begins():
    for case, (turns, episodes) in TURNS.items():
        assert cut(*turns)[0] == episodes, case


@settings(max_examples=120)
@given(st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=6), st.integers(10, 30), st.integers(0, 3))
def test_any_completion(turns, longest, dropped):
    """Episodes are the completion, laid end to end; each begins with a token of the policy's, and each of its turns."""
    own = []
    ids = []
    for text, is_own in turns:
        tokens = TOKENIZER(text)["input_ids"] + [END] * is_own
        ids += tokens
        own += [int(is_own)] * len(tokens)
    ids = ids[: len(ids) - dropped]  # it may end within a character
    own = own[: len(ids)]
    episodes = Segmenter(TOKENIZER, max_episode_tokens=longest)(ids, own)
    assert [token for part in episodes.slices() for token in ids[part]] == ids
    bounds = list(episodes.boundaries)
    assert bounds[0] == 0 and bounds == sorted(set(bounds)) and bounds[-1] <= len(ids)
    begins = [at for at, is_own in enumerate(own) if is_own and not (at and own[at - 1])]
    assert set(begins[1:]) <= set(bounds) and all(own[at] for at in bounds[1:] if at < len(ids))
    inner = [part.stop - part.start for part in episodes.slices()[:-1]]
    if all(own):
        assert max(inner, default=0) <= longest


def test_impossible_settings_are_refused():
    for arguments, said in [
        ({"markers": []}, r"markers=\[\] cannot begin an episode"),
        ({"markers": ["Wait", ""]}, "cannot begin an episode"),
        ({"markers": "Wait"}, "markers='Wait' cannot begin an episode: pass a list"),
        *(({"markers": one}, "cannot begin an episode") for one in (None, iter(["So"]), re.compile("So"), ["So", 1])),
        *(({"max_episode_tokens": one}, f"tokens={one}: an episode has 1 token") for one in (0, None)),
        ({"final_answer": "(answer: )?"}, r"final_answer='\(answer: \)\?' matches an empty text"),
        ({"final_answer": "\boxed"}, r"final_answer='\\x08oxed' holds a control character.* raw string"),
        ({"final_answer": r"\boxed\{"}, r"looks for 'oxed' at the beginning of a word.*such as r'"),
    ]:
        refused(said, Segmenter, TOKENIZER, **arguments)
    refused("ByT5Tokenizer is not a fast tokenizer", Segmenter, ByT5Tokenizer())
    assert all(re.match(r"\w", marker) for marker in EPISODE_MARKERS)
