r"""Loads math and programming problems as datasets for TRL. A dataset has exactly the columns that training reads::

    hub name | file | directory | save_to_disk  ──► datasets.Dataset ──► problem, answer columns ──► prompt, answer
                                                                    └──► problem, tests columns ──► prompt, tests, …
                                                       solution=True ──► and the human solution

These columns are read, in upper or lower case:

======================================  ======================  ================================  =====================
dataset                                 problem                 answer or tests                   solution
======================================  ======================  ================================  =====================
GSM8K (arXiv:2110.14168)                `question`              `answer`: what follows `####`,    `answer`
                                                                without thousands separators
MATH (arXiv:2103.03874), MATH-500,      `problem`               `answer`, else the last           `solution`
AIME                                                            ``\boxed{}`` of `solution`
MBPP (arXiv:2108.07732), MBPP+          `text` or `prompt`, and `test` or `test_list`, scripts    `code`
                                        the first assert
ready-made                              `prompt`, a string or a `answer`, or verl's               `completion`,
                                        conversation, unchanged `reward_model`; or `tests`,       unchanged
                                                                scripts, or `inputs`, `outputs`
======================================  ======================  ================================  =====================

A dataset with other columns becomes a ready-made one with a few lines of `datasets` (docs/howto/code-rewards.md).

MBPP+ is published as one split of 378 problems. Here it has the two of the paper's authors: in the order of `task_id`,
the first 264 problems are "train", and the last 114 are "test". "all" means the whole dataset.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, ReadInstruction, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from dash_trl.rewards import last_boxed, last_hashes, plain_answer

logger = logging.getLogger(__name__)

PROMPT_TEMPLATES = {
    "plain": "{problem}",
    # From the model cards of Qwen2.5-Math and DeepSeek-R1; many models were trained on this wording.
    "boxed": "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # For base models, which continue a text but do not follow instructions.
    "question-answer": "Question: {problem}\nAnswer:",
    "code": "{problem}\n\nPut the whole program into one block that begins with ```python and ends with ```.",
}
FIRST_TEST = "\n\nYour program should pass this test, and others like it:\n\n"  # MBPP's text does not name the function

PROBLEM_COLUMNS = ("prompt", "problem", "question")
CONTEXT_COLUMNS = ("context", "passage", "choices", "options", "input")  # parts of a problem, which no prompt shows
SOLUTION_COLUMNS = ("completion", "solution", "answer", "code")
ANSWER_COLUMNS = ("answer", "solution", "reward_model")
TEST_COLUMNS = ("tests", "inputs", "outputs", "entry_point")
FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
MBPP_PLUS_COLUMNS = {"task_id", "prompt", "code", "test_list", "test"}
MBPP_PLUS_ROWS = 378
MBPP_PLUS_TRAIN = 264  # Section 4.1 of the paper


def load_math_dataset(
    name_or_path: str | Path,
    *,
    config: str | None = None,
    split: str = "train",
    prompt_template: str | None = None,
    chat: bool = False,
    solution: bool = False,
    problem_column: str | None = None,
    answer_column: str | None = None,
) -> Dataset:
    r"""Load math problems with gold answers, for `DASHTrainer(train_dataset=...)` and `MathAccuracyReward`::

        load_math_dataset("openai/gsm8k", config="main", chat=tokenizer.chat_template is not None)

    Args:
        name_or_path: a dataset on the hub; a .json, .jsonl, .csv or .parquet file; a directory of such files, named
            after their splits (train.jsonl, test.jsonl); or a directory that `save_to_disk` wrote.
        config: name of the configuration on the hub, such as "main". None = the default.
        split: a split, such as "test" or "train[:1000]". A single file or a saved `Dataset` is the split "train".
        prompt_template: a name in `PROMPT_TEMPLATES`, or a text that contains `{problem}`. None = "boxed"; but the
            prompts of a column `prompt` stay unchanged.
        chat: True = make each prompt a conversation of one user message, for a tokenizer with a chat template.
        solution: True = keep the first of `SOLUTION_COLUMNS` that exists, as `solution`; a ready-made `completion`
            keeps its name.
        problem_column: column with the problems. None = the first of `PROBLEM_COLUMNS` that exists.
        answer_column: column with the gold answers. None = in each row, the first of `ANSWER_COLUMNS` that has an
            answer. A `solution` has one only in a ``\boxed{}`` or after `####`.
    Returns:
        A dataset in the order of the source, with the columns `prompt` (string or conversation), `answer` (string)
        and, if asked for, the solution.
    Raises:
        ValueError: if the path, split, template or a column does not exist, or a row lacks a problem or an answer.
    """
    dataset = load_rows(name_or_path, config, split)
    prompts = _prompts(dataset, problem_column, prompt_template, "boxed", chat)
    answers_from = _columns("answer", answer_column, ANSWER_COLUMNS, dataset)
    answers = [
        next(filter(None, (final_answer(row[one], one == "solution" != answer_column) for one in answers_from)), None)
        for row in dataset.select_columns(answers_from)
    ]
    where = " or ".join(map(repr, answers_from))
    marked = "a solution's is its last \\boxed{} or ####; if the whole column is the answer, name it as answer_column"
    _require_all(answers, dataset, f"a gold answer in {where} ({marked})")
    return dataset.from_dict({"prompt": prompts, "answer": answers, **(_solutions(dataset) if solution else {})})


def load_code_dataset(
    name_or_path: str | Path,
    *,
    config: str | None = None,
    split: str = "train",
    prompt_template: str | None = None,
    chat: bool = False,
    solution: bool = False,
    problem_column: str | None = None,
) -> Dataset:
    r"""Load programming problems with unit tests, for `DASHTrainer(train_dataset=...)` and `CodeReward`::

        load_code_dataset("google-research-datasets/mbpp", chat=tokenizer.chat_template is not None)

    Args:
        split: as in `load_math_dataset`; MBPP+ has the splits "train" and "test".
        prompt_template: None = "code", which asks for a fenced block. The other arguments are as in
            `load_math_dataset`, too.
    Returns:
        A dataset in the order of the source, with these columns:

        - `prompt`: string or conversation.
        - `tests`: list of scripts that test the program.
        - `inputs`, `outputs`: for programs that read standard input, lists of strings, one for each test.
        - `entry_point`: the name of the function, or None.
        - the solution, if asked for.
    Raises:
        ValueError: as in `load_math_dataset`; also if a row has no tests, or an entry point that is not a name.
    """
    dataset = load_rows(name_or_path, config, split)
    if "test_list" in dataset.column_names:
        dataset = dataset.from_list([mbpp_row(row) for row in dataset])
    prompts = _prompts(dataset, problem_column, prompt_template, "code", chat)
    columns = {name: dataset[name][:] for name in _columns("tests", None, TEST_COLUMNS, dataset)}
    loaded = {"prompt": prompts, "entry_point": [None] * len(dataset), **columns}
    tested = [row.get("tests") or isinstance(row.get("inputs"), list) and row["inputs"] or None for row in dataset]
    _require_all(tested, dataset, "tests in 'tests', or in the lists 'inputs' and 'outputs' (json.loads makes them)")
    named = [None if name and not name.isidentifier() else True for name in loaded["entry_point"]]
    _require_all(named, dataset, "an `entry_point` that a program can define (for a method, name its class)")
    return dataset.from_dict(loaded | (_solutions(dataset) if solution else {}))


def has_tests(name_or_path: str | Path, *, config: str | None = None) -> bool:
    known = {column.lower() for column in next(iter(_splits(str(name_or_path), config).values())).column_names}
    return "tests" in known or "test_list" in known or known >= {"inputs", "outputs"}


# ------------------------------------------------------------------------------------------ from a row to its fields


def mbpp_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a row of MBPP or MBPP+ into `problem`, `tests`, `entry_point` and `code`. The problem shows an assert.

    The names of the row's columns are in lower case.
    """
    listed = _scripts(row["test_list"])
    asserts = [one for one in listed if "assert" in one]  # MBPP+ also lists imports
    setup = [*_scripts(row.get("test_setup_code")), *_scripts(row.get("test_imports"))]
    setup += [one for one in listed if "assert" not in one]
    tests = ["\n".join([*setup, one]).lstrip() for one in _scripts(row.get("test")) or asserts]
    problem = (row.get("text") or row.get("prompt") or "").strip()
    shown = "".join(asserts[:1]).strip()
    # The tests may use further names of the solution, such as a class `Pair`: then no name is the only one.
    defined = re.findall(r"^(?:def|class) (\w+)", str(row.get("code")), re.MULTILINE)
    used = [name for name in defined if re.search(rf"\b{name}\s*\(", "".join(tests))]
    return {
        "problem": problem and problem + FIRST_TEST + shown,
        "tests": tests,
        "entry_point": used[0] if len(used) == 1 else None,
        "code": row.get("code"),
    }


def _scripts(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else list(value or [])
    # EvalPlus's script for Mbpp/88 has no inputs, so it tests nothing.
    return [one for one in values if one.strip() and not re.search(r"^inputs = \[\]$", one, re.MULTILINE)]


def _prompts(dataset: Dataset, column: str | None, template: str | None, default: str, chat: bool) -> list[Any]:
    """Return the prompts of a dataset. Without a `template`, `default` is used; a column `prompt` stays unchanged."""
    column = _columns("problem", column, PROBLEM_COLUMNS, dataset)[0]
    name = template or ("plain" if column == "prompt" else default)
    text = PROMPT_TEMPLATES.get(name, name)
    if "{problem}" not in text:
        raise ValueError(
            f"prompt_template = {template!r} has no {{problem}}, so every prompt would be the same: put {{problem}} "
            f"where the problem goes, or use one of the named templates {sorted(PROMPT_TEMPLATES)}."
        )
    if left_out := [one for one in CONTEXT_COLUMNS if one in dataset.column_names and one != column]:
        logger.warning(
            f"The prompts show the column {column!r}, but not {left_out}. If the problems need these, add a column "
            "that has all of it by dataset.map, and name it as problem_column."
        )
    prompts = [make_prompt(problem, text, chat) for problem in dataset[column]]
    _require_all(prompts, dataset, f"a problem in {column!r}")
    return prompts


def make_prompt(problem: object, template: str, chat: bool) -> str | list[dict[str, str]] | None:
    """Make the prompt for one problem, by a template that contains `{problem}`; None if the problem is empty.

    A conversation is returned unchanged. With `chat`, a text becomes a conversation of one user message.
    """
    if isinstance(problem, list):
        return problem or None
    if problem is None or not str(problem).strip():
        return None
    # `str.format` would fail on the braces of LaTeX in problems, and on the braces of \boxed{} in a template.
    text = template.replace("{problem}", str(problem))
    return [{"role": "user", "content": text}] if chat else text


def final_answer(value: object, marked: bool) -> str | None:
    r"""Return the answer in a value: the text after `####` or in a ``\boxed{}``, else the whole value; None if empty.

    With `marked`, the whole value is no answer, because it is a solution.
    """
    text = plain_answer(value)
    if (hashes := last_hashes(text)) is not None:
        return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", hashes)  # without thousands separators
    boxed = last_boxed(text)
    return (text if boxed is None and not marked else boxed) or None


# ------------------------------------------------------------------------------------------------------ loading


def load_rows(name_or_path: str | Path, config: str | None, split: str) -> Dataset:
    """Load a dataset with all of its columns, whose names become lower case."""
    rows = select_split(_splits(str(name_or_path), config), split, str(name_or_path))
    return rows.rename_columns({name: name.lower() for name in rows.column_names})


def _splits(source: str, config: str | None) -> dict[str, Dataset]:
    path = Path(source).expanduser()
    # Cells of a table are texts: as numbers, 007 would lose its zeros, and an answer "None" would be missing.
    # Converters of columns that do not exist are ignored.
    settings = (
        {"converters": dict.fromkeys(range(100), str.strip), "keep_default_na": False, "na_values": ""}
        if path.suffix == ".csv" or any(path.glob("*.csv"))
        else {}
    )
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            loaded = load_from_disk(str(path))
        elif path.is_file():
            loaded = load_dataset(FILE_FORMATS[path.suffix], data_files=str(path), **settings)
        else:
            loaded = load_dataset(str(path) if path.is_dir() else source, config, **settings)
    except (KeyError, FileNotFoundError, ConnectionError, ValueError, StopIteration, DatasetGenerationError) as error:
        raise ValueError(
            f"{source!r} is neither a path with data files ({', '.join(FILE_FORMATS)}; looked for {path.absolute()}) "
            f"nor a dataset that the hub gives ({error.__cause__ or error!r:.300}): correct it, or the connection."
        ) from error
    return _split_mbpp_plus(dict(loaded) if isinstance(loaded, DatasetDict) else {"train": loaded})


def select_split(splits: Mapping[str, Dataset], split: str, source: str) -> Dataset:
    """Select a split ("test"), a part of a split ("train[:100]"), or "all" of the data that `source` names.

    Raises:
        ValueError: if the split does not exist.
    """
    try:
        parts = ReadInstruction.from_spec("+".join(splits) if split == "all" else split)
        ranges = parts.to_absolute({name: len(rows) for name, rows in splits.items()})
        ranges = [one for one in ranges if one.from_ < one.to]
        if not ranges:
            raise ValueError("no row is in it")
    except ValueError as error:
        raise ValueError(
            f"{source!r} has no split {split!r} ({error}): choose one of {list(splits)}, or a part of one, such as "
            f"'{next(iter(splits))}[:100]' (flags: --dataset_train_split, --dataset_test_split)."
        ) from error
    return concatenate_datasets([splits[one.splitname].select(range(one.from_, one.to)) for one in ranges])


def _split_mbpp_plus(splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """Split MBPP+ in two by its problems' numbers; return other data unchanged."""
    rows = next(iter(splits.values()))
    if len(splits) > 1 or len(rows) != MBPP_PLUS_ROWS or not MBPP_PLUS_COLUMNS <= set(rows.column_names):
        return splits
    numbers = [int(re.sub(r"\D", "", str(name))) for name in rows["task_id"]]  # 2 or Mbpp/2
    order = sorted(range(len(rows)), key=numbers.__getitem__)
    return {"train": rows.select(order[:MBPP_PLUS_TRAIN]), "test": rows.select(order[MBPP_PLUS_TRAIN:])}


def _columns(what: str, wanted: str | None, known: Sequence[str], dataset: Dataset) -> list[str]:
    """Return the names of the columns to read, the preferred column first. Raise a `ValueError` if none exists."""
    names = known if wanted is None else [wanted.lower()]
    found = [name for name in names if name in dataset.column_names]
    if not found:
        raise ValueError(
            f"The dataset has no {what} column: looked for {list(names)}, but its columns are {dataset.column_names}. "
            "Rename the right one, or, for a problem or an answer, name it with problem_column or answer_column "
            "(for a reward of your own, the answer may be any column)."
        )
    return found


def _solutions(dataset: Dataset) -> dict[str, Any]:
    column = _columns("solution", None, SOLUTION_COLUMNS, dataset)[0]
    return {"completion" if column == "completion" else "solution": dataset[column][:]}


def _require_all(values: Sequence[object], dataset: Dataset, what: str) -> None:
    missing = [i for i, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(values)} rows lack {what}; the first is row {missing[0]}: "
            f"{str(dataset[missing[0]]):.200}. Remove these rows and load the copy that save_to_disk writes."
        )
