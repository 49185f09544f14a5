"""Where what was made once is kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dash_trl` or `~/.cache/dash_trl`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is invalid and to be ignored.
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "dash_trl"
