"""The small rewards: the form of a completion, and its length (TRL's)."""

import pytest

from dash_trl.rewards import FormatReward, get_soft_overlong_punishment

BOX = r"\boxed{4}"
THOUGHT = "<think>\n2 + 2 is 4.\n</think>\n\n"


@pytest.mark.parametrize(
    "completion, has_form",
    [
        (f"{THOUGHT}4", True),
        (f" \n{THOUGHT}4", True),
        ("<think>a</think>b", True),
        ("<think>a\n\nb < c > d</think>\n\n4", True),
        ("4", False),
        ("", False),
        (THOUGHT, False),  # no answer: TRL's gives 1.0
        (f"{THOUGHT} \n", False),
        ("<think></think>4", False),  # no thought: TRL's gives 1.0
        ("<think>\n\n</think>4", False),
        ("<think>a 4", False),
        ("a</think>4", False),
        (f"So: {THOUGHT}4", False),
        (f"{THOUGHT}{THOUGHT}4", False),
        ("<think>a<think>b</think>4", False),
        ("<think>a</think>b</think>4", False),  # TRL's gives 1.0
        ("<think>a</think>4<think>", False),
        ("</think>a<think>4", False),
    ],
)
def test_a_thought_and_an_answer(completion, has_form):
    assert FormatReward()([completion]) == [float(has_form)]
    opened = completion.lstrip().removeprefix("<think>")  # what a model writes whose template opens the thought
    if completion.lstrip().startswith("<think>"):
        assert FormatReward(think_in_prompt=True)([opened]) == [float(has_form)]
        assert FormatReward(think_in_prompt=True)([completion]) == [0.0]


@pytest.mark.parametrize(
    "answer, has_form",
    [
        (BOX, True),
        (rf"So it is ${BOX}$.", True),
        (r"\fbox{4}", True),
        (r"\boxed{\frac{1}{2}}", True),
        (r"\boxed{\text{a \boxed{4}}}", True),  # one, with a box inside
        ("4", False),
        (f"{BOX} or {BOX}", False),
        (r"\boxed{}", False),
        (r"\boxed{ }", False),
        (r"\boxed{4", False),
        (rf"{BOX} and \boxed{{5", False),
    ],
)
def test_an_answer_in_one_box(answer, has_form):
    assert FormatReward(think=False, box=True)([answer]) == [float(has_form)]
    assert FormatReward(box=True)([f"{THOUGHT}{answer}"]) == [float(has_form)]
    assert FormatReward(box=True)([f"<think>{BOX} or {BOX}?</think>{answer}"]) == [float(has_form)]
    assert FormatReward(think=False, box=True)([f"<think>{BOX} or {BOX}?</think>{answer}"]) == [float(has_form)]
    assert FormatReward(box=True)([answer]) == [0.0]


def message(content: str, **fields: str) -> list[dict]:
    return [{"role": "assistant", "content": content, **fields}]


def test_conversations_and_thoughts_that_the_tokenizer_took_out():
    batch = [
        message(f"{THOUGHT}4"),
        message("4"),
        message("4", reasoning_content="2 + 2"),
        message("", thinking="a"),
        [],
    ]
    assert FormatReward()(completions=batch, prompts=batch, answer=["4"] * 5) == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert FormatReward(think_in_prompt=True)(batch) == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert FormatReward(box=True)([message(BOX, thinking="a"), message("4", thinking=BOX)]) == [1.0, 0.0]
    assert FormatReward().__name__ == "format"


def dapo(length: int, longest: int, cache: int) -> float:
    """Equation 13 of DAPO (arXiv:2503.14476)."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize("longest, cache", [(20480, 4096), (100, 20), (100, 100), (100, 0), (7, 3)])
def test_trls_length_penalty_is_dapos(longest, cache):
    edges = [edge + step for edge in (1, longest - cache, longest) for step in (-1, 0, 1)]
    lengths = [length for length in edges if length >= 0]
    reward = get_soft_overlong_punishment(max_completion_len=longest, soft_punish_cache=cache)
    ids = [[5] * length for length in lengths]
    for completions in (["text"] * len(ids), [message("text")] * len(ids)):  # of no account: it counts tokens
        given = reward(prompts=completions, completions=completions, completion_ids=ids)
        assert given == [dapo(length, longest, cache) for length in lengths]
