"""The YAML files that users start from: accelerate takes them, DASHConfig has their keys, and they are the paper's."""

from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from dash_trl.config import computes_bf16
from tests.launching import ROOT

ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
# Supervised ones have another script, and a test of their own. `test_paper.py` says which there are.
RUNS = sorted(path for path in (ROOT / "examples" / "configs").glob("*.yaml") if not path.stem.startswith("sft_"))
TRAINING_GPUS = 4  # Table 7; for programs 2

FIGURE_7 = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: false
  zero3_save_16bit_model: false
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def test_every_file_of_accelerate():
    """accelerate takes the file, and the comment at its top launches it."""
    assert len(ACCELERATE) == 7
    for path in ACCELERATE:
        config = load_config_from_file(str(path))
        kind = {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "zero3_offload": "DEEPSPEED", "fsdp2": "FSDP"}
        expected = kind.get(path.stem, "NO" if path.stem == "single_process" else "MULTI_GPU")
        assert config.distributed_type.value == expected and config.use_cpu == (path.stem == "cpu")
        # -1: accelerate asks for --num_processes, where a number of ours would be wrong on most machines.
        assert config.num_processes == {"single_process": 1, "cpu": 2, "zero3_offload": TRAINING_GPUS}.get(
            path.stem, -1
        )
        plugin = {**read(path).get("deepspeed_config", {}), **read(path).get("fsdp_config", {})}
        assert not set(plugin) - {action.dest for action in launch_command_parser()._actions}
        assert f"dash_trl train --accelerate_config {path.stem}" in path.read_text().splitlines()[1]
        # What is saved is one model that `from_pretrained` loads.
        assert plugin.get("zero_stage") != 3 or plugin["zero3_save_16bit_model"]
        assert plugin.get("fsdp_state_dict_type", "FULL_STATE_DICT") == "FULL_STATE_DICT"


def test_zero3_offload_is_figure_7_that_saves_a_model():
    printed = yaml.safe_load(FIGURE_7)
    printed["deepspeed_config"]["zero3_save_16bit_model"] = True
    assert read(ROOT / "accelerate_configs" / "zero3_offload.yaml") == printed


def keys_of_table_7(path: Path) -> dict[str, Any]:
    method, size = path.stem.split("_qwen2.5-")
    gpus = 2 if method.endswith("_code") else TRAINING_GPUS  # with the same keys, so that half as many rows make a step
    rows = 4 if method.endswith("_rows4") else 2
    method = method.removesuffix("_rows4").removesuffix("_code")
    large = method in ("multi", "mini") and size == "1.5b"
    sampled = (1024 if large else 256) // TRAINING_GPUS // rows  # micro-steps
    unfiltered = method in ("grpo", "no_gf")
    assert gpus * rows * (1 if method == "grpo" else sampled) % 4 == 0  # num_generations
    return {
        "model_name_or_path": f"Qwen/Qwen2.5-{size.upper()}",
        "per_device_train_batch_size": rows,
        "learning_rate": 3e-6 if large else 1e-6,
        "num_train_epochs": 3,
        "num_generations": 4,
        "max_completion_length": 2048,
        "temperature": 0.9,
        "beta": 0.0 if method == "no_kl" else 0.04,
        "gradient_filter_threshold": None if unfiltered else 0.1,
        "num_iterations": 3 if method == "multi" else 1,
        "gradient_accumulation_steps": 1 if method == "mini" else sampled,
        "steps_per_generation": 1 if method == "grpo" else sampled,
        # What the table does not say.
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "filter_denominator": "all",
        "vllm_importance_sampling_correction": False,
    }


def test_every_run_has_the_keys_of_table_7():
    for path in RUNS:
        expected = keys_of_table_7(path)
        assert {key: read(path)[key] for key in expected} == expected, path.name


def test_the_runs_differ_in_nothing_else():
    own = {*keys_of_table_7(RUNS[0]), "output_dir", "dataset_name"}
    shared = [{key: value for key, value in read(path).items() if key not in own} for path in RUNS]
    assert all(run == shared[0] for run in shared)
    for path in RUNS:
        program = "_code_" in path.stem
        assert read(path)["dataset_name"] == ("evalplus/mbppplus" if program else "nlile/hendrycks-MATH-benchmark")
        assert ("train_code.py" in path.read_text()) == program
        assert read(path)["output_dir"].endswith(f"/{path.stem}")


def test_a_gpu_that_emulates_bf16(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not computes_bf16() and "--fp16 true" in caplog.text
