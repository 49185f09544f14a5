"""The main job and the notebook, as users start them: the demo learns, real data runs, flags and YAML both work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from dash_trl.embedded import embedded_model

ROOT = Path(__file__).parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
SETTINGS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
SMALL = {**SETTINGS, "max_steps": 2, "max_completion_length": 16, "use_cpu": True, "bf16": False, "report_to": "none"}


def launch(*arguments: object, script: str = "train_math", check: bool = True) -> subprocess.CompletedProcess[str]:
    """`accelerate launch examples/train_math.py …` in its own process, with two threads as `make demo` has."""
    config = str(ROOT / "accelerate_configs" / "single_process.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / f"{script}.py"), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "2", "CI": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def flags(settings: dict[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def steps(folder: Path) -> list[dict]:
    """The metrics of the training steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "filter/kept_rows" in line and "train_runtime" not in line]


@pytest.mark.slow
def test_without_arguments_it_learns_and_says_where_everything_is(tmp_path):
    done = launch("--output_dir", tmp_path)
    measured = dict(re.findall(r"(sampled|greedy) accuracy on 256 .*: (.* before, .*) after", done.stdout))
    sampled, greedy = (tuple(map(float, measured[name].split(" before, "))) for name in ("sampled", "greedy"))
    assert 0.35 <= sampled[0] <= 0.65
    assert sampled[1] - sampled[0] >= 0.2
    assert greedy[1] >= greedy[0] - 0.005  # one problem of 256
    assert "kept=" in done.stderr and "reward=" in done.stderr  # the progress bar
    metrics, plot, model = (
        re.search(rf"^{name}: +(.+)$", done.stdout, re.M)[1] for name in ("metrics", "plot", "model")
    )
    assert len(steps(tmp_path)) == 80 and Path(metrics) == tmp_path / "metrics.jsonl"
    assert Path(plot).read_bytes().startswith(b"\x89PNG")
    saved, original = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(embedded_model())
    text = "<|im_start|>user\n7+5-3<|im_end|>\n7+5=12\nThe answer is 9"
    assert saved(text)["input_ids"] == original(text)["input_ids"]


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason=f"GSM8K is not in {GSM8K}")
def test_real_problems_with_flags(tmp_path):
    """GSM8K with the math reward, evaluation, checkpoints; the tiny model solves no problem, so no row is kept."""
    done = launch(
        *("--model_name_or_path", embedded_model(), "--dataset_name", GSM8K, "--output_dir", tmp_path),
        *flags({**SMALL, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": False, "save_steps": 1}),
        *flags({"dataset_test_split": "test[:8]", "per_device_eval_batch_size": 4, "beta": 0.04}),
    )
    assert len(steps(tmp_path)) == 2
    for step in steps(tmp_path):
        assert step["reward"] == 0 and step["filter/dropped_constant"] == 1 and step["filter/dropped_unscored"] == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_reward" in line for line in lines)
    assert (tmp_path / "checkpoint-2").is_dir() and (tmp_path / "model.safetensors").exists()
    assert "accuracy on 256" not in done.stdout  # that is the embedded task's


def test_own_problems_from_yaml_with_lora(tmp_path):
    """`prompt`/`answer` rows, a prompt template, PEFT; a flag wins over the file, and a second run resumes."""
    data, config, output = tmp_path / "data.jsonl", tmp_path / "run.yaml", tmp_path / "run"
    data.write_text("".join(json.dumps({"prompt": f"{i}+2=", "answer": str(i + 2)}) + "\n" for i in range(16)))
    settings = {**SMALL, "model_name_or_path": embedded_model(), "dataset_name": str(data), "output_dir": str(output)}
    settings |= {"max_steps": 7, "prompt_template": "Add: {problem}", "use_peft": True, "lora_r": 2, "save_steps": 1}
    config.write_text(yaml.safe_dump(settings))
    launch("--config", config, "--max_steps", 1, "--learning_rate", 1e-3)
    assert len(steps(output)) == 1 and (output / "adapter_config.json").exists()
    launch("--config", config, "--max_steps", 2, "--resume_from_checkpoint", output / "checkpoint-1")
    assert (output / "checkpoint-2").exists()


def test_process_rewards_on_the_embedded_task(tmp_path):
    launch(
        "--output_dir",
        tmp_path,
        *flags({**SMALL, "max_steps": 3, "max_completion_length": 64}),
        script="train_math_process",
    )
    done = steps(tmp_path)
    assert len(done) == 3 and all(step["time/values"] > 0 for step in done)
    assert all(step["process/structured_rows"] > 0.5 for step in done)  # a response of one episode has no structure


def test_mistakes_end_with_one_sentence(tmp_path):
    done = launch("--model_name_or_path", embedded_model(), *flags(SMALL), check=False)
    assert done.returncode != 0 and "--dataset_name" in done.stderr
    named = ("--model_name_or_path", tmp_path / "nowhere", "--dataset_name", tmp_path)
    done = launch(*named, *flags(SMALL), check=False)
    assert done.returncode != 0 and "nowhere" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quickstart", ["rows had no signal above the threshold", "filter/kept_rows"]),
        ("process_rewards", ["The answer is", "torch.Size([8", "process/value_last"]),
    ],
)
def test_notebooks_run(name, said, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("STEPS = 2"))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert all(words in printed for words in said), printed[-2000:]
