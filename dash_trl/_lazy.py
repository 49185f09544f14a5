"""Imports the names of a package when they are first used (PEP 562), so that `import dash_trl` is fast."""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the `__init__.py` of a package, whose `__name__` is `package`.

    The names are read from the imports under the first `if TYPE_CHECKING:` of that `__init__.py`. So each name is
    written once, and type checkers see ordinary imports. The names under a second `if TYPE_CHECKING:` are for other
    folders of dash_trl: they can be imported, but `__dir__` and `__all__` leave them out.
    """
    module = sys.modules[package]
    tree = ast.parse(inspect.getsource(module))
    blocks: list[Any] = [node for node in tree.body if isinstance(node, ast.If)]  # which have imports only
    homes = {alias.name: node.module for block in blocks for node in block.body for alias in node.names}
    for_users = {alias.name for node in blocks[0].body for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(module, name, value)  # so that `__getattr__` is not called again for this name
        return value

    return get, lambda: sorted(vars(module).keys() - homes | for_users), sorted(for_users)
