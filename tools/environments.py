"""Makes the virtual environments that the Makefile names: with uv where it is installed, else with venv and pip.

    python tools/environments.py test                 .venv: torch for a CPU, both packages and their tools
    python tools/environments.py oldest-triton        .venv/triton-3.6.0, next to its own
    python tools/environments.py triton 3.7.1         .venv-triton-3.7.1: the same with another Triton
    python tools/environments.py gpu                  .venv-gpu: on top of a torch that sees the GPU
    python tools/environments.py engines              .venv-engines: vLLM, SGLang and transformers on a CPU

constraints.txt and tests/engines/constraints.txt pin every package, those that others ask for included. uv does not
read pip's configuration: where it cannot find a package, pip is asked. INDEX names another package index, TORCH what is
installed for a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST_TRITON = "3.6.0"
CPU_TORCH = "torch==2.13.0+cpu"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_TORCH = "torch==2.15.0"
PROJECTS = ("-e", "./packages/softsm[trace]", "-e", ".[dev,docs,hf,plot]")
SEES_GPU = "import torch; assert torch.cuda.is_available()"


class Environment:
    """One virtual environment. Byte code is left to the first import: compiling all of torch takes longer than
    unpacking it."""

    def __init__(self, name: str):
        self.path = ROOT / name
        self.python = self.path / "bin" / "python"
        self.log = self.path / "install.log"

    def create(self, python: str = sys.executable, *options: str) -> None:
        if not self.python.exists():
            run([python, "-m", "venv", *options, str(self.path)])

    def install(self, *arguments: str, quiet: bool = False) -> bool:
        """Whether the packages are there afterwards. What pip prints about a failure is shown, or only logged."""
        index = ["--index-url", os.environ["INDEX"]] if os.environ.get("INDEX") else []
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile", *index]
        uv = shutil.which("uv")
        with self.log.open("a") as log:
            if uv:
                fast = [uv, "pip", "install", "-q", "--python", str(self.python), *index, *arguments]
                if subprocess.run(fast, cwd=ROOT, stdout=log, stderr=log).returncode == 0:
                    return True
            return subprocess.run([*pip, *arguments], cwd=ROOT, stderr=log if quiet else None).returncode == 0

    def require(self, *arguments: str) -> None:
        if not self.install(*arguments):
            sys.exit(f"the packages of {self.path.name} could not be installed; see above and {self.log}")

    def done(self) -> None:
        (self.path / ".installed").touch()


def run(command: list[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def wants_python(*versions: tuple[int, int]) -> None:
    if sys.version_info[:2] not in versions:
        names = " or ".join(f"{major}.{minor}" for major, minor in versions)
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(f"{sys.executable} is Python {found}; the pinned versions are for {names}: set PYTHON=")


def cpu_torch(env: Environment, torch: str, *constraints: str) -> bool:
    """From the usual index, or else from that of the CPU builds."""
    return env.install(*constraints, torch, quiet=True) or env.install(
        "--extra-index-url", CPU_TORCH_INDEX, *constraints, torch, quiet=True
    )


def test(name: str = ".venv", triton: str | None = None) -> None:
    wants_python((3, 11), (3, 12), (3, 13))
    env = Environment(name)
    env.create()
    pinned = (ROOT / "constraints.txt").read_text()
    if triton:
        pinned = re.sub(r"^triton==.*", f"triton=={triton}", pinned, flags=re.M)
    constraints = env.path / "constraints.txt"
    constraints.write_text(pinned)
    print(f"installing torch for a CPU, dsv4, softsm and their tools into {name}", flush=True)
    if not cpu_torch(env, CPU_TORCH, "-c", str(constraints)):
        print(f"{CPU_TORCH} is not available here (see {env.log}); taking {GPU_TORCH}, which accepts triton 3.9, too")
        constraints.write_text(re.sub(r"^setuptools==.*\n", "", re.sub(r"^torch==.*", GPU_TORCH, pinned, flags=re.M)))
        env.require("-c", str(constraints), GPU_TORCH)
    env.require("-c", str(constraints), *PROJECTS)
    env.done()


def oldest_triton() -> None:
    """Besides the environment's own: its front end reads every Hopper kernel in make test."""
    env = Environment(".venv")
    beside = env.path / f"triton-{OLDEST_TRITON}"
    print(f"installing triton {OLDEST_TRITON} beside it", flush=True)
    env.require("--no-deps", "--upgrade", "--target", str(beside), f"triton=={OLDEST_TRITON}")
    (beside / ".installed").touch()


def gpu() -> None:
    """On top of the torch that PYTHON or python3 has, if that sees the GPU; else with the one of TORCH."""
    env, wanted = Environment(".venv-gpu"), os.environ.get("TORCH")
    for python in () if wanted else (sys.executable, "python3"):
        if subprocess.run([python, "-c", SEES_GPU], stderr=subprocess.DEVNULL).returncode == 0:
            print(f"installing dsv4, softsm and their tools into {env.path.name}, on top of the torch of {python}")
            env.create(python, "--clear", "--system-site-packages")
            break
    else:
        env.create()
        env.require(wanted or GPU_TORCH)
    env.require(*PROJECTS)
    if subprocess.run([str(env.python), "-c", SEES_GPU], stderr=subprocess.DEVNULL).returncode:
        shutil.rmtree(env.path)
        sys.exit(
            "this machine has a GPU, but the torch that was found or installed does not see it; set PYTHON to a "
            "Python whose torch does, or TORCH to what is to be installed"
        )
    env.done()


def engines() -> None:
    """vLLM pins a numba on which softsm does not run, and asks for packages for images and sound that need another
    torch. The oldest and the newest transformers are next to the one that vLLM needs."""
    wants_python((3, 11))
    env, folder = Environment(".venv-engines"), ROOT / "tests" / "engines"
    env.create()
    torch = re.search(r"^torch==\S+", (folder / "requirements.txt").read_text(), flags=re.M)
    assert torch
    print(f"installing {torch[0]}, vLLM and SGLang into {env.path.name}", flush=True)
    if not cpu_torch(env, torch[0]):
        sys.exit(f"{torch[0]} is not available here, see {env.log}: the engines were not tested")
    env.require("-r", str(folder / "requirements.txt"), "-c", str(folder / "constraints.txt"))
    subprocess.run([str(env.python), "-m", "pip", "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec"])
    others = ("numba==0.68.1", "llvmlite==0.50.0", "sglang==0.5.23", "-e", "./packages/softsm", "-e", ".")
    env.require("--no-deps", *others)
    beside = {
        "5.17.0": ("transformers==5.17.0", "huggingface_hub==1.33.0", "kernels==0.16.2", "kernels-data==0.16.2"),
        "5.22.2": ("transformers==5.22.2",),
    }
    for version, packages in beside.items():
        env.require("--no-deps", "--upgrade", "--target", str(env.path / "transformers" / version), *packages)
    env.done()


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "triton":
        test(f".venv-triton-{rest[0]}", rest[0])
    else:
        {"test": test, "oldest-triton": oldest_triton, "gpu": gpu, "engines": engines}[what]()


if __name__ == "__main__":
    main()
