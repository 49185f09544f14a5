"""Makes the paper's tables and figures: trains and evaluates what is missing, and compares with the paper's numbers.

    python examples/paper/run.py table3                        # the toy model, offline, on 2 CPU cores
    python examples/paper/run.py all                           # all tables and figures
    python examples/paper/run.py table3 --quick                # a test with a few steps; its numbers mean nothing
    python examples/paper/run.py table3 --scale paper --dry_run     # prints the GPUs for Qwen2.5, and the commands
    python examples/paper/run.py table3 --scale paper

To continue an interrupted command, run it again. A training continues from its last checkpoint, or starts anew if there
is none. Finished runs are not repeated, even if they were made for another table. experiments.py lists the runs, the
tables and the paper's numbers. OUTPUT_DIR contains:

    table3.md, figure1.png, …
    runs/<run>/                                   models and metrics.jsonl
    evaluation/<problems>/<run>.json, .jsonl      results and samples; command.json has the command without models
    logs/
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import report
from experiments import (
    EVALUATIONS,
    FIGURES,
    METHODS,
    PAPER_TRACES,
    STEPS,
    TABLES,
    TEACHER,
    TRACES,
    Column,
    Figure,
    Row,
    config_of,
    model_of,
    rows_of,
)

from dash_trl.monitoring import plot_pass_at_k
from dash_trl.workers import Command

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SEEDS = {"toy": (0, 1, 2, 3, 4), "paper": (42,)}  # 42 is Transformers' default, which the authors used
QUICK_STEPS = 2
METRICS = "metrics.jsonl"  # the log of a training
# The environment of `make demo`, and offline.
TOY_ENVIRONMENT = {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000", "HF_HUB_OFFLINE": "1"}
SAVED_EVERY = 0.1  # share of a run's steps between two checkpoints at the paper's scale
TAIL_LINES = 25  # number of log lines that the error of a failed program shows
SERVER_SECONDS = 900.0  # time limit until the servers are ready


@dataclass(frozen=True)
class Run:
    """One training: a method with a model size and a seed. Or the sampling of the teacher's solutions, for all runs."""

    method: str
    size: str = ""
    seed: int | None = None


class Scale:
    """The runs, models and evaluations at a scale: their files, their commands, and which of them are missing."""

    def __init__(self, name: str, folder: Path, seeds: Sequence[int], quick: bool):
        self.toy = name == "toy"
        self.folder = folder
        self.seeds = seeds
        self.quick = quick
        self.problems = folder / "problems"

    def home(self, run: Run) -> Path:
        """Return the folder of a run; its name is the name of the run."""
        stem = run.method if self.toy or run.method == TRACES else config_of(run.method, run.size).stem
        return self.folder / "runs" / (stem if run.seed is None else f"{stem}_seed{run.seed}")

    def runs(self, method: str, size: str) -> list[Run]:
        """Return one run per seed; none for a base model."""
        return [] if METHODS[method].script is None else [Run(method, size, seed) for seed in self.seeds]

    def runs_of(self, tables: Sequence[str]) -> list[Run]:
        """Return the runs that tables need. A run that another run depends on comes first."""
        rows = [row for table in tables for row in rows_of(table, toy=self.toy)]
        methods = [(METHODS[row.method].stopped_by, row.method, row.size) for row in rows]
        settings = dict.fromkeys((one, size) for first, method, size in methods for one in (first, method) if one)
        runs = [run for setting in settings for run in self.runs(*setting)]
        return [Run(TRACES), *runs] if any(METHODS[run.method].traces for run in runs) else runs

    def models(self, method: str, size: str) -> list[str]:
        """Return the models of a row of a table: one per seed, or the base model if the method does not train."""
        base = model_of(size)
        if self.toy:
            base = str(self.problems / "base_code") if METHODS[method].code else "toy"
        return [str(self.home(run)) for run in self.runs(method, size)] or [base]

    # ------------------------------------------------------------------------------------------------- commands

    def command(self, run: Run) -> list[str]:
        """Return the command of a training from its beginning."""
        method = METHODS[run.method]
        home = self.home(run)
        flags: dict[str, Any] = {"seed": run.seed}
        command = [sys.executable, str(EXAMPLES / f"{method.script}.py")]
        if run.method == TRACES:
            command += ["toy" if self.toy else TEACHER, "--output", str(home / "traces.jsonl")]
            part = {"dataset_test_split": "train[:64]"} if self.quick else {}
            return [*command, *as_flags(method.flags if self.toy else PAPER_TRACES), *as_flags(part)]
        if self.toy:
            flags |= {"disable_tqdm": True, "report_to": "none", **method.flags}
            if self.quick:
                flags["max_steps"] = QUICK_STEPS * max(1, flags.get("max_steps", 0) // STEPS)
        else:
            config = str(ROOT / "accelerate_configs" / "zero3_offload.yaml")
            launch = ["-m", "accelerate.commands.launch", "--config_file", config]
            command[1:1] = [*launch, "--num_processes", str(self.gpus(run)[0])]
            flags = {"config": config_of(run.method, run.size), **flags}
            flags |= {"save_strategy": "steps", "save_steps": SAVED_EVERY, "save_total_limit": 1}
        if method.traces:
            flags["completions"] = self.home(Run(TRACES)) / "traces.jsonl"
        if method.stopped_by:
            first = self.home(Run(method.stopped_by, run.size, run.seed))
            known = is_done(first)
            flags["time_limit"] = round(report.seconds_of(first / METRICS), 1) if known else "SECONDS_OF_DASH"
        return [*command, *as_flags(flags), "--output_dir", str(home)]

    def gpus(self, run: Run) -> tuple[int, int]:
        """Return the number of GPUs for training and for servers, as in the paper (Appendix A)."""
        if self.toy or run.method == TRACES:
            return 0 if self.toy else 1, 0
        method = METHODS[run.method]
        return 2 if method.code else 4, 0 if method.script == "sft" else 2

    def servers(self, run: Run) -> list[str]:
        """Return the command of the vLLM servers that a training samples from, one per GPU."""
        return [sys.executable, "-m", "dash_trl", "serve", model_of(run.size), "--servers", str(self.gpus(run)[1])]

    def evaluation(self, kind: str, models: Sequence[str]) -> list[str]:
        """Return the command of an evaluation."""
        spec = EVALUATIONS[kind]
        flags = dict(spec.toy if self.toy else {**spec.paper, "use_vllm": True})
        if self.toy and spec.problems is not None:
            flags["dataset_name"] = self.problems / spec.problems
        if self.quick:
            flags["dataset_test_split"] = "train[:8]" if spec.problems else "test[:8]"
        output = ["--output_dir", str(self.folder / "evaluation" / kind)]
        return [sys.executable, "-m", "dash_trl", "eval", *models, *as_flags(flags), *output]

    def figures(self, kind: str, model: str) -> Path:
        """Return the file of an evaluation's results; it is named after the last part of the model's name."""
        return self.folder / "evaluation" / kind / f"{Path(model).name}.json"

    def made_by(self, kind: str) -> Path:
        """Return the file of the command, without models, that made the results of an evaluation."""
        return self.folder / "evaluation" / kind / "command.json"

    # ------------------------------------------------------------------------------------------ what is missing

    def left(self, tables: Sequence[str]) -> tuple[list[Run], list[tuple[str, list[str]]]]:
        """Return the missing trainings, and the missing evaluations as (kind, models of one process).

        At the paper's scale a process evaluates one model, which fills its GPU.
        """
        evaluations: list[tuple[str, list[str]]] = []
        for kind in EVALUATIONS:
            asked = [table for table in tables if kind in [column.source[0] for column in TABLES[table].columns]]
            rows = [row for table in asked for row in rows_of(table, toy=self.toy)]
            settings = [(row.method, row.size) for row in rows]
            for figure in FIGURES.values():
                if figure.evaluation == kind and figure.table in tables:
                    settings += [(method, size) for method in figure.methods.values() for size in figure.sizes]
            models = dict.fromkeys(one for setting in settings for one in self.models(*setting))
            found = [one for one in models if not self.figures(kind, one).is_file()]
            evaluations += [(kind, found)] if self.toy and found else [(kind, [one]) for one in found]
        return [run for run in self.runs_of(tables) if not is_done(self.home(run))], evaluations

    def gpus_needed(self, tables: Sequence[str]) -> int:
        """Return the largest number of GPUs that a missing training takes."""
        return max([sum(self.gpus(run)) for run in self.left(tables)[0]], default=1)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command: `--name` and the value, or all values of a tuple."""
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in settings.items()}
    return [word for name, several in values.items() for word in (f"--{name}", *map(str, several))]


# ------------------------------------------------------------------------------------------------- what is done


def is_done(home: Path) -> bool:
    """Whether the run in this folder is finished."""
    return (home / "run.json").is_file()


def check_same(file: Path, command: Sequence[str]) -> None:
    """Raises a `ValueError` if the file exists and contains another command than this one."""
    if not file.is_file():
        return
    found = json.loads(file.read_text())
    if found[1:] != list(command)[1:]:  # the path of Python does not matter
        was = [one for one in found if one not in command]
        now = [one for one in command if one not in found]
        raise ValueError(
            f"{file.parent} holds results of other settings: {shlex.join(was)}, where this one has {shlex.join(now)}. "
            f"Choose another --output_dir, or remove {file.parent}."
        )


def has_checkpoint(home: Path) -> bool:
    """Whether a run has a complete checkpoint; trainer_state.json is written last."""
    return any(home.glob("checkpoint-*/trainer_state.json"))


# ------------------------------------------------------------------------------------------------------ the work


class Work:
    """Trains, evaluates and writes tables. `stop` ends all programs that it has started.

    Args:
        scale: files and commands of the runs.
        gpus: names of GPUs as in CUDA_VISIBLE_DEVICES, for the paper's scale.
    """

    def __init__(self, scale: Scale, gpus: Sequence[str] = ()):
        self.scale = scale
        self._gpus = gpus
        self._logs = scale.folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._programs: list[Command] = []

    def stop(self) -> None:
        """Ends all started programs, with their children."""
        while self._programs:
            self._programs[-1].stop()
            self._programs.pop()

    def train(self, run: Run) -> None:
        """Trains or resumes a run; does nothing if the run is finished."""
        home = self.scale.home(run)
        command = self.scale.command(run)
        check_same(home / "run.json", command)
        if is_done(home):
            return
        more: list[str] = []
        if has_checkpoint(home):
            check_same(home / "begun.json", command)
            more = ["--resume_from_checkpoint", "true"]
        else:
            self._clear(home)
        home.mkdir(parents=True, exist_ok=True)
        (home / "begun.json").write_text(json.dumps(command))
        training, sampling = self.scale.gpus(run)
        if sampling:
            more += self._serve(run, self._gpus[training : training + sampling])
        self._call(self.scale.home(run).name, [*command, *more], self._gpus[:training])
        os.replace(home / "begun.json", home / "run.json")  # run.json marks the run as finished

    def evaluate(self, kind: str, models: Sequence[str]) -> None:
        """Evaluates models in one process."""
        if self.scale.toy and EVALUATIONS[kind].problems is not None:
            from problems import write_problems  # imported here, since it imports torch

            write_problems(self.scale.problems)
        made_by = self.scale.made_by(kind)
        made_by.parent.mkdir(parents=True, exist_ok=True)
        made_by.write_text(json.dumps(self.scale.evaluation(kind, [])))
        self._call(f"evaluation_{kind}", self.scale.evaluation(kind, models), self._gpus[:1])

    def _clear(self, home: Path) -> None:
        """Removes an unfinished run, and the evaluations of an earlier model of this name."""
        shutil.rmtree(home, ignore_errors=True)
        for file in self.scale.folder.glob(f"evaluation/*/{home.name}.json*"):
            file.unlink()

    def _call(self, name: str, command: Sequence[str], gpus: Sequence[str]) -> None:
        """Runs a program to its end, then stops the servers; if it fails, raises an error with the end of its log."""
        print(name, flush=True)
        program = self._start(name, command, gpus)
        code = program.process.wait()
        self.stop()
        if code != 0:
            raise RuntimeError(
                f"{shlex.join(command)} ended with {code}. The end of {program.log}:\n{tail(program.log)}"
            )

    def _start(self, name: str, command: Sequence[str], gpus: Sequence[str]) -> Command:
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            **on(gpus),
        }
        if self.scale.toy:
            environment |= {key: os.environ.get(key, value) for key, value in TOY_ENVIRONMENT.items()}
        log = self._logs / f"{name}.log"
        self._programs.append(Command(command, environment=environment, log=log))
        return self._programs[-1]

    def _serve(self, run: Run, gpus: Sequence[str]) -> list[str]:
        """Starts vLLM servers, which run until `stop`, and returns the flag with their URLs."""
        name = f"{self.scale.home(run).name}_servers"
        command = self.scale.servers(run)
        log = self._logs / f"{name}.log"
        log.unlink(missing_ok=True)  # the log of an earlier try has old URLs
        servers = self._start(name, command, gpus)
        started = time.monotonic()
        while not (urls := urls_in(log.read_text(errors="replace"))):
            if not servers.running or time.monotonic() - started > SERVER_SECONDS:
                raise RuntimeError(f"{shlex.join(command)} gave no servers. The end of {log}:\n{tail(log)}")
            time.sleep(1.0)
        return ["--vllm_server_urls", *urls]

    def make(self, table: str) -> list[Path]:
        """Trains and evaluates what is missing for a table, and writes the table and its figures."""
        for kind in EVALUATIONS:
            check_same(self.scale.made_by(kind), self.scale.evaluation(kind, []))
        for run in self.scale.runs_of([table]):
            self.train(run)
        for kind, models in self.scale.left([table])[1]:
            self.evaluate(kind, models)
        return write(self.scale, table)


def on(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables for a program on these GPUs; none at the toy scale."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def write(scale: Scale, table: str) -> list[Path]:
    """Writes a table as Markdown and CSV, and its figures, from finished runs and evaluations."""

    def find(row: Row, column: Column) -> report.Cell | None:
        kind, what = column.source
        if kind != "time":
            models = scale.models(row.method, row.size)
            return report.measured([json.loads(scale.figures(kind, one).read_text()) for one in models], what)
        times = per_seed(scale, row, column)
        return report.over_seeds(times) if times else None

    text = report.markdown(table, find, toy=scale.toy, notes=[*notes(scale), *paired(scale, table)])
    files = [scale.folder / f"{table}.md"]
    files[0].write_text(text)
    for name, figure in FIGURES.items():
        if figure.table == table and figure.evaluation is not None:
            files.append(plot_pass_at_k(pass_at_k_lines(scale, figure), scale.folder / f"{name}.png"))
        elif figure.table == table and (not scale.toy or "0.5" in figure.sizes):
            logs = {
                (method, size): [scale.home(run) / METRICS for run in scale.runs(method, size)]
                for method in figure.methods.values()
                for size in figure.sizes
            }
            files.append(report.draw(figure, logs, scale.folder / f"{name}.png", toy=scale.toy))
    print(f"\n{text}\n{', '.join(map(str, files))}\n", flush=True)
    return files


def per_seed(scale: Scale, row: Row, column: Column) -> list[float]:
    """Return our number of a row and a column for each seed; none for the time of a row without training."""
    kind, what = column.source
    if kind == "time":
        seconds = [report.seconds_of(scale.home(run) / METRICS) for run in scale.runs(row.method, row.size)]
        return [one / (1 if scale.toy else column.unit) for one in seconds]
    files = [scale.figures(kind, one) for one in scale.models(row.method, row.size)]
    return [report.measured([json.loads(file.read_text())], what).value for file in files]


def paired(scale: Scale, table: str) -> list[str]:
    """Return a sentence for each two trained methods of a table: the differences of the same seeds, with intervals."""
    if len(scale.seeds) < 2:
        return []
    said = []
    rows = [row for row in rows_of(table, toy=scale.toy) if METHODS[row.method].script is not None]
    for first, second in combinations(rows, 2):
        if first.size != second.size:
            continue
        cells = []
        for column in TABLES[table].columns:
            pairs = zip(*(per_seed(scale, row, column) for row in (first, second)), strict=True)
            time = column.source[0] == "time"
            cell = report.over_seeds([100 * (new / old - 1) if time else new - old for old, new in pairs])
            name = column.toy if scale.toy else column.title
            unit = "%" if time else "points"
            cells.append(f"{name.rpartition(' (')[0]} {cell.value:+.1f} ± {cell.high - cell.value:.1f} {unit}")
        said.append(f"{second.label} against {first.label}, paired by seed: {', '.join(cells)}.")
    return said


def pass_at_k_lines(scale: Scale, figure: Figure) -> dict[str, Any]:
    """Return pass@k by label, in the form of an evaluation's JSON; for several seeds, the mean and its interval."""
    assert figure.evaluation is not None
    (size,) = figure.sizes
    lines = {}
    for label, method in figure.methods.items():
        files = [scale.figures(figure.evaluation, one) for one in scale.models(method, size)]
        found = [json.loads(file.read_text()) for file in files]
        cells = {k: report.measured(found, k) for k in found[0]["pass_at"]}
        lines[label] = {"pass_at": {k: [one.value / 100, one.low / 100, one.high / 100] for k, one in cells.items()}}
    return lines


def notes(scale: Scale) -> list[str]:
    """Return the sentences below a table, about its intervals."""
    seeds = ", ".join(map(str, scale.seeds))
    several = f"Means over the seeds {seeds} with 95 % intervals (Student's t); without training, of one model: "
    one = "The 95 % intervals are of one run (seed " + seeds + "): "
    said = [(several if len(scale.seeds) > 1 else one) + "a bootstrap over the problems."]
    return ["**Of --quick: these figures say nothing.**", *said] if scale.quick else said


# ---------------------------------------------------------------------------------------------------- announcements


def needs(scale: Scale, tables: Sequence[str]) -> str:
    """Describes the missing work, and at the paper's scale the GPUs that it takes."""
    runs, evaluations = scale.left(tables)
    models = sum(len(several) for _, several in evaluations)
    count = f"{len(runs)} trainings and {models} evaluations of a model are missing"
    if scale.toy:
        return f"{count}."
    return f"{count}. They take {scale.gpus_needed(tables)} GPUs."


def commands(scale: Scale, tables: Sequence[str]) -> Iterator[str]:
    """Yields the commands of the missing work, as lines for a shell."""
    runs, evaluations = scale.left(tables)
    for run in runs:
        command = scale.command(run)
        yield f"# {scale.home(run).name}{', from its last checkpoint' if has_checkpoint(scale.home(run)) else ''}"
        training, sampling = scale.gpus(run)
        gpus = [str(number) for number in range(training + sampling)]
        if sampling:
            yield for_a_shell(scale.servers(run), gpus[training:])
            command += ["--vllm_server_urls", "THEIR_URLS"]
        yield for_a_shell(command, gpus[:training])
    for kind, models in evaluations:
        yield f"# evaluation: {kind}"
        yield shlex.join(scale.evaluation(kind, models))


def for_a_shell(command: Sequence[str], gpus: Sequence[str]) -> str:
    """Return a command with its environment variables, as a line for a shell."""
    return " ".join([*(f"{name}={value}" for name, value in on(gpus).items()), shlex.join(command)])


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def urls_in(text: str) -> list[str]:
    """Return the URLs that `dash_trl serve` prints when its servers are ready; none before."""
    found = [line.split()[1:] for line in text.splitlines() if line.strip().startswith("--vllm_server_urls ")]
    return found[-1] if found else []


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "tables", nargs="+", choices=[*TABLES, "all"], metavar="TABLE", help=f"{', '.join(TABLES)}; all"
    )
    parser.add_argument("--scale", choices=list(SEEDS), default="toy")
    parser.add_argument("--output_dir", help="default: outputs/paper/<scale>, and a folder of its own for --quick")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2 3 4; at the paper's scale 42")
    parser.add_argument("--quick", action="store_true", help="a few steps of each toy run, as a test")
    parser.add_argument("--dry_run", action="store_true", help="print the GPUs and the commands; run nothing")
    arguments = parser.parse_args(argv)
    tables = list(TABLES) if "all" in arguments.tables else [name for name in TABLES if name in arguments.tables]
    seeds = list(dict.fromkeys(arguments.seeds or SEEDS[arguments.scale]))
    if len(seeds) > report.MOST_SEEDS:
        raise ValueError(f"{len(seeds)} seeds: give at most {report.MOST_SEEDS}, for which there are t quantiles here.")
    if arguments.quick and arguments.scale != "toy":
        raise ValueError("--quick is for --scale toy: at the paper's scale it would still need the GPUs.")
    default = Path("outputs", "paper", arguments.scale + ("_quick" if arguments.quick else ""))
    scale = Scale(arguments.scale, Path(arguments.output_dir or default).resolve(), seeds, arguments.quick)
    if arguments.dry_run:
        print(needs(scale, tables), *commands(scale, tables), sep="\n")
        return
    from dash_trl.serve import visible_gpus  # imported here, since it imports torch

    gpus = visible_gpus()
    needed = scale.gpus_needed(tables)
    if not scale.toy and len(gpus) < needed:
        raise ValueError(
            f"The runs take {needed} GPUs, but {len(gpus)} are visible. --dry_run prints the commands, which you can "
            "run on another machine, or with other numbers of GPUs. --scale toy needs none."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped. Run the same command again to continue."))
    work = Work(scale, [] if scale.toy else gpus)
    try:
        for number, table in enumerate(tables):
            print(needs(scale, tables[number:]), flush=True)
            work.make(table)
    finally:
        work.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
