"""Runs `dash_trl.command` for `python -m dash_trl`."""

import sys

from dash_trl.command import main

if __name__ == "__main__":
    sys.exit(main())
