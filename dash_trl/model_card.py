"""Adds the settings of a run to TRL's model card."""

from dataclasses import fields

from dash_trl import __version__
from dash_trl.config import DASHConfig

# TRL's options with the largest effect on the result. The model card always lists them.
SHARED = (
    "loss_type",
    "learning_rate",
    "lr_scheduler_type",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "max_completion_length",
    "temperature",
    "beta",
    "scale_rewards",
    "seed",
)
PRIVATE = ("vllm_server_urls", "vllm_weight_dir")  # addresses and folders do not belong on the hub
BEHIND = "### Framework versions"  # the settings are inserted before this heading of TRL's card
UNNAMED = "[None](https://huggingface.co/None)"  # TRL's card has this link if the model came from a folder


def with_settings_of_run(card: str, args: DASHConfig, processes: int) -> str:
    """Insert a table of the run's settings into TRL's model card.

    The options that `DASHConfig` adds to TRL's are listed only if they differ from their defaults. Those in `PRIVATE`
    are never listed.

    Args:
        card: TRL's card, in Markdown.
        args: the settings.
        processes: number of processes that trained.
    Returns:
        The card with the table, in Markdown.
    """
    own = [one for one in fields(args) if one.name in DASHConfig.__annotations__ and one.name not in PRIVATE]
    names = [*SHARED, *(one.name for one in own if getattr(args, one.name) != one.default)]
    rows = [f"| `{name}` | {getattr(args, name)} |" for name in dict.fromkeys(names)]
    table = "\n".join([f"| dash_trl {__version__} | {processes} processes |", "|---|---|", *rows])
    before, heading, behind = card.replace(UNNAMED, "a local model").partition(BEHIND)
    return f"{before}### Settings\n\n{table}\n\n{heading}{behind}"
