"""What starts a kernel, built beside it: Triton 3.6 has a C compiler make a function for the types of its arguments.

That takes 0.25 to 0.4 s, and Triton begins it once a kernel is compiled, though it asks for nothing but those types.
What is built lies in Triton's cache, where whoever loads the kernel finds it. The names read here are private to
Triton: where it has others, as from 3.7 on, which builds no such function, nothing is begun.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def are_built() -> bool:
    """Whether this Triton has a C compiler build them, on NVIDIA's GPUs."""
    try:
        from triton.backends.nvidia import driver
    except ImportError:
        return False
    return hasattr(driver, "make_launcher") and hasattr(driver, "compile_module_from_src")


def launcher_builder(compile_kernel: Callable[[], Any]) -> Callable[[], None] | None:
    """What builds that of a kernel, of what Triton's AsyncCompileMode is given to compile it; None where none is built.

    What fails there fails again, and says so, where the kernel is loaded.
    """
    given = captured(compile_kernel)
    if getattr(given.get("target"), "backend", None) != "cuda" or "src" not in given or not are_built():
        return None

    def build() -> None:
        with suppress(Exception):
            _build(given["src"])

    return build


def captured(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function has of the one that it was defined in."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return {
        name: cell.cell_contents for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True)
    }


def _build(source: Any) -> None:
    from triton.backends.nvidia import driver

    signature = dict(source.signature)
    names = source.fn.arg_names
    constants = {
        (names.index(place),) if isinstance(place, str) else place: value for place, value in source.constants.items()
    }
    # That a tensor travels as a descriptor of the GPU's own is all that is asked of what is known once compiled.
    descriptors: list[dict[str, Any]] = [
        {} for kind in signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")
    ]
    driver.compile_module_from_src(
        src=driver.make_launcher(constants, signature, descriptors or None),
        name="__triton_launcher",
        library_dirs=driver.library_dirs(),
        include_dirs=driver.include_dirs,
        libraries=driver.libraries,
    )
