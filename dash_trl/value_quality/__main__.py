"""`python -m dash_trl.value_quality`; see `command`."""

import sys

from dash_trl.value_quality.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
