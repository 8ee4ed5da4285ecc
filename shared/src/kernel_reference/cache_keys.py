"""Keys of Triton's cache that do not depend on which kernels a process compiled before.

A key is made of a function's source, the keys of the functions that it calls, and the constants that all of them read.
Triton (3.6 and 3.7) takes over a called function's constants before it asks for that function's key, with which alone
they are found: of one that no kernel has called before they are left out. So what was compiled ahead would be compiled
once more where another kernel that calls the same functions came first. Here keys are asked for before.
"""

from __future__ import annotations

import threading
from typing import Any

_lock = threading.Lock()


def settle_keys(kernel: Any) -> None:
    """Have Triton make a kernel's key, and those of the functions that it calls, once.

    The names are private to Triton: where it has others, keys are as it makes them.
    """
    # The interpreter makes none.
    if getattr(kernel, "hash", None) is not None or not hasattr(type(kernel), "cache_key"):
        return
    from triton.runtime import jit

    finder: Any = getattr(jit, "DependenciesFinder", None)
    if not hasattr(finder, "_update_hash"):
        return
    with _lock:
        update = finder._update_hash

        def by_key(self: Any, function: Any) -> None:
            _ = function.cache_key
            update(self, function)

        finder._update_hash = by_key
        try:
            _ = kernel.cache_key
        finally:
            finder._update_hash = update
