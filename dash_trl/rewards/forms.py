"""The forms of reward functions that a user may write, told apart by their signatures.

| form | signature | called |
|---|---|---|
| TRL's | `reward(completions, **columns) -> list` | once with the whole batch, by keyword |
| per sample | `reward(completion, answer) -> score` | for each completion, with what it names |
| verl's | `compute_score(data_source, solution_str, ground_truth, extra_info=None) -> score` | for each completion |
| stateful | an object, or its class, with a method `compute_score` of one of the last two forms | for each completion |

A per-sample function names any of `prompt`, `completion`, `completion_ids` and the data set's columns; one with
`**columns` gets them all. In verl's, `solution_str` is the completion's text, `ground_truth` the column of that name or
`answer`, `data_source` the column of that name or None, `extra_info` the row. A stateful object may have
`post_process_scores(scores) -> scores`, for the scores of a whole group, and `close()`. An object's `max_concurrency`
is how many calls it takes at a time, so that none waits within its time limit.

`load_reward`: one of these from a user's file.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from dash_trl.rewards.math import completion_text

DEFAULT_NAME = "compute_score"  # in a file of `load_reward`
ROW = ("prompt", "completion", "completion_ids")  # of a completion, beside the data set's columns
# What TRL hands to a function of its form, beside the data set's columns.
BATCH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
FORMS = (
    "A reward function is one of: reward(completions, **columns) -> list, called with the batch as in TRL; "
    "reward(completion, answer, ...) -> score, called for each completion with the columns that it names; "
    "compute_score(data_source, solution_str, ground_truth, extra_info) -> score; or an object with such a method "
    "compute_score."
)


@dataclass(frozen=True)
class Score:
    """What a reward function says of one completion.

    Attributes:
        value: None = it does not apply to this one.
        notes: what it says beside: numbers, which become metrics, and texts, which are kept with logged completions.
    """

    value: float | None
    notes: Mapping[str, float | str] = field(default_factory=dict)


def read_score(returned: Any) -> Score:
    """What a per-sample function may return, read.

    A number or None; beside it, in a tuple, a dict of notes, or the prompt and the explanation of a judge, or all of
    these; or one dict, with the number as `score` (verl's).

    Raises:
        ValueError: for anything else. NaN and ±inf are numbers here; they leave the completion unscored.
    """
    notes: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise ValueError(f"returned a dict without 'score': {returned!r:.200}")
        notes = dict(returned)
        returned = notes.pop("score")
    elif isinstance(returned, tuple):
        value, *beside = returned or (returned,)
        if beside and isinstance(beside[-1], Mapping):
            notes = dict(beside.pop())
        if len(beside) == 2:
            notes = {"prompt": str(beside[0]), "explanation": str(beside[1]), **notes}
        elif beside:
            raise ValueError(f"returned {returned!r:.200}: neither (score, notes) nor (score, prompt, explanation)")
        returned = value
    score = None if returned is None else _number(returned, f"{returned!r:.200}, which is no score")
    return Score(score, {str(name): _note(name, value) for name, value in notes.items()})


def _number(value: Any, wrong: str) -> float:
    """Raises ValueError: what a function `returned` is `wrong`."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several
        pass
    raise ValueError(f"returned {wrong}")


def _note(name: Any, value: Any) -> float | str:
    if value is None or isinstance(value, str):
        return value or ""
    return _number(value, f"the note {name!r} = {value!r:.100}, neither a number nor a text")


@dataclass(frozen=True)
class RewardForm:
    """A reward function and how it is called.

    Attributes:
        name: TRL names its metrics after it.
        function: what is called.
        batch: it is TRL's, and gets the whole batch.
        asynchronous: it is a coroutine function.
        names: by which a per-sample function takes its arguments; None: it takes all.
        required: those of the names that have no default.
        post_process: of a group's scores, if it has one.
        close: ends what it holds, if it has one.
        max_concurrency: calls at a time in this process, where the object has an attribute of that name.
    """

    name: str
    function: Callable[..., Any]
    batch: bool
    asynchronous: bool
    names: tuple[str, ...] | None = None
    required: tuple[str, ...] = ()
    post_process: Callable[[list[float]], Iterable[float]] | None = None
    close: Callable[[], Any] | None = None
    max_concurrency: int | None = None

    def arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Of one call.

        Args:
            known: of a completion, its prompt, completion, completion_ids and columns.

        Raises:
            ValueError: if it names a column that there is not.
        """
        if self.names is None:
            return dict(known)
        row = {**_as_in_verl(known), **known} if "solution_str" in self.names else known
        for name in self.required:
            if name not in row:
                raise self._without(name, [one for one in known if one not in ROW[1:]])
        return {name: row[name] for name in self.names if name in row}

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises a ValueError if it names a column that the data set does not have."""
        if not self.batch:
            self.arguments(dict.fromkeys((*columns, *ROW), ""))
        for name in self.required if self.batch else ():
            if name not in {*BATCH, *columns} - {"prompt", "completion"}:  # which TRL leaves out
                raise self._without(name, columns)

    def _without(self, name: str, columns: Iterable[str]) -> ValueError:
        wanted = "'answer' (its ground_truth)" if name == "ground_truth" and not self.batch else repr(name)
        return ValueError(
            f"The reward function '{self.name}' asks for {wanted}, but the data set has the columns {sorted(columns)}. "
            "Rename the column or the parameter, or give the parameter a default."
        )


def _as_in_verl(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "data_source": None,
        "solution_str": completion_text(row["completion"]),
        "extra_info": {name: value for name, value in row.items() if name not in ("completion", "completion_ids")},
    }
    return {**found, "ground_truth": row["answer"]} if "answer" in row else found


def form_of(function: Any) -> RewardForm:
    """How a reward function is called, from its signature.

    Raises:
        ValueError: if it has none of the forms.
    """
    owner = function
    if isinstance(owner, type):
        try:
            owner = function = owner()
        except TypeError as error:
            raise ValueError(
                f"The reward class {owner.__name__} cannot be made without arguments ({error}): pass an object of it."
            ) from error
    name = getattr(owner, "__name__", None) or type(owner).__name__
    stateful = hasattr(owner, "compute_score")
    function = getattr(owner, "compute_score", function)
    if not callable(function):
        raise ValueError(f"{function!r:.100} is no reward function. {FORMS}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"The signature of the reward function '{name}' cannot be read. {FORMS}") from None

    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    rest = any(one.kind == one.VAR_KEYWORD for one in parameters)
    whole = "completions" in named or "prompts" in named
    single = "completion" in named or "solution_str" in named
    if whole and single or stateful and whole or not (whole or single or rest or "completion_ids" in named):
        raise ValueError(f"{name}({', '.join(map(str, parameters))}) has none of the forms. {FORMS}")
    batch = not single and not stateful
    return RewardForm(
        name=name,
        function=function,
        batch=batch,
        asynchronous=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        names=None if rest and not batch and "solution_str" not in named else tuple(named),
        required=tuple(one.name for one in named.values() if one.default is one.empty),
        post_process=getattr(owner, "post_process_scores", None),
        close=getattr(owner, "close", None),
        max_concurrency=getattr(owner, "max_concurrency", None),
    )


def load_reward(path: str | Path, name: str = DEFAULT_NAME) -> Any:
    """What a Python file calls `name`: a reward function of any form, a class, or a `RewardRunner`.

    Worker processes get it by value: they need not be able to import the file.

    Raises:
        ValueError: if there is no such file or name, or if the file fails.
    """
    file = Path(path).expanduser()
    spec = importlib.util.spec_from_file_location(f"reward_file_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"reward_path={str(path)!r} is no Python file, looked for at {file.absolute()}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent.absolute()))  # as for a script: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"reward_path={str(path)!r} fails when it is run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent.absolute()))
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == spec.name]
        raise ValueError(
            f"{str(path)!r} defines no {name!r}; it has {own[:5]}. Name the function or class with reward_name."
        )
    cloudpickle.register_pickle_by_value(module)
    return getattr(module, name)
