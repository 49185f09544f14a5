"""Imports the names of a package when they are first used (PEP 562), so that importing the package is fast."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy(package: str, **modules: Sequence[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, whose `modules` have the names that it gives to others."""
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get, lambda: sorted(homes)
