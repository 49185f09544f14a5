"""The model card of a run: TRL's, and the settings by which the model was trained."""

from dataclasses import fields

from dash_trl import __version__
from dash_trl.config import DASHConfig

# TRL's options that decide what is learned, beside those of DASH's own that are set.
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
PRIVATE = ("vllm_server_urls", "vllm_weight_dir")  # addresses and folders are nobody's business on the hub
BEHIND = "### Framework versions"  # the heading of TRL's card before which the settings stand


def with_settings_of_run(card: str, args: DASHConfig, processes: int) -> str:
    """A card of TRL's with a table of the settings; an option of DASH's own only where it is not its default.

    Args:
        card: Markdown. processes: how many trained.
    """
    own = [one for one in fields(args) if one.name in DASHConfig.__annotations__ and one.name not in PRIVATE]
    names = [*SHARED, *(one.name for one in own if getattr(args, one.name) != one.default)]
    rows = [f"| `{name}` | {getattr(args, name)} |" for name in dict.fromkeys(names)]
    table = "\n".join([f"| dash_trl {__version__} | {processes} processes |", "|---|---|", *rows])
    before, heading, behind = card.partition(BEHIND)
    return f"{before}### Settings\n\n{table}\n\n{heading}{behind}"
