"""The kernel of the indexer's top-k: a radix select over the bits of a row's scores, exact, ties by the lower position.

A program has a row. Scores become integers of the same order, position breaks ties, and of both together the k-th
highest is found digit by digit, each from a histogram of those that have the digits before. As soon as these are few
they are kept in shared memory, so that a row is read twice unless its scores are very much alike. What is selected is
marked in a bit map and comes out in the order of positions: the same list whatever the order in which threads ran.
"""

from typing import Any, NamedTuple

from tilelang_mla.kernels.common import WARP, macro

# Bits of the digits: three of a score, two of a position.
DIGITS = (11, 11, 10, 10, 10)
_BINS, _PARTS = 1 << max(DIGITS), 256
# Positions that two digits tell apart.
MOST_POSITIONS = 1 << DIGITS[3] + DIGITS[4]
# Candidates that are kept in shared memory, and so the most positions of a list.
KEPT = 4096
# Loads of a thread that are in flight.
_AT_ONCE = 8
# What is told of a histogram and of a list, in shared memory.
_BIN, _ABOVE, _IN_BIN, _COUNT, _SEQUENCE = 0, 1, 2, 3, 4
# Of a float32: all but its sign, which is the order of NaN too, and infinity.
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000


class Sizes(NamedTuple):
    """What the kernel is compiled for: words of the bit map, and threads of a program."""

    words: int
    threads: int
    serial: bool

    @property
    def lanes(self) -> int:
        """Threads that scan together."""
        return 1 if self.serial else WARP


class Memory(NamedTuple):
    """Shared memory: a histogram and its parts, the candidates' orders and positions, marks, and what is told."""

    histogram: Any
    parts: Any
    orders: Any
    positions: Any
    marks: Any
    told: Any


# What a thread knows of its row, in registers: how many are still to be selected of the candidates, the digits that
# were found of the last one's score and of its position, whether candidates are kept, whether all are selected.
_WANTED, _ORDER, _PLACE, _KEPT, _DONE = 0, 1, 2, 3, 4


def select(T: Any, *, words: int, threads: int, dtype: Any, serial: bool = False) -> Any:
    """The kernel. bits: of scores. page_size: of the table that turns positions to indices of the pool; 0 of none."""
    S = Sizes(words, 1 if serial else threads, serial)
    tokens, width, most = (T.dynamic(name) for name in ("tokens", "width", "most"))
    batch, columns, bounds = (T.dynamic(name) for name in ("batch", "columns", "bounds"))
    scores_row, table_row, out_row = (T.dynamic(name) for name in ("scores_row", "table_row", "out_row"))

    @T.prim_func
    def select_keys(
        bits: T.StridedTensor((tokens, width), (scores_row, 1), dtype),
        lengths: T.Tensor((tokens,), T.int32),
        block_table: T.StridedTensor((batch, columns), (table_row, 1), T.int32),
        cu_seqlens_q: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((tokens, most), (out_row, 1), T.int32),
        page_size: T.int32,
        ragged: T.int32,
        each: T.int32,
    ):
        with T.Kernel(tokens, threads=S.threads) as i_row:
            histogram = T.alloc_shared((_BINS,), T.int32)
            parts = T.alloc_shared((_PARTS,), T.int32)
            orders = T.alloc_shared((KEPT,), T.int32)
            positions = T.alloc_shared((KEPT,), T.int32)
            marks = T.alloc_shared((words,), T.int32)
            told = T.alloc_shared((8,), T.int32)
            memory = Memory(histogram, parts, orders, positions, marks, told)
            thread = T.get_thread_binding()
            length = T.alloc_var(T.int32, init=lengths[i_row])
            if length < 0 or length > width:
                length = 0
            if length > most:
                select_row(T, S, bits, memory, i_row, length, most, thread)
            else:
                for turn in T.serial(T.truncdiv(length + (S.threads - 1), S.threads)):
                    if turn * S.threads + thread < length:
                        positions[turn * S.threads + thread] = turn * S.threads + thread
            find_sequence(T, S, cu_seqlens_q, told, i_row, ragged, each, thread)
            synchronise(T, S)
            for turn in T.serial(T.truncdiv(most + (S.threads - 1), S.threads)):
                i = T.alloc_var(T.int32, init=turn * S.threads + thread)
                if i < most:
                    index = T.alloc_var(T.int32, init=-1)
                    if i < length:
                        index = positions[i]
                        if page_size > 0:
                            index = index_of(T, block_table, told[_SEQUENCE], positions[i], page_size)
                    out[i_row, i] = index

    return select_keys


@macro
def synchronise(T, S):
    if not S.serial:
        T.sync_threads()


@macro
def index_of(T, block_table, sequence, position, page_size):
    """Where a position of a sequence is in the pool; -1 where the table has no page for it."""
    index = T.alloc_var(T.int32, init=-1)
    column = T.alloc_var(T.int32, init=T.truncdiv(position, page_size))
    if sequence >= 0 and column < block_table.shape[1]:
        page = T.alloc_var(T.int32, init=block_table[sequence, column])
        if page >= 0:
            index = page * page_size + (position - column * page_size)
    return index


@macro
def find_sequence(T, S, cu_seqlens_q, told, i_row, ragged, each, thread):
    """The sequence of a row; -1 of a row that is none's."""
    if thread == 0:
        told[_SEQUENCE] = -1
        if ragged == 0:
            told[_SEQUENCE] = T.truncdiv(i_row, T.max(each, 1))
    synchronise(T, S)
    if ragged != 0:
        for turn in T.serial(T.truncdiv(cu_seqlens_q.shape[0] - 1 + (S.threads - 1), S.threads)):
            i = T.alloc_var(T.int32, init=turn * S.threads + thread)
            if i + 1 < cu_seqlens_q.shape[0]:
                if cu_seqlens_q[i] <= i_row and i_row < cu_seqlens_q[i + 1]:
                    told[_SEQUENCE] = i


def order_of(T: Any, bits: Any) -> Any:
    """An int32 in the order of the score: as IEEE 754 has it, the two zeros alike, NaN above all."""
    magnitude = bits & _MAGNITUDE
    return T.if_then_else(magnitude > _INFINITY, _MAGNITUDE, T.if_then_else(bits < 0, -magnitude, magnitude))


def digit_of(level: int, order: Any, position: Any) -> Any:
    """A digit of a score, or of its position: the lower the higher."""
    if level == 0:
        return (order >> 21) + 1024
    if level == 1:
        return (order >> 10) & 2047
    if level == 2:
        return order & 1023
    place = MOST_POSITIONS - 1 - position
    return place >> 10 if level == 3 else place & 1023


def is_candidate(T: Any, level: int, state: Any, order: Any, position: Any) -> Any:
    """Whether the digits before this one are those that were found."""
    if level == 0:
        return True
    if level == 1:
        return order >> 21 == state[_ORDER] >> 21
    if level == 2:
        return order >> 10 == state[_ORDER] >> 10
    if level == 3:
        return order == state[_ORDER]
    return T.And(order == state[_ORDER], (MOST_POSITIONS - 1 - position) >> 10 == state[_PLACE] >> 10)


def found(level: int, digit: Any) -> Any:
    """What a digit is of a score, or of a position."""
    return (digit - 1024) << 21 if level == 0 else digit << 10 if level in (1, 3) else digit


@macro
def select_row(T, S, bits, memory, i_row, length, most, thread):
    """Positions of the ``most`` highest scores of a row that has more, in their order."""
    state = T.alloc_local((5,), T.int32)
    state[_WANTED] = most
    state[_ORDER] = 0
    state[_PLACE] = 0
    state[_KEPT] = 0
    state[_DONE] = 0
    for turn in T.serial(T.truncdiv(T.truncdiv(length + 31, 32) + (S.threads - 1), S.threads)):
        if turn * S.threads + thread < S.words:
            memory.marks[turn * S.threads + thread] = 0
    if thread == 0:
        memory.told[_COUNT] = 0
    narrow(T, S, bits, memory, state, i_row, length, 0, thread)
    narrow(T, S, bits, memory, state, i_row, length, 1, thread)
    narrow(T, S, bits, memory, state, i_row, length, 2, thread)
    narrow(T, S, bits, memory, state, i_row, length, 3, thread)
    narrow(T, S, bits, memory, state, i_row, length, 4, thread)
    mark_selected(T, S, bits, memory, state, i_row, length, thread)
    synchronise(T, S)
    list_marked(T, S, memory, length, thread)


@macro
def narrow(T, S, bits, memory, state, i_row, length, level, thread):
    """Find a digit, unless all candidates are selected already; keep them as soon as they are few."""
    if state[_DONE] == 0:
        count_digits(T, S, bits, memory, state, i_row, length, level, thread)
        find_digit(T, S, memory, state[_WANTED], thread)
        i_digit = _ORDER if level < 3 else _PLACE
        state[i_digit] = state[i_digit] | found(level, memory.told[_BIN])
        state[_WANTED] = state[_WANTED] - memory.told[_ABOVE]
        if memory.told[_IN_BIN] == state[_WANTED]:
            state[_DONE] = 1
        if state[_DONE] == 0 and state[_KEPT] == 0 and memory.told[_IN_BIN] <= KEPT and level < len(DIGITS) - 1:
            walk_row(T, S, bits, memory, i_row, length, thread, keep_one, level + 1, state)
            state[_KEPT] = 1
        synchronise(T, S)


@macro
def count_digits(T, S, bits, memory, state, i_row, length, level, thread):
    """A histogram of a digit of the candidates."""
    histogram = memory.histogram
    for turn in T.serial(_BINS // S.threads):
        histogram[turn * S.threads + thread] = 0
    synchronise(T, S)
    if state[_KEPT] != 0:
        walk_kept(T, S, memory, thread, count_one, level, state)
    else:
        walk_row(T, S, bits, memory, i_row, length, thread, count_one, level, state)
    synchronise(T, S)


@macro
def count_one(T, memory, level, state, order, position):
    if is_candidate(T, level, state, order, position):
        T.atomic_add(memory.histogram[digit_of(level, order, position)], 1)


@macro
def walk_kept(T, S, memory, thread, visit, level, state):
    """``visit`` every candidate that is kept."""
    count = T.alloc_var(T.int32, init=memory.told[_COUNT])
    for turn in T.serial(T.truncdiv(count + (S.threads - 1), S.threads)):
        i = T.alloc_var(T.int32, init=turn * S.threads + thread)
        if i < count:
            visit(T, memory, level, state, memory.orders[i], memory.positions[i])


@macro
def walk_row(T, S, bits, memory, i_row, length, thread, visit, level, state):
    """``visit`` every score of the row."""
    ahead = T.alloc_local((_AT_ONCE,), T.int32)
    orders = T.alloc_local((_AT_ONCE,), T.int32)
    load_bits(T, S, bits, ahead, i_row, thread, length)
    for turn in T.serial(T.truncdiv(length + (S.threads * _AT_ONCE - 1), S.threads * _AT_ONCE)):
        first = T.alloc_var(T.int32, init=turn * (S.threads * _AT_ONCE) + thread)
        take_orders(T, S, bits, orders, ahead, i_row, first, length)
        for u in T.unroll(_AT_ONCE):
            position = first + u * S.threads
            if position < length:
                visit(T, memory, level, state, orders[u], position)


@macro
def load_bits(T, S, bits, loaded, i_row, first, length):
    for u in T.unroll(_AT_ONCE):
        if first + u * S.threads < length:
            loaded[u] = bits[i_row, first + u * S.threads]


@macro
def take_orders(T, S, bits, orders, ahead, i_row, first, length):
    """The orders of what was loaded ahead; what comes next is loaded while they are looked at."""
    for u in T.unroll(_AT_ONCE):
        orders[u] = order_of(T, ahead[u])
    load_bits(T, S, bits, ahead, i_row, first + S.threads * _AT_ONCE, length)


@macro
def find_digit(T, S, memory, wanted, thread):
    """The digit of the ``wanted``-th highest, how many are above it and how many have it."""
    histogram, parts, told = memory.histogram, memory.parts, memory.told
    each, of_lane = _BINS // _PARTS, _PARTS // S.lanes
    for turn in T.serial(-(-_PARTS // S.threads)):
        i = T.alloc_var(T.int32, init=turn * S.threads + thread)
        if i < _PARTS:
            total = T.alloc_var(T.int32, init=0)
            for j in T.serial(each):
                total = total + histogram[i * each + j]
            parts[i] = total
    synchronise(T, S)
    if thread < S.lanes:
        # The last lane has the lowest digits.
        own = T.alloc_var(T.int32, init=0)
        first = T.alloc_var(T.int32, init=(S.lanes - 1 - thread) * of_lane)
        for j in T.serial(of_lane):
            own = own + parts[first + j]
        above = T.alloc_var(T.int32, init=own)
        if not S.serial:
            for i in T.unroll(5):
                other = T.alloc_var(T.int32, init=T.shfl_up(above, 1 << i))
                if thread >= 1 << i:
                    above = above + other
        above = above - own
        if above < wanted and wanted <= above + own:
            part = T.alloc_var(T.int32, init=first + (of_lane - 1))
            while above + parts[part] < wanted:
                above = above + parts[part]
                part = part - 1
            digit = T.alloc_var(T.int32, init=part * each + (each - 1))
            while above + histogram[digit] < wanted:
                above = above + histogram[digit]
                digit = digit - 1
            told[_BIN] = digit
            told[_ABOVE] = above
            told[_IN_BIN] = histogram[digit]
    synchronise(T, S)


@macro
def keep_one(T, memory, level, state, order, position):
    """Keep a candidate; mark what is above them all."""
    if is_candidate(T, level, state, order, position):
        i = T.alloc_var(T.int32, init=T.atomic_add(memory.told[_COUNT], 1, return_prev=True))
        memory.orders[i] = order
        memory.positions[i] = position
    else:
        mark_one(T, memory, level, state, order, position)


@macro
def mark_one(T, memory, level, state, order, position):
    """Mark what is not below the last that is selected."""
    place = MOST_POSITIONS - 1 - position
    if order > state[_ORDER] or (order == state[_ORDER] and place >= state[_PLACE]):
        # Each position once, so that adding sets a bit: TileLang's atomic_or takes an address for one of global memory.
        T.atomic_add(memory.marks[position >> 5], 1 << (position & 31))


@macro
def mark_selected(T, S, bits, memory, state, i_row, length, thread):
    """Mark the candidates that are selected, or all of the row if they were never few."""
    if state[_KEPT] != 0:
        walk_kept(T, S, memory, thread, mark_one, len(DIGITS), state)
    else:
        walk_row(T, S, bits, memory, i_row, length, thread, mark_one, len(DIGITS), state)


def ones(T: Any, S: Sizes, word: Any) -> Any:
    """How many bits of a word are set: TileLang has no name for it that its targets share."""
    return ones_one_by_one(T, word) if S.serial else T.call_pure_extern(T.int32, "__popc", word)


@macro
def ones_one_by_one(T, word):
    count = T.alloc_var(T.int32, init=0)
    for i in T.serial(32):
        count = count + ((word >> i) & 1)
    return count


@macro
def list_marked(T, S, memory, length, thread):
    """Marked positions in their order: a thread has some words of the bit map, behind those of the thread before."""
    marks, positions, parts = memory.marks, memory.positions, memory.parts
    words = T.alloc_var(T.int32, init=T.truncdiv(length + 31, 32))
    each = T.alloc_var(T.int32, init=T.truncdiv(words + (S.threads - 1), S.threads))
    begin = T.alloc_var(T.int32, init=T.min(thread * each, words))
    end = T.alloc_var(T.int32, init=T.min(begin + each, words))
    own = T.alloc_var(T.int32, init=0)
    for i in T.serial(end - begin):
        own = own + ones(T, S, marks[begin + i])
    before = T.alloc_var(T.int32, init=own)
    if not S.serial:
        for i in T.unroll(5):
            other = T.alloc_var(T.int32, init=T.shfl_up(before, 1 << i))
            if thread % WARP >= 1 << i:
                before = before + other
        if thread % WARP == WARP - 1:
            parts[thread // WARP] = before
        T.sync_threads()
        for i in T.serial(thread // WARP):
            before = before + parts[i]
    before = before - own
    for i in T.serial(end - begin):
        rest = T.alloc_var(T.int32, init=marks[begin + i])
        while rest != 0:
            lowest = T.alloc_var(T.int32, init=ones(T, S, (rest & -rest) - 1))
            positions[before] = (begin + i) * 32 + lowest
            before = before + 1
            rest = rest & (rest - 1)
