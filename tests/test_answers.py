"""Reading answers: where a completion gives its final answer, and how answers are spelled."""

import pytest

from dash_trl.rewards import final_text, last_boxed
from dash_trl.rewards.answers import MAX_ANSWER_CHARS, MAX_DEPTH, Answer, find_answer, gold_text
from dash_trl.rewards.spelling import (
    is_text_answer,
    normalize_answer,
    same_text,
    split_chain,
    split_list,
    split_units,
    to_latex,
)

READ = {
    last_boxed: [
        (r"\boxed{72}", "72"),
        (r"first \boxed{1}, then $\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{ \fbox{5} }", r"\fbox{5}"),
        (r"\fbox{5}", "5"),
        (r"$\boxed 5$", "5"),
        (r"\\boxed{5}", "5"),
        (r"\\\boxed{5}", "5"),
        (r"} \boxed{5} {", "5"),
        (r"{ \boxed{5", None),
        (r"\boxed{}", ""),
        (r"\boxed{3} and cut off: \boxed{4", "3"),
        (r"cut off: \boxed{4 + \boxed{3}", "3"),
        ("no box", None),
    ],
    final_text: [
        ("no tags", "no tags"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>a</think>b<think>c", "b"),
        ("<think>a", ""),
        ("a</think>", ""),
    ],
    gold_text: [
        ("72", "72"),
        ("so\n#### 1,200", "1,200"),
        (r"$\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\$36", r"\$36"),
        (r"x \boxed{5}.", "5"),
        (r"so $\boxed{1}$ and $\boxed{2}$", "1, 2"),
        ("$5$ or $7$", "5 or 7"),
    ],
    is_text_answer: [
        (r"\text{Evelyn}", True),
        (r"\text{(C)}", True),
        (r"$\text{no}$", True),
        (r"\text{ii}, \text{iv}", True),
        ("No solution", True),
        ("east", True),
        ("Yes", True),
        ("A", False),
        ("xy", False),
        ("abcd2", False),
        (r"5.4 \text{ cents}", False),
        (r"\cot x", False),
        ("", False),
    ],
    to_latex: [
        ("x² + y₁₂⁻³", "x^{2} + y_{12}^{-3}"),
        ("¾ 3½", r"\frac{3}{4} 3\frac{1}{2}"),
        ("√2 ∛10 √(x) √π", r"\sqrt{2} \sqrt[3]{10} \sqrt(x) \sqrt{\pi} "),
        ("α Λ ω", r"\alpha  \Lambda  \omega "),
        ("５ ٥ 𝟓 （％", "5 5 5 (%"),
        ("90° ≤ ℝ", r"90^\circ  \le  \mathbb{R} "),
        ("José, 北京, €5", "José, 北京, €5"),
    ],
    normalize_answer: [
        ("5. ", "5"),
        (r"5\,", r"5\,"),
        (r"\$5 and $x$", r"\$5 and x"),
        ("1e3 2.5E-4 x1e3", r"1 \times 10^{3} 2.5 \times 10^{-4} x1e3"),
        (r"\text{5 or 7} \text{Tom and Ann}", r"5 or 7  \text{Tom and Ann}"),
        ("2pi theta spin", r"2\pi  \theta  spin"),
        ("5 million, 1.25 thousand, 2x million", "5000000, 1250, 2x million"),
        (r"5\text{ million people}", r"5000000\text{  people}"),
        (r"5 percent, 5\text{ percent}", r"5 \%, 5\%"),
    ],
    split_units: [
        ("5 km", ("5", {"km"})),
        (r"5\text{ kilometers}", ("5", {"km"})),
        (r"25 \text{ cm}^2", ("25", {"cm^2"})),
        ("25 sq cm", ("25", {"cm^2"})),
        (r"\$5", ("5", {"dollar"})),
        ("-€5", ("-5", {"euro"})),
        (r"\frac{270}7\text{ degrees}", (r"\frac{270}7", {"degree"})),
        (r"90^{\circ}", ("90", {"degree"})),
        ("3 feet, 2 m", ("3, 2", {"ft", "m"})),
        ("72 apples each", ("72", set())),
        (r"5\text{ m/s}", ("5", set())),
        ("5 hundred", ("5 hundred", set())),
        (r"2\text{ dozen}", (r"2\text{ dozen}", set())),
        ("25 meters squared", ("25", {"m^2"})),
        ("3x + 2h", ("3x + 2h", set())),
        ("8abc", ("8abc", set())),
        (r"50\%", (r"50\%", set())),
        ("1, 2", ("1, 2", set())),
    ],
    split_list: [
        ("1, 2 or 3; 4", ["1", "2", "3", "4"]),
        (r"1 \text{ and } 2", ["1", "2"]),
        ("(1,2), [3,4)", ["(1,2)", "[3,4)"]),
        (r"\{1,2\}", [r"\{1,2\}"]),
        (r"1,200, 10,\!080", ["1,200", r"10,\!080"]),
        ("for land", ["for land"]),
    ],
    split_chain: [
        (r"x = 2 + 3 = 5 \approx 5.0", ["x", "2 + 3", "5", "5.0"]),
        (r"\sum_{k=1}^{3} k = 6", [r"\sum_{k=1}^{3} k", "6"]),
        (r"x \le 5 \neq 6 <= 7", [r"x \le 5 \neq 6 <= 7"]),
    ],
}


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        pytest.param(function, *row, id=f"{function.__name__}: {row[0]}")
        for function, rows in READ.items()
        for row in rows
    ],
)
def test_what_is_read_in_a_text(function, text, expected):
    assert function(text) == expected


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"$\boxed{1}$ and $\boxed{-2}$", "1, -2"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1, 2, 3"),
        (r"\boxed{1} \text{ or } \boxed{2}", "1, 2"),
        (r"\boxed{1} and \boxed{2} and \boxed{1}", "1, 2"),
        (r"\boxed{1} is wrong, so \boxed{2}", "2"),
        ("#### 1\nmore\n#### 72 apples\n", "72 apples"),
        ("#### 5 #### 7", "7"),
        ("#### 7 ####", "7"),
        (r"#### 1 \boxed{2}", "2"),
        ("the answer is 5. The answer is 6, as 7 is odd", "6"),
        ("the answer is $5$ or $7$, not $9$", "5, 7"),
        ("the answer is $5$ km", "5 km"),
        ("the answer is either 5 or 7 apples", "5, 7"),
        ("the answer is between 5 and 7", "5, 7"),
        ("it costs $5 and $7.", "it costs 5 and 7"),
        (r"so \[x = 5\]", "x = 5"),
        ("Who?\nEvelyn.", "Evelyn"),
        ("", ""),
    ],
)
def test_the_text_of_the_answer(completion, answer):
    assert find_answer(completion).text == answer


@pytest.mark.parametrize(
    ("completion", "prose"),
    [
        (r"\boxed{5}", ""),
        ("the answer is $5$ km", ""),
        ("Well, the answer is 5 since 7 is odd.", "answer is 5 since 7 is odd."),
        ("#### 5 since 7", "answer is 5 since 7"),
        ("a" * 3_000 + "\nin all ½", r"in all \frac{1}{2}"),
    ],
)
def test_the_text_in_which_a_number_is_looked_for(completion, prose):
    assert find_answer(completion).prose == prose


def test_an_answer_beyond_the_limits_is_none():
    longest, deepest = "5" * MAX_ANSWER_CHARS, "(" * MAX_DEPTH + "5" + ")" * MAX_DEPTH
    for answer in (longest, deepest):
        assert find_answer(rf"\boxed{{{answer}}}") == Answer(answer)
    for answer in (longest + "5", f"({deepest})"):
        for completion in (
            rf"\boxed{{{answer}}}",
            f"#### {answer}",
            f"the answer is {answer}",
            f"the answer is ${answer}$",
        ):
            assert find_answer(completion) == Answer()


def test_text_without_letters_and_digits_is_the_same_as_nothing():
    assert same_text(r"\left( 1, 2 \right)", "(1,2)")
    assert not same_text("???", "???")
    assert not same_text("", "")
