"""`dash_trl doctor` shows versions, GPUs, vLLM and the sandbox of this machine, and which parts of dash_trl work on it.

    look() ──► Machine: what was found ──► findings(machine): what follows from it ──► printed

The command imports the trainer and starts the sandbox. It neither loads a model nor starts a server, so "yes" for vLLM
only means that the installed version fits this machine. The exit status is 1 if training does not work.
"""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from dash_trl.sandbox import Sandbox
from dash_trl.versions import bounds, fits, installed

NEEDED = ("torch", "trl", "transformers", "accelerate", "datasets", "math-verify")
# optional package → the extra of dash_trl that installs it
EXTRAS = {
    "vllm": "vllm",
    "deepspeed": "deepspeed",
    "peft": "peft",
    "ray": "ray",
    "openai": "judge",
    "trackio": "trackio",
}
PLUGINS = "vllm.general_plugins"  # the group of entry points that vLLM loads


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide what works on it.

    Attributes:
        versions: package → its installed version, for `NEEDED`, `EXTRAS` and dash_trl; None = not installed.
        asked: package → its required versions.
        gpus: the names of the GPUs that torch sees.
        bf16: whether the GPUs compute in bf16.
        torch_build: "CPU", or the platform that torch was built for.
        driver: whether nvidia-smi exists.
        vllm_program: whether the command `vllm` can be called.
        vllm_modules: whether `vllm` can be imported.
        vllm_plugin: whether vLLM finds dash_trl's plugin.
        broken: the error when the trainer is imported; empty if the import works.
        sandbox: the kind of isolation in which the sandbox runs programs; None = the sandbox does not start.
        no_sandbox: the error when the sandbox starts; empty if it starts.
    """

    versions: Mapping[str, str | None]
    asked: Mapping[str, SpecifierSet] = field(default_factory=dict)
    gpus: Sequence[str] = ()
    bf16: bool = False
    torch_build: str = "CPU"
    driver: bool = False
    vllm_program: bool = False
    vllm_modules: bool = False
    vllm_plugin: bool = False
    broken: str = ""
    sandbox: str | None = None
    no_sandbox: str = ""


@dataclass(frozen=True)
class Finding:
    """One line of the report: whether a feature works on this machine, and why.

    Attributes:
        what: the feature.
        works: "yes", "no", or "but", which means that the feature works with a restriction.
        why: the reason, and what to do about it.
    """

    what: str
    works: str
    why: str

    def __str__(self) -> str:
        return f"  {self.works:4} {self.what}: {self.why}"


def look() -> Machine:
    """Examines this machine. For this, it imports torch and the trainer, and starts and ends a sandbox."""
    names = ["dash_trl", *NEEDED, *EXTRAS]
    extras = {name: bounds("trl" if name == "vllm" else "dash_trl", extra) for name, extra in EXTRAS.items()}
    asked = bounds() | {name: found[name] for name, found in extras.items() if name in found}
    kind, problem = _sandbox()
    return Machine(
        {name: installed(name) for name in names},
        asked,
        **(_torch() if find_spec("torch") else {}),
        driver=shutil.which("nvidia-smi") is not None,
        broken=_broken(),
        vllm_program=_has_vllm_program(),
        vllm_modules=find_spec("vllm") is not None,
        vllm_plugin=any(one.value.startswith("dash_trl.") for one in entry_points(group=PLUGINS)),
        sandbox=kind,
        no_sandbox=problem,
    )


def _torch() -> dict:
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    return {"gpus": gpus, "bf16": bool(gpus) and torch.cuda.is_bf16_supported(), "torch_build": build}


def _broken() -> str:
    """Returns the error when the trainer is imported; empty if the import works.

    Versions alone do not show every conflict between packages, so the import is tried.
    """
    try:
        import dash_trl.trainer  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _has_vllm_program() -> bool:
    if not find_spec("torch"):
        return False
    from dash_trl.serve import vllm_program

    try:
        return bool(vllm_program())
    except ValueError:
        return False


def _sandbox() -> tuple[str | None, str]:
    try:
        return Sandbox().kind, ""
    except ValueError as error:
        return None, str(error)


# ------------------------------------------------------------------------------------------------ conclusions


def findings(machine: Machine) -> list[Finding]:
    """Returns which features work on a machine, training first."""
    return [*_training(machine), *_on_several(machine), *_vllm(machine), _programs(machine), *_packages(machine)]


def _fits(machine: Machine, name: str) -> bool:
    found = machine.versions.get(name)
    return found is not None and (name not in machine.asked or fits(found, machine.asked[name]))


def wrong_versions(machine: Machine) -> list[str]:
    """Lists the packages of `NEEDED` that are missing or have an untested version, as texts."""
    found = {name: machine.versions[name] for name in NEEDED if not _fits(machine, name)}
    return [
        f"{name} {one} ({machine.asked[name]} was tested)" if one else f"{name} is missing"
        for name, one in found.items()
    ]


def _training(machine: Machine) -> Iterator[Finding]:
    wrong = wrong_versions(machine)
    if machine.broken:
        yield Finding("training", "no", f"DASHTrainer cannot be imported ({'; '.join([machine.broken, *wrong])})")
        return
    missing = [name for name in NEEDED if machine.versions[name] is None]
    if missing:
        yield Finding("training", "no", f"{'; '.join(wrong)}. Run `pip install dash_trl`.")
    elif wrong:
        yield Finding("training", "but", f"{'; '.join(wrong)}: this was never tested. Install a tested version.")
    if not missing and machine.gpus and machine.bf16:
        yield Finding("training on a GPU", "yes", f"{', '.join(machine.gpus)}, in bf16")
    elif not missing and machine.gpus:
        yield Finding(
            "training on a GPU", "but", f"{', '.join(machine.gpus)}, not in bf16: add --bf16 false, or --fp16 true"
        )
    elif machine.driver:
        why = "nvidia-smi exists, but torch sees no GPU"
        remedy = (
            "install the build for your CUDA version"
            if machine.torch_build == "CPU"
            else "check the driver and CUDA_VISIBLE_DEVICES"
        )
        yield Finding("training on a GPU", "no", f"{why} (its build: {machine.torch_build}): {remedy}.")
    else:
        yield Finding("training on a GPU", "no", "there is none")
    if not missing:
        yield Finding(
            "training on the CPU",
            "yes",
            "--use_cpu true --bf16 false (`dash_trl train` without a model sets these itself)",
        )


def _on_several(machine: Machine) -> Iterator[Finding]:
    count = len(machine.gpus)
    if count > 1:
        yield Finding("training on several GPUs", "yes", f"--accelerate_config ddp --num_processes {count}")
    else:
        yield Finding("training on several GPUs", "no", f"there {'is one' if count else 'are none'}")
    yield _package(machine, "deepspeed", "ZeRO (--accelerate_config zero2, zero3)")


def _vllm(machine: Machine) -> Iterator[Finding]:
    what = "sampling by vLLM (serve, --use_vllm)"
    found, cpu_build = machine.versions["vllm"], "cpu" in (machine.versions["vllm"] or "").partition("+")[2]
    if found is None or not machine.vllm_modules:
        how = (
            '`pip install "dash_trl[vllm]"`'
            if machine.gpus
            else "without a GPU vLLM needs its CPU build (docs/howto/vllm.md)"
        )
        half = "" if found is None else f" (the metadata of {found} exist, but its modules do not)"
        yield Finding(what, "no", f"not installed{half}: {how}")
    elif not machine.gpus and not cpu_build:
        yield Finding(what, "no", f"{found} needs a GPU; a CPU needs another build (docs/howto/vllm.md)")
    elif not _fits(machine, "vllm"):
        yield Finding(what, "but", f"{found}, but TRL asks for {machine.asked['vllm']}")
    elif not machine.vllm_program:
        yield Finding(
            what, "but", f"{found}, for --use_vllm only: the command `vllm` is not on the PATH, so no server can start"
        )
    elif not machine.vllm_plugin:
        why = f"{found} does not find dash_trl's plugin: install dash_trl in this environment"
        yield Finding(what, "but", f"{why}{', else a server on a CPU ignores new weights' if cpu_build else ''}")
    else:
        slow = ", on the CPU although there are GPUs" if machine.gpus and cpu_build else ""
        yield Finding(what, "but" if slow else "yes", f"{found}{slow}; installed, but not started here")


def _programs(machine: Machine) -> Finding:
    what = "programs in a sandbox (CodeReward)"
    if machine.sandbox is None:
        return Finding(what, "no", machine.no_sandbox)
    return Finding(what, "yes", f"confined by bubblewrap, with {machine.sandbox} of their own")


def _packages(machine: Machine) -> Iterator[Finding]:
    yield _package(machine, "peft", "LoRA")
    yield _package(machine, "ray", 'rewards on a cluster (backend="ray")')
    yield _package(machine, "openai", "JudgeReward")
    yield _package(machine, "trackio", 'runs in a browser (report_to="trackio")')


def _package(machine: Machine, name: str, what: str) -> Finding:
    found, install = machine.versions[name], f'`pip install "dash_trl[{EXTRAS[name]}]"`'
    if found is None:
        return Finding(what, "no", f"{name} is not installed: {install}")
    if not _fits(machine, name):
        return Finding(what, "but", f"{name} {found}, but {machine.asked[name]} was tested: {install}")
    return Finding(what, "yes", f"{name} {found}")


def report(machine: Machine) -> str:
    """Returns the text that `dash_trl doctor` prints: versions, and all findings."""
    versions = [f"  {name} {found or '–'}" for name, found in machine.versions.items() if found or name in NEEDED]
    return "\n".join(
        [
            f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
            f"torch's build: {machine.torch_build}; GPUs: {', '.join(machine.gpus) or 'none'}",
            "\nVersions",
            *versions,
            "\nWhat works",
            *map(str, findings(machine)),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dash_trl doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    machine = look()
    print(report(machine))
    return int(bool(machine.broken) or any(machine.versions[name] is None for name in NEEDED))


if __name__ == "__main__":
    sys.exit(main())
