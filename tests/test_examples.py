"""The main job and the notebook, as users start them: the demo learns, real data runs, flags and YAML both work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import yaml
from transformers import AutoTokenizer

from dash_trl.embedded.warm_up import embedded_model
from dash_trl.rewards import load_reward

ROOT = Path(__file__).parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
SETTINGS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}
SMALL = {**SETTINGS, "max_steps": 2, "max_completion_length": 16, "use_cpu": True, "bf16": False, "report_to": "none"}


def launch(
    *arguments: object, script: str = "train_math", config: str = "single_process", check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`accelerate launch examples/train_math.py …` in its own process, with two threads as `make demo` has."""
    file = str(ROOT / "accelerate_configs" / f"{config}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file]
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


def main(*arguments: object, script: str = "train_math") -> None:
    """The script in this process, which shows the same as a launch, but for the launch."""
    module = import_module(script)
    if script == "train_math_process":
        rest: dict = {"own_arguments": (module.ProcessArguments,), "make_callbacks": module.make_callbacks}
    else:
        rest = {"make_task": module.Programming if script == "train_code" else module.Mathematics}
    import_module("train_math").main(list(map(str, arguments)), **rest)


@pytest.mark.slow
def test_without_arguments_it_learns_and_says_where_everything_is(tmp_path):
    done = launch("--output_dir", tmp_path)
    measured = dict(re.findall(r"(sampled|greedy) accuracy on 256 .*: (.* before, .*) after", done.stdout))
    sampled, greedy = (tuple(map(float, measured[name].split(" before, "))) for name in ("sampled", "greedy"))
    assert 0.35 <= sampled[0] <= 0.65
    assert sampled[1] - sampled[0] >= 0.2
    assert greedy[1] >= 0.95  # 0.969 to 1.0 over seeds, machines and threads: the sums are not unlearned
    assert "kept=" in done.stderr and "reward=" in done.stderr  # the progress bar
    metrics, plot, model = (
        re.search(rf"^{name}: +(.+)$", done.stdout, re.M)[1] for name in ("metrics", "plot", "model")
    )
    assert len(steps(tmp_path)) == 80 and Path(metrics) == tmp_path / "metrics.jsonl"
    assert Path(plot).read_bytes().startswith(b"\x89PNG")
    saved, original = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(embedded_model())
    text = "<|im_start|>user\n7+5-3<|im_end|>\n7+5=12\nThe answer is 9"
    assert saved(text)["input_ids"] == original(text)["input_ids"]


@pytest.mark.skipif(not GSM8K.exists(), reason=f"GSM8K is not in {GSM8K}")
def test_real_problems_with_flags(examples, tmp_path, capsys):
    """GSM8K with the math reward, evaluation, checkpoints; the tiny model solves next to no problem."""
    main(
        *("--model_name_or_path", embedded_model(), "--dataset_name", GSM8K, "--output_dir", tmp_path),
        *flags({**SMALL, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": False, "save_steps": 1}),
        *flags({"dataset_train_split": "train[:64]", "dataset_test_split": "test[:8]", "beta": 0.04}),
        *flags({"per_device_eval_batch_size": 4}),
    )
    assert len(steps(tmp_path)) == 2
    for step in steps(tmp_path):
        assert step["reward"] < 0.2 and step["filter/dropped_unscored"] == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_reward" in line for line in lines)
    assert (tmp_path / "checkpoint-2").is_dir() and (tmp_path / "model.safetensors").exists()
    assert "accuracy on 256" not in capsys.readouterr().out  # that is the embedded task's


def test_own_problems_from_yaml_with_lora(examples, tmp_path):
    """`prompt`/`answer` rows, a prompt template, PEFT; a flag wins over the file, and a second run resumes."""
    config, output = tmp_path / "run.yaml", tmp_path / "run"
    settings = {**SMALL, "model_name_or_path": "model", "dataset_name": "own.jsonl", "output_dir": str(output)}
    settings |= {"max_steps": 7, "prompt_template": "Add: {problem}", "use_peft": True, "lora_r": 2, "save_steps": 1}
    config.write_text(yaml.safe_dump(settings))
    main("--config", config, "--max_steps", 1, "--learning_rate", 1e-3)
    assert len(steps(output)) == 1 and (output / "adapter_config.json").exists()
    main("--config", config, "--max_steps", 2, "--resume_from_checkpoint", output / "checkpoint-1")
    assert (output / "checkpoint-2").exists()


@pytest.mark.parametrize("value", ["answer", "outcome"])
def test_process_rewards_on_the_embedded_task(examples, tmp_path, monkeypatch, value):
    monkeypatch.setattr("train_math.measure", lambda *arguments: {})
    settings = {**SMALL, "max_completion_length": 64, "value": value, "output_dir": tmp_path}
    main(*flags(settings), script="train_math_process")
    done = steps(tmp_path)
    if value == "answer":
        assert len(done) == 2 and all(step["time/values"] > 0 for step in done)
        assert all(step["process/structured_rows"] > 0.5 for step in done)  # one episode has no structure
    else:
        assert [step["process/learned_rollouts"] for step in done] == [16, 32]
        assert all(step["process/weight"] == 0 for step in done)  # too few problems to know what V is worth


@pytest.mark.slow
def test_code_learns_and_says_where_everything_is(tmp_path):
    done = launch("--output_dir", tmp_path, "--max_steps", 20, script="train_code")
    before, after = map(float, re.search(r"sampled accuracy on 256 .*: (.*) before, (.*) after", done.stdout).groups())
    assert after - before >= 0.1, done.stdout
    assert all(step["rewards/code/passed"] >= step["rewards/code/mean"] for step in steps(tmp_path))


@pytest.mark.parametrize("script", ["train_math", "train_code"])
def test_code_on_problems_of_ones_own(examples, tmp_path, script):
    """MBPP's columns, which either script knows; the tiny model writes no program, so no row is kept."""
    row = {"text": "Add one.", "code": "", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    (tmp_path / "own.jsonl").write_text((json.dumps(row) + "\n") * 8)
    settings = {**SMALL, "max_steps": 1, "model_name_or_path": "model", "dataset_name": "own.jsonl"}
    main(*flags({**settings, "output_dir": tmp_path / "run"}), script=script)
    (step,) = steps(tmp_path / "run")
    assert step["filter/dropped_constant"] == 1 and step["rewards/code/passed"] == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_judge_teaches_the_embedded_task_to_two_ranks(tmp_path):
    """Both ask the one judge of the first rank; 16 steps in place of 80."""
    settings = {"max_steps": 16, "gradient_accumulation_steps": 8, "use_cpu": True, "log_completions": True}
    launch("--output_dir", tmp_path, *flags(settings), script="train_judge", config="cpu")
    done = steps(tmp_path)
    scores = [step["rewards/judge/mean"] for step in done]
    assert len(done) == 16 and sum(scores[-4:]) / 4 - sum(scores[:4]) / 4 >= 0.1  # 0.53 to 0.8 where it was tried
    assert all(step["filter/dropped_unscored"] == 0 for step in done)
    kept = pyarrow.parquet.read_table(next((tmp_path / "completions").glob("*1.parquet"))).to_pylist()
    assert len(kept) == 128 and all("<completion " in row["judge/prompt"] for row in kept)
    assert "Every step is right." in {row["judge/explanation"] for row in kept}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--judge_url", "http://127.0.0.1:9/v1"], "judge_url='http://127.0.0.1:9/v1' has no effect without --judge_m"),
        (["--judge_template", "{completion}"], "judge_template='{completion}' has no effect without --judge_model"),
        (["--model_name_or_path", "./nowhere", "--dataset_name", "own.jsonl"], "no judge. Add --judge_model"),
        (["--judge_model", "gpt"], "no API key for the judge: set OPENAI_API_KEY"),
        (["--judge_model", "gpt", "--judge_url", "127.0.0.1"], "base_url='127.0.0.1' is no address"),
        (["--reward_path", "own.py"], "reward_path='own.py' has no effect here"),
    ],
)
def test_mistakes_about_the_judge(train_math, monkeypatch, arguments, message):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    import train_judge

    with pytest.raises(ValueError, match=message):
        train_math.main([*arguments, *flags(SMALL)], make_task=train_judge.Judged)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--value", "outcome", "--value_space", "probability"], "value_space='probability' has no effect with --val"),
        (["--value", "outcome", "--force_prompt", "So: "], "force_prompt='So: ' has no effect with --value outcome"),
        (["--process_weight", "some"], "process_weight='some'.* out of range: weights are >= 0 .*'auto'"),
    ],
)
def test_mistakes_about_the_value(monkeypatch, arguments, message):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from train_math_process import ProcessArguments, make_callbacks
    from trl import TrlParser

    with pytest.raises(ValueError, match=message):
        make_callbacks(
            SimpleNamespace(dataset_name=None), *TrlParser(ProcessArguments).parse_args_and_config(arguments)
        )


MODEL, DATA = ["--model_name_or_path", "./nowhere"], ["--dataset_name", "own.jsonl"]


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The scripts can be imported, in a folder with a data file and a model."""
    rows = [json.dumps({"prompt": f"{i}+2=", "answer": str(i + 2)}) + "\n" for i in range(16)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    (tmp_path / "model").symlink_to(embedded_model())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")


@pytest.fixture
def train_math(examples, tmp_path, monkeypatch):
    """The module, beside YAML files; it may begin no warm-up."""
    (tmp_path / "model.yaml").write_text("model_name_or_path: ./nowhere\n")
    (tmp_path / "misspelt.yaml").write_text("model-name-or-path: model\n")
    (tmp_path / "list.yaml").write_text("- max_steps: 2\n")
    import train_math

    monkeypatch.setattr(train_math, "embedded_model", None)
    return train_math


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # half a task, in all spellings that argparse takes
        (MODEL, "model_name_or_path='./nowhere' with dataset_name=None: give both"),
        (["--model_name=./nowhere"], "give both"),
        (["--config", "model.yaml"], "give both"),
        (DATA, "model_name_or_path=None with dataset_name='own.jsonl': give both"),
        # options without effect
        (["--dataset_train_split", "trian"], r"\['dataset_train_split'\] have no effect without --model_name_or_path"),
        (["--prompt_template", "plain"], r"\['prompt_template'\] have no effect without"),
        (["--reward_name", "judge"], "reward_name='judge' has no effect without --reward_path"),
        ([*MODEL, *DATA, "--dataset_test_split", "dev"], "no effect, since nothing is evaluated: add --eval_strategy"),
        ([*MODEL, *DATA, "--do_eval"], "no effect, since nothing is evaluated"),
        # the YAML file, by TRL
        (["--config", "misspelt.yaml"], "Unknown arguments .*--model-name-or-path"),
        (["--config", "list.yaml"], "list.yaml must contain a YAML mapping"),
        # what is not there
        ([*MODEL, *DATA], "model='./nowhere' cannot be loaded: neither a directory"),
        (["--model_name_or_path", "", *DATA], "model='' cannot be loaded"),
        (["--model_name_or_path", "model", "--dataset_name", "./none.jsonl"], "'./none.jsonl' is neither a path"),
        (["--model_name_or_path", "model", *DATA, "--dataset_train_split", "trian"], "has no split 'trian'"),
        (["--model_name_or_path", "model", *DATA, "--eval_strategy", "steps"], "'own.jsonl' has no split 'test'"),
        (["--model_name_or_path", "model", *DATA, "--reward_path", "nowhere.py"], "nowhere.py' is no Python file"),
    ],
)
def test_mistakes(train_math, arguments, message):
    with pytest.raises(ValueError, match=message):
        train_math.main([*arguments, *flags(SMALL)])


def test_code_without_tests_is_a_mistake(train_math, tmp_path):
    import train_code

    (tmp_path / "own.jsonl").write_text(json.dumps({"text": "Add one.", "test_list": []}) + "\n")
    arguments = ["--model_name_or_path", "model", *DATA, *flags(SMALL)]
    with pytest.raises(ValueError, match="1 of 1 rows of 'own.jsonl' lack tests in 'test_list'"):
        train_math.main(arguments, make_task=train_code.Programming)


def test_the_paper_s_runs_are_no_mistakes(train_math):
    types = (train_math.MathArguments, train_math.DASHConfig, train_math.ModelConfig)
    one_process = ["--use_cpu", "--bf16=False", "--per_device_train_batch_size=8"]  # where the paper has four
    files = sorted((ROOT / "examples" / "configs").glob("*.yaml"))
    for file in (file for file in files if not file.stem.startswith("sft_")):
        script, args, model = train_math.parse(["--config", str(file), *one_process], types, {})
        train_math.check_effects(script, args, model)
        assert (model.model_name_or_path, args.logging_steps) == (
            yaml.safe_load(file.read_text())["model_name_or_path"],
            1,
        )


def test_what_asks_for_an_evaluation_gets_its_data(train_math):
    types = (train_math.MathArguments, train_math.DASHConfig, train_math.ModelConfig)
    asked = {(): None, ("--eval_strategy", "steps"): 256, ("--eval_on_start",): 256}
    for arguments, rows in asked.items():
        script, args, _ = train_math.parse([*arguments, *flags(SMALL)], types, {})
        evaluation = train_math.load_problems(train_math.Mathematics(script), args, None)[1]
        assert (evaluation and len(evaluation)) == rows


OWN_REWARDS = """
from helper import WORTH

def compute_score(data_source, solution_str, ground_truth):
    return WORTH * (len(solution_str + ground_truth) % 2)

class Length:
    def compute_score(self, completion):
        return len(completion[-1]["content"]), {"digits": 1.0}
"""


@pytest.fixture
def own_rewards(tmp_path):
    (tmp_path / "helper.py").write_text("WORTH = 3")
    (tmp_path / "own.py").write_text(OWN_REWARDS)
    return tmp_path / "own.py"


@pytest.mark.parametrize("name", ["compute_score", "Length"])
def test_a_reward_of_one_s_own(examples, own_rewards, tmp_path, monkeypatch, name):
    monkeypatch.setattr("train_math.measure", lambda *arguments: {})
    settings = {**SMALL, "max_steps": 1, "reward_path": own_rewards, "reward_name": name, "output_dir": tmp_path}
    main(*flags(settings))
    (step,) = steps(tmp_path)
    assert step["rewards/Length/digits"] == 1.0 if name == "Length" else 0 < step["rewards/compute_score/mean"] < 3


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (OWN_REWARDS, "compute_scores", r"defines no 'compute_scores'; it has \['compute_score', 'Length'\]"),
        ("import nothing_like_it", "x", "fails when it is run: ModuleNotFoundError"),
        ("def x(:", "x", "fails when it is run: SyntaxError"),
    ],
)
def test_files_without_the_reward(own_rewards, text, name, message):
    own_rewards.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_reward(own_rewards, name)


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
