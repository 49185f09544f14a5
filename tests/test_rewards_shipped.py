"""The reward for the form of a completion."""

from dash_trl.rewards import FormatReward

BOX = r"\boxed{4}"
THOUGHT = "<think>\n2 + 2 is 4.\n</think>\n\n"
THOUGHTS = {
    f"{THOUGHT}4": 1.0,
    f" \n{THOUGHT}4": 1.0,
    "<think>a</think>b": 1.0,
    "<think>a\n\nb < c > d</think>\n\n4": 1.0,
    "4": 0.0,
    "": 0.0,
    THOUGHT: 0.0,  # no answer: TRL's gives 1.0
    f"{THOUGHT} \n": 0.0,
    "<think></think>4": 0.0,  # no thought: TRL's gives 1.0
    "<think>\n\n</think>4": 0.0,
    "<think>a 4": 0.0,
    "a</think>4": 0.0,
    f"So: {THOUGHT}4": 0.0,
    f"{THOUGHT}{THOUGHT}4": 0.0,
    "<think>a<think>b</think>4": 0.0,
    "<think>a</think>b</think>4": 0.0,  # TRL's gives 1.0
    "<think>a</think>4<think>": 0.0,
    "</think>a<think>4": 0.0,
}
BOXES = {
    BOX: 1.0,
    rf"So it is ${BOX}$.": 1.0,
    r"\fbox{4}": 1.0,
    r"\boxed{\frac{1}{2}}": 1.0,
    r"\boxed{\text{a \boxed{4}}}": 1.0,  # one, with a box inside
    "4": 0.0,
    f"{BOX} or {BOX}": 0.0,
    r"\boxed{}": 0.0,
    r"\boxed{ }": 0.0,
    r"\boxed{4": 0.0,
    rf"{BOX} and \boxed{{5": 0.0,
}


def given(texts: list[str], **settings: bool) -> dict[str, float]:
    return dict(zip(texts, FormatReward(**settings)(texts), strict=True))


def test_a_thought_and_an_answer():
    assert given(list(THOUGHTS)) == THOUGHTS
    begun = {text: score for text, score in THOUGHTS.items() if text.lstrip().startswith("<think>")}
    opened = {text.lstrip().removeprefix("<think>"): score for text, score in begun.items()}
    assert given(list(opened), think_in_prompt=True) == opened  # what a model writes whose template opens the thought
    assert given(list(begun), think_in_prompt=True) == dict.fromkeys(begun, 0.0)


def test_an_answer_in_one_box():
    """After a thought, whose boxes do not count."""
    thoughtful = {f"{THOUGHT}{answer}": score for answer, score in BOXES.items()}
    thoughtful |= {f"<think>{BOX} or {BOX}?</think>{answer}": score for answer, score in BOXES.items()}
    assert given(list(BOXES), think=False, box=True) == BOXES
    assert given(list(thoughtful), box=True) == given(list(thoughtful), think=False, box=True) == thoughtful
    assert given(list(BOXES), box=True) == dict.fromkeys(BOXES, 0.0)


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
