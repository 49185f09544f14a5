"""`dash_trl`: the scripts that it runs, the arguments of accelerate, and the doctor's report on other machines."""

import importlib.util
import re
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from sft import SupervisedArguments, SupervisedConfig
from train_math import MathArguments
from trl import ModelConfig

from dash_trl import DASHConfig, command, doctor
from dash_trl.doctor import Machine, findings
from dash_trl.sandbox import Sandbox
from dash_trl.versions import bounds, fits, installed

ROOT = Path(__file__).parents[1]


def test_accelerate_gets_its_flags_and_the_script_all_others(monkeypatch):
    flags = ["--max_steps", "1", "--num_processes", "2", "--accelerate_config", "zero3", "--num_generations=4"]
    assert command.launch_arguments("sft.py", flags) == [
        *("--config_file", str(ROOT / "accelerate_configs" / "zero3.yaml"), "--num_processes", "2"),
        *(str(ROOT / "examples" / "sft.py"), "--max_steps", "1", "--num_generations=4"),
    ]
    own = str(ROOT / "accelerate_configs" / "cpu.yaml")
    assert command.launch_arguments("sft.py", [f"--accelerate_config={own}"])[:2] == ["--config_file", own]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)  # ddp.yaml leaves the number of processes open
    for flags, processes in (
        ([], ["--num_processes", "3"]),
        (["--gpu_ids", "0,2"], ["--gpu_ids", "0,2", "--num_processes", "2"]),
        (["--num_machines", "2"], ["--num_machines", "2"]),
    ):
        assert command.launch_arguments("sft.py", ["--accelerate_config", "ddp", *flags])[2:-1] == processes
    with pytest.raises(ValueError, match="'zero4' is neither a file nor one of cpu, ddp, .*zero3"):
        command.launch_arguments("sft.py", ["--accelerate_config", "zero4"])


def test_no_script_has_a_flag_of_the_launcher():
    for kind in (DASHConfig, ModelConfig, MathArguments, SupervisedArguments, SupervisedConfig):
        assert not {*command.LAUNCH, "accelerate_config"} & {one.name for one in fields(kind)}


def test_every_script_of_the_command_exists_where_it_is_looked_for(tmp_path):
    assert all((command.files("examples") / script).is_file() for script in command.SCRIPTS.values())
    copy = shutil.copy(command.__file__, tmp_path / "command.py")  # beside the examples, as in a wheel
    (tmp_path / "examples").mkdir()
    spec = importlib.util.spec_from_file_location("copy_of_command", copy)
    carried = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(carried)
    assert carried.files("examples") == tmp_path / "examples"
    assert carried.files("accelerate_configs") == tmp_path.parent / "accelerate_configs"


def test_the_help_is_that_of_the_command(capsys):
    for name, said in (("serve", "dash_trl.serve"), ("eval", "dash_trl.evaluation")):
        with pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0 and f"usage: python -m {said}" in capsys.readouterr().out


@pytest.mark.usefixtures("launch")  # it starts one process
def test_a_failed_launch_ends_with_the_script_s_own_error(capfd):
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "--accelerate_config", "single_process", "--max_steps", "many"])
    assert ended.value.code
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("train_math.py: error: argument --max_steps") and last.endswith("invalid int value: 'many'")


def test_a_failed_launch_of_several_processes_does_so_too(python):
    flags = ["--accelerate_config", "cpu", "--use_cpu", "--bf16", "false", "--dataset_name", "none.jsonl"]
    done = python("-m", "dash_trl", "train", *flags, cwd=ROOT)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.strip(" =")]
    assert said[-1].startswith("  ValueError: model_name_or_path=None with dataset_name='none.jsonl': give both")


# -------------------------------------------------------------------------------------------------------- the doctor

EVERYTHING = {name: "1.0" for name in ("dash_trl", *doctor.NEEDED, *doctor.EXTRAS)}
GPUS = Machine(
    EVERYTHING,
    gpus=["A", "B"],
    bf16=True,
    torch_build="CUDA 13.0",
    driver=True,
    vllm_program=True,
    vllm_modules=True,
    vllm_plugin=True,
    sandbox="namespaces",
)
CPU_VLLM = replace(
    GPUS, gpus=[], bf16=False, torch_build="CPU", driver=False, versions={**EVERYTHING, "vllm": "1.0+cpu"}
)


def without(machine: Machine, *names: str) -> Machine:
    return replace(machine, versions={**machine.versions, **dict.fromkeys(names)})


def said(machine: Machine, what: str) -> str:
    """Returns the first finding about a topic: "yes", "no" or "but", with the reason."""
    return next(f"{one.works}: {one.why}" for one in findings(machine) if what in one.what)


def test_a_machine_with_everything_has_no_reservation():
    assert {one.works for one in findings(GPUS)} == {"yes"}


MACHINES: list[tuple[Machine, str, str]] = [
    (replace(GPUS, bf16=False), "on a GPU", "but: A, B, not in bf16: add --bf16 false"),
    (replace(GPUS, gpus=["A"]), "several GPUs", "no: there is one"),
    (replace(CPU_VLLM, driver=True), "on a GPU", "no: nvidia-smi exists, .*build: CPU.*install the build for your"),
    (replace(GPUS, gpus=[], bf16=False), "on a GPU", "no: nvidia-smi exists, .*CUDA_VISIBLE_DEVICES"),
    (CPU_VLLM, "on a GPU", "no: there is none"),
    (CPU_VLLM, "on the CPU", "yes: --use_cpu true --bf16 false"),
    (CPU_VLLM, "vLLM", "yes: 1.0.cpu; installed, but not started here"),
    (replace(CPU_VLLM, versions=EVERYTHING), "vLLM", "no: 1.0 needs a GPU"),
    (replace(GPUS, versions=CPU_VLLM.versions), "vLLM", "but: .*on the CPU although there are GPUs"),
    (without(GPUS, "vllm"), "vLLM", r"no: not installed: `pip install .dash_trl\[vllm\]"),
    (without(CPU_VLLM, "vllm"), "vLLM", "no: not installed: .*CPU build"),
    (replace(GPUS, vllm_modules=False), "vLLM", "no: not installed .the metadata of 1.0 exist"),
    (replace(GPUS, vllm_program=False), "vLLM", "but: 1.0, for --use_vllm only"),
    (replace(CPU_VLLM, vllm_plugin=False), "vLLM", "but: .*plugin.*ignores new weights"),
    (replace(GPUS, asked={"vllm": SpecifierSet("<=0.31")}), "vLLM", "but: 1.0, but TRL asks for <=0.31"),
    (replace(GPUS, asked={"trl": SpecifierSet("<1")}), "training", r"but: trl 1.0 \(<1 was tested\)"),
    (without(GPUS, "trl"), "training", "no: trl is missing"),
    (without(GPUS, "peft"), "LoRA", r"no: peft is not installed: .*dash_trl\[peft\]"),
    (replace(GPUS, asked={"peft": SpecifierSet(">2")}), "LoRA", "but: peft 1.0, but >2 was tested"),
    (replace(GPUS, broken="ImportError: x"), "training", "no: DASHTrainer cannot be imported .ImportError: x"),
    (replace(GPUS, sandbox=None, no_sandbox="no kernel"), "sandbox", "no: no kernel"),
]


def test_what_follows_from_a_machine():
    for machine, what, expected in MACHINES:
        assert re.match(expected, said(machine, what)), (expected, said(machine, what))


def test_what_is_looked_at_is_this_machine(monkeypatch):
    """Its sandbox is tried, and its GPUs are those of torch."""
    try:
        expected = Sandbox().kind, ""
    except ValueError as error:
        expected = None, str(error)
    found = doctor.look()
    assert (found.sandbox, found.no_sandbox) == expected
    assert found.gpus == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", "GPU {}".format)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = doctor.look()
    assert (found.gpus, found.bf16, found.torch_build) == (["GPU 0", "GPU 1"], False, "CUDA 13.0")


def test_vllm_is_looked_for_where_serve_looks(monkeypatch, tmp_path):
    """Beside Python, and on the PATH; here Python is in a folder with nothing else, and then with a vLLM."""
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert not doctor.look().vllm_program
    (tmp_path / "vllm").touch(0o755)
    assert doctor.look().vllm_program


def test_the_report_and_the_exit_code(monkeypatch, capsys):
    assert command.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and "What works" in printed
    monkeypatch.setattr(doctor, "look", lambda: without(GPUS, "torch"))
    assert command.main(["doctor"]) == 1 and "torch is missing" in capsys.readouterr().out


def test_versions_come_from_the_metadata():
    assert bounds("trl", "vllm")["vllm"].contains("0.31.0") and "vllm" not in bounds("trl")
    assert bounds()["torch"].contains("2.13.0") and "peft" not in bounds()
    assert bounds("nobody-has-this") == {} and installed("nobody-has-this") is None
    assert fits("2.13.0+cpu", SpecifierSet("<=2.13.0")) and not fits("1.17.0", bounds()["trl"])


def test_an_installation_in_which_the_trainer_fails_is_no_good(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "dash_trl.trainer", None)  # its import raises
    assert command.main(["doctor"]) == 1 and "DASHTrainer cannot be imported" in capsys.readouterr().out
