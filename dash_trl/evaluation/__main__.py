"""`python -m dash_trl.evaluation`; see `command`."""

import sys

from dash_trl.evaluation.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
