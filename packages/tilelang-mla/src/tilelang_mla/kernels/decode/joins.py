"""How the two programs of a cluster merge the two parts of a list that they have, each half of its latents.

Both weigh what they have accumulated by the running maximum and the sum of both, give the other one the half that it is
to store, by its shared memory, and add what they are given. All threads of both meet twice: when products are done and
rings are free, and when all has been given.
"""

from typing import Any

from tilelang_mla.kernels.common import GROUP, ROWS, macro, number_of_sum, row_owners
from tilelang_mla.kernels.decode.rows import at


def is_whole(T: Any, S: Any, work: Any, half: int) -> Any:
    """Whether a half of the latents is a result: of a list of one part, and of two the half that a program joins."""
    return T.block_rank_in_cluster() == half if S.joined else work.num_parts == 1


@macro
def join_sums(T, memory, s):
    """The running maximum and the sums of both parts; block_max is what brings this one's to that maximum."""
    sums = at(T, memory.weights[0, 0])
    for i in T.Parallel(*s.row_sum.shape, loop_layout=row_owners(T, s.row_sum.shape[0])):
        T.call_extern("handle", "mla::rows::put", sums, i, s.running_max[i])
        T.call_extern("handle", "mla::rows::put", sums, ROWS + i, s.row_sum[i])
    T.cluster_sync()
    for i in T.Parallel(*s.row_sum.shape):
        s.rescale[i] = T.call_extern("float32", "mla::rows::of_other", sums, i)
        s.block_max[i] = s.running_max[i]
        s.running_max[i] = T.max(s.running_max[i], s.rescale[i])
        s.block_max[i] = T.exp2(s.block_max[i] - s.running_max[i])
        s.row_sum[i] = s.row_sum[i] * s.block_max[i] + T.call_extern(
            "float32", "mla::rows::of_other", sums, ROWS + i
        ) * T.exp2(s.rescale[i] - s.running_max[i])


@macro
def weigh_part(T, s):
    """The last rescale, of this part."""
    for i in T.Parallel(*s.row_sum.shape):
        s.rescale[i] = s.rescale[i] * s.block_max[i]


@macro
def join_halves(T, acc, ring, half):
    """Half of the latents of both parts, in the program of this rank; the other one gives it its own, and is done.

    ring: of keys, which nobody reads any more.
    """
    thread = T.get_thread_binding() % GROUP
    if T.block_rank_in_cluster() != half:
        there = T.alloc_var(T.int32, init=T.call_extern("int32", "mla::rows::there", at(T, ring[0, 0, 0]), thread))
        for i, j in T.Parallel(*acc.shape):
            T.call_extern("handle", "mla::rows::give", there, number_of_sum(i, j), acc[i, j])
    T.cluster_sync()
    if T.block_rank_in_cluster() == half:
        here = T.alloc_var(T.int32, init=T.call_extern("int32", "mla::rows::here", at(T, ring[0, 0, 0]), thread))
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] = acc[i, j] + T.call_extern("float32", "mla::rows::given", here, number_of_sum(i, j))
