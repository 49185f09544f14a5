"""`python -m dash_trl`; see `command`."""

import sys

from dash_trl.command import main

if __name__ == "__main__":
    sys.exit(main())
