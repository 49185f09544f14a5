"""Fixtures by which a test says what it uses: a new interpreter, a launch, or the toy model, which it may train.

And whether a process has ended.
"""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
SHARED = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.exists(), reason=f"GSM8K, MATH-500 and MBPP+ are not in {SHARED}")
Done = subprocess.CompletedProcess[str]
HANGS = 1800.0  # seconds; a last resort


@pytest.fixture(scope="session")
def toy() -> str:
    """Return the folder of the toy model. It is made when it is first needed, which takes up to a minute."""
    from dash_trl.toy import toy_model

    return toy_model()


@pytest.fixture(scope="session")
def python() -> Callable[..., Done]:
    """Return a function that runs a new interpreter with arguments, to its end."""

    def run(*arguments: object, fails: bool = False, **settings: object) -> Done:
        """Args: fails: True = its exit code must not be 0, False = it must be. settings: of `subprocess.run`."""
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, **settings)
        assert (done.returncode != 0) == fails, done.stdout[-9000:] + done.stderr[-6000:]
        return done

    return run


@pytest.fixture(scope="session")
def launch(python) -> Callable[..., Done]:
    """Return a function that runs a script by `accelerate launch`, to its end."""

    def launch(script: Path, *arguments: object, config: Path, options: tuple = (), threads: int = 1) -> Done:
        """Runs a script on the ranks of an accelerate configuration.

        Args:
            script: the script.
            arguments: of the script.
            config: file of the configuration.
            options: further ones of accelerate.
            threads: of each rank.
        """
        command = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", 0]
        path = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CI": "1", "PYTHONPATH": path}
        return python(*command, *options, script, *arguments, env=environment)

    return launch


def ends(process: int) -> bool:
    """Return whether a process has gone, or goes by itself, though init may not have reaped it yet."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    gone = bool(select.select([handle], [], [], 60)[0])
    os.close(handle)
    return gone


def flags(settings: dict[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]
