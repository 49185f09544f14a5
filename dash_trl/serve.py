"""Start vLLM servers with the flags that `DASHTrainer` needs, and stop them together.

Examples::

    dash_trl serve Qwen/Qwen2.5-0.5B-Instruct --servers 2
    dash_trl serve toy                     # the tiny model of `make demo`
    dash_trl serve MODEL --servers 2 --max-model-len 4096 --dtype bfloat16   # more options for `vllm serve`
    dash_trl serve MODEL --enable-lora --max-lora-rank 16     # LoRA: only the adapter is sent

The command prints the option `--vllm_server_urls …`. Append it to the training command. Options that the command does
not know are passed to `vllm serve`.

All endpoints require a key. If the environment variable VLLM_API_KEY is set, its value is the key; set the variable for
the trainer, too. Otherwise a key is created in a file, where trainers of the same user find it. The servers listen on
127.0.0.1. `--host` opens them to other machines. Their trainers need VLLM_API_KEY, since they do not see the file.

Each server gets an equal share of the visible GPUs and uses its share for tensor parallelism. If the model's
attention heads cannot be split over this number of GPUs, vLLM refuses to start. Then start more servers, or set
`--tensor-parallel-size`.
"""

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from accelerate.utils import is_port_in_use

from dash_trl.server_key import API_KEY, MIDDLEWARE, key_file, key_header, own_key
from dash_trl.toy import toy_model
from dash_trl.vllm_plugin import WORKER_EXTENSION
from dash_trl.workers import Command

HOST = "127.0.0.1"
FIRST_PORT = 8000
FLAGS = (
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
    *("--worker-extension-cls", WORKER_EXTENSION, "--middleware", MIDDLEWARE),
)
# In bfloat16, log-probs would differ from the trainer's by 1e-3 and more. Without `--enforce-eager` vLLM needs a
# compiler, which most CPU machines lack. A window of preemptive sampling may have more rows than vLLM's default on a
# CPU, 128, so that some rows would have to wait; 256 is its default on a GPU. The completions of a prompt share only
# whole blocks of it, and vLLM's default block on a CPU has 128 tokens, more than a short prompt.
CPU_FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "256", "--block-size", "32")


@contextmanager
def vllm_servers(
    model: str, count: int = 1, *, host: str = HOST, port: int = FIRST_PORT, options: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Context manager that starts vLLM servers, waits until all answer, gives their URLs, and stops them on exit.

    Args:
        model: a hub name or a directory.
        count: number of servers, each of which gets an equal share of the visible GPUs.
        host: address at which the servers listen.
        port: port of the first server; the others take the next free ports.
        options: more arguments for `vllm serve`, which override ours.

    Raises:
        ValueError: if there are more servers than GPUs, or if vLLM is not installed.
        ValueError: also if a server ends before it is ready; the message contains the last lines of its log.
    """
    gpus = visible_gpus()
    share = len(gpus) // count
    if gpus and not share:
        raise ValueError(f"servers={count}, but only {len(gpus)} GPUs are visible. Start at most one per GPU.")
    # The environment of this Python may not be activated.
    program = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise ValueError(
            f"vLLM is not installed in the environment of {sys.executable}. On a machine with a GPU, run "
            f"`{sys.executable} -m pip install 'trl[vllm]'`. For a CPU, see docs/howto/vllm.md."
        )
    # Servers on a CPU share its cores; vLLM's cache would take most of the memory (in GiB).
    on_cpu = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    # Without the last variable vLLM ignores our plugin's `Resolver`.
    ours = {API_KEY: own_key(), "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    flags = [*FLAGS, *(["--tensor-parallel-size", str(share)] if gpus else CPU_FLAGS), *options]
    logs = Path(tempfile.mkdtemp(prefix="dash_trl_serve_"))
    print(f"Starting vLLM, logs: {logs}", flush=True)
    commands = dict[str, Command]()
    try:
        for number, free in enumerate(free_ports(count, port)):
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number * share : (number + 1) * share])}
            commands[f"http://{host}:{free}"] = Command(
                [program, "serve", model, "--host", host, "--port", str(free), *flags],
                environment={**(devices if gpus else on_cpu | os.environ), **ours},
                log=logs / f"server_{number}.log",
            )
        for url, command in commands.items():
            wait_until_ready(url, command)
        yield list(commands)
    finally:
        for command in commands.values():  # all at once; `stop` waits
            command.terminate()
        for command in commands.values():
            command.stop()


def wait_until_ready(url: str, command: Command) -> None:
    """Wait until a server answers, or raise a `ValueError` with the last lines of its log if it ends."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has a 127.0.0.1 of its own
    while command.running:
        with suppress(OSError):
            direct.open(urllib.request.Request(f"{url}/health", headers=key_header(url)), timeout=5).close()
            return
        time.sleep(0.5)
    last = command.log.read_text(errors="replace").splitlines()[-15:]
    raise ValueError("\n".join([f"The server {url} did not start. The end of {command.log}:", *last]))


def visible_gpus() -> list[str]:
    """Return the visible GPUs as `CUDA_VISIBLE_DEVICES` names them."""
    count = torch.cuda.device_count()
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]


def free_ports(count: int, first: int) -> list[int]:
    """Return the next `count` ports, from `first` on, at which nothing listens on this machine."""
    return list(itertools.islice(itertools.filterfalse(is_port_in_use, itertools.count(first)), count))


def stop(number: int, _: object) -> None:
    """End the program because of a signal. The next one is ignored, because it would leave servers running."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit("Stopped.")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dash_trl serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a hub name, a directory, or 'toy'")
    parser.add_argument("--servers", type=int, default=1, help="number of servers; the visible GPUs are split evenly")
    parser.add_argument("--host", default=HOST, help="address at which the servers listen")
    parser.add_argument("--port", type=int, default=FIRST_PORT, help="port of the first server; others take the next")
    given, options = parser.parse_known_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    model = toy_model() if given.model == "toy" else given.model
    with vllm_servers(model, given.servers, host=given.host, port=given.port, options=options) as urls:
        print(f"Ready. The servers' key is {API_KEY} or, if that is not set, in {key_file()}. Train with:")
        print(f"\n    --vllm_server_urls {' '.join(urls)}\n\nCtrl+C stops the servers.", flush=True)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        sys.exit("A server has ended, so all are stopped.")


if __name__ == "__main__":
    main(sys.argv[1:])
