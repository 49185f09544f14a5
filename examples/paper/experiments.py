"""The paper's methods, tables and figures, and their settings for the paper's models and for the toy model.

A run is a method with a model size and a seed. At the paper's scale, a file in `examples/configs/` has its settings. At
the toy scale, the flags below override the defaults of the training scripts. The toy model trains in one process, with
8 rows per micro-step as in the paper (2 on each of 4 GPUs), and with 16 micro-steps per optimizer step instead of 32.
Tables and figures refer to methods. If they refer to the same method, they share its runs.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "configs"
TOY_REWARDS = Path(__file__).parents[2] / "dash_trl" / "toy" / "problems.py"
TEACHER = "Qwen/Qwen2.5-7B-Instruct"
# The paper's temperature in training. It does not say which one it evaluates with. The authors' scripts have 0.7 (MATH,
# run/evaluate.py) or 0.6 (lighteval), each with top_p 0.95 and one sample, and 0.9 for programs, with 8 samples.
TEMPERATURE = 0.9


# ---------------------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Method:
    """How a model is trained.

    Attributes:
        script: name in examples/. None: the model is not trained.
        flags: flags at the toy scale.
        code: True = on programs, False = on mathematics.
        stopped_by: a method. Its training time is the time limit of this method.
        traces: True = the model learns from a teacher's solutions.
    """

    script: str | None
    flags: dict[str, Any] = field(default_factory=dict)
    code: bool = False
    stopped_by: str | None = None
    traces: bool = False


# Optimizer steps of the toy runs, over which the learning rate falls to 0.
STEPS = 40
CODE_STEPS = 20
MICRO_STEPS = 16  # micro-steps of a toy optimizer step
DASH = {
    "max_steps": STEPS,
    "beta": 0.04,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "filter_denominator": "all",
    "gradient_filter_threshold": 0.1,
}
NO_GF = {**DASH, "gradient_filter_threshold": None}
GRPO = {**NO_GF, "steps_per_generation": 1}
ROWS_4 = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": MICRO_STEPS // 2}  # 4 on each of 4 GPUs
MULTI = {"num_iterations": 3, "max_steps": 3 * STEPS}
MINI = {"gradient_accumulation_steps": 1, "steps_per_generation": MICRO_STEPS, "max_steps": MICRO_STEPS * STEPS}
ON_CODE = {"max_steps": CODE_STEPS}

TRACES = "traces"  # samples the teacher's solutions, which all runs with `traces=True` share
PAPER_TRACES = {
    "dataset_name": "nlile/hendrycks-MATH-benchmark",
    "temperature": 0.7,
    "use_vllm": True,
}

METHODS = {
    TRACES: Method("traces", {"temperature": 0.7}),
    "base": Method(None),
    "sft_h": Method("sft"),
    "sft_m": Method("sft", traces=True),
    "grpo": Method("train_math", GRPO),
    "no_gf": Method("train_math", NO_GF),
    "dash": Method("train_math", DASH),
    "no_kl": Method("train_math", {**DASH, "beta": 0.0}),
    "multi": Method("train_math", {**DASH, **MULTI}, stopped_by="dash"),
    "mini": Method("train_math", {**DASH, **MINI}, stopped_by="dash"),
    "no_gf_rows4": Method("train_math", {**NO_GF, **ROWS_4}),
    "dash_rows4": Method("train_math", {**DASH, **ROWS_4}),
    "base_code": Method(None, code=True),
    "sft_h_code": Method("sft", {"dataset_name": "toy_code"}, code=True),
    "grpo_code": Method("train_code", {**GRPO, **ON_CODE}, code=True),
    "no_gf_code": Method("train_code", {**NO_GF, **ON_CODE}, code=True),
    "dash_code": Method("train_code", {**DASH, **ON_CODE}, code=True),
}


# ------------------------------------------------------------------------------------------------------ evaluations


@dataclass(frozen=True)
class Evaluation:
    """An evaluation by `dash_trl eval`.

    Attributes:
        paper: flags at the paper's scale.
        toy: flags at the toy scale.
        problems: a file that `problems.py` writes. It replaces the dataset at the toy scale.
    """

    paper: dict[str, Any]
    toy: dict[str, Any]
    problems: str | None = None


# The reward function of the toy problems, and the length of their answers.
ARITHMETIC = {"reward_path": TOY_REWARDS, "reward_name": "arithmetic_reward", "max_completion_length": 64}
MATH = {"num_samples": 4, "k": 1, "temperature": TEMPERATURE}
CODE = {"num_samples": 8, "k": (1, 8)}
MANY = {"num_samples": 64, "k": (1, 2, 4, 8, 16, 32, 64)}  # for Figure 5
EVALUATIONS = {
    "in": Evaluation(
        {"dataset_name": "nlile/hendrycks-MATH-benchmark", **MATH},
        {"dataset_name": "toy", **MATH, "temperature": 1.0},
    ),
    "out": Evaluation(
        {"dataset_name": "openai/gsm8k", "dataset_config": "main", **MATH},
        {**MATH, "temperature": 1.0, "dataset_test_split": "train", **ARITHMETIC},
        problems="toy_shifted.jsonl",
    ),
    "many": Evaluation(
        {"dataset_name": "nlile/hendrycks-MATH-benchmark", **MANY, "temperature": TEMPERATURE},
        {"dataset_name": "toy", "num_samples": 16, "k": (1, 2, 4, 8, 16), "temperature": 1.0},
    ),
    "code": Evaluation(
        {"dataset_name": "evalplus/mbppplus", **CODE, "temperature": TEMPERATURE},
        {**CODE, "temperature": 1.0, "dataset_test_split": "train[:114]", "max_completion_length": 24},
        problems="toy_code.jsonl",
    ),
}


# ----------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        source: what the column shows. ("time", "") = training time. (evaluation, "accuracy") = accuracy.
            (evaluation, "8") = pass@8.
        title: the title at the paper's scale.
        toy: the title at the toy scale.
        unit: the paper's unit of time, in seconds.
    """

    source: tuple[str, str]
    title: str
    toy: str
    unit: float = 3600.0


HOURS = Column(("time", ""), "Time (h)", "Time (s)")
MINUTES = Column(("time", ""), "Time (min)", "Time (s)", unit=60.0)
IN = Column(("in", "accuracy"), "MATH (%)", "`7+5-3` (%)")
OUT = Column(("out", "accuracy"), "GSM8K (%)", "`7+5-3=` (%)")
PASS_1 = Column(("code", "1"), "pass@1 (%)", "pass@1 (%)")
PASS_8 = Column(("code", "8"), "pass@8 (%)", "pass@8 (%)")


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        label: the method's name in the table.
        method: the method's name in `METHODS`.
        size: model size in billions of parameters.
        paper: the paper's number in each column; None = "N/A".
    """

    label: str
    method: str
    size: str
    paper: tuple[float | None, ...]


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def _rows(label: str, method: str, **sizes: tuple[float | None, ...]) -> tuple[Row, ...]:
    """One row per size: `b05` is 0.5 billion parameters."""
    return tuple(Row(label, method, f"{name[1]}.{name[2]}", paper) for name, paper in sizes.items())


TABLES = {
    "table1": Table(
        "Comparison of SFT to on-policy RL on math",
        (IN, OUT),
        (
            *_rows("Base", "base", b05=(22.6, 30.3), b15=(48.0, 58.8), b30=(58.8, 66.0)),
            *_rows("SFT-H", "sft_h", b05=(8.0, 7.2), b15=(17.2, 32.8), b30=(24.0, 30.6)),
            *_rows("SFT-M", "sft_m", b05=(24.0, 22.7), b15=(46.2, 46.0), b30=(53.0, 66.0)),
            *_rows("DASH", "dash", b05=(27.2, 31.1), b15=(54.0, 58.8), b30=(64.6, 64.6)),
        ),
    ),
    "table2": Table(
        "Comparison of SFT to on-policy RL on coding",
        (PASS_1, PASS_8),
        (
            *_rows("Base", "base_code", b05=(2.6, 22.8), b15=(7.1, 60.5)),
            *_rows("SFT-H", "sft_h_code", b05=(8.77, 29.0), b15=(19.3, 42.1)),
            *_rows("DASH", "dash_code", b05=(11.4, 40.4), b15=(23.7, 63.2)),
        ),
    ),
    "table3": Table(
        "Comparing on-policy RL algorithms on Qwen2.5-0.5B for math",
        (HOURS, IN, OUT),
        (
            *_rows("Base", "base", b05=(None, 22.6, 30.3)),
            *_rows("GRPO", "grpo", b05=(38.9, 27.6, 32.8)),
            *_rows("No-GF", "no_gf", b05=(6.9, 27.4, 31.6)),
            *_rows("DASH", "dash", b05=(6.6, 27.2, 31.1)),
        ),
    ),
    "table4": Table(
        "Comparing on-policy RL algorithms using Qwen2.5-0.5B for coding",
        (MINUTES, PASS_1, PASS_8),
        (
            *_rows("Base", "base_code", b05=(None, 2.3, 22.8)),
            *_rows("GRPO", "grpo_code", b05=(35.3, 11.4, 49.1)),
            *_rows("No-GF", "no_gf_code", b05=(16.3, 10.5, 43.9)),
            *_rows("DASH", "dash_code", b05=(16.5, 11.4, 40.4)),
        ),
    ),
    "table5": Table(
        "Comparing PG to PPO for math",
        (IN, OUT),
        (
            *_rows("DASH", "dash", b05=(27.2, 31.1), b15=(54.0, 58.8)),
            *_rows("Multi", "multi", b05=(28.8, 31.5), b15=(54.0, 61.0)),
            *_rows("Mini", "mini", b05=(29.8, 31.6), b15=(36.0, 8.1)),
        ),
    ),
    "table6": Table(
        "Comparing No-KL to DASH and Base on math",
        (HOURS, IN, OUT),
        (
            *_rows("Base", "base", b05=(None, 22.6, 30.3), b15=(None, 48.0, 58.8), b30=(None, 58.8, 66.0)),
            *_rows("DASH (with KL)", "dash", b05=(6.6, 27.2, 31.1), b15=(12.8, 54.0, 58.8), b30=(22.6, 64.6, 64.6)),
            *_rows("No-KL", "no_kl", b05=(5.7, 31.4, 34.0), b15=(10.3, 56.8, 62.1), b30=(17.6, 66.4, 60.0)),
        ),
    ),
    "table10": Table(
        "Comparing No-GF to DASH with per device batch of 4 instead of 2 for Qwen2.5-0.5B on math",
        (HOURS, IN, OUT),
        (
            *_rows("No-GF", "no_gf_rows4", b05=(5.1, 31.8, 31.3)),
            *_rows("DASH", "dash_rows4", b05=(4.6, 28.4, 30.9)),
        ),
    ),
}


# ---------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: curves of logged metrics, the split of time, or pass@k.

    Attributes:
        title: title of the figure.
        table: a table. The figure shows the runs of this table, and is drawn together with it.
        methods: the methods by label.
        panels: for each panel's title, the names of logged metrics (see `MetricsFileCallback`). The panel shows their
            sum. None = the figure shows pass@k if it has an `evaluation`, else the split of time.
        sizes: model sizes. Each has its own row of panels; the toy scale shows only the first size.
        over: the logged metric on the horizontal axis.
        evaluation: an evaluation, of which the figure shows pass@k.
    """

    title: str
    table: str
    methods: dict[str, str]
    panels: dict[str, tuple[str, ...]] | None
    sizes: tuple[str, ...] = ("0.5",)
    over: str = "step"
    evaluation: str | None = None


SIGNAL = {
    "mean |advantage|": ("advantage/abs_mean",),
    "seconds of the loss": ("time/logprobs", "time/train"),
    "reward": ("reward",),
}
PG_PPO = {"DASH": "dash", "Multi": "multi", "Mini": "mini"}
FIGURES = {
    "figure1": Figure("The split of time", "table3", {"GRPO": "grpo", "No-GF": "no_gf", "DASH": "dash"}, None),
    "figure3": Figure("DASH and No-GF", "table3", {"DASH": "dash", "No-GF": "no_gf"}, SIGNAL),
    "figure4": Figure("PG and PPO", "table5", PG_PPO, {"reward": ("reward",)}, over="time/elapsed"),
    "figure5": Figure(
        "KL and pass@k",
        "table6",
        {"Base": "base", "DASH (with KL)": "dash", "No-KL": "no_kl"},
        None,
        sizes=("3.0",),
        evaluation="many",
    ),
    "figure6": Figure(
        "With and without KL",
        "table6",
        {"DASH": "dash", "No-KL": "no_kl"},
        {"reward": ("reward",), "tokens of a completion": ("completions/mean_length",)},
        sizes=("0.5", "1.5", "3.0"),
    ),
    "figure8": Figure("PG and PPO", "table5", PG_PPO, {"reward": ("reward",)}, sizes=("1.5",), over="time/elapsed"),
    "figure9": Figure(
        "DASH and No-GF, 4 rows per device", "table10", {"DASH": "dash_rows4", "No-GF": "no_gf_rows4"}, SIGNAL
    ),
}


# ------------------------------------------------------------------------------------------------------------- runs


def config_of(method: str, size: str) -> Path:
    """Return the YAML file of a run of the paper."""
    return CONFIGS / f"{method}_qwen2.5-{_short(size)}b.yaml"


def model_of(size: str) -> str:
    """Return the hub name of a base model of the paper."""
    return f"Qwen/Qwen2.5-{_short(size).upper()}B"


def _short(size: str) -> str:
    return size.removesuffix(".0")


def rows_of(table: str, *, toy: bool) -> list[Row]:
    """Return the rows of a table; the toy scale has only the size "0.5"."""
    return [row for row in TABLES[table].rows if not toy or row.size == "0.5"]
