"""Loading math problems: layouts, sources, templates, and errors that say what to do."""

import hashlib
import json
from pathlib import Path

import datasets
import pytest

from dash_trl import CodeReward, MathAccuracyReward
from dash_trl.data import (
    PROMPT_TEMPLATES,
    final_answer,
    find_answer,
    load_code_dataset,
    load_math_dataset,
    make_prompt,
    resolve_template,
)
from tests.tiny import write_rows

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.exists(), reason=f"GSM8K and MATH-500 are not in {SHARED}")

GSM8K = [{"question": "1 + 1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, {"question": "2?", "answer": "#### 1,200"}]
MATH = [{"problem": "Half?", "solution": r"So $\boxed{\frac{1}{\sqrt{4}}}$.", "level": 2}]


def new_file(folder: Path, rows: list[dict]) -> Path:
    return write_rows(folder / f"{len(list(folder.iterdir()))}.jsonl", rows)


@pytest.fixture(scope="module")
def reward():
    with CodeReward() as one:
        yield one


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# -------------------------------------------------------------------------------------------------------------- rows


def test_final_answer():
    for value, marked, answer in [
        ("work 5\n#### 1,200", False, "1200"),
        ("#### 1,234,567", False, "1234567"),
        ("#### 1,23", False, "1,23"),
        ("72", False, "72"),
        (72, False, "72"),
        (0, False, "0"),
        (42.0, False, "42"),
        (0.5, False, "0.5"),
        (r"\left( 3, \frac{\pi}{2} \right)", False, r"\left( 3, \frac{\pi}{2} \right)"),
        (r"not \boxed{1} but \boxed{\frac{1}{\sqrt{2}}}.", True, r"\frac{1}{\sqrt{2}}"),
        ("prose", True, None),
        ("prose", False, "prose"),
        ("", False, None),
        (None, False, None),
        (r"\boxed{}", True, None),
    ]:
        assert final_answer(value, marked=marked) == answer, value


def test_the_answer_of_a_row():
    for row, answer in [
        ({"answer": None, "solution": r"\boxed{3}"}, "3"),  # the solution helps out where the answer is empty
        ({"answer": "4", "solution": r"\boxed{3}"}, "4"),
        ({"answer": " ", "solution": "prose"}, None),
    ]:
        assert find_answer(row, ["answer", "solution"]) == answer, row


def test_a_column_that_is_named_may_hold_bare_answers(tmp_path):
    rows = write_rows(tmp_path / "a.jsonl", [{"prompt": "Find 17*2.", "solution": "34"}])
    assert load_math_dataset(rows, answer_column="solution")["answer"][:] == ["34"]
    with pytest.raises(ValueError, match="lack a gold answer in 'solution'"):
        load_math_dataset(rows)
    mixed = write_rows(tmp_path / "b.jsonl", [*MATH, {"problem": "p", "solution": "So it is 5"}])
    with pytest.raises(ValueError, match="1 of 2 rows .* lack a gold answer in 'solution'"):
        load_math_dataset(mixed, answer_column="solution")


def test_gold_answers_that_are_sentences_are_named(tmp_path, caplog):
    prose = "He is in 5th place, so 4 people crossed the line before him."
    rows = [{"prompt": "p", "answer": one} for one in ("4", prose, f"{prose} #### 4")]
    load_math_dataset(write_rows(tmp_path / "a.jsonl", rows))
    (record,) = caplog.records
    assert "1 of 3 gold answers" in record.message and "row 1: 'He is in 5th place" in record.message


TEMPLATE = "Q: {problem} Use \\boxed{}."
CONVERSATION = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def test_prompts():
    for problem, template, chat, prompt in [
        (r"$\frac{1}{2}$? {0} {problem}", TEMPLATE, False, r"Q: $\frac{1}{2}$? {0} {problem} Use \boxed{}."),
        (r"$\frac{1}{2}$? {0} {problem}", None, False, r"$\frac{1}{2}$? {0} {problem}"),
        ("a", TEMPLATE, True, [{"role": "user", "content": "Q: a Use \\boxed{}."}]),
        (CONVERSATION, TEMPLATE, True, CONVERSATION),
        (None, TEMPLATE, False, None),
        (" ", TEMPLATE, False, None),
        ([], TEMPLATE, False, None),
    ]:
        assert make_prompt(problem, template, chat=chat) == prompt, (problem, template)


def test_templates():
    assert resolve_template("plain") == "{problem}"
    assert resolve_template("Solve {problem}") == "Solve {problem}"
    assert all("{problem}" in text for text in PROMPT_TEMPLATES.values())
    with pytest.raises(ValueError, match=r"prompt_template = 'bxoed' has no \{problem\}.*'boxed', 'code', 'plain'"):
        load_math_dataset("/no/where", prompt_template="bxoed")  # it is found before anything is loaded


# ----------------------------------------------------------------------------------------------------------- layouts

BOXED = "Half?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
READY = {"prompt": "p", "answer": "1"}
NAMED = {"Problem": "p", "Answer": 7, "other": "q", "gold": "8"}
CHAT = {"prompt": [{"role": "user", "content": "p"}], "answer": "1"}
WHOLE_CHAT = {**CHAT, "completion": [{"role": "assistant", "content": "c"}]}


def test_layouts(tmp_path):
    for rows, settings, expected in [
        (
            GSM8K,
            {"prompt_template": "plain"},
            [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2?", "answer": "1200"}],
        ),
        (MATH, {}, [{"prompt": BOXED, "answer": r"\frac{1}{\sqrt{4}}"}]),
        (MATH, {"chat": True}, [{"prompt": [{"role": "user", "content": BOXED}], "answer": r"\frac{1}{\sqrt{4}}"}]),
        # a ready prompt stays as it is unless a template is asked for, and a conversation always
        ([READY], {}, [READY]),
        ([READY], {"prompt_template": "Q {problem}"}, [{"prompt": "Q p", "answer": "1"}]),
        ([CHAT], {"prompt_template": "boxed"}, [CHAT]),
        ([WHOLE_CHAT], {"completion": True}, [WHOLE_CHAT]),
        # names in any case, and by name
        ([NAMED], {"prompt_template": "plain"}, [{"prompt": "p", "answer": "7"}]),
        (
            [NAMED],
            {"prompt_template": "plain", "problem_column": "other", "answer_column": "gold"},
            [{"prompt": "q", "answer": "8"}],
        ),
    ]:
        assert load_math_dataset(new_file(tmp_path, rows), **settings).to_list() == expected, (rows, settings)


# ----------------------------------------------------------------------------------------------------------- sources


def test_file_formats(tmp_path):
    for suffix in ("json", "csv", "parquet"):
        path = tmp_path / f"test.{suffix}"
        getattr(datasets.Dataset.from_list(GSM8K), f"to_{suffix}")(str(path))
        assert load_math_dataset(path)["answer"][:] == ["2", "1200"]
        assert load_math_dataset(str(path), split="train[1:]")["answer"][:] == ["1200"]


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
    with pytest.raises(ValueError, match=r"no split 'dev' .*: choose one of \['train', 'test'\]"):
        load_math_dataset(tmp_path / "two", split="dev")


def test_one_split_and_its_parts(tmp_path):
    """Ten rows under a name that says nothing of a split, as a file and as a folder that datasets has saved."""
    rows = datasets.Dataset.from_list([{"prompt": "p", "answer": str(i)} for i in range(10)])
    rows.to_json(tmp_path / "own.jsonl")
    rows.save_to_disk(tmp_path / "own")
    parts = {"train": "0123456789", "train[:3]": "012", "train[-20%:]": "89", "train[8:20]": "89"}
    mistakes = {
        "test": r"has no split 'test' .*: choose one of \['train'\], or a part .* 'train\[:100\]'",
        "train+test": r"has no split 'train\+test'",
        "train[20:]": r"split 'train\[20:\]', has no rows",
        "train[:3": r"has no split 'train\[:3' \(Unrecognized",
    }
    for path in (tmp_path / "own.jsonl", tmp_path / "own"):
        for split, answers in {**parts, "train[:1]+train[8:]": "089"}.items():
            assert load_math_dataset(path, split=split)["answer"][:] == list(answers)
        for split, message in mistakes.items():
            with pytest.raises(ValueError, match=message):
                load_math_dataset(path, split=split)


def test_a_hub_name_goes_to_datasets_with_its_config_and_split(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.DatasetDict(train=datasets.Dataset.from_list(GSM8K), test=datasets.Dataset.from_list(GSM8K[1:]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_math_dataset("openai/gsm8k", config="main", split="test")) == 1
    assert len(load_math_dataset("openai/gsm8k", config="main", split="all")) == 3
    assert calls == [(("openai/gsm8k", "main"), {})] * 2


@needs_data
def test_the_real_files():
    """Their rows, answers and solutions: the reward calls each of these right, whatever the prompt asks for."""
    sizes = {("gsm8k", "train"): 7_473, ("gsm8k", "test"): 1_319, ("math500", "test"): 500}
    for (name, split), size in sizes.items():
        rows = load_math_dataset(SHARED / name, split=split, completion=True)
        assert (rows.column_names, len(rows)) == (["prompt", "answer", "completion"], size)
        assert name != "gsm8k" or all(float(answer).is_integer() for answer in rows["answer"])
        assert not any("<<" in text or "####" in text for text in rows["completion"]) or name != "gsm8k"
        part = rows.select(range(0, size, 20))
        rewards = MathAccuracyReward()(completions=part["completion"][:], answer=part["answer"][:])
        assert len(rewards) == len(part) and set(rewards) == {1.0}
    from_solutions = load_math_dataset(SHARED / "math500", split="test", answer_column="solution")
    assert from_solutions["answer"][:] == rows["answer"][:]


# ------------------------------------------------------------------------------------------------------------ errors


NOWHERE = "' is neither a path .* nor .*hub .*correct it, or the connection"
UNREADABLE = "' is empty, or not a data file that can be read .*.parquet"


def test_names_without_data(tmp_path, monkeypatch):
    rows = [
        *((name, f"'{name}{NOWHERE}") for name in ("./nowhere", "/no/where", "nowhere.jsonl", "a/b/c", "no/where")),
        *((name, f"{name}{UNREADABLE}") for name in ("./a.txt", "./a.jsonl")),
        ("./d", "d' is neither a path with data files .*doesn't contain any data files"),
    ]
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    Path("a.jsonl").write_text("")
    Path("d").mkdir()
    for name, message in rows:
        with pytest.raises(ValueError, match=message):
            load_math_dataset(name)


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
HUMANEVAL = {
    "prompt": 'import math\n\ndef helper(a):\n    return a\n\ndef add(a, b):\n    """Adds."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == helper(3)\n",
}
SHOWN = "Write a function to add.\n\nYour program should pass this test, and others like it:\n\n"
SHOWN += "assert sum([add(1, 2)]) == 3"
CODE_PROMPT = PROMPT_TEMPLATES["code"].format(problem=SHOWN)


MBPP_TESTS = [f"import math\n{test}" for test in MBPP["test_list"]]
PLUS_TESTS = [f"import math\nimport cmath\n{test}" for test in MBPP["test_list"]]


def test_layouts_of_programs(tmp_path):
    for rows, settings, expected in [
        # the prompt shows the first test, which names the function; all are scored, and other columns are left
        (
            [MBPP],
            {"prompt_template": "plain"},
            [{"prompt": SHOWN, "tests": MBPP_TESTS, "entry_point": "add"}],
        ),
        # MBPP+ has a script of tests; its asserts, where there is none
        (
            [PLUS, {**PLUS, "test": ""}],
            {},
            [
                {"prompt": CODE_PROMPT, "tests": [f"import math\nimport cmath\n{PLUS['test']}"], "entry_point": "add"},
                {"prompt": CODE_PROMPT, "tests": PLUS_TESTS, "entry_point": "add"},
            ],
        ),
        (
            [MBPP],
            {"chat": True},
            [{"prompt": [{"role": "user", "content": CODE_PROMPT}], "tests": MBPP_TESTS, "entry_point": "add"}],
        ),
        # ready-made
        (
            [{"prompt": "p", "tests": ["assert f(1)"], "entry_point": "f"}, {"prompt": "q", "tests": ["assert g(1)"]}],
            {},
            [
                {"prompt": "p", "tests": ["assert f(1)"], "entry_point": "f"},
                {"prompt": "q", "tests": ["assert g(1)"], "entry_point": None},
            ],
        ),
    ]:
        assert load_code_dataset(new_file(tmp_path, rows), **settings).to_list() == expected, (rows, settings)


def test_human_eval_layout(tmp_path, reward):
    """The prompt stays a program's beginning; its helpers are the tests', so that no program can replace them."""
    path = write_rows(tmp_path / "a.jsonl", [HUMANEVAL])
    (row,) = load_code_dataset(path).to_list()
    assert row["prompt"] == row["starter_code"] == HUMANEVAL["prompt"] and row["entry_point"] == "add"
    right, own_helper = "    return a + b\n", "    return 0\n\ndef helper(a):\n    return 0\n"
    names = ("tests", "entry_point", "starter_code")
    assert [reward(text, *(row[name] for name in names))[0] for text in (right, own_helper)] == [1.0, 0.0]
    (row,) = load_code_dataset(path, chat=True).to_list()
    assert row["prompt"][0]["content"].startswith(HUMANEVAL["prompt"]) and "```python" in row["prompt"][0]["content"]


# ----------------------------------------------------------------------------------------------------- MBPP+ in two


def plus_rows(count: int, **changes) -> list[dict]:
    return [{**PLUS, "task_id": i, "prompt": f"Task {i}.", **changes} for i in range(count)]


def tasks(path: Path, split: str) -> list[int]:
    prompts = load_code_dataset(path, split=split, prompt_template="plain")["prompt"]
    return [int(prompt.split(".")[0].removeprefix("Task ")) for prompt in prompts]


def test_mbpp_plus_has_two_splits_for_good(tmp_path):
    """Whatever its one split is called, and whatever the order of its rows."""
    rows = plus_rows(378)
    folder = write_rows(tmp_path / "d" / "train.jsonl", rows).parent
    for path in (folder, write_rows(tmp_path / "own.jsonl", rows[::-1])):
        train, test = tasks(path, "train"), tasks(path, "test")
        assert (len(train), len(test)) == (264, 114) and sorted(train + test) == list(range(378))
        assert sorted(test)[:8] == [1, 5, 11, 13, 16, 22, 30, 32]
        assert tasks(path, "all") == train + test and tasks(path, "test[:3]") == test[:3]


@needs_data
def test_mbpp_plus_itself(caplog):
    """It is read whole, and its split is pinned."""
    caplog.set_level("INFO", "dash_trl.data")
    rows = {split: load_code_dataset(SHARED / "mbppplus", split=split, completion=True) for split in ("train", "test")}
    assert "MBPP+ is split by seed 0 into 264 and 114 problems." in caplog.messages
    names = {split: part["entry_point"][:] for split, part in rows.items()}
    hashes = {split: hashlib.sha256(" ".join(names[split]).encode()).hexdigest()[:16] for split in names}
    assert hashes == {"train": "26d49fd737d58a08", "test": "1d5e018be7b586e5"}
    solutions = [json.loads(line) for line in (SHARED / "mbppplus" / "test.jsonl").read_text().splitlines()]
    assert {*names["train"], *names["test"]} == {one["entry_point"] for one in solutions}
    assert all("assert" in prompt for part in rows.values() for prompt in part["prompt"])


def test_what_is_not_mbpp_plus_is_not_split(tmp_path):
    for rows in (plus_rows(377), [{**row, "task_id": None} for row in plus_rows(3)]):
        path = write_rows(tmp_path / str(len(rows)) / "test.jsonl", rows).parent
        assert len(load_code_dataset(path, split="test")) == len(rows)
        with pytest.raises(ValueError, match=r"no split 'train' .*: choose one of \['test'\]"):
            load_code_dataset(path)


# ------------------------------------------------------------------------------------------------------- completions


def test_completions_of_math(tmp_path):
    for row, template, completion in [
        # GSM8K's marks go, and the answer has the form that the prompt asks for
        (GSM8K[0], "boxed", " 1+1=2\nThe answer is \\boxed{2}."),
        (GSM8K[0], "plain", " 1+1=2\nThe answer is 2."),
        (GSM8K[0], "{problem}\n", "1+1=2\nThe answer is 2."),
        ({"question": "?", "answer": "So 9.\n#### 1,200"}, "boxed", " So 9.\nThe answer is \\boxed{1200}."),
        # MATH's solutions have their boxes
        (MATH[0], "boxed", " " + MATH[0]["solution"]),
        (MATH[0], "plain", " " + MATH[0]["solution"]),
        # one without is given the answer
        ({"problem": "?", "solution": "Add.", "answer": "5"}, "boxed", " Add.\nThe answer is \\boxed{5}."),
        # ready-made
        ({"prompt": "p", "completion": "<<1>> 2", "solution": "no", "answer": "2"}, None, "<<1>> 2"),
    ]:
        path = new_file(tmp_path, [row])
        for chat in (False, True):
            (loaded,) = load_math_dataset(path, prompt_template=template, chat=chat, completion=True).to_list()
            assert set(loaded) == {"prompt", "answer", "completion"}
            text = completion.strip() if chat and "completion" not in row else completion
            expected = [{"role": "assistant", "content": text}] if chat else text
            assert loaded["completion"] == expected, (row, template)


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def test_completions_of_code(tmp_path, reward):
    for row, template, chat, completion in [
        (MBPP, None, True, fenced(MBPP["code"])),
        (MBPP, None, False, " " + fenced(MBPP["code"])),
        (MBPP, "plain", False, "\n" + MBPP["code"]),
        (MBPP, "plain", True, MBPP["code"]),
        ({**MBPP, "code": MBPP["code"].replace("\n", "\r\n")}, None, True, fenced(MBPP["code"])),
        (HUMANEVAL, None, False, HUMANEVAL["canonical_solution"].rstrip()),
        (HUMANEVAL, None, True, fenced(HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"].rstrip())),
    ]:
        path = new_file(tmp_path, [row])
        (loaded,) = load_code_dataset(path, prompt_template=template, chat=chat, completion=True).to_list()
        assert loaded["completion"] == ([{"role": "assistant", "content": completion}] if chat else completion)
        assert reward(*(loaded.get(name) for name in ("completion", "tests", "entry_point", "starter_code")))[0] == 1.0


# --------------------------------------------------------------------------------------------- rows that lack something

UNSOLVED = {"problem": "Why?", "solution": "Because.", "level": 1}
SOLVED = {"problem": "p", "answer": r"Add. \boxed{1}"}
EXPLAINED = {"problem": "p", "answer": "1", "solution": "Add."}


def test_what_is_missing_is_named(tmp_path):
    for load, rows, settings, message in [
        # columns
        (
            load_math_dataset,
            [{"text": "a", "answer": "1"}],
            {},
            r"no problem column: looked for .*'text', 'answer'\]. Name the right one with problem_column",
        ),
        (
            load_math_dataset,
            [{"problem": "a", "label": "1"}],
            {},
            r"no answer column: looked for .*'problem', 'label'\]. Name the right one with answer_column",
        ),
        (load_math_dataset, [READY], {"answer_column": "gold"}, r"no answer column: looked for \['gold'\]"),
        (load_code_dataset, [READY], {}, r"has no tests column: looked for .*'test_list'.*\]. Rename the right one"),
        (
            load_code_dataset,
            [{"text": "p", "test_list": ["assert f(1)"], "program": "f = bool"}],
            {"completion": True},
            r"no solution column: .*'completion', 'code'.*'program'\]",
        ),
        # answers, problems, tests
        (
            load_math_dataset,
            [*MATH, UNSOLVED, UNSOLVED],
            {},
            r"2 of 3 rows .* lack a gold answer .* row 1: .*Because.*Remove these rows",
        ),
        (load_math_dataset, [READY, {**READY, "prompt": " "}], {}, "1 of 2 rows .* lack a problem .* row 1"),
        (
            load_code_dataset,
            [MBPP, {**MBPP, "test_list": []}],
            {},
            "1 of 2 rows of .* lack tests in 'test_list'; the first is row 1",
        ),
        (
            load_code_dataset,
            [MBPP, {**MBPP, "test_list": ["assert add(1"]}],
            {},
            "Row 1 of .* has a test in 'test_list' that is no Python .*'import math",
        ),
        (
            load_code_dataset,
            [HUMANEVAL, {**HUMANEVAL, "entry_point": "Solution().add"}],
            {},
            r"Row 1 of .* has the entry_point 'Solution\(\).add', .*check\(Solution\(\).add\).*'Solution'",
        ),
        (
            load_code_dataset,
            [MBPP, {**MBPP, "text": " "}],
            {},
            "1 of 2 rows of .* lack a problem in 'text'; the first is row 1",
        ),
        # solutions
        (
            load_math_dataset,
            [SOLVED, {"problem": "p", "answer": "1"}],
            {"completion": True},
            r"lack a solution in 'answer' \(an answer alone is none",
        ),
        (
            load_math_dataset,
            [SOLVED, {"problem": "p", "answer": "#### 1"}, {"problem": "p", "answer": r"\boxed{1}"}],
            {"completion": True},
            "2 of 3 rows .* lack a solution in 'answer'",
        ),
        (
            load_math_dataset,
            [EXPLAINED, {**EXPLAINED, "solution": " "}, {**EXPLAINED, "solution": None}],
            {"completion": True},
            "2 of 3 rows .* lack a solution in 'solution'; the first is row 1",
        ),
        (
            load_code_dataset,
            [MBPP, {**MBPP, "code": ""}, {**MBPP, "code": None}],
            {"completion": True},
            "2 of 3 rows .* lack a solution in 'code'; the first is row 1",
        ),
    ]:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            load(new_file(tmp_path, rows), **settings)
