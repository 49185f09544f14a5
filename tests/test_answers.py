"""Reading answers: the last box of a text, and what is left of it without thoughts; `math_cases.jsonl` has the rest."""

from dash_trl.rewards import final_text, last_boxed

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
        (r"\boxed{}", None),
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
        ("<thinking>a</thinking>b", "b"),
        ("◁think▷a◁/think▷b", "b"),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "b"),
        ("<|channel|>analysis<|message|>a", ""),
        ("analysisA.assistantcommentary to=f{}assistantfinalb", "b"),
        ("analysis of b", "analysis of b"),
        ("final b", "final b"),
    ],
}


def test_what_is_read_in_a_text():
    for function, rows in READ.items():
        for text, expected in rows:
            assert function(text) == expected, (function.__name__, text)
