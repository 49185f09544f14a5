"""Finds the folder for the files that this package caches."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/dash_trl`, or `~/.cache/dash_trl` if the variable is not set."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification, a relative path is invalid and must be ignored.
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "dash_trl"
