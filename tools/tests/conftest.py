"""Tests import tools as the tools import each other, and of kernel-reference what needs no torch, from the sources."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "shared" / "src")]
