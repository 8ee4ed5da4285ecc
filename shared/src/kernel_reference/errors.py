"""The one form of argument errors, for code that needs no torch; ``checks`` offers it to the packages."""

from __future__ import annotations

from typing import NoReturn


def fail(name: str, wanted: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise ``error`` saying that argument ``name`` must be ``wanted`` but was ``got``.

    ``error`` is TypeError for an argument of the wrong kind, ValueError for one of the right kind with a wrong value.
    """
    raise error(f"{name} must be {wanted}, got {got}")
