"""What a process holds as time goes by: memory of a GPU, and of the host."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


def allocated(device: torch.device) -> int:
    """Bytes that tensors on a GPU have now; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class Minutes:
    """Numbers of bytes at the beginning, about once a minute, and at the end.

    Each has ``seconds`` since the beginning, the GPU's memory that tensors have (``allocated``) and that torch has for
    them (``reserved``), and what the process has of the host's (``resident``).
    """

    def __init__(self, device: torch.device, seconds: float = 60.0) -> None:
        self._device, self._seconds = device, seconds
        self._begun = time.monotonic()
        self.taken: list[dict[str, int]] = []
        self.take()

    def pass_by(self) -> None:
        """Take the numbers if a minute is over."""
        if time.monotonic() - self._begun >= self._seconds * len(self.taken):
            self.take()

    def take(self) -> None:
        self.taken.append(
            {
                "seconds": round(time.monotonic() - self._begun),
                "allocated": allocated(self._device),
                "reserved": torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0,
                "resident": _resident(),
            }
        )


def _resident() -> int:
    statistics = Path("/proc/self/statm")
    return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statistics.exists() else 0
