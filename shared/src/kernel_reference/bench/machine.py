"""The machine, driver and versions that a measurement belongs to."""

from __future__ import annotations

import importlib
import platform
import re
import subprocess
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """Device name, driver, compute capability, CUDA (or HIP) version and the versions of what runs on it."""

    device: str
    driver: str
    capability: str
    cuda: str
    torch: str
    triton: str
    python: str


def describe(device: torch.device) -> Machine:
    """Describe the machine of the CUDA (or HIP) ``device``."""
    major, minor = torch.cuda.get_device_capability(device)
    return Machine(
        device=torch.cuda.get_device_name(device),
        driver=driver_version(),
        capability=f"{major}.{minor}",
        cuda=f"hip {torch.version.hip}" if torch.version.hip else str(torch.version.cuda),
        torch=str(torch.__version__),
        triton=_triton_version(),
        python=platform.python_version(),
    )


def driver_version() -> str:
    """The GPU driver's version, from the first of nvidia-smi, /proc, NVML, amdgpu that knows it, else ``unknown``."""
    for source in (_from_nvidia_smi, _from_proc, _from_nvml, _from_amdgpu):
        # A missing tool, file or package means: ask the next one.
        with suppress(Exception):
            found = source()
            if found:
                return found
    return "unknown"


def _from_nvidia_smi() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0].strip()


def _from_proc(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", path.read_text(encoding="utf-8"))
    return found.group(1) if found else ""


def _from_nvml() -> str:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        found = nvml.nvmlSystemGetDriverVersion()
        return found.decode() if isinstance(found, bytes) else str(found)
    finally:
        nvml.nvmlShutdown()


def _from_amdgpu() -> str:
    return f"amdgpu {Path('/sys/module/amdgpu/version').read_text(encoding='utf-8').strip()}"


def _triton_version() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return "not installed"


def package_of(file: Path) -> tuple[str, str]:
    """Name and version of the package that ``file`` lies in.

    From the nearest pyproject.toml above it with a [project]; without one, the name of the folder that holds the file's
    folder. The version is the installed one, so that a stale installation shows, else that of pyproject.toml.
    """
    name, static = file.resolve().parent.parent.name, "0+source"
    for folder in file.resolve().parents:
        project = folder / "pyproject.toml"
        if project.is_file():
            table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
            if "name" in table:
                name, static = str(table["name"]), str(table.get("version", static))
                break
    try:
        return name, version(name)
    except PackageNotFoundError:
        return name, static


def commit_of(folder: Path) -> str | None:
    """The git commit of ``folder``, with ``+changes`` where tracked files differ from it; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
