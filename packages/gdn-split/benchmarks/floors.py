"""What no kernel of a call can do without, at the grid of the call: being launched, and states found by their slots."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gdn_split.kernels.split import wait_for_inputs
from gdn_split.launch import device_limits

LAUNCH, STATES, ORS = "empty kernel", "states through slots", "exclusive ors of all inputs"
# Four channels are a 64-bit word, in which the floor of a convolution counts. Of a group of Qwen3-Next's heads q and k
# are 32 words each, v and z 64.
_CHANNELS, _WORDS, _GROUP = 4, 32, 192


@triton.jit
def launched(p_out, DEPENDENT: tl.constexpr):
    wait_for_inputs(DEPENDENT)
    tl.store(p_out + tl.program_id(0), 1)


@triton.jit
def copy_states(p_pool, p_slots, s_slot, PIECES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """A program reads BLOCK integers of its sequence's state and writes them back, one bit changed."""
    wait_for_inputs(DEPENDENT)
    slot = tl.load(p_slots + tl.program_id(0) // PIECES).to(tl.int64)
    p = p_pool + slot * s_slot + tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    tl.store(p, tl.load(p) ^ 1, cache_modifier=".cs")


@triton.jit
def move_words(
    p_x, p_state, p_weight, p_bias, p_slots, p_y, i_p, S_WORD: tl.constexpr, S_TAP: tl.constexpr,
    GROUPS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """32 words of q, k or v of SEQUENCES sequences: read with their weights, bias and states; both are written."""
    TILES: tl.constexpr = 4 * GROUPS
    i_n = i_p // TILES * SEQUENCES
    slots = ()
    for s in tl.static_range(SEQUENCES):
        slots = slots + (tl.load(p_slots + i_n + s).to(tl.int64),)
    i_g = i_p % TILES // 4
    i_t = i_p % 4
    o = tl.arange(0, 32)
    o_c = tl.where(i_t == 0, i_g, tl.where(i_t == 1, GROUPS + i_g, 2 * GROUPS + 2 * i_g + i_t - 2)) * 32 + o
    b_w = tl.load(p_weight + 4 * o_c[:, None] + tl.arange(0, 4)[None, :])
    one, two = tl.split(tl.reshape(b_w, [32, 2, 2]))
    w_1, w_2 = tl.split(one)
    w_3, w_4 = tl.split(two)
    b_w = w_1 ^ w_2 ^ w_3 ^ w_4 ^ tl.load(p_bias + o_c)
    found = ()
    for s in tl.static_range(SEQUENCES):
        x = tl.load(p_x + (i_n + s).to(tl.int64) * (GROUPS * 192) + i_g * 192 + i_t * 32 + o)
        p = p_state + slots[s] * (GROUPS * 384) + o_c * S_WORD
        found = found + ((x, tl.load(p), tl.load(p + S_TAP), tl.load(p + 2 * S_TAP), p),)
    for s in tl.static_range(SEQUENCES):
        x, x_3, x_2, x_1, p = found[s]
        tl.store(p_y + (i_n + s).to(tl.int64) * (GROUPS * 128) + o_c, x ^ x_1 ^ x_2 ^ x_3 ^ b_w)
        tl.store(p, x_2)
        tl.store(p + S_TAP, x_1)
        tl.store(p + 2 * S_TAP, x)


@triton.jit
def move_z(p_x, p_slots, p_z, i_p, GROUPS: tl.constexpr, SEQUENCES: tl.constexpr):
    i_g = i_p % GROUPS
    o = tl.arange(0, 64)
    for s in tl.static_range(SEQUENCES):
        i_n = (i_p // GROUPS * SEQUENCES + s).to(tl.int64)
        b_z = tl.load(p_x + i_n * (GROUPS * 192) + i_g * 192 + 128 + o)
        b_z = tl.where(tl.load(p_slots + i_n) >= 0, b_z, 0)
        tl.store(p_z + i_n * (GROUPS * 64) + i_g * 64 + o, b_z)


@triton.jit(do_not_specialize=["sequences"])
def exclusive_ors(
    p_x, p_state, p_weight, p_bias, p_slots, p_y, p_z, sequences, S_WORD: tl.constexpr, S_TAP: tl.constexpr,
    GROUPS: tl.constexpr, SEQUENCES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    i_p = tl.program_id(0)
    tiles = sequences // SEQUENCES * (4 * GROUPS)
    if i_p < tiles:
        move_words(p_x, p_state, p_weight, p_bias, p_slots, p_y, i_p, S_WORD, S_TAP, GROUPS, SEQUENCES)
    else:
        move_z(p_x, p_slots, p_z, i_p - tiles, GROUPS, SEQUENCES)


def _start(kernel: Any, programs: int, num_warps: int, first: torch.Tensor, *others: object) -> None:
    dependent = device_limits(first.device).dependent_launch
    options = {"launch_pdl": True} if dependent else {}
    kernel[(programs,)](first, *others, dependent, num_warps=num_warps, **options)


def launch_alone(device: torch.device, programs: int, num_warps: int) -> torch.Tensor:
    """The least time that a kernel of so many programs and warps takes."""
    out = torch.empty(programs, dtype=torch.int32, device=device)
    _start(launched, programs, num_warps, out)
    return out


def states_alone(pool: torch.Tensor, slots: torch.Tensor, block: int, num_warps: int) -> torch.Tensor:
    """The states' way alone, of float32 pools; a program takes ``block`` elements."""
    sequences, elements = len(slots), pool[0].numel()
    pieces = elements // block
    integers = pool.view(torch.int32)
    _start(copy_states, sequences * pieces, num_warps, integers, slots, pool.stride(0), pieces, block)
    return integers


def check(outputs: torch.Tensor, pool: torch.Tensor) -> float:
    """Of either: every number is written, and every element has been there and back."""
    wanted = torch.ones_like(outputs) if outputs.shape != pool.shape else pool.view(torch.int32) ^ 1
    if not torch.equal(outputs, wanted):
        raise AssertionError("not all programs have run")
    return 0.0


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int64)


def _state_words(state: torch.Tensor) -> torch.Tensor:
    """A packed state as [slots, words, 3], three words being four channels; a channel-last one as its own taps'."""
    if state.stride(2) == 1:
        return _words(state.flatten(1)).unflatten(1, (-1, 3))
    return _words(state.transpose(1, 2)).transpose(1, 2)


def convolution_by_ors(
    qkvz: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slots: torch.Tensor,
    a_program: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """All that a split with a convolution of Qwen3-Next reads and writes but b and a, in the best grid that was found.

    Nothing is computed but exclusive ors: what no kernel of it can do without.
    """
    n, groups = len(qkvz), qkvz.shape[1] // (_CHANNELS * _GROUP)
    y, z = (qkvz.new_empty((n, groups * words), dtype=torch.int64) for words in (128, 64))
    words = _state_words(state)
    given = (_words(qkvz), words, _words(weight), _words(bias), slots, y, z, n, *words.stride()[1:], groups, a_program)
    _start(exclusive_ors, n // a_program * 5 * groups, 1, *given)
    return y, z, words


def check_ors(
    outputs: tuple[torch.Tensor, ...], qkvz: torch.Tensor, state: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor, slots: torch.Tensor,
) -> float:  # fmt: skip
    """``state``: before the call."""
    y, z, kept = outputs
    parts = _words(qkvz).unflatten(1, (-1, _GROUP)).split([_WORDS, _WORDS, 2 * _WORDS, 2 * _WORDS], 2)
    *x, wanted_z = (part.flatten(1) for part in parts)
    joined = torch.cat(x, 1)
    before = _state_words(state)[slots.long()]
    wanted = joined ^ before[..., 0] ^ before[..., 1] ^ before[..., 2] ^ _words(bias)
    for of_channel in _words(weight).flatten().unflatten(0, (-1, _CHANNELS)).unbind(1):
        wanted = wanted ^ of_channel
    after = torch.stack((before[..., 1], before[..., 2], joined), 2)
    if not (torch.equal(y, wanted) and torch.equal(z, wanted_z) and torch.equal(kept[slots.long()], after)):
        raise AssertionError("not all programs have run")
    return 0.0
