"""The forms of reward functions that a user may write. The parameter names of a function determine its form.

- **TRL's form**, ``reward(completions, **columns) -> list``, is called once with the whole batch, by keyword.
- **Per sample**, ``reward(completion, answer) -> score``, is called for each completion with the arguments that it
  names: at least one of `prompt`, `completion` and `completion_ids`, and any columns of the dataset. With ``**columns``
  it gets all of these, but ``reward(completion_ids, **columns)`` has TRL's form.
- **verl's form**, ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> score``, is called for
  each completion. `solution_str` is its text; the others are columns. Without such a column, `ground_truth` is that of
  the column `reward_model`, else the column `answer`; `data_source` is None; `extra_info` is a dict of all columns.
- **A stateful object**, or its class, has a method `compute_score` of the per-sample form or of verl's form. Optional
  members are `close()`, and `max_concurrency`, the largest number of calls at a time.

`load_reward` loads a reward of any form from a user's file.
"""

import inspect
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Worker processes import this module, so it must not import torch.
from dash_trl.rewards.answers import ground_truth
from dash_trl.rewards.math import completion_text

DEFAULT_NAME = "compute_score"  # the name that `load_reward` looks for in a file by default
ROW = ("prompt", "completion", "completion_ids")  # arguments of a per-sample function, besides the dataset's columns
# Arguments that TRL passes to a function of TRL's form, besides the dataset's columns.
BATCH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
FORMS = (
    "A reward function has one of these forms: reward(completions, **columns) -> list, called with the whole batch as "
    "in TRL; reward(completion, answer, ...) -> score, called for each completion with the columns that it names; "
    "compute_score(data_source, solution_str, ground_truth, extra_info) -> score, called for each completion; or an "
    "object with a method compute_score of one of the last two forms."
)


@dataclass(frozen=True)
class Score:
    """The score of one completion by one reward function.

    Attributes:
        value: the reward; None if the function does not apply to this completion.
        notes: further results by name. Numbers become metrics; strings become columns of the table of completions.
    """

    value: float | None
    notes: Mapping[str, float | str] = field(default_factory=dict)


def read_score(returned: object) -> Score:
    """Read the return value of a per-sample function.

    - A number, or None if the function does not apply.
    - (score, notes) with a dict of notes.
    - A dict with the score as `score`, as in verl; its other items are the notes.

    Raises:
        ValueError: if the return value has another form.
    """
    notes: dict[str, object] = {}
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise ValueError(f"returned a dict without 'score': {returned!r:.200}")
        notes = dict(returned)
        returned = notes.pop("score")
    elif isinstance(returned, tuple):
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise ValueError(f"returned {returned!r:.200}, which is not (score, notes)")
        notes = dict(returned[1])
        returned = returned[0]
    score = None if returned is None else _number(returned, f"{returned!r:.200}, which is not a score")
    return Score(score, {str(name): _note(name, value) for name, value in notes.items()})


def _number(value: Any, wrong: str) -> float:
    """Convert a value to a number, or raise a ValueError: "returned" and then `wrong`."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        pass
    raise ValueError(f"returned {wrong}")


def _note(name: object, value: object) -> float | str:
    if value is None or isinstance(value, str):
        return value or ""
    return _number(value, f"the note {name!r} = {value!r:.100}, which is neither a number nor a string")


def scored(function: Callable[..., Any], /, **arguments: Any) -> Score:
    """Call a per-sample function and read its score, which may run user code, too, within the call's time limit."""
    return read_score(function(**arguments))


async def scored_async(function: Callable[..., Any], /, **arguments: Any) -> Score:
    return read_score(await function(**arguments))


@dataclass(frozen=True)
class RewardForm:
    """How a reward function is called.

    Attributes:
        name: the function's name in TRL's metrics.
        function: the function or method that is called.
        batch: True = TRL's form, called with the whole batch; False = called for each completion.
        names: arguments that a per-sample function takes → whether one has no default. None = all.
        close, max_concurrency: optional members of a stateful object.
    """

    name: str
    function: Callable[..., Any]
    batch: bool
    asynchronous: bool
    names: Mapping[str, bool] | None
    close: Callable[..., Any] | None
    max_concurrency: int | None

    def arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Select the arguments for one call.

        Raises:
            ValueError: if the row lacks a column that the function requires.
        """
        if self.names is None:
            return dict(known)
        in_verl = "solution_str" in self.names
        row = _as_in_verl(known) if in_verl else known
        for name, is_required in self.names.items():
            if is_required and name not in row:
                said = " or 'answer'" if in_verl and name == "ground_truth" else ""
                raise ValueError(
                    f"The reward function '{self.name}' asks for {name!r}{said}, but it can get only {sorted(known)}. "
                    "Rename the column or the parameter, or give the parameter a default."
                )
        return {name: row[name] for name in self.names if name in row}

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise a ValueError if the dataset lacks a column that the function requires."""
        known = {*columns, *ROW}
        if self.batch:  # TRL does not pass on the columns `prompt` and `completion`
            known = known - {"prompt", "completion"} | {*BATCH}
        self.arguments(dict.fromkeys(known, ""))


def _as_in_verl(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with all arguments of verl's form. The row's own columns of these names stay."""
    columns = {name: value for name, value in row.items() if name not in ("completion", "completion_ids")}
    golds = [("ground_truth", ground_truth(row[name])) for name in ("answer", "reward_model") if name in row]
    info = row.get("extra_info", columns)
    return {
        "data_source": None,
        "solution_str": completion_text(row["completion"]),
        **dict(golds),
        **row,
        "extra_info": {} if info is None else info,
    }


def form_of(function: Any) -> RewardForm:
    """Return how a reward function, a stateful object or its class is called; ValueError if it has no form."""
    owner = function() if isinstance(function, type) else function
    name = getattr(owner, "__name__", None) or type(owner).__name__
    function = getattr(owner, "compute_score", owner)
    stateful = function is not owner
    if not callable(function):
        raise ValueError(f"{function!r:.100} is not a reward function. {FORMS}")
    parameters = inspect.signature(function).parameters.values()
    own = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    named = {one.name: one.default is one.empty for one in own}
    rest = any(one.kind == one.VAR_KEYWORD for one in parameters)
    whole = "completions" in named or "prompts" in named
    # TRL passes `completion_ids`, too, but always beside arguments that only a function with **columns can take.
    single = bool(named.keys() & {"completion", "solution_str"}) or (
        not whole and ("prompt" in named or "completion_ids" in named and not rest)
    )
    if whole and single or stateful and whole or not (single or rest or "completions" in named):
        raise ValueError(f"{name}({', '.join(map(str, parameters))}) has none of the forms. {FORMS}")
    batch = not single and not stateful
    return RewardForm(
        name=name,
        function=function,
        batch=batch,
        asynchronous=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        names=None if rest and not batch and "solution_str" not in named else named,
        close=getattr(owner, "close", None),
        max_concurrency=getattr(owner, "max_concurrency", None),
    )


def load_reward(path: str | Path, name: str = DEFAULT_NAME) -> Any:
    """Load a reward from a Python file: a function of any form, an object or its class, or a `RewardRunner`.

    Raises:
        ValueError: if there is no such file or name.
    """
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise ValueError(f"reward_path={str(path)!r} is no Python file, looked for at {file}.")
    sys.path.insert(0, str(file.parent))  # as for a script: the file may import modules of its folder
    try:
        # No module of this name stays, so that cloudpickle sends what is defined here to worker processes by value.
        found = runpy.run_path(str(file), run_name=f"reward_file_{file.stem}")
    finally:
        sys.path.remove(str(file.parent))
    if name not in found:
        own = [key for key, value in found.items() if getattr(value, "__module__", None) == found["__name__"]]
        raise ValueError(
            f"{str(path)!r} defines no {name!r}; it has {own[:5]}. Name the function or class with reward_name."
        )
    return found[name]
