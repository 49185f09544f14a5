"""The scripts and notebooks, as users start them: the demo learns, real data runs, flags and YAML both work."""

import asyncio
import json
import os
import re
import runpy
import signal
import sys
from dataclasses import fields
from pathlib import Path
from unittest import mock

import nbformat
import pytest
import toy_tools
import train_code
import train_math
import yaml
from train_math import MathArguments
from transformers import TrainerCallback

import dash_trl.script
from dash_trl.toy import WarmUp, toy_defaults
from tests.launching import CONFIGS, ROOT, SHARED, flags, needs_data
from tests.tiny import read_rows, refused

DEMO = ROOT / "examples" / "train_math.py"
SMALL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
SMALL |= {"max_steps": 1, "max_completion_length": 16, "use_cpu": True, "bf16": False}


def steps(folder: Path) -> list[dict]:
    """The metrics of the training steps."""
    lines = read_rows(folder / "metrics.jsonl")
    return [line for line in lines if "filter/kept_rows" in line and "train_runtime" not in line]


def main(script: str, *arguments: object) -> None:
    """The script in this process, which shows the same as a launch, but for the launch."""
    with mock.patch.object(sys, "argv", [script, *map(str, arguments)]):
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")


def measured(said: str) -> dict[str, tuple[float, float]]:
    """The accuracies that a script has printed, before and after training."""
    found = re.findall(r"(sampled|greedy) accuracy on 256 held-out problems: (.*) before, (.*) after", said)
    return {name: (float(before), float(after)) for name, before, after in found}


@pytest.mark.smoke
def test_smoke_of_the_demo(launch, toy, tmp_path):
    """`make demo` with few steps: it says where everything is."""
    config = CONFIGS / "single_process.yaml"
    few = flags({"output_dir": tmp_path, "max_steps": 2, "gradient_accumulation_steps": 4})
    done = launch(DEMO, *few, config=config, threads=2)
    assert measured(done.stdout).keys() == {"sampled", "greedy"}
    assert all(f"{name}=" in done.stderr for name in ("kept", "reward", "tokens/s"))  # the progress bar
    assert "FutureWarning" not in done.stderr and done.stdout.count("of the last completions: ") == 2
    metrics, plot, model = (
        re.search(rf"^{name}: +(.+)$", done.stdout, re.M)[1] for name in ("metrics", "plot", "model")
    )
    assert len(steps(tmp_path)) == 2 and Path(metrics) == tmp_path / "metrics.jsonl"
    assert Path(plot).read_bytes().startswith(b"\x89PNG")
    assert (Path(model) / "model.safetensors").exists()


def test_the_demo_learns(toy, tmp_path, capsys):
    """In half of the steps that it takes without --max_steps."""
    main("train_math", "--output_dir", tmp_path, "--max_steps", 40)
    found = measured(capsys.readouterr().out)
    assert 0.35 <= found["sampled"][0] <= 0.65
    assert found["sampled"][1] - found["sampled"][0] >= 0.2
    assert found["greedy"][1] >= 0.9  # 0.938 to 0.973 on three machines: the sums are not unlearned
    assert len(steps(tmp_path)) == 40


def test_the_minimal_script_draws_and_saves_and_started_again_goes_on(toy, tmp_path, monkeypatch, capsys):
    _, _, code = (ROOT / "examples" / "minimal.py").read_text().partition("from pathlib")
    assert code in (ROOT / "docs" / "tutorials" / "quickstart.md").read_text()
    monkeypatch.chdir(tmp_path)
    for last in (2, 3):
        few = {"gradient_accumulation_steps": 4, "max_steps": last}
        with mock.patch("dash_trl.toy.toy_defaults", return_value=toy_defaults() | few):
            main("minimal")
        assert [step["step"] for step in steps(Path("outputs/minimal"))] == [*range(1, last + 1)]
    assert Path("outputs/minimal/run.png").exists() and Path("outputs/minimal/model.safetensors").exists()
    assert "| 3/3 [" in (said := capsys.readouterr().err) and "reward=" in said and "'reward'" not in said


class Interrupts(TrainerCallback):
    """Sends signals in the second step: the first one, and the others while the run ends."""

    step = 2

    def __init__(self, first, *others):
        self.first = first
        self.others = others

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            try:
                signal.raise_signal(self.first)
            finally:
                for number in self.others:
                    signal.raise_signal(number)


@pytest.mark.parametrize(
    ("saves", "said"), [("steps", "with --resume_from_checkpoint .*-1"), ("no", "no checkpoint: --save_st")]
)
def test_ctrl_c_says_where_the_run_stands(toy, tmp_path, capsys, monkeypatch, saves, said):
    monkeypatch.setattr(train_math, "toy_accuracies", lambda *arguments: {})

    ended_at_once = []
    monkeypatch.setattr(os, "_exit", ended_at_once.append)
    ctrl_c = signal.SIGINT
    term = signal.SIGTERM
    before = [signal.getsignal(number) for number in (ctrl_c, term)]
    for numbers, code in (
        ((ctrl_c,), 130),
        ((term, term), 143),  # the launcher passes signals on
        ((ctrl_c, ctrl_c, ctrl_c), 130),
    ):
        with pytest.raises(SystemExit) as ended:
            monkeypatch.setattr(train_math, "TimeLimitCallback", lambda limit, numbers=numbers: Interrupts(*numbers))
            train_math.main(
                flags({**SMALL, "max_steps": 3, "output_dir": tmp_path, "save_strategy": saves, "save_steps": 1})
            )
        assert ended.value.args == (code,) and [signal.getsignal(number) for number in (ctrl_c, term)] == before
    assert ended_at_once == [130] and not (tmp_path / "model.safetensors").exists()
    assert len(re.findall(f"Stopped after step 2 of 3. .*{said}", capsys.readouterr().out)) == 3
    monkeypatch.setattr(Interrupts, "step", 3)  # all steps are done
    with pytest.raises(SystemExit):
        train_math.main(flags({**SMALL, "max_steps": 3, "output_dir": tmp_path, "save_strategy": "no"}))
    assert (tmp_path / "model.safetensors").exists()


@needs_data
def test_real_problems_with_flags(toy, tmp_path, capsys):
    """GSM8K, the math reward on single completions, evaluation, checkpoints. The model solves next to no problem."""
    main(
        *("train_math", "--model_name_or_path", toy, "--dataset_name", SHARED / "gsm8k", "--output_dir", tmp_path),
        *flags({**SMALL, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": False, "save_steps": 1}),
        *flags({"dataset_train_split": "train[:16]", "dataset_test_split": "test[:1]", "beta": 0.04}),
        *flags({"per_device_eval_batch_size": 4, "reward_pipeline": True}),
    )
    (step,) = steps(tmp_path)
    assert step["rewards/math_accuracy/mean"] < 0.2 and step["filter/dropped_unscored"] == 0
    assert "eval_reward" in (tmp_path / "metrics.jsonl").read_text()
    assert (tmp_path / "checkpoint-1").is_dir() and (tmp_path / "model.safetensors").exists()
    assert "accuracy on 256" not in capsys.readouterr().out  # that is the toy task's


OWN_REWARDS = """
from helper import WORTH

def compute_score(data_source, solution_str, ground_truth):
    return WORTH * (len(solution_str + ground_truth) % 2)

class Length:
    def compute_score(self, completion):
        return len(completion[-1]["content"]), {"digits": 1.0}
"""


@pytest.fixture
def own_rewards(own_folder):
    (own_folder / "helper.py").write_text("WORTH = 3")
    (own_folder / "own.py").write_text(OWN_REWARDS)
    return own_folder / "own.py"


def test_own_problems_and_reward_from_yaml_with_lora(own_rewards):
    """`prompt`/`answer` rows, a prompt template, PEFT; a flag wins over the file, and a second run resumes."""
    settings = {
        **SMALL,
        "model_name_or_path": "model",
        "dataset_name": "own.jsonl",
        "reward_path": "own.py",
        "max_steps": 7,
        "prompt_template": "Add: {problem}",
        "use_peft": True,
        "lora_r": 2,
        "save_steps": 1,
    }
    Path("run.yaml").write_text(yaml.safe_dump({**settings, "output_dir": "run"}))
    main("train_math", "--config", "run.yaml", "--max_steps", 1, "--learning_rate", 1e-3)
    (step,) = steps(Path("run"))
    assert 0 < step["rewards/compute_score/mean"] < 3 and Path("run", "adapter_config.json").exists()
    main("train_math", "--config", "run.yaml", "--max_steps", 2, "--resume_from_checkpoint", "true")
    texts = MathArguments(dataset_name="own.jsonl", plain_prompts=True).problems(chat=True, split="train")["prompt"]
    assert Path("run", "checkpoint-2").exists() and {type(text) for text in texts} == {str}


def test_process_rewards_on_the_toy_task_with_a_reward_of_one_s_own(own_rewards, tmp_path, monkeypatch):
    monkeypatch.setattr(dash_trl.script, "toy_accuracies", lambda *arguments: {})
    settings = {**SMALL, "max_completion_length": 64, "reward_path": "own.py", "reward_name": "Length"}
    main("train_math_process", *flags({**settings, "output_dir": tmp_path}))
    (step,) = steps(tmp_path)
    assert step["time/values"] > 0 and step["process/structured_rows"] > 0.5  # one episode has no structure
    assert step["rewards/Length/digits"] == 1.0


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_programs_are_trained_on(toy, tmp_path, monkeypatch, count):
    monkeypatch.setattr(dash_trl.script, "toy_accuracies", lambda *arguments: {})  # the demo shows that
    settings = {"max_steps": count, "gradient_accumulation_steps": 4 if count == 1 else 16, "output_dir": tmp_path}
    main("train_code", *flags(settings))
    first, *_, last = [step["rewards/code/mean"] for step in steps(tmp_path)] * 2
    assert 0.1 < first < 0.9 and (count == 1 or last - first >= 0.1)
    for step in steps(tmp_path):
        assert step["rewards/code/mean"] <= step["rewards/code/passed"]
        assert step["filter/kept_rows"] > 0 and step["filter/dropped_unscored"] == 0


def test_a_tool_is_called_and_measured(toy, tmp_path, monkeypatch, capsys):
    """With a model that was warmed up for next to no time, on a few of the problems."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warm_up = WarmUp(steps=2, batch_size=4, hidden_size=32, num_layers=1, num_heads=1)
    monkeypatch.setattr(toy_tools, "CALCULATOR_WARM_UP", warm_up)
    monkeypatch.setitem(toy_tools.SIZES, "test", 4)
    settings = {**SMALL, "per_device_eval_batch_size": 8, "output_dir": tmp_path / "run", "noise": True}
    main("train_tools", *flags(settings))
    assert all(0 <= share <= 1 for share in measured(capsys.readouterr().out)["sampled"])
    (step,) = [one for one in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in one]
    assert {"tools/call_frequency", "tools/failure_frequency"} <= step.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("noise", [False, True])
def test_what_is_learned_is_to_use_the_tool(toy, tmp_path, capsys, noise):
    main("train_tools", *flags({"output_dir": tmp_path, "noise": noise}))
    before, after = measured(capsys.readouterr().out)["sampled"]
    assert (before <= 0.05 and after - before <= 0.05) if noise else (0.15 <= before <= 0.4 and after - before >= 0.2)


def test_the_help_is_short_and_names_the_flag_for_all(capsys):
    for flag, whole in (("--help", False), ("--help_all", True)):
        with pytest.raises(SystemExit):
            train_math.main([flag])
        shown = capsys.readouterr().out
        assert ("adam_beta1" in shown) == whole and all(f"--{one.name}" in shown for one in fields(MathArguments))
        assert whole or shown.splitlines()[-1].startswith("--help_all shows all flags")


# ------------------------------------------------------------------------------------------------------ mistakes

MODEL = ["--model_name_or_path", "./nowhere"]
DATA = ["--dataset_name", "own.jsonl"]
THERE = ["--model_name_or_path", "model"]


MISTAKES = [  # script, its arguments, part of the error message
    # half a task
    (train_math, MODEL, "model_name_or_path='./nowhere' with dataset_name=None: give both"),
    (train_math, DATA, "model_name_or_path=None with dataset_name='own.jsonl': give both"),
    (train_math, [*MODEL, "--dataset_name", "toy"], "model='./nowhere' cannot be loaded"),
    # options without effect
    (train_math, ["--dataset_name", "toy", "--prompt_template", "plain"], r"\['prompt_template'\] have no effect"),
    (train_math, ["--dataset_train_split", "trian"], r"\['dataset_train_split'\] have no effect without --model_n"),
    (
        train_math,
        [*MODEL, *DATA, "--dataset_test_split", "dev"],
        "no effect without --eval_strategy steps .or epoch., since nothing is evaluated",
    ),
    (train_math, [*MODEL, *DATA, "--lora_r", "64", "--use_dora"], r"\['lora_r', 'use_dora'\] have no effect without"),
    (
        train_math,
        ["--resume_from_checkpoint", "true"],
        "resume_from_checkpoint='true' names no whole checkpoint of its run: /.* does not exist",
    ),
    (
        train_math,
        [*THERE, *DATA, "--reward_path", "own.py", "--reward_name", "compute_scores"],
        r"defines no 'compute_scores'; it has \['compute_score', 'Length'\]",
    ),
    # what is not there
    (train_math, [*THERE, *DATA, "--dataset_train_split", "trian"], "has no split 'trian'"),
    (train_math, [*THERE, *DATA, "--eval_strategy", "steps"], "'own.jsonl' has no split 'test'"),
    (train_code, [*THERE, "--dataset_name", "untested.jsonl"], "1 of 1 rows lack tests in 'tests'"),
]


def test_mistakes(own_rewards, monkeypatch):
    """None begins a warm-up."""
    Path("untested.jsonl").write_text(json.dumps({"text": "Add one.", "test_list": []}) + "\n")
    for example, arguments, message in MISTAKES:
        monkeypatch.setattr(train_math, "toy_model", None if "toy" not in arguments else lambda **_: "model")
        refused(message, example.main, [*arguments, *flags(SMALL)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quickstart", ["rows had no signal above the threshold", "filter/kept_rows"]),
        ("process_rewards", ["The answer is", "torch.Size([8", "process/value_last"]),
    ],
)
def test_a_notebook_runs_and_is_stored_with_its_outputs(name, said, toy, tmp_path, monkeypatch, capsys):
    """Stored: of one run from the first cell to the last, without errors, warnings and paths of a machine.

    Here it runs with one training step, within a running event loop, as in Jupyter.
    """
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    cells = [one for one in nbformat.reads(text, as_version=4).cells if one.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells if "print(" in cell.source or "display(" in cell.source)
    shown = [output for cell in cells for output in cell.outputs]
    assert all(one.get("name", "stdout") == "stdout" and one.output_type != "error" for one in shown)
    assert not re.search(r"/(home|root|tmp|work|Users)/", text) and len(text) < 200_000

    monkeypatch.chdir(tmp_path)
    names = {"STEPS": 1}

    async def run() -> None:
        for cell in cells:
            exec(cell.source, names)

    asyncio.run(run())
    printed = capsys.readouterr().out
    assert all(words in printed for words in said), printed[-2000:]
