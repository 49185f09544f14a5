r"""Loads math and programming problems as datasets for TRL. A dataset has exactly the columns that training reads::

    hub name | file | directory | save_to_disk  ──► datasets.Dataset ──► problem, answer columns ──► prompt, answer
                                                                    └──► problem, tests columns ──► prompt, tests, …
                                                     completion=True ──► and the human solution, as `completion`

The following layouts are recognised. Upper and lower case of column names do not matter.

=======================================  ==========================  ==============================  ===================
dataset                                 problem                     answer                          solution
=======================================  ==========================  ==============================  ===================
GSM8K (arXiv:2110.14168)                 `question`                  `answer`: what follows `####`,  `answer`
                                                                     without thousands separators
MATH (arXiv:2103.03874), MATH-500, AIME  `problem`                   `answer`, else the last         `solution`
                                                                     ``\boxed{}`` of `solution`
OlympiadBench (arXiv:2402.14008)         `question`                  `final_answer`, a list          `solution`, the
                                                                                                     first of a list
ready-made                               `prompt`, a string or a     as in MATH                      `completion`,
                                         conversation, unchanged                                     unchanged
=======================================  ==========================  ==============================  ===================

========================================  =======================  ===============================  ====================
dataset                                  problem                  tests                            solution
========================================  =======================  ===============================  ====================
MBPP (arXiv:2108.07732), MBPP+            `text` or `prompt`, and  `test` or `test_list`, scripts   `code`
                                          the first assert
HumanEval (arXiv:2107.03374), HumanEval+  `prompt`, the beginning  `test`, a `check`                `canonical_solution`
                                          of a program
APPS (arXiv:2105.09938), TACO             `question`               `input_output`, JSON: inputs,
                                                                   outputs, `fn_name`
CodeContests (arXiv:2203.07814)           `description`            `public_tests`, `private_tests`
                                                                   and `generated_tests`
ready-made                                `prompt`, unchanged      `tests`, scripts, or `inputs`    `completion`,
                                                                   and `outputs`                    unchanged
========================================  =======================  ===============================  ====================

MBPP+ is published as one split of 378 problems. Here it has two, as in the paper: 264 problems in "train" and 114 in
"test". The splits are drawn with the seed `MBPP_PLUS_SEED`, because the paper's own splits are not published. Both
"train+test" and "all" mean the whole dataset.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import logging
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dash_trl.rewards import completion_text, last_boxed, last_hashes

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

PROMPT_TEMPLATES = {
    "plain": "{problem}",
    # From the model cards of Qwen2.5-Math and DeepSeek-R1; many models were trained on this wording.
    "boxed": "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # For base models, which continue a text but do not follow instructions.
    "question-answer": "Question: {problem}\nAnswer:",
    "code": "{problem}\n\nPut the whole program into one block that begins with ```python and ends with ```.",
}
DEFAULT_TEMPLATE, CODE_TEMPLATE = "boxed", "code"
FIRST_TEST = "\n\nYour program should pass this test, and others like it:\n\n"  # MBPP's text does not name the function
READS = "\n\nYour program should read from standard input and print its output."
BEGINS = "\n\nYour program should define what begins like this:\n\n"

PROBLEM_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "final_answer", "solution")
SOLUTION_COLUMNS = ("completion", "solution", "answer")  # an `answer` must contain the reasoning, too
TEXT_COLUMNS = ("prompt", "text", "question", "description")
PROGRAM_COLUMNS = ("completion", "code", "canonical_solution", "solution")
SCRIPT_COLUMNS = ("tests", "test", "test_list")
CONTEST_COLUMNS = ("public_tests", "private_tests", "generated_tests")
TEST_COLUMNS = (*SCRIPT_COLUMNS, "inputs", "input_output", *CONTEST_COLUMNS)
OPTIONS = ("problem", "answer")  # a column that the caller may name, with `problem_column` or `answer_column`
READY = ("tests", "inputs")  # a dataset with one of these columns is ready-made: its prompts stay unchanged
SETUP_COLUMNS = ("test_setup_code", "test_imports")
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
ONLY_SPLIT = "train"  # the split of a single file or a saved `Dataset`, named as in `datasets`
MBPP_PLUS_COLUMNS = {"task_id", "prompt", "code", "test_list", "test"}
MBPP_PLUS_ROWS, MBPP_PLUS_TRAIN = 378, 264  # Section 4.1 of the paper
MBPP_PLUS, MBPP_PLUS_SEED = ("train", "test"), 0
SENTENCE_WORDS = 6  # a gold answer of as many words that ends with a full stop is taken for a sentence
EXCERPT_CHARS = 200  # length of the part of a row that an error shows


def load_math_dataset(
    name_or_path: str | Path,
    *,
    config: str | None = None,
    split: str = "train",
    prompt_template: str | None = None,
    chat: bool = False,
    completion: bool = False,
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> Dataset:
    r"""Loads math problems with gold answers, for `DASHTrainer(train_dataset=...)` and `MathAccuracyReward`::

        load_math_dataset("openai/gsm8k", config="main", chat=tokenizer.chat_template is not None)

    Args:
        name_or_path: a dataset on the hub; a .json, .jsonl, .csv or .parquet file; a directory of such files, named
            after their splits (train.jsonl, test.jsonl); or a directory that `save_to_disk` wrote.
        config: name of the configuration on the hub, such as "main". None = the default.
        split: name of the split, such as "test" or "train[:1000]". A single file or a saved `Dataset` has only the
            split "train".
        prompt_template: a name in `PROMPT_TEMPLATES`, or a text that contains `{problem}`. None = "boxed"; but the
            prompts of a column `prompt` stay unchanged.
        chat: True = make each prompt a conversation of one user message, for a tokenizer with a chat template.
        completion: True = add a column with the solutions, for supervised fine-tuning. GSM8K's <<calculator marks>> are
            removed. If a solution has no ``\boxed{}``, a last sentence with the answer is added. This sentence has a
            box if the prompt asks for a box.
        problem_column: name of the column with the problems. None = the first of `PROBLEM_COLUMNS` that exists.
        answer_column: name of the column with the gold answers. None = in each row, the first column of
            `ANSWER_COLUMNS` that has an answer in it.
    Returns:
        A dataset with the columns `prompt` (string or conversation), `answer` (string) and, if asked for, `completion`
        (in the form of the prompt), in the order of the source.
    Raises:
        ValueError: if the path, split, template or a column does not exist, or a row lacks a problem, an answer or a
            solution.
    """
    template = None if prompt_template is None else resolve_template(prompt_template)
    source = str(name_or_path)
    dataset = _load(source, config, split)
    problems_from = _find_columns("problem", problem_column, PROBLEM_COLUMNS, dataset, source)[0]
    answers_from = _find_columns("answer", answer_column, ANSWER_COLUMNS, dataset, source)

    if template is None and problems_from.lower() != "prompt":
        template = PROMPT_TEMPLATES[DEFAULT_TEMPLATE]
    prompts: list[Any] = [make_prompt(problem, template, chat) for problem in dataset[problems_from]]
    _require_all(prompts, dataset, f"a problem in {problems_from!r}", source)
    rows = dataset.select_columns(answers_from)
    answers: list[Any] = [find_answer(row, answers_from) for row in rows]
    if answer_column is not None and not any(answers):  # a column `solution` that holds answers, not solutions
        answers = [final_answer(row[answers_from[0]]) for row in rows]
    where = " or ".join(map(repr, answers_from))
    _require_all(answers, dataset, f"a gold answer in {where} (a solution's is its last \\boxed{{}} or ####)", source)
    _warn_of_sentences(answers, where, source)

    loaded = {"prompt": prompts, "answer": answers}
    if completion:
        solutions, ready = _solutions(dataset, SOLUTION_COLUMNS, source)
        loaded["completion"] = [
            make_completion(one if ready else math_solution(one, prompt, answer), prompt)
            for one, prompt, answer in zip(solutions, prompts, answers, strict=True)
        ]

    return dataset.from_dict(loaded)


def load_code_dataset(
    name_or_path: str | Path,
    *,
    config: str | None = None,
    split: str = "train",
    prompt_template: str | None = None,
    chat: bool = False,
    completion: bool = False,
    problem_column: str | None = None,
) -> Dataset:
    r"""Loads programming problems with unit tests, for `DASHTrainer(train_dataset=...)` and `CodeReward`::

        load_code_dataset("google-research-datasets/mbpp", chat=tokenizer.chat_template is not None)

    The problems come from the first column of `TEXT_COLUMNS` that exists, and the solutions from the first column of
    `PROGRAM_COLUMNS` that exists. The tests of a row come from the first column of `TEST_COLUMNS` that has tests in it,
    but the three columns of CodeContests are used together.

    Args:
        name_or_path: see `load_math_dataset`.
        config: see `load_math_dataset`.
        split: see `load_math_dataset`; MBPP+ has the splits "train" and "test".
        prompt_template: a name in `PROMPT_TEMPLATES`, or a text that contains `{problem}`. None = "code", which asks
            for a fenced block; but ready-made prompts stay unchanged, and so do HumanEval's prompts without `chat`.
        chat: see `load_math_dataset`.
        completion: True = add a column with the solutions, for supervised fine-tuning. A solution is in a fenced block
            if the prompt asks for this block.
        problem_column: name of the column with the problems. None = the first of `TEXT_COLUMNS` that exists.
    Returns:
        A dataset in the order of the source, with these columns:

        - `prompt`: string or conversation.
        - `tests`: list of scripts that test the program. For programs that read standard input, the columns are
          `inputs` and `outputs` instead: lists of strings, one for each test. A dataset may have all three columns.
        - `entry_point`: the name of the function, or None.
        - `starter_code`: the beginning of the program, which the completion continues. The column exists for HumanEval,
          and for ready-made datasets that contain it.
        - `completion`: the solution, as a text or a conversation like the prompt; only with `completion=True`.
    Raises:
        ValueError: as in `load_math_dataset`; also if a row has no tests, tests that are not Python, or an entry point
            that is not a name.
    """
    template = None if prompt_template is None else resolve_template(prompt_template)
    source = str(name_or_path)
    dataset = _load(source, config, split)
    problems_from = _find_columns("problem", problem_column, TEXT_COLUMNS, dataset, source)[0]
    tests_from = _find_columns("tests", None, TEST_COLUMNS, dataset, source)

    where = " or ".join(map(repr, tests_from))
    rows = []
    for i, row in enumerate(dataset):
        try:
            rows.append(code_row(row, problems_from, tests_from))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"Row {i} of {source!r} has inputs and outputs in {where} that cannot be read "
                f"({type(error).__name__}: {error}). Correct or remove it."
            ) from error
    _require_all([row["tests"] or row["inputs"] or None for row in rows], dataset, f"tests in {where}", source)
    for i, row in enumerate(rows):
        if (name := row["entry_point"]) and not str(name).isidentifier():
            raise ValueError(
                f"Row {i} of {source!r} has the entry_point {name!r}, which no program can define, so every completion "
                f"would score 0. For a method, as in LeetCodeDataset, make the columns 'prompt' (the whole task), "
                f"'tests' (scripts that call it, such as the test followed by 'check({name})') and 'entry_point' "
                f"(the class: {str(name).partition('(')[0]!r})."
            )
        for test in row["tests"] or ():
            try:
                ast.parse(test)
            except (SyntaxError, ValueError) as error:
                raise ValueError(
                    f"Row {i} of {source!r} has a test in {where} that is no Python ({error}): "
                    f"{test[:EXCERPT_CHARS]!r}. Correct or remove it; tests are scripts whose asserts call the program."
                ) from error
    starts = any(row["starter_code"] for row in rows)
    if template is None and (chat or not starts) and tests_from[0].lower() not in READY:
        template = PROMPT_TEMPLATES[CODE_TEMPLATE]
    prompts: list[Any] = [make_prompt(row["problem"], template, chat) for row in rows]
    _require_all(prompts, dataset, f"a problem in {problems_from!r}", source)

    kept = [name for name in ("tests", "inputs", "outputs") if any(row[name] for row in rows)]
    kept += ["entry_point", *(["starter_code"] if starts else [])]
    loaded = {"prompt": prompts, **{name: [row[name] for row in rows] for name in kept}}
    if completion:
        solutions, ready = _solutions(dataset, PROGRAM_COLUMNS, source)
        loaded["completion"] = [
            make_completion(one if ready else code_solution(one, prompt, row["starter_code"]), prompt)
            for one, prompt, row in zip(solutions, prompts, rows, strict=True)
        ]

    return dataset.from_dict(loaded)


# ------------------------------------------------------------------------------------------ from a row to its fields


def code_row(row: Mapping[str, Any], problem_column: str, test_columns: Sequence[str]) -> dict[str, Any]:
    """Turns a row of any known layout into the fields that training reads.

    Args:
        row: the row.
        problem_column: the column with the problem.
        test_columns: the columns that may have tests, the preferred column first.
    Returns:
        `problem`, `tests`, `inputs`, `outputs`, `entry_point` and `starter_code`. A field that the row lacks is None or
        empty.
    """
    fields = {name.lower(): value for name, value in row.items()}
    problem, name, starter = row[problem_column], fields.get("entry_point"), fields.get("starter_code")
    written = [(column.lower(), _scripts(row[column])) for column in test_columns if column.lower() in SCRIPT_COLUMNS]
    column, tests = next((one for one in written if one[1]), ("", []))
    inputs: list[str] = []
    outputs: list[str] = []
    if column in ("test", "test_list"):
        listed = _scripts(fields.get("test_list"))
        shown = [one for one in listed if "assert" in one]  # MBPP+ also lists imports
        setup = [one for key in SETUP_COLUMNS for one in _scripts(fields.get(key))]
        setup += [one for one in listed if "assert" not in one]
        tests = shown if column == "test_list" else tests
        name = name or _entry_point(shown, fields.get("code"))
        if name and "def check(" in tests[0]:
            starter = str(problem)
            setup += [other_definitions(starter, name)]
            tests = [f"{tests[0]}\n\ncheck({name})"]
        elif shown and isinstance(problem, str) and problem.strip():
            problem = f"{problem.strip()}{FIRST_TEST}{shown[0].strip()}"
        tests = ["\n".join([*setup, test]).lstrip() for test in tests]
    elif not tests or fields.get("inputs"):  # a ready-made row may have scripts and inputs
        pairs, function = _contest_tests(fields)
        if function:
            name = "Solution" if "class Solution" in (starter or "") else function
            tests = [_call_test(name, function, *pair) for pair in pairs]
        else:
            inputs, outputs = [_as_text(one) for one, _ in pairs], [_as_text(one) for _, one in pairs]
        if not fields.get("inputs") and isinstance(problem, str) and problem.strip():
            problem = problem.rstrip() + (f"{BEGINS}{starter.rstrip()}" if starter else READS if inputs else "")
            starter = None  # completions do not continue the starter code of such problems
    return {
        "problem": problem,
        "tests": tests or None,
        "inputs": inputs,
        "outputs": outputs,
        "entry_point": name,
        "starter_code": starter,
    }


def _contest_tests(fields: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], str | None]:
    """Returns the tests of a row as (input, expected output) pairs, and the name of the function that they test.

    If the name is None, the program reads the input from standard input and prints the output. Otherwise, the input is
    the function's arguments, and the output is its result.
    """
    written = fields.get("input_output") or {}
    both = json.loads(written) if isinstance(written, str) else written
    parts = [(one.get("inputs"), one.get("outputs")) for one in (fields, both)]
    parts += [(one["input"], one["output"]) for one in map(fields.get, CONTEST_COLUMNS) if one]
    return [pair for one in parts for pair in zip(one[0] or (), one[1] or (), strict=True)], both.get("fn_name")


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)  # TACO has lists of lines


def _call_test(name: str, function: str, arguments: Any, expected: Any) -> str:
    """Returns a script that calls a function and asserts its result.

    As in APPS, the result may be a tuple where a list is expected, and the expected value may be wrapped in a list.

    Args:
        name: name that the program must define: the function or, for a method, the class `Solution`.
        function: name of the function or method.
        arguments: the arguments, as a list or as LiveCodeBench's text.
        expected: the expected result, as a value or as LiveCodeBench's text.
    """
    if isinstance(arguments, str):  # in LiveCodeBench: JSON with one argument per line
        arguments, expected = [json.loads(line) for line in arguments.split("\n")], json.loads(expected)
    call = "Solution()." * (name != function) + function
    return f"{_PLAIN}found, wanted = plain({call}(*{arguments!r})), {expected!r}\nassert wanted in (found, [found])\n"


_PLAIN = """\
def plain(value):
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value

"""


def _scripts(value: Any) -> list[str]:
    """Returns the scripts in a cell of a table, except those that are empty or test nothing.

    The cell contains one text or a list of texts.
    """
    values = [value] if isinstance(value, str) else list(value if value is not None else [])
    return [one for one in values if isinstance(one, str) and one.strip() and not _NO_INPUTS.search(one)]


_NO_INPUTS = re.compile(r"^inputs = \[\]$", re.MULTILINE)  # EvalPlus's script for Mbpp/88 tests nothing


def _entry_point(tests: Sequence[str], solution: Any) -> str | None:
    """Returns the name of the function that the first test calls; None if there is none.

    If the test calls several functions, the first that the solution defines is meant. If it defines none of them, the
    first that is not a builtin function is meant.
    """
    try:
        calls = [node.func for node in ast.walk(ast.parse(tests[0])) if isinstance(node, ast.Call)] if tests else []
        own = {node.name for node in ast.parse(str(solution or "")).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError:
        return None
    names = [call.id for call in calls if isinstance(call, ast.Name)]
    known = [name for name in names if name in own] or [name for name in names if not hasattr(builtins, name)]
    return known[0] if known else None


def other_definitions(program: str, name: str) -> str:
    """Returns a program without its function `name`. The imports and helpers that remain may be used by tests, too.

    Args:
        program: the program. If it is not valid Python, the result is empty.
        name: name of the function to leave out.
    """
    try:
        tree = ast.parse(program)
    except SyntaxError:
        return ""
    tree.body = [node for node in tree.body if getattr(node, "name", None) != name]
    return ast.unparse(tree)


def resolve_template(template: str) -> str:
    """Returns the text of a prompt template.

    Args:
        template: a name in `PROMPT_TEMPLATES`, or a text that contains `{problem}`.
    Raises:
        ValueError: if the text does not contain `{problem}`.
    """
    text = PROMPT_TEMPLATES.get(template, template)
    if "{problem}" not in text:
        raise ValueError(
            f"prompt_template = {template!r} has no {{problem}}, so every prompt would be the same: put {{problem}} "
            f"where the problem goes, or use one of the named templates {sorted(PROMPT_TEMPLATES)}."
        )
    return text


def make_prompt(problem: Any, template: str | None, chat: bool) -> str | list[dict[str, str]] | None:
    """Makes the prompt for one problem. The result is None if the problem is empty.

    Args:
        problem: a text or a conversation. A conversation is returned unchanged.
        template: a text that contains `{problem}`. None: the problem itself is the prompt.
        chat: True = make a conversation of one user message.
    """
    if isinstance(problem, Sequence) and not isinstance(problem, str):
        return list(problem) or None
    if problem is None or not str(problem).strip():
        return None
    # `str.format` would fail on the braces of LaTeX in problems, and on the braces of \boxed{} in a template.
    text = str(problem) if template is None else template.replace("{problem}", str(problem))
    return [{"role": "user", "content": text}] if chat else text


def make_completion(solution: Any, prompt: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Makes a completion from a solution: a text if the prompt is a text, otherwise one assistant message."""
    if isinstance(prompt, str):
        return completion_text(solution)
    return [{"role": "assistant", "content": solution}] if isinstance(solution, str) else list(solution)


def math_solution(solution: str, prompt: str | list[dict[str, str]], answer: str) -> str:
    r"""Makes a completion from the solution of a math problem: without calculator marks, with the answer at its end.

    Args:
        solution: the solution. If it has a ``\boxed{}``, no answer is added at its end.
        prompt: the prompt. After a prompt that is a text, the completion begins with a space. The added answer is in a
            box if the prompt asks for a box.
        answer: the gold answer.
    """
    text = _CALCULATOR.sub("", solution).strip()
    if last_boxed(text) is None:
        if last_hashes(text) is not None:
            text = text.rpartition("####")[0].rstrip()
        final = rf"\boxed{{{answer}}}" if r"\boxed" in _text(prompt) else answer
        text = f"{text}\nThe answer is {final}.".lstrip()
    return f"{_gap(prompt, ' ')}{text}"


def code_solution(solution: str, prompt: str | list[dict[str, str]], starter_code: str | None) -> str:
    """Makes a completion from the solution of a programming problem: a program, in a fence if the prompt asks for it.

    Args:
        solution: a whole program, or the part of a program that follows `starter_code`. The two parts are joined. If
            the prompt itself is `starter_code`, the completion is only the second part.
        prompt: the prompt.
        starter_code: the beginning of the program, or None.
    """
    text = "\n".join(solution.splitlines()).strip("\n")  # lines in MBPP end in \r\n
    if starter_code and text[:1].isspace():
        if prompt == starter_code:
            return text
        text = f"{starter_code.rstrip()}\n{text}"
    text = textwrap.dedent(text)
    if "```" in _text(prompt):
        return f"{_gap(prompt, ' ')}```python\n{text}\n```"
    return _gap(prompt, "\n") + text


def _text(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def _gap(prompt: str | list[dict[str, str]], gap: str) -> str:
    """Returns the white space at the beginning of a completion, which separates it from its prompt.

    The result is `gap`, or an empty text if the prompt is a conversation or ends with white space. For math problems,
    `gap` is a space, because tokens often begin with a space. A newline would form one token with the punctuation mark
    at the end of the prompt.
    """
    return gap if isinstance(prompt, str) and not prompt[-1:].isspace() else ""


_CALCULATOR = re.compile(r"<<[^<>]*>>")


def find_answer(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """Returns the gold answer of a row, from the first column that has an answer; None if no column has one.

    Args:
        row: the row.
        columns: names of the columns, the preferred column first.
    """
    for column in columns:
        value = row[column]
        if isinstance(value, Sequence) and not isinstance(value, str):  # OlympiadBench's list of answers
            value = _DOLLAR.sub("", ", ".join(map(str, value)))
        answer = final_answer(value, marked=column.lower() == "solution")
        if answer:
            return answer
    return None


def final_answer(value: Any, *, marked: bool = False) -> str | None:
    r"""Returns the answer in a value: the text after `####` or in a ``\boxed{}``, else the whole value.

    Args:
        value: the value of a column: an answer, or a solution.
        marked: True = accept only an answer that follows `####` or is in a ``\boxed{}``, because a whole solution is no
            answer.
    Returns:
        The answer; None if there is none.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table with an empty cell has floats in this column: 42.0 is the answer 42
    text = "" if value is None else str(value).strip()
    hashes = last_hashes(text)
    if hashes is not None:
        return _THOUSANDS.sub("", hashes)
    boxed = last_boxed(text)
    if boxed is None and not marked:
        return text or None
    return boxed or None


_DOLLAR = re.compile(r"(?<!\\)\$")  # the signs around a formula
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


# ------------------------------------------------------------------------------------------------------ loading


def _load(source: str, config: str | None, split: str) -> Dataset:
    """Returns the rows of a split. Raises a `ValueError` if the split has no rows."""
    rows = select_split(_splits(source, config), split, source)
    if len(rows) == 0:
        raise ValueError(f"{source!r}, split {split!r}, has no rows: there is nothing to train on.")
    return rows


def _splits(source: str, config: str | None) -> dict[str, Dataset]:
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = Path(source).expanduser()
    if path.is_file() and (path.suffix not in FILE_FORMATS or path.stat().st_size == 0):
        raise ValueError(f"{source!r} is empty, or not a data file that can be read ({', '.join(FILE_FORMATS)}).")
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            loaded = load_from_disk(str(path))
        elif path.is_file():
            loaded = load_dataset(FILE_FORMATS[path.suffix], data_files={ONLY_SPLIT: str(path)})
        else:
            loaded = load_dataset(str(path) if path.is_dir() else source, config)
    except (FileNotFoundError, ConnectionError) as error:  # DatasetNotFoundError is a FileNotFoundError
        raise ValueError(
            f"{source!r} is neither a path with data files (looked for {path.absolute()}) nor a dataset that the hub "
            f"gives ({error}): correct it, or the connection."
        ) from error
    return _split_mbpp_plus(dict(loaded) if isinstance(loaded, DatasetDict) else {ONLY_SPLIT: loaded})


def select_split(splits: Mapping[str, Dataset], split: str, source: str) -> Dataset:
    """Selects a split, a part of a split, or all splits.

    Args:
        splits: the data by split.
        split: the split or part of a split in the notation of `datasets`, such as "test" or "train[:100]"; or "all".
        source: name of the data, for the error.
    Raises:
        ValueError: if the split does not exist.
    """
    from datasets import ReadInstruction, concatenate_datasets

    try:
        parts = ReadInstruction.from_spec("+".join(splits) if split == "all" else split)
        ranges = parts.to_absolute({name: len(rows) for name, rows in splits.items()})
    except ValueError as error:
        raise ValueError(
            f"{source!r} has no split {split!r} ({error}): choose one of {list(splits)}, or a part of one, such as "
            f"'{next(iter(splits))}[:100]'."
        ) from error
    return concatenate_datasets(
        [splits[one.splitname].select(range(one.from_, one.to) if one.from_ < one.to else []) for one in ranges]
    )


def _split_mbpp_plus(splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """Splits MBPP+ in two by the hashes of its problems' numbers; returns other data unchanged."""
    rows = next(iter(splits.values()))
    if len(splits) > 1 or len(rows) != MBPP_PLUS_ROWS or not MBPP_PLUS_COLUMNS <= set(rows.column_names):
        return splits
    hashes = [hashlib.sha256(f"{MBPP_PLUS_SEED}:{name}".encode()).digest() for name in rows["task_id"]]
    train = set(sorted(hashes)[:MBPP_PLUS_TRAIN])
    parts = {name: [i for i, one in enumerate(hashes) if (one in train) == (name == "train")] for name in MBPP_PLUS}
    logger.info("MBPP+ is split by seed %d into %d and %d problems.", MBPP_PLUS_SEED, *map(len, parts.values()))
    return {name: rows.select(part) for name, part in parts.items()}


def _find_columns(what: str, wanted: str | None, known: Sequence[str], dataset: Dataset, source: str) -> list[str]:
    """Returns the names of the columns to read, the preferred column first. Raises a `ValueError` if none exists."""
    by_lower_name = {column.lower(): column for column in dataset.column_names}
    names = known if wanted is None else [wanted.lower()]
    found = [by_lower_name[name] for name in names if name in by_lower_name]
    if not found:
        remedy = f"Name the right one with {what}_column, or rename it." if what in OPTIONS else "Rename the right one."
        raise ValueError(
            f"{source!r} has no {what} column: looked for {list(names)}, but its columns are {dataset.column_names}. "
            f"{remedy}"
        )
    return found


def _solutions(dataset: Dataset, known: Sequence[str], source: str) -> tuple[list[Any], bool]:
    """Returns the solutions, and whether they come from a column `completion`, so that they must stay unchanged."""
    column = _find_columns("solution", None, known, dataset, source)[0]
    bare = column.lower() == "answer"
    found = [_solution(value, bare) for value in dataset[column]]
    what = f"a solution in {column!r}" + (" (an answer alone is none; a solution ends in #### or \\boxed{})" * bare)
    _require_all(found, dataset, what, source)
    return found, column.lower() == "completion"


def _solution(value: Any, marked: bool) -> Any:
    """Returns the value of a column if the value is a solution, else None.

    With `marked`, a value is a solution only if it has a `####` or a box, with text before this mark.
    """
    if isinstance(value, Sequence) and value and isinstance(value[0], str) and not isinstance(value, str):
        value = value[0]  # the first of OlympiadBench's list of solutions
    text = completion_text(value)
    way = re.split(r"####|\\boxed", text)[0] if not marked or final_answer(text, marked=True) else ""
    return value if way.strip() or not marked and text.strip() else None


def _require_all(values: Sequence[Any], dataset: Dataset, what: str, source: str) -> None:
    missing = [i for i, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(values)} rows of {source!r} lack {what}; the first is row {missing[0]}: "
            f"{str(dataset[missing[0]])[:EXCERPT_CHARS]}. Remove these rows and load the copy that save_to_disk writes."
        )


def _warn_of_sentences(answers: Sequence[str], where: str, source: str) -> None:
    """Warns of gold answers that are sentences, since hardly any completion has the same sentence as its answer."""
    found = [i for i, one in enumerate(answers) if one.endswith(".") and len(one.split()) >= SENTENCE_WORDS]
    if found:
        logger.warning(
            f"{len(found)} of {len(answers)} gold answers in {where} of {source!r} are sentences; the first is row "
            f"{found[0]}: {answers[found[0]][:EXCERPT_CHARS]!r}. A completion is correct only if its answer is this "
            "text: mark the answer in it by #### or \\boxed{}, or name another column with answer_column."
        )


def has_tests(name_or_path: str | Path, *, config: str | None = None) -> bool:
    """Decides by the columns of a dataset whether to load it with `load_code_dataset` or with `load_math_dataset`.

    Args:
        name_or_path: see `load_math_dataset`.
        config: see `load_math_dataset`.
    Returns:
        True if the dataset has tests, and so programming problems; False if it has math problems.
    Raises:
        ValueError: if the dataset has neither columns for tests nor columns for answers.
    """
    columns = next(iter(_splits(str(name_or_path), config).values())).column_names
    known = {column.lower() for column in columns}
    tests = not known.isdisjoint({*TEST_COLUMNS} - {"inputs"}) or known >= {"inputs", "outputs"}
    if not tests and known.isdisjoint(ANSWER_COLUMNS):
        raise ValueError(
            f"{str(name_or_path)!r} has neither gold answers ({', '.join(ANSWER_COLUMNS)}) nor unit tests "
            f"({', '.join(TEST_COLUMNS)}): its columns are {list(columns)}. Name the column of the gold answers with "
            "answer_column, or rename the right one."
        )
    return tests
