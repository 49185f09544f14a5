"""Compares sending only changed weights to a vLLM server with sending all, after AdamW steps of Qwen2.5-0.5B's shape.

    python benchmarks/weight_difference.py --json weight_difference.json          # ~15 minutes on 2 cores, 12 GB

Weights are random, in float32 in the trainer and in bfloat16 on one server of this machine. Each step trains on `ROWS`
new random sequences. Figures are medians of the steps after the first one, by learning rate:

- `share`: share of the bfloat16 values that a step has changed.
- `bytes`: size of the difference.
- `whole_bytes`: size of all weights.
- `make_s`: seconds of comparing and packing, with the checksum.
- `load_s`: seconds until the server has loaded the difference and reported its checksum.
- `send_s`, `checksum_s`: seconds of sending the bytes alone, and of the checksum report alone.
- `write_s`, `read_s`: `make_s` and `load_s` if all weights are written to a file on the local disk.
- `http_s`: `load_s` if all weights are sent over HTTP.
"""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness
import torch
from qwen import SHAPE

from dash_trl.sampling import ServerPool, find_changes
from dash_trl.sampling.weights import DifferenceWeights, FileWeights
from dash_trl.serve import Servers
from dash_trl.toy import arithmetic_tokenizer

RATES, ROWS, LENGTH = (1e-6, 1e-5), 4, 64
OPTIONS = ["--dtype", "bfloat16", "--max-model-len", "512"]


def on_server(pool: ServerPool, ask: Any) -> Any:
    """Calls `ask` with the server; returns (answer, seconds)."""
    answers, seconds = harness.timed(pool.ask_all, ask)
    return next(iter(answers.values())), seconds


def step(model: Any, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(SHAPE["vocab_size"], (ROWS, LENGTH), generator=generator)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def at_rate(rate: float, steps: int, pool: ServerPool, directory: Path) -> dict[str, Any]:
    model = harness.qwen2(**SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    few, whole = (kind(directory, torch.bfloat16) for kind in (DifferenceWeights, FileWeights))

    def load(weights: FileWeights, version: int) -> tuple[float, float]:
        snapshot, make = harness.timed(weights.write, model.named_parameters(), version)
        return make, on_server(pool, lambda server: weights._load(server, snapshot))[1]

    async def only_send(server: Any) -> None:
        for part in few._parts:
            await server._rpc("dash_load_differences", dtype="bfloat16", head="[]", body=part["body"])

    figures = defaultdict(list)
    figures["http_s"].append(load(few, 0)[1])
    for number in range(1, steps + 2):
        before = {name: value.bfloat16() for name, value in model.named_parameters()}
        step(model, optimizer, number)
        new = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
        found = [one for name, value in new.items() for one in find_changes(name, before[name], value)]
        make, loaded = load(few, number)
        if number == 1:  # AdamW's first step changes every weight by the learning rate
            continue
        figures["share"].append(sum(len(one.values) for one in found) / model.num_parameters())
        figures["bytes"].append(sum(one.nbytes for one in found))
        figures["make_s"].append(make)
        figures["load_s"].append(loaded)
        figures["send_s"].append(on_server(pool, only_send)[1])
        figures["checksum_s"].append(on_server(pool, lambda server: server.weight_report())[1])
    for number in range(2):
        write, read = load(whole, number)
        figures["write_s"].append(write)
        figures["read_s"].append(read)
    return harness.medians(figures) | {"whole_bytes": 2 * model.num_parameters()}


def main(steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)  # an idle vLLM worker polls, so on two cores a second thread here would wait for it
    directory = Path(tempfile.mkdtemp(dir=harness.OUTPUT.name))
    harness.qwen2(**SHAPE).bfloat16().save_pretrained(directory / "model")
    arithmetic_tokenizer().save_pretrained(directory / "model")
    results = {}
    with Servers(str(directory / "model"), 1, port=8900, options=OPTIONS) as servers:
        servers.wait_until_ready()
        pool = ServerPool(servers.urls)
        pool.wait_until_ready()
        for rate in RATES:
            results[f"{rate:g}"] = at_rate(rate, steps, pool, directory / "weights")
            harness.say(f"learning rate {rate:g}", results[f"{rate:g}"])
    return results


if __name__ == "__main__":
    harness.run(main, __doc__, steps={"type": int, "default": 5, "help": "counted AdamW steps at each rate"})
