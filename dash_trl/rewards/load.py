"""`load_reward`: a reward function from a user's file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

DEFAULT_NAME = "compute_score"


def load_reward(path: str | Path, name: str = DEFAULT_NAME) -> Any:
    """What a Python file calls `name`: a reward function of any form, a class, or a `RewardAgent`.

    Worker processes get it by value: they need not be able to import the file.

    Raises:
        ValueError: if there is no such file or name, or if the file fails.
    """
    import cloudpickle

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
