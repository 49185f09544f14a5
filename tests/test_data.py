"""Loading math problems: layouts, sources, templates, and errors that say what to do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import pytest
from sft import with_completions

from dash_trl import MathAccuracyReward
from dash_trl.data import PROMPT_TEMPLATES, final_answer, load_code_dataset, load_math_dataset, mbpp_row
from tests.launching import SHARED, needs_data
from tests.tiny import assistant, refused, user, write_rows

GSM8K = [{"question": "1 + 1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, {"question": "2?", "answer": "#### 1,200"}]
MATH = [{"problem": "Half?", "solution": r"So $\boxed{\frac{1}{\sqrt{4}}}$.", "level": 2}]


def new_file(folder: Path, rows: list[dict]) -> Path:
    return write_rows(folder / f"{len(list(folder.iterdir()))}.jsonl", rows)


def solved(load: Callable, path: Path, **settings: object) -> datasets.Dataset:
    return with_completions(load(path, solution=True, **settings))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# -------------------------------------------------------------------------------------------------------------- rows


def test_final_answer():
    for value, answer in [
        ("work 5\n#### 1,200", "1200"),
        ("#### 1,234,567", "1234567"),
        ("#### 1,23", "1,23"),
        (0, "0"),
        (42.0, "42"),
        (0.5, "0.5"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\left( 3, \frac{\pi}{2} \right)"),
        ("prose", "prose"),
        ("", None),
        (None, None),
        (float("nan"), None),
        (["1", 2.0], "1, 2"),
        ({"ground_truth": "4", "style": "rule"}, "4"),
    ]:
        assert final_answer(value, marked=False) == answer, value
    solution = r"not \boxed{1} but \boxed{\frac{1}{\sqrt{2}}}."
    for value, answer in [(solution, r"\frac{1}{\sqrt{2}}"), ("prose", None), (r"\boxed{}", None)]:
        assert final_answer(value, marked=True) == answer, value


# ----------------------------------------------------------------------------------------------------------- layouts

BOXED = "Half?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
PLAIN = {"prompt_template": "plain"}
READY = {"prompt": "p", "answer": "1"}
BARE = {"prompt": "p", "solution": "34"}
NAMED = {"Problem": "p", "Answer": 7, "other": "q", "gold": "8"}
CHAT = {"prompt": [{"role": "system", "content": "s"}, *user("p")], "answer": "1"}
WHOLE_CHAT = {**CHAT, "completion": assistant("c")}


def test_layouts(tmp_path):
    for rows, settings, expected in [
        (GSM8K, PLAIN, [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2?", "answer": "1200"}]),
        (MATH, {}, [{"prompt": BOXED, "answer": r"\frac{1}{\sqrt{4}}"}]),
        (MATH, {"chat": True}, [{"prompt": user(BOXED), "answer": r"\frac{1}{\sqrt{4}}"}]),
        # a ready prompt stays as it is unless a template is asked for, and a conversation always
        ([READY], {}, [READY]),
        ([READY], {"prompt_template": "Q {problem} {0}"}, [{"prompt": "Q p {0}", "answer": "1"}]),
        ([CHAT], {"prompt_template": "boxed"}, [CHAT]),
        ([WHOLE_CHAT], {"solution": True}, [WHOLE_CHAT]),
        ([{"prompt": "p", "reward_model": {"ground_truth": "1", "style": "rule"}}], {}, [READY]),
        # names in any case, and by name
        ([NAMED], PLAIN, [{"prompt": "p", "answer": "7"}]),
        ([BARE], {"answer_column": "solution"}, [{"prompt": "p", "answer": "34"}]),
        ([NAMED], {**PLAIN, "problem_column": "other", "answer_column": "gold"}, [{"prompt": "q", "answer": "8"}]),
    ]:
        assert load_math_dataset(new_file(tmp_path, rows), **settings).to_list() == expected, (rows, settings)


def test_columns_that_no_prompt_shows_are_named(tmp_path, caplog):
    load_math_dataset(new_file(tmp_path, [{"question": "1?", "answer": "1", "choices": ["1", "2"]}]))
    assert "'question', but not ['choices']" in caplog.text


# ----------------------------------------------------------------------------------------------------------- sources


def test_file_formats(tmp_path):
    for suffix in ("json", "csv", "parquet"):
        path = tmp_path / f"test.{suffix}"
        getattr(datasets.Dataset.from_list(GSM8K), f"to_{suffix}")(str(path))
        assert load_math_dataset(path)["answer"][:] == ["2", "1200"]
        assert load_math_dataset(str(path), split="train[1:]")["answer"][:] == ["1200"]


def test_a_csv_file_has_texts(tmp_path):
    """No number loses its zeros, and no answer "None" is missing. A row without an answer has that of its solution."""
    path = tmp_path / "only" / "train.csv"
    path.parent.mkdir()
    path.write_text("prompt,answer,solution\n1,007,\n2,None,\n3,,\\boxed{1.50}\n")
    for source in (path, path.parent):
        assert load_math_dataset(source)["answer"][:] == ["007", "None", "1.50"]


def test_folders_of_splits(tmp_path):
    """Of a file each, and as datasets saves one split, or several."""
    write_rows(tmp_path / "files" / "train.jsonl", GSM8K)
    write_rows(tmp_path / "files" / "test.jsonl", GSM8K[1:])
    train = datasets.Dataset.from_list(GSM8K)
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": train, "test": train.select([1])}).save_to_disk(str(tmp_path / "two"))
    for name in ("files", "one", "two"):
        assert load_math_dataset(tmp_path / name)["answer"][:] == ["2", "1200"]
        assert name == "one" or load_math_dataset(tmp_path / name, split="test")["answer"][:] == ["1200"]
    refused(r"no split 'dev' .*: choose one of \['train', 'test'\]", load_math_dataset, tmp_path / "two", split="dev")


def test_one_split_and_its_parts(tmp_path):
    """Ten rows under a name that says nothing of a split, as a file and as a folder that datasets has saved."""
    rows = datasets.Dataset.from_list([{"prompt": "p", "answer": str(i)} for i in range(10)])
    rows.to_json(tmp_path / "own.jsonl")
    rows.save_to_disk(tmp_path / "own")
    parts = {
        "train": "0123456789",
        "train[:3]": "012",
        "train[-20%:]": "89",
        "train[8:20]": "89",
        "train[:1]+train[8:]": "089",
    }
    mistakes = {
        "test": r"has no split 'test' .*: choose one of \['train'\], or a part .* 'train\[:100\]'",
        "train[:3": r"has no split 'train\[:3' \(Unrecognized",
    }
    for path in (tmp_path / "own.jsonl", tmp_path / "own"):
        for split, answers in parts.items():
            assert load_math_dataset(path, split=split)["answer"][:] == list(answers)
        for split, message in mistakes.items():
            refused(message, load_math_dataset, path, split=split)


def test_a_hub_name_goes_to_datasets_with_its_config_and_split(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.DatasetDict(train=datasets.Dataset.from_list(GSM8K), test=datasets.Dataset.from_list(GSM8K[1:]))

    monkeypatch.setattr("dash_trl.data.load_dataset", load_dataset)
    assert len(load_math_dataset("openai/gsm8k", config="main", split="test")) == 1
    assert len(load_math_dataset("openai/gsm8k", config="main", split="all")) == 3
    assert calls == [(("openai/gsm8k", "main"), {})] * 2


@needs_data
def test_the_real_files():
    """Their rows, answers and solutions: the reward calls each of these right, whatever the prompt asks for."""
    sizes = {("gsm8k", "train"): 7_473, ("gsm8k", "test"): 1_319, ("math500", "test"): 500}
    for (name, split), size in sizes.items():
        rows = solved(load_math_dataset, SHARED / name, split=split)
        assert (rows.column_names, len(rows)) == (["prompt", "answer", "solution", "completion"], size)
        assert name != "gsm8k" or all(float(answer).is_integer() for answer in rows["answer"])
        part = rows.select(range(0, size, 20))
        rewards = MathAccuracyReward()(completions=part["completion"][:], answer=part["answer"][:])
        assert len(rewards) == len(part) and set(rewards) == {1.0}


# ------------------------------------------------------------------------------------------------------------ errors


def test_names_without_data(tmp_path):
    nowhere = "is neither a path with data files .*.parquet.* nor .*hub .*correct it, or the connection"
    for name in ("./nowhere", "nowhere.jsonl", "no/where", str(tmp_path)):
        refused(f"'{name}' {nowhere}", load_math_dataset, name)
    for text, reason in (('{"problem": ', "JSON parse error"), ("", "StopIteration")):
        (broken := tmp_path / "broken.jsonl").write_text(text)
        refused(f"hub gives .*{reason}", load_math_dataset, broken)


# ------------------------------------------------------------------------------------------------------------ programs

MBPP = {
    "task_id": 2,
    "text": "Write a function to add.",
    "code": "def helper(a):\n    return a\n\ndef add(a, b):\n    return helper(a) + b",
    "test_list": ["assert sum([add(1, 2)]) == 3", "assert add(2, 2) == 4"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
PLUS = {
    "prompt": "Write a function to add.",
    "code": MBPP["code"],
    "test_imports": ["import math"],
    "test_list": ["import cmath", *MBPP["test_list"]],
    "test": "for a, b in [(1, 2)]:\n    assert add(a, b) == a + b\n",
}
SHOWN = "Write a function to add.\n\nYour program should pass this test, and others like it:\n\n"
SHOWN += "assert sum([add(1, 2)]) == 3"
CODE_PROMPT = PROMPT_TEMPLATES["code"].format(problem=SHOWN)


MBPP_TESTS = [f"import math\n{test}" for test in MBPP["test_list"]]
PLUS_TESTS = [f"import math\nimport cmath\n{test}" for test in MBPP["test_list"]]


def test_layouts_of_programs(tmp_path):
    asked = {"prompt": CODE_PROMPT, "entry_point": "add"}
    mbpp = {"tests": MBPP_TESTS, "entry_point": "add"}
    ready = {"prompt": "p", "tests": ["assert f(1)"], "entry_point": "f"}
    unnamed = {"tests": ["assert f(1)"], "inputs": ["1 2"], "outputs": ["3"]}
    for rows, settings, expected in [
        # the prompt shows the first test, which names the function; all are scored, and other columns are left
        ([MBPP], PLAIN, [{"prompt": SHOWN, **mbpp}]),
        # MBPP+ has a script of tests; its asserts, where there is none
        (
            [PLUS, {**PLUS, "test": ""}],
            {},
            [{**asked, "tests": [f"import math\nimport cmath\n{PLUS['test']}"]}, {**asked, "tests": PLUS_TESTS}],
        ),
        ([MBPP], {"chat": True}, [{"prompt": user(CODE_PROMPT), **mbpp}]),
        # ready-made
        (
            [ready, {"prompt": "q", "tests": ["assert g(1)"]}],
            {},
            [ready, {"prompt": "q", "tests": ["assert g(1)"], "entry_point": None}],
        ),
        # scripts and inputs
        ([{"Prompt": "p", **unnamed}], {"chat": True}, [{"prompt": user("p"), **unnamed, "entry_point": None}]),
    ]:
        assert load_code_dataset(new_file(tmp_path, rows), **settings).to_list() == expected, (rows, settings)


# ----------------------------------------------------------------------------------------------------- MBPP+ in two


def tasks(path: Path, split: str) -> list[int]:
    prompts = load_code_dataset(path, split=split, prompt_template="plain")["prompt"]
    return [int(prompt.split(".")[0].removeprefix("Task ")) for prompt in prompts]


def test_mbpp_plus_has_two_splits_for_good(tmp_path):
    """Those of the authors. Whatever its one split is called, and whatever the order of its rows."""
    rows = [{**PLUS, "task_id": number, "prompt": f"Task {number}."} for number in range(378)]
    folder = write_rows(tmp_path / "d" / "train.jsonl", rows).parent
    for path in (folder, write_rows(tmp_path / "own.jsonl", rows[::-1])):
        assert tasks(path, "train") == list(range(264)) and tasks(path, "test") == list(range(264, 378))
        assert tasks(path, "all") == list(range(378)) and tasks(path, "test[:3]") == [264, 265, 266]


# ------------------------------------------------------------------------------------------------------- completions


def test_completions_of_math(tmp_path):
    for row, template, completion in [
        # GSM8K's marks go, and the answer has the form that the prompt asks for
        (GSM8K[0], "boxed", " 1+1=2\nThe answer is \\boxed{2}."),
        (GSM8K[0], "plain", " 1+1=2\nThe answer is 2."),
        (GSM8K[0], "{problem}\n", "1+1=2\nThe answer is 2."),
        # MATH's solutions have their boxes
        (MATH[0], "boxed", " " + MATH[0]["solution"]),
        # one without is given the answer
        ({"problem": "?", "solution": "Add.", "answer": "5"}, "boxed", " Add.\nThe answer is \\boxed{5}."),
        # ready-made
        ({"prompt": "p", "completion": "<<1>> 2", "solution": "no", "answer": "2"}, None, "<<1>> 2"),
    ]:
        path = new_file(tmp_path, [row])
        for chat in (False, True):
            (loaded,) = solved(load_math_dataset, path, prompt_template=template, chat=chat)
            text = completion.strip() if chat and "completion" not in row else completion
            assert loaded["completion"] == (assistant(text) if chat else text), (row, template)


def test_tests_that_use_several_names_of_the_solution_have_no_entry_point():
    for test, name in (("assert f(1) == 2", "f"), ("assert f(Pair(1)) == 2", None)):
        row = {"test_list": [test], "code": "class Pair: pass\ndef f(x): return 2"}
        assert mbpp_row(row)["entry_point"] == name


def test_completions_of_code(tmp_path):
    program = MBPP["code"]
    fenced = f"```python\n{program}\n```"
    for code, settings, completion in [
        (program, {"chat": True}, assistant(fenced)),
        (program, {}, "\n" + fenced),
        (program, PLAIN, "\n" + program),
        (program.replace("\n", "\r\n"), {}, "\n" + fenced),
    ]:
        (loaded,) = solved(load_code_dataset, new_file(tmp_path, [{**MBPP, "code": code}]), **settings)
        assert loaded["completion"] == completion


# --------------------------------------------------------------------------------------------- rows that lack something

UNSOLVED = {"problem": "Why?", "solution": "Because.", "level": 1}
EXPLAINED = {"problem": "p", "answer": "1", "solution": "Add."}


def test_what_is_missing_is_named(tmp_path):
    math_solved = partial(solved, load_math_dataset)
    code_solved = partial(solved, load_code_dataset)
    for load, rows, message in [
        # columns
        (
            load_math_dataset,
            [{"text": "a", "answer": "1"}],
            r"no problem column: looked for .*'text', 'answer'\]. .* with problem_column",
        ),
        (
            load_math_dataset,
            [{"problem": "a", "label": "1"}],
            r"no answer column: looked for .*'problem', 'label'\]. .* or answer_column",
        ),
        (partial(load_math_dataset, answer_column="gold"), [READY], r"no answer column: looked for \['gold'\]"),
        (load_code_dataset, [READY], r"has no tests column: looked for .*'tests'.*\]. Rename the right one"),
        (code_solved, [{"text": "p", "test_list": ["assert f(1)"], "program": "f = bool"}], "Row 0 lacks a solution"),
        # answers, problems, tests
        (
            load_math_dataset,
            [*MATH, UNSOLVED, UNSOLVED],
            r"2 of 3 rows lack a gold answer .* row 1: .*Because.*Remove these rows",
        ),
        (load_math_dataset, [READY, {**READY, "prompt": " "}], "1 of 2 rows lack a problem .* row 1"),
        (load_math_dataset, [{**READY, "answer": {"a": 1}}], r"gold answer \{'a': 1\} is of type dict.*answer_column"),
        (load_math_dataset, [{**READY, "answer": 10**30}], "gold answer .* is of type float"),
        (
            load_code_dataset,
            [MBPP, {**MBPP, "test_list": []}],
            "1 of 2 rows lack tests in 'tests', .*; the first is row 1",
        ),
        (
            load_code_dataset,
            [{"prompt": "p", "inputs": "12", "outputs": "24"}],
            "1 of 1 rows lack tests .* lists 'inputs' and 'outputs'",
        ),
        (
            load_code_dataset,
            [{"prompt": "p", "tests": ["assert f(1)"], "entry_point": one} for one in ("f", "Solution().add")],
            r"1 of 2 rows lack an `entry_point` that a program can define .* name its class.* row 1: .*Solution",
        ),
        (
            load_code_dataset,
            [MBPP, {**MBPP, "text": " "}],
            "1 of 2 rows lack a problem in 'problem'; the first is row 1",
        ),
        (load_math_dataset, [BARE], "lack a gold answer in 'solution'"),
        # solutions
        (
            math_solved,
            [{"problem": "p", "answer": "Add. #### 1"}, {"problem": "p", "answer": "1"}],
            r"Row 1 lacks a solution \(an answer alone is none",
        ),
        (math_solved, [EXPLAINED, {**EXPLAINED, "solution": " "}], "Row 1 lacks a solution"),
    ]:
        refused(f"(?s){message}", load, new_file(tmp_path, rows))
