"""How long TileLang's simplifier may look for proofs.

Lowering a decoding kernel asks Z3 7200 questions whether an expression always holds, and five answers are yes, each
found at once: the others take a third of the time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import z3

# Of Z3's solver: contradictions that it meets before it gives a question up.
_LIMIT, _CONFLICTS = "smt.max_conflicts", 10

_lock = Lock()
_inside = 0
_before = ""


@contextmanager
def short_proofs() -> Iterator[None]:
    """Have Z3 give up early meanwhile, in the whole process, in whose settings it stands."""
    global _inside, _before
    with _lock:
        if not _inside:
            _before = z3.get_param(_LIMIT)
            z3.set_param(_LIMIT, _CONFLICTS)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                z3.set_param(_LIMIT, _before)
