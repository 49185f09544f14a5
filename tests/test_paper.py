"""examples/paper: its lists are whole, its commands parse, its tables are right, and an interrupted one goes on."""

import json
import os
import shlex
import signal
from pathlib import Path

import experiments
import problems
import pytest
import run as runner
import sft
import traces
import train_math
from transformers import HfArgumentParser
from trl import ModelConfig

from dash_trl import DASHConfig
from dash_trl.evaluation import EvaluationArguments
from dash_trl.evaluation import main as evaluate
from dash_trl.workers import Command
from tests.launching import ROOT
from tests.tiny import refusal, refused, write_rows

EXAMPLES = ROOT / "examples"
TABLES = list(experiments.TABLES)
RUN = runner.Run("dash", "0.5", 0)
QUICK = ("table10", "--quick", "--seeds", "0", "--output_dir")


def scale(name: str, folder: Path, seeds=(0,), quick: bool = False) -> runner.Scale:
    return runner.Scale(name, folder, seeds, quick)


# ------------------------------------------------------------------------------------------------------- the lists


def test_every_table_of_the_paper_with_figures_of_accuracy_is_there():
    """Every row has its run, every file of a run its row, every figure runs of its table."""
    assert TABLES == [f"table{number}" for number in (1, 2, 3, 4, 5, 6, 10)]
    assert list(experiments.FIGURES) == [f"figure{number}" for number in (1, 3, 4, 5, 6, 8, 9)]
    files = set()
    for name, table in experiments.TABLES.items():
        for row in table.rows:
            method = experiments.METHODS[row.method]
            if method.script:
                files.add(experiments.config_of(row.method, row.size))
            assert method.code == (name in ("table2", "table4")) and row.size in ("0.5", "1.5", "3.0")
            assert len(row.paper) == len(table.columns)
    assert files == {*(EXAMPLES / "configs").glob("*.yaml")}
    for figure in experiments.FIGURES.values():
        rows = {(row.method, row.size) for row in experiments.TABLES[figure.table].rows}
        assert {(method, size) for method in figure.methods.values() for size in figure.sizes} <= rows


def test_what_a_run_depends_on_comes_before_it(tmp_path):
    runs = [one.method for one in scale("toy", tmp_path).runs_of(["table1", "table5"])]
    assert runs == ["traces", "sft_h", "sft_m", "dash", "multi", "mini"]  # DASH once, for both tables


# ---------------------------------------------------------------------------------------------------- the commands


SAMPLERS = {"eval": (EvaluationArguments, "models"), "traces.py": (traces.TraceArguments, "teacher")}
TRAINERS = {"sft.py": (sft.SupervisedArguments, sft.SupervisedConfig)}
TRAINERS |= dict.fromkeys(("train_math.py", "train_code.py"), (train_math.MathArguments, DASHConfig))
STAND_INS = {"SECONDS_OF_DASH": "9", "THEIR_URLS": "http://127.0.0.1:8000"}


@pytest.mark.parametrize("name", ["toy", "paper"])
def test_every_command_parses(name, tmp_path):
    """By the parser of its script; files that are named exist."""
    lines = [line for line in runner.commands(scale(name, tmp_path), TABLES) if not line.startswith("#")]
    seen = set()
    for line in lines:
        words = [STAND_INS.get(word, word) for word in shlex.split(line)]
        names = [Path(word).name for word in words]
        script = next(one for one in (*SAMPLERS, *TRAINERS, "serve") if one in names)
        flags = words[names.index(script) + 1 :]
        seen.add(script)
        if script in SAMPLERS:
            kind, positional = SAMPLERS[script]
            parser = HfArgumentParser(kind)
            parser.add_argument(positional, nargs="+")
            parser.parse_args_into_dataclasses(flags)
        elif script in TRAINERS:
            flags += ["--use_cpu", "--bf16=False"]  # where the paper has GPUs
            if script != "sft.py" and name == "paper":
                flags += ["--per_device_train_batch_size=8"]
            given, args, model = train_math.parse(flags, (*TRAINERS[script], ModelConfig), {})
            (sft.check_arguments if script == "sft.py" else train_math.check_effects)(given, args, model)
            assert args.seed == 0 and Path(args.output_dir).parent == tmp_path / "runs"
            assert (given.time_limit == 9) == any(method in args.output_dir for method in ("multi", "mini"))
            assert getattr(given, "completions", None) is None or "sft_m" in args.output_dir
    assert seen == {*SAMPLERS, *TRAINERS} | ({"serve"} if name == "paper" else set())


def test_it_says_first_what_it_takes(tmp_path, capsys, monkeypatch):
    arguments = ["table3", "--scale", "paper", "--output_dir", str(tmp_path)]
    runner.main([*arguments, "--dry_run"])
    said = capsys.readouterr().out
    assert said.startswith("3 trainings and 8 evaluations of a model are missing. They take 6 GPUs")
    assert "-m dash_trl serve Qwen/Qwen2.5-0.5B --servers 2" in said and "--num_processes 4" in said
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    refused("The runs take 6 GPUs, but 0 are visible. --dry_run prints the commands", runner.main, arguments)


# ------------------------------------------------------------------------------------------------------- the tables


def pretend(one: runner.Scale, method: str, accuracies=(), seconds=(), kinds=("in", "out")) -> None:
    """Runs that are done, and their evaluations, by hand."""
    for kind in kinds:
        for model, accuracy in zip(one.models(method, "0.5"), accuracies, strict=False):
            file = one.figures(kind, model)
            file.parent.mkdir(parents=True, exist_ok=True)
            figures = {"accuracy": accuracy, "accuracy_interval": [accuracy - 0.05, accuracy + 0.05], "pass_at": {}}
            file.write_text(json.dumps({**figures, "failed": 0.02 * (accuracy == 0.25)}))
    for run, elapsed in zip(one.runs(method, "0.5"), seconds, strict=False):
        rewards = {0.1: 1, 0.2: 2, 0.4: 2}
        logs = [{"step": step, "reward": one, "time/elapsed": elapsed * step / 2} for one, step in rewards.items()]
        write_rows(one.home(run) / "metrics.jsonl", logs)
        (one.home(run) / "run.json").write_text(json.dumps(one.command(run)))


# t = 4.303 with 2 degrees of freedom: 80, 82, 84 has s = 2, and 4.303 · 2 / √3 = 4.97; 10, 11, 12 half of it. By pairs,
# 8 is −20, −27.27 and −33.33 % from 10, 11 and 12.
EXPECTED = """\
### Table 10. Comparing No-GF to DASH with per device batch of 4 instead of 2 for Qwen2.5-0.5B on math (the toy \
model; the paper's figures are of Qwen2.5-0.5B)

| Method | Time (s) | paper: Time (h) | `7+5-3` (%) | paper: MATH (%) | `7+5-3=` (%) | paper: GSM8K (%) |
| --- | --- | --- | --- | --- | --- | --- |
| No-GF | 11.0 [8.5, 13.5] | 5.1 | 82.0 [77.0, 87.0] | 31.8 | 5.0 [5.0, 5.0] | 31.3 |
| DASH | 8.0 [8.0, 8.0] | 4.6 | 25.0 [25.0, 25.0]* | 28.4 | 6.0 [6.0, 6.0] | 30.9 |

Means over the seeds 0, 1, 2 with 95 % intervals (Student's t); without training, of one model: a bootstrap over the \
problems.

DASH against No-GF, paired by seed: Time -26.9 ± 16.6 %, `7+5-3` -57.0 ± 5.0 points, `7+5-3=` +1.0 ± 0.0 points.

* More than 1 % of the rewards failed, and count neither way.
"""


def test_a_table_by_hand(tmp_path):
    one = scale("toy", tmp_path, (0, 1, 2))
    pretend(one, "no_gf_rows4", (0.80, 0.82, 0.84), (10, 11, 12), kinds=["in"])
    pretend(one, "dash_rows4", (0.25, 0.25, 0.25), (8, 8, 8), kinds=["in"])
    pretend(one, "no_gf_rows4", (0.05,) * 3, kinds=["out"])
    pretend(one, "dash_rows4", (0.06,) * 3, kinds=["out"])
    files = runner.write(one, "table10")
    assert (tmp_path / "table10.md").read_text() == EXPECTED
    assert files[-1].name == "figure9.png" and files[-1].read_bytes().startswith(b"\x89PNG")


def test_one_run_has_the_interval_of_its_evaluation(tmp_path):
    one = scale("toy", tmp_path)
    for method, accuracy in (("dash", 0.8), ("multi", 0.7), ("mini", 0.6)):
        pretend(one, method, [accuracy], [9.0])
    files = runner.write(one, "table5")
    assert "| Multi | 70.0 [65.0, 75.0] | 28.8 |" in (tmp_path / "table5.md").read_text()
    assert [file.name for file in files] == ["table5.md", "figure4.png"]  # figure 8: a size that is not


# ------------------------------------------------------------------------------------------------ interrupted runs


def test_other_settings_are_refused_and_what_is_made_again_is_evaluated_again(tmp_path, monkeypatch):
    one = scale("toy", tmp_path, quick=True)
    for method in ("dash", "no_kl"):
        pretend(one, method, [0.8], [20.0])
    runner.Work(one).train(RUN)  # starts nothing
    assert "holds results of other settings: 2, where this one has 40" in refusal(
        runner.Work(scale("toy", tmp_path)).train, RUN
    )
    assert one.command(runner.Run("mini", "0.5", 0))[-4:-2] == ["--time_limit", "20.0"]
    (one.home(RUN) / "run.json").unlink()  # as an interrupt leaves it
    monkeypatch.setattr(runner.Scale, "command", lambda self, run: ["false"])
    refused("false ended with 1", runner.Work(one).train, RUN, error=RuntimeError)
    assert [path.name for path in one.home(RUN).iterdir()] == ["begun.json"]
    assert not one.figures("in", str(one.home(RUN))).exists()
    assert one.figures("in", one.models("no_kl", "0.5")[0]).exists()


def test_a_half_done_run_resumes_from_a_whole_checkpoint(tmp_path, monkeypatch):
    one = scale("toy", tmp_path)
    monkeypatch.setattr(runner.Scale, "command", lambda self, run: ["sh", "-c", "echo $*", "sh"])
    (path := one.home(RUN) / "checkpoint-9").mkdir(parents=True)
    assert not runner.has_checkpoint(one.home(RUN))
    (path / "trainer_state.json").touch()
    runner.Work(one).train(RUN)
    assert (tmp_path / "logs" / "dash_seed0.log").read_text() == "--resume_from_checkpoint true\n"
    assert runner.is_done(one.home(RUN)) and path.exists()


def test_servers_are_stopped_after_the_training_that_they_serve(tmp_path, monkeypatch):
    """The paper's scale, with other programs: the training gets their URLs."""
    server = "echo --vllm_server_urls http://a:1; exec sleep 600"
    training = "echo $CUDA_VISIBLE_DEVICES $*"
    monkeypatch.setattr(runner.Scale, "servers", lambda self, run: ["sh", "-c", server])
    monkeypatch.setattr(runner.Scale, "command", lambda self, run: ["sh", "-c", training, "sh"])
    one = scale("paper", tmp_path)
    runner.Work(one, list("abcdef")).train(RUN)
    said = (tmp_path / "logs" / f"{one.home(RUN).name}.log").read_text()
    assert runner.is_done(one.home(RUN)) and said == "a,b,c,d --vllm_server_urls http://a:1\n"


def test_an_interrupted_table_goes_on(tmp_path, monkeypatch, capsys):
    """Whatever a program does is pretended. The second one is interrupted while it runs."""
    called = []
    programs = []

    def start(arguments, *, log, **settings):
        called.append(log.stem)
        for method in ("no_gf_rows4", "dash_rows4"):
            if log.stem == f"{method}_seed0" and len(called) != 2:
                pretend(one, method, seconds=[9.0])
            elif log.stem.startswith("evaluation"):
                pretend(one, method, [0.8], kinds=[log.stem.removeprefix("evaluation_")])
        program = f"kill -TERM {os.getpid()}; exec sleep 600" if len(called) == 2 else "true"
        programs.append(Command(["sh", "-c", program], log=log, **settings))
        return programs[-1]

    one = scale("toy", tmp_path, quick=True)
    half = one.home(runner.Run("dash_rows4", "0.5", 0))
    monkeypatch.setattr(runner, "Command", start)
    monkeypatch.setattr(problems, "write_problems", lambda folder: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        refused(
            "Stopped. Run the same command again to continue.", runner.main, [*QUICK, str(tmp_path)], error=SystemExit
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not programs[-1].running and (half / "begun.json").exists() and not runner.is_done(half)
    runner.main([*QUICK, str(tmp_path)])
    signal.signal(signal.SIGTERM, handler)
    assert called[2:] == ["dash_rows4_seed0", "evaluation_in", "evaluation_out"]
    assert "1 trainings and 4 evaluations" in capsys.readouterr().out
    table = (tmp_path / "table10.md").read_text()
    assert "--quick: these figures say nothing" in table and "–" not in table


def test_the_problems_that_the_package_has_not(toy, tmp_path):
    """The base models are right on some of them, as docs/results/paper.md says."""
    one = scale("toy", tmp_path, quick=True)
    problems.write_problems(one.problems)
    for kind, method, count in (("out", "base", 24), ("code", "base_code", 6)):
        (model,) = one.models(method, "0.5")
        _, _, _, _, *arguments = one.evaluation(kind, [model])
        evaluate([*arguments, "--dataset_test_split", f"train[:{count}]"])
        assert 0 < json.loads(one.figures(kind, model).read_text())["accuracy"] < 0.7


@pytest.mark.exhaustive
def test_real_runs_make_a_table(python, tmp_path):
    python(EXAMPLES / "paper" / "run.py", *QUICK, tmp_path)
    assert "–" not in (tmp_path / "table10.md").read_text()
