"""Runs the notebooks and stores them with their outputs, without warnings, progress bars and times.

pip install -e ".[notebook]" && python tools/notebooks.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def is_noise(output: Any) -> bool:
    return output.get("name") == "stderr" or "[WARNING]" in output.get("text", "")  # DeepSpeed warns on stdout


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with TemporaryDirectory() as folder:  # the runs write their files here
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=None, record_timing=False, resources=resources).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [one for one in cell.outputs if not is_noise(one)]
        notebook.metadata.language_info = {"name": "python"}  # no version of Python
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
