"""Runs `python examples/value_quality MODEL …`; see `command`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.value_quality.command import main  # noqa: E402

if __name__ == "__main__":
    main(sys.argv[1:])
