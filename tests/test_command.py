"""`dash_trl`: the scripts that it runs, the arguments of accelerate, and the doctor's report."""

import os
import signal
import subprocess
import sys
from dataclasses import fields

import psutil
import pytest
import torch
from packaging.specifiers import SpecifierSet
from sft import SupervisedArguments, SupervisedConfig
from train_math import MathArguments
from trl import ModelConfig

from dash_trl import DASHConfig, command, doctor, signals
from dash_trl.rewards import watch
from dash_trl.versions import bounds
from tests.launching import ROOT
from tests.tiny import refused
from tests.vllm_run import wait_until


def test_accelerate_gets_its_flags_and_the_script_all_others(monkeypatch):
    flags = ["--max_steps", "1", "--num_processes", "2", "--accelerate_config", "zero3", "--num_generations=4"]
    assert command.launch_arguments(command.SCRIPTS["sft"], flags) == [
        *("--num_processes", "2", "--config_file", str(ROOT / "accelerate_configs" / "zero3.yaml")),
        *(str(ROOT / "dash_trl" / "signals.py"), str(ROOT / "examples" / "sft.py")),
        *("--max_steps", "1", "--num_generations=4"),
    ]
    own = str(ROOT / "accelerate_configs" / "cpu.yaml")
    assert command.launch_arguments("sft.py", [f"--accelerate_config={own}"])[:2] == ["--config_file", own]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)  # ddp.yaml leaves the number of processes open
    for flags, processes in (
        ([], ["--num_processes", "3"]),
        (["--gpu_ids", "0,2"], ["--gpu_ids", "0,2", "--num_processes", "2"]),
        (["--num_machines", "2"], ["--num_machines", "2"]),
    ):
        assert command.launch_arguments("sft.py", ["--accelerate_config", "ddp", *flags])[2:-2] == processes
    unknown = ["--accelerate_config", "zero4"]
    refused("'zero4' is neither a file nor one of cpu, ddp, .*zero3", command.launch_arguments, "sft.py", unknown)


def test_no_script_has_a_flag_of_the_launcher():
    for kind in (DASHConfig, ModelConfig, MathArguments, SupervisedArguments, SupervisedConfig):
        assert not {*command.LAUNCH, "accelerate_config"} & {one.name for one in fields(kind)}


def test_the_help_is_that_of_the_command(capsys):
    for name in ("serve", "eval"):
        with pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0 and f"usage: dash_trl {name}" in capsys.readouterr().out


@pytest.mark.usefixtures("launch")  # it starts one process
@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("max_steps", "many", "train_math.py: error: argument --max_steps/--max-steps: invalid int value: 'many'"),
        ("num_generations", "3", "ValueError: generation_batch_size (128) must be divisible by num_generations (3)."),
    ],
)
def test_a_failed_launch_ends_with_the_script_s_own_error(capfd, flag, value, said):
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "--accelerate_config", "single_process", f"--{flag}", value])
    assert ended.value.code
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == said and not any(line.startswith("Traceback") for line in lines)


def test_only_errors_of_this_package_have_no_traceback(capsys, monkeypatch):
    """Not those that Python raises within it, nor those that the user's own code has caused."""

    def scored(name):
        reward = watch(lambda completions: (int(one) for one in completions), "broken")
        reward(completions=[name])
        raise reward.outcomes[0]

    def interrupted(name):
        raise KeyboardInterrupt

    within = eval(compile("lambda name: int(name)", command.__file__, "eval"))
    works = {command.accelerate_config: "ValueError: accelerate_config='zero4' is", within: "Traceback"}
    works |= {int: "Traceback", scored: "Traceback", interrupted: "KeyboardInterrupt: "}
    for work, said in works.items():
        with pytest.raises((ValueError, KeyboardInterrupt)) as found:
            work("zero4")
        signals.say(found.type, found.value, found.tb)
        assert capsys.readouterr().err.startswith(said)
    monkeypatch.setattr(os, "_exit", lambda code: print(code))
    signals.end(signal.SIGTERM, None)  # before the training
    assert capsys.readouterr().out == "143\n"


def test_a_failed_launch_of_several_processes_does_so_too(python):
    flags = ["--accelerate_config", "cpu", "--use_cpu", "--bf16", "false", "--dataset_name", "none.jsonl"]
    done = python("-m", "dash_trl", "train", *flags, fails=True, cwd=ROOT)
    said = [line for line in done.stderr.splitlines() if line.strip(" =")]
    assert said[-1].startswith("  ValueError: model_name_or_path=None with dataset_name='none.jsonl': give both")


@pytest.mark.parametrize(
    ("config", "send", "number"),
    [
        ("single_process", os.kill, signal.SIGTERM),
        ("single_process", os.kill, signal.SIGINT),
        ("single_process", os.killpg, signal.SIGINT),
        ("cpu", os.kill, signal.SIGTERM),  # two processes
        ("cpu", os.killpg, signal.SIGINT),
    ],
)
def test_a_signal_ends_the_launcher_and_the_script(tmp_path, config, send, number):
    """`kill PID` and Ctrl-C must not leave a training behind. They print one line, and 143 or 130 says which it was."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\npathlib.Path('pid' + os.environ.get('RANK', '0')).write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    flags = [str(script), ["--accelerate_config", config]]
    code = f"from dash_trl import command; command.GRACE = 1; command.launch(*{flags})"
    pids = [tmp_path / f"pid{rank}" for rank in range(1 if config == "single_process" else 2)]
    pipes = {"stderr": subprocess.PIPE, "start_new_session": True, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, **pipes) as launcher:
        wait_until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
        scripts = [psutil.Process(int(pid.read_text())) for pid in pids]
        send(launcher.pid, number)
        said = launcher.communicate()[1]
    assert launcher.returncode == 128 + number and not any(one.is_running() for one in scripts)
    assert said.strip() == "Stopped, but not during training, so no step is lost. To start again, repeat the command."


# -------------------------------------------------------------------------------------------------------- the doctor


def test_the_report_and_the_exit_code(tiny_model, monkeypatch, capsys):
    assert command.main(["doctor", tiny_model]) == 0
    printed = capsys.readouterr().out
    assert "yes  training" in printed and f"{torch.__version__} torch" in printed
    assert f"yes  passes of {tiny_model}: Qwen2ForCausalLM, " in printed and ", without padding" in printed
    assert command.main(["doctor", "no/model"]) == 0
    assert "no   passes of no/model: " in capsys.readouterr().out
    assert not bounds()["transformers"].contains("6")
    monkeypatch.setattr("dash_trl.doctor.bounds", lambda: {"trl": SpecifierSet("<1")})

    def fail():
        raise ValueError("outer") from KeyError("inner")

    monkeypatch.setitem(doctor.PARTS, "training", fail)
    assert command.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "no   training: KeyError: 'inner'" in printed and "trl (tested: <1)" in printed
