"""Plain PyTorch oracles for attention, linear attention and projection kernels, and tools to test kernels against them.

``import kernel_reference`` loads nothing but the standard library; each module is imported by its name
(``from kernel_reference import attention``). The oracles need torch and einops; the host side of a kernel package
(checks, ragged, transforms, dispatch, launching, collectives, partials, plans, integers) torch at most;
``kernel_reference.testing`` and ``kernel_reference.bench`` the extras of the same names.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kernel-reference")
except PackageNotFoundError:
    # A source tree on PYTHONPATH carries no metadata.
    __version__ = "0+source"

__all__ = [
    "ahead",
    "attention",
    "blocks",
    "cascade",
    "checks",
    "collectives",
    "dispatch",
    "indexing",
    "integers",
    "launching",
    "models",
    "paging",
    "partials",
    "plans",
    "projection",
    "ragged",
    "recurrence",
    "selection",
    "sharding",
    "transforms",
]
