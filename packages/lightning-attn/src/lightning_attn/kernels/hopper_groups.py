"""The groups in which device functions of the kernels for sm_90 are handed what they share."""

from typing import Any, NamedTuple


class Stages(NamedTuple):
    """The ring: q and k of a stage, in pieces, have one full and one empty barrier, v another two.

    v is free later than q and k are: outputs are stored from there.
    """

    q: Any
    k: Any
    v: Any
    full: Any
    full_v: Any
    empty: Any
    empty_v: Any


class Tiles(NamedTuple):
    """Shared memory beside the ring: the weighted scores of one chunk, as an operand, ``ready`` once they are there;
    the weights of states; and ``led``, once the state has come to the program's own chunks.

    In float16 a query's scores are scaled: ``up`` is ``seeing`` with that, and ``down`` undoes it.
    """

    scores: Any
    ready: Any
    up: Any
    down: Any
    seeing: Any
    entering: Any
    led: Any


class Operands(NamedTuple):
    """TMA descriptors of q, k, v and outputs, or pointers to them; None where a kernel has none."""

    q: Any
    k: Any
    v: Any
    o: Any


class HeadRows(NamedTuple):
    """Rows of a program's heads; of q, k and v where sequences of one token go by no ring."""

    q: Any
    k: Any
    v: Any
    o: Any


class Decays(NamedTuple):
    """What decays and weights are made of."""

    p_slopes: Any
    scale: Any


class Span(NamedTuple):
    """What a program takes: rows begin to end of a sequence, of which i_segment is the segment's number.

    first: the sequence's first row. is_token: the sequence is one token, and goes by no ring. short: the number of the
    chunk that is not whole, or -1, and rest its rows. The last three are of kernels by roles alone.
    """

    i_n: Any
    i_segment: Any
    first: Any
    length: Any
    begin: Any
    end: Any
    slot: Any
    is_token: Any = None
    short: Any = None
    rest: Any = None


class Pools(NamedTuple):
    """States before a call, those that it leaves, and those between its segments."""

    initial: Any
    final: Any
    carried: Any


class State(NamedTuple):
    """Pieces of a state in float32, and what is ``ahead_of`` it, operands for the next chunk's queries."""

    pieces: Any
    ahead: Any


class Waiting(NamedTuple):
    """Outputs of the chunk before, to be stored while the next one is multiplied, if they are there."""

    outputs: Any
    are_there: Any
