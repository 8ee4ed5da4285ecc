"""What several of these tests need: the oracle with a plain version beside it, and ragged batches in guarded memory.

Tests are imported one by one (``--import-mode=importlib``), so that what they share reaches them as a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.recurrence import linear_attention, linear_attention_chunked
from kernel_reference.testing.guards import Canaried, assert_bitwise_equal, canaried, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle

Tensor = torch.Tensor

# From a state that a token leaves whole to one that it replaces; the first few of them differ most.
_SLOPES = (0.02, 0.0, 8.0, 0.2, 1e-5, 0.9, 3.0, 1e-3)
_CHUNK = 64
# Fewer rows than this do not tell how large a head's values are: the one dot product may happen to be 0.
_ENOUGH_ROWS = 16
# Strides of a pool [slots, heads, D, E], by what lies beside what.
_POOLS = {
    "packed": lambda h, d, e: (h * d * e, d * e, e, 1),
    "gaps": lambda h, d, e: (h * d * (e + 8) + 24, d * (e + 8), e + 8, 1),
    "transposed": lambda h, d, e: (h * d * e, d * e, 1, d),
    "heads last": lambda h, d, e: (h * d * e, 1, e * h, h),
}


class Wanted(NamedTuple):
    """A result in float64, and what one or two plain versions in the dtype under test make of it.

    again: makes all this anew, of inputs near these.
    """

    exact: Tensor
    plain: Tensor
    other: Tensor | None = None
    again: Callable[[], Wanted] | None = None


def wanted_of(forms_of: Callable[..., Sequence[Sequence[Tensor]]], inputs: Sequence[Tensor | None]) -> list[Wanted]:
    """Each result that ``forms_of`` makes of these inputs: in float64, then by one or two plain versions."""

    def again(i: int) -> Wanted:
        # Each number moved by up to a 32nd of itself: results of the same sizes, rounded elsewhere.
        moves = [None if x is None else 1 + (torch.rand_like(x, dtype=torch.float64) - 0.5) / 16 for x in inputs]
        near = [None if x is None else (x.double() * move).to(x.dtype) for x, move in zip(inputs, moves, strict=True)]
        return Wanted(*[form[i] for form in forms_of(*near)])

    return [Wanted(*forms, again=partial(again, i)) for i, forms in enumerate(zip(*forms_of(*inputs), strict=True))]


class Attended(NamedTuple):
    """out [T, H, E] and the states [B, H, D, E] after each sequence."""

    out: Wanted
    state: Wanted


def exact(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, lengths: Sequence[int], initial: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence in float64: literally where that is quick, in chunks where it is not."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=q.device)
    form = linear_attention if max(lengths, default=0) <= 16 else linear_attention_chunked
    return form(q, k, v, slopes, cu_seqlens=ends, initial_state=initial, scale=scale)


def plain(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, lengths: Sequence[int], initial: Tensor | None = None,
    scale: float = 1.0, products: torch.dtype | None = None, chunk: int = _CHUNK, weighted_values: bool = False,
    stored: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence in chunks as plain PyTorch in the dtype of the inputs: what a kernel's errors are measured beside.

    Each matrix product takes operands of ``products`` (the inputs' dtype unless given) and sums in float32, which is
    what the hardware's matrix instructions do; the state and the decays stay float32, the output is rounded once.
    ``linear_attention_chunked`` with a 16-bit ``compute_dtype`` would round the state after every chunk, which no
    kernel does, and so would pardon errors many times those of a good one; in float32 the two are the same. Decoding
    is held to ``products`` in float32, and many tokens decoded one by one to a ``chunk`` of 1, since there the state is
    rounded at every token: to the dtype that it is ``stored`` in. What a token's product with its value decays by until
    the chunk's end is multiplied into the key, or, ``weighted_values``, into the value.
    """
    operands = products or v.dtype

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a.to(operands).float() @ b.to(operands).float()

    heads = max(q.shape[1], v.shape[1])
    dtype, s = v.dtype, slopes.float().reshape(heads, 1, 1)

    @cache
    def weights(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        place = torch.arange(tokens, dtype=torch.float32, device=q.device)
        distance = (place[:, None] - place).clamp(min=0)
        within = torch.where(place[:, None] >= place, torch.exp(-s * distance), 0)
        seeing, entering = torch.exp(-s * (place[:, None] + 1)), torch.exp(-s * (place[-1] - place)[:, None])
        return within, seeing, entering, torch.exp(-s * (place[-1] + 1))

    # [H, T, D] and [H, T, E]
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1) for x in (q, k, v))
    sizes = (heads, q.shape[2], v.shape[2])
    outs, states = [q.new_zeros((0, heads, sizes[2]), dtype=torch.float32)], []
    for i, (begin, end) in enumerate(zip(accumulate(lengths, initial=0), accumulate(lengths), strict=False)):
        state = q.new_zeros(sizes, dtype=torch.float32) if initial is None else initial[i].float()
        for first in range(begin, end, chunk):
            tokens = slice(first, min(first + chunk, end))
            qc, kc, vc = q[:, tokens], k[:, tokens], v[:, tokens]
            within, seeing, entering, decay = weights(qc.shape[1])
            out = product(within * product(qc, kc.mT), vc) + seeing * product(qc, state)
            outs.append((scale * out).transpose(0, 1))
            weighted = (kc, entering * vc.float()) if weighted_values else (entering * kc.float(), vc)
            state = decay * state + product(weighted[0].mT, weighted[1])
            state = state if stored is None else state.to(stored).float()
        states.append(state)
    return torch.cat(outs).to(dtype), torch.stack(states) if states else q.new_zeros((0, *sizes), dtype=torch.float32)


def otherwise(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, lengths: Sequence[int], initial: Tensor | None = None,
    scale: float = 1.0, **how: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As good a plain version, which rounds elsewhere: the recurrence as it is written, or values that are weighted."""
    if sum(lengths) > 16 or how.get("stored") is not None:
        return plain(q, k, v, slopes, lengths, initial, scale, weighted_values=True, **how)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device=q.device)
    out, state = linear_attention(
        q, k, v, slopes, cu_seqlens=ends, initial_state=initial, scale=scale, compute_dtype=torch.float32
    )
    return out.to(v.dtype), state


def assert_rounded(got: Tensor, wanted: Wanted, *, apart: tuple[int, ...], what: str = "the result") -> None:
    """``assert_close_to_oracle`` with every head (the dimensions ``apart``) scaled to the same size.

    A head that never decays holds values a hundred times those of one that does at once, whose errors it would hide.
    They are scaled by powers of two, which is exact. Of two plain versions the one that is further off counts, element
    by element: the largest errors of two results that round in different places may well differ by more than twice.
    """
    want = wanted.exact
    factor = torch.ones((), dtype=want.dtype, device=want.device)
    together = [dim for dim in range(want.ndim) if dim not in apart]
    if want.numel() and torch.Size(want.shape[dim] for dim in together[:-1]).numel() >= _ENOUGH_ROWS:
        size = want.abs().amax(together, keepdim=True)
        factor = torch.exp2(-torch.where(size > 0, size, 1).log2().round().clamp(-14, 14))

    def scaled(wanted: Wanted) -> tuple[Tensor, Tensor]:
        want, beside = wanted.exact, wanted.plain.to(got.dtype)
        if wanted.other is not None:
            other = wanted.other.to(got.dtype)
            beside = torch.where((other.double() - want).abs() > (beside.double() - want).abs(), other, beside)
        return want * factor, beside * factor.to(got.dtype)

    again = wanted.again
    assert_close_to_oracle(
        got * factor.to(got.dtype), *scaled(wanted), what=what, again=again and (lambda: scaled(again()))
    )


class Ragged:
    """Sequences packed one after another and their states in the slots of a pool, in guarded memory.

    Whatever a call has no business with is NaN: rows of no sequence and of padding, slots that are not in use, the
    states of sequences that start from zeros, the outputs before they are written, and what lies round the pool and
    the outputs. :meth:`check` then holds everything to the oracle.
    """

    def __init__(
        self, device: torch.device, lengths: Sequence[int], *, heads: tuple[int, int] = (4, 4),
        sizes: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16,
        pool_dtype: torch.dtype = torch.float32, pool: str = "packed", slots: Sequence[int] | None = None,
        num_slots: int | None = None, initial: bool | Sequence[bool] = True, rows_after: int = 0, fused: bool = False,
        scale: float = 1.0, slopes: Tensor | None = None, index_dtype: torch.dtype = torch.int32,
    ) -> None:  # fmt: skip
        self.lengths = list(lengths)
        batch, rows, (hqk, hv), (d, e) = len(lengths), sum(lengths) + rows_after, heads, sizes
        self.num_heads = max(heads)
        self.num_slots = batch + 3 if num_slots is None else num_slots
        self.slot_of = list(slots) if slots is not None else torch.randperm(self.num_slots)[:batch].tolist()
        self.initial = [initial] * batch if isinstance(initial, bool) else list(initial)
        self.begins = list(accumulate(lengths, initial=0))
        self.scale = scale
        self.slopes = decay_rates(self.num_heads, device) if slopes is None else slopes
        indices = {"dtype": index_dtype, "device": device}
        self.cu_seqlens = torch.tensor(self.begins, **indices)
        self.slots = torch.tensor(self.slot_of, **indices)
        self.has_initial_state = torch.tensor(self.initial, dtype=torch.bool, device=device)
        widths = [hqk * d, hqk * d, hv * e]
        if fused:
            whole = poison_(torch.empty(rows, sum(widths), dtype=dtype, device=device))
            parts = whole.split(widths, dim=1)
        else:
            parts = [poison_(torch.empty(rows, width, dtype=dtype, device=device)) for width in widths]
        shapes = ((hqk, d), (hqk, d), (hv, e))
        self.q, self.k, self.v = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
        for i in self.live:
            for x in (self.q, self.k, self.v):
                own = x[self._rows(i)]
                own.copy_(torch.randn(own.shape, device=device))
        shape = (self.num_slots, self.num_heads, d, e)
        self.pool: Canaried = canaried(shape, pool_dtype, device, strides=_POOLS[pool](*shape[1:]))
        for i in self.live:
            if self.initial[i]:
                self.pool.tensor[self.slot_of[i]] = torch.randn(shape[1:], device=device).to(pool_dtype)
        self.before = self.pool.tensor.clone()
        self.out: Canaried = canaried((rows, self.num_heads, e), dtype, device, row_padding=8)

    def _rows(self, i: int, tokens: int | None = None) -> slice:
        return slice(self.begins[i], self.begins[i] + (self.lengths[i] if tokens is None else tokens))

    @property
    def live(self) -> list[int]:
        """The sequences that are not padding."""
        return [i for i, slot in enumerate(self.slot_of) if 0 <= slot < self.num_slots]

    def attend(self, lengths: dict[int, int], **how: Any) -> Attended:
        """The first so many tokens of each of these sequences, packed; ``how`` as for :func:`plain`."""
        q, k, v = (
            torch.cat([x[:0], *[x[self._rows(i, tokens)] for i, tokens in lengths.items()]])
            for x in (self.q, self.k, self.v)
        )
        states = [
            self.before[self.slot_of[i]] if self.initial[i] else torch.zeros_like(self.before[0]) for i in lengths
        ]
        initial = torch.stack(states) if states else self.before[:0]
        counts = list(lengths.values())

        def of(q: Tensor, k: Tensor, v: Tensor, initial: Tensor) -> list[tuple[Tensor, Tensor]]:
            given = q, k, v, self.slopes, counts, initial, self.scale
            return [exact(*given), plain(*given, **how), otherwise(*given, **how)]

        return Attended(*wanted_of(of, [q, k, v, initial]))

    def check(
        self, *, out: bool = True, states: Sequence[int] | None = None,
        snapshots: Sequence[tuple[int, int, int]] = (), **how: Any,
    ) -> None:  # fmt: skip
        """Outputs and states are the oracle's, padding is zero and nothing else has changed.

        out: whether outputs were asked for. states: how many tokens each sequence's state advances by, all of them
        unless given. snapshots: (sequence, tokens, slot) of further states. how: as for :func:`plain`.
        """
        if out:
            self.check_out(self.out.tensor, **how)
            self.out.check(written=True)
        counts = self.lengths if states is None else states
        advanced = {i: counts[i] for i in self.live if counts[i]}
        self._check_states([self.slot_of[i] for i in advanced], self.attend(advanced, **how), "the states")
        for sequence, tokens, slot in snapshots:
            self._check_states([slot], self.attend({sequence: tokens}, **how), f"the snapshot after {tokens} tokens")
        self.pool.check(written=False)
        changed = {self.slot_of[i] for i in advanced} | {slot for *_, slot in snapshots}
        for slot in set(range(self.num_slots)) - changed:
            assert_bitwise_equal(self.pool.tensor[slot], self.before[slot], what=f"slot {slot}, which is not in use,")

    def check_out(self, out: Tensor, **how: Any) -> None:
        """[T, H, E]: the oracle's in rows of sequences, 0 in all others."""
        alive = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
        for i in self.live:
            alive[self._rows(i)] = True
        assert not bool((out[~alive] != 0).any()), "rows of no sequence or of padding are not zero"
        wanted = self.attend({i: self.lengths[i] for i in self.live}, **how).out
        assert_rounded(out[alive], wanted, apart=(1,), what="the output")

    def _check_states(self, slots: list[int], attended: Attended, what: str) -> None:
        got = self.pool.tensor[slots] if slots else self.pool.tensor[:0]
        assert_rounded(got, attended.state, apart=(0, 1), what=what)


def decay_rates(heads: int, device: torch.device) -> Tensor:
    """Decays of every kind, from none to all of the state in one token."""
    return torch.tensor([_SLOPES[h % len(_SLOPES)] for h in range(heads)], dtype=torch.float32, device=device)


class Tensors:
    """Makes and compares tensors on the device under test."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    exact = staticmethod(exact)
    plain = staticmethod(plain)
    otherwise = staticmethod(otherwise)
    Wanted = Wanted
    wanted = staticmethod(wanted_of)
    assert_rounded = staticmethod(assert_rounded)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def slopes(self, heads: int) -> Tensor:
        return decay_rates(heads, self.device)

    def ragged(self, lengths: Sequence[int], **options: Any) -> Ragged:
        return Ragged(self.device, lengths, **options)

    def padded(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, initial: Tensor | None = None, scale: float = 1.0,
        form: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``form`` (exact, plain or otherwise) of [b, h, n, d] tensors: out [b, h, n, e] and states [b, h, d, e]."""
        batch, _, tokens, _ = q.shape
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out, state = form(*packed, slopes, [tokens] * batch, initial, scale)
        return out.unflatten(0, (batch, tokens)).transpose(1, 2), state

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, initial: Tensor | None = None,
               scale: float = 1.0, **how: Any) -> Attended:  # fmt: skip
        """All forms of [b, h, n, d] tensors; ``how`` as for :func:`plain`."""
        forms = exact, partial(plain, **how), partial(otherwise, **how)

        def of(q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None) -> list[tuple[Tensor, Tensor]]:
            return [self.padded(q, k, v, slopes, initial, scale, form) for form in forms]

        return Attended(*wanted_of(of, [q, k, v, initial]))

    def check_powers(self, attention: Any, gradients: Any, size: int, tokens: int, powers: Sequence[int]) -> None:
        """In float16, the powers of two that the inputs of :class:`Kernels`' functions are multiplied by are those that
        the results are, bit for bit: as in float32, whatever happens in between.
        """
        of_q, of_k, of_v, of_d_out, of_scale = powers
        shape = (1, 2, tokens, size)
        # From 1 to 2, so that none leaves the normal range.
        mantissas = [(1 + torch.randint(0, 1024, shape) / 1024) * torch.randn(shape).sign() for _ in range(4)]
        history, d_state = (self.normal(1, 2, size, size) for _ in range(2))
        slopes = torch.tensor([0.005, 0.0], device=self.device)

        def results(*powers: int) -> list[Tensor]:
            q, k, v, d_out = (
                (x * 2.0**power).to(self.device, torch.float16) for x, power in zip(mantissas, powers[:4], strict=True)
            )
            of_q, of_k, of_v, of_d_out, of_scale = powers
            before = history * 2.0 ** (of_k + of_v)
            after = d_state * 2.0 ** (of_q + of_d_out + of_scale)
            scale = 0.75 * 2.0**of_scale
            return [
                *attention(q, k, v, slopes, before, scale),
                *gradients(q, k, v, slopes, before, d_out, after, scale),
            ]

        moved = {
            "out": of_q + of_k + of_v + of_scale, "the state": of_k + of_v, "dq": of_k + of_v + of_d_out + of_scale,
            "dk": of_q + of_v + of_d_out + of_scale, "dv": of_q + of_k + of_d_out + of_scale,
            "d_history": of_q + of_d_out + of_scale,
        }  # fmt: skip
        for (name, power), got, base in zip(moved.items(), results(*powers), results(0, 0, 0, 0, 0), strict=True):
            wanted = base.double() * 2.0**power
            limits = torch.finfo(got.dtype)
            normal = wanted.abs() >= limits.smallest_normal
            assert wanted.abs().max() <= limits.max, name
            assert torch.equal(got.double()[normal], wanted[normal]), name
            assert ((got.double() - wanted).abs() <= limits.smallest_normal * limits.eps).all(), name


# Powers of two that q, k, v, the output's gradient and the scale are multiplied by: results stay in the range of
# float16, or most of them do, and what they are made of would not.
_POWERS = {
    "scores above": (7, 7, -12, -12, 0), "a state above": (-14, 9, 10, -13, 0), "scores below": (-12, -12, 12, 4, 0),
    "a state below": (14, -12, -12, 2, 0), "a small scale": (14, 10, 0, 0, -20),
    "a large scale": (-14, -12, -2, -2, 20),
}  # fmt: skip


@pytest.fixture(params=_POWERS.values(), ids=_POWERS)
def powers(request: pytest.FixtureRequest) -> Sequence[int]:
    """For :meth:`Tensors.check_powers`."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def on_one_thread(one_thread: None) -> None:
    """On the CPU every product here is so small that a second thread costs more than it does."""


@pytest.fixture(scope="session")
def tensors(device: torch.device) -> Tensors:
    return Tensors(device)


class Kernels:
    """The launches themselves, with plans of the caller's: on a GPU, or in Triton's interpreter.

    Where results are not those of a :class:`Ragged`, they are made in guarded memory and the guards checked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def prepare(op: str, given: Sequence[Any], *numbers: Any, plan: Any = None) -> tuple[Any, Any]:
        """What launches an op, and its tensors as that takes them: checked, but for values and a plan."""
        from lightning_attn import arguments, launch
        from lightning_attn import tensors as groups
        from lightning_attn.gradients import launch as of_gradients

        names = {"attention_backward": "AttentionBackward", "verify": "Decode"}
        tensors = getattr(groups, names.get(op, op.title()))(*given)
        problem = getattr(arguments, f"check_{op}")(tensors, *numbers)
        room = of_gradients if op == "attention_backward" else launch
        prepare = getattr(room, f"prepare_{'decode' if op == 'verify' else op}")
        return prepare(problem, plan, tensors), tensors

    def call(self, op: str, given: Sequence[Any], *numbers: Any, plan: Any = None) -> None:
        """Launch an op: its tensors, its results among them, and its numbers but for the plan."""
        run, tensors = self.prepare(op, given, *numbers, plan=plan)
        run(tensors)

    def prefill(
        self, batch: Ragged, plan: Any, positions: Sequence[Sequence[int]] | None = None, *, initial: bool | None = None
    ) -> list[tuple[int, int, int]]:
        """A ragged batch, with snapshots at these positions [B][P], -1 for none, each into a slot that is free.

        initial: speaks for all sequences. Returns the snapshots to come, as :meth:`Ragged.check` wants them.
        """
        indices = {"dtype": batch.slots.dtype, "device": self.device}
        snapshots, taken = (None, None), []
        if positions is not None:
            free = iter([slot for slot in torch.randperm(batch.num_slots).tolist() if slot not in batch.slot_of])
            slots = [[-1 if position < 0 else next(free) for position in row] for row in positions]
            width = max(map(len, positions), default=0)
            snapshots = tuple(torch.tensor(rows, **indices).reshape(len(rows), width) for rows in (positions, slots))
            taken = [(i, p, slots[i][j]) for i in batch.live for j, p in enumerate(positions[i]) if p > 0]
        own = batch.has_initial_state if initial is None else None
        tensors = (
            batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, batch.pool.tensor, batch.slots, own, *snapshots,
            batch.out.tensor,
        )  # fmt: skip
        self.call("varlen", tensors, bool(initial), batch.scale, plan=plan)
        return taken

    def decode(self, batch: Ragged, plan: Any) -> None:
        """A batch whose sequences have one token each."""
        tensors = (batch.q, batch.k, batch.v, batch.pool.tensor, batch.slots, batch.slopes, batch.out.tensor)
        self.call("decode", tensors, batch.scale, plan=plan)

    def verify(self, batch: Ragged, plan: Any) -> None:
        """A batch whose sequences have as many tokens each, as drafts."""
        q, k, v, out = (self.drafts(batch, x) for x in (batch.q, batch.k, batch.v, batch.out.tensor))
        tensors = (q, k, v, batch.pool.tensor, batch.slots, batch.slopes, out)
        self.call("verify", tensors, batch.scale, plan=plan)

    def commit(self, batch: Ragged, accepted: Sequence[int], plan: Any) -> None:
        """The first so many drafts of each sequence."""
        counts = torch.tensor(accepted, dtype=batch.slots.dtype, device=self.device)
        k, v = (self.drafts(batch, x) for x in (batch.k, batch.v))
        tensors = (k, v, batch.pool.tensor, batch.slots, batch.slopes, counts)
        self.call("commit", tensors, plan=plan)

    def drafts_with_the_bits_of_decoding(
        self, tensors: Any, plan: Any, accepted: Sequence[int], tokens: int, **options: Any
    ) -> Ragged:
        """A batch of so many drafts each, verified and committed, after it was held to decoding token by token."""
        drafts = tensors.ragged([tokens] * len(accepted), **options)
        self.verify(drafts, plan)
        self.commit(drafts, accepted, plan)
        outs, states = [], [drafts.before]
        q, k, v = (self.drafts(drafts, x) for x in (drafts.q, drafts.k, drafts.v))
        step = tensors.ragged([1] * len(accepted), **options)
        step.pool.tensor.copy_(drafts.before)
        for t in range(tokens):
            step.q, step.k, step.v = q[:, t], k[:, t], v[:, t]
            self.decode(step, plan)
            outs.append(step.out.tensor.clone())
            states.append(step.pool.tensor.clone())
        assert_bitwise_equal(drafts.out.tensor, torch.stack(outs, dim=1).flatten(0, 1), what="the verified outputs")
        wanted = drafts.before.clone()
        for i in drafts.live:
            wanted[drafts.slot_of[i]] = states[accepted[i]][drafts.slot_of[i]]
        assert_bitwise_equal(drafts.pool.tensor, wanted, what="the committed states")
        return drafts

    @staticmethod
    def drafts(batch: Ragged, x: Tensor) -> Tensor:
        """[B * T, heads, elements] as [B, T, heads, elements]."""
        return x.unflatten(0, (len(batch.lengths), batch.lengths[0]))

    def attention(
        self, plan: Any, q: Tensor, k: Tensor, v: Tensor, ed: Tensor, history: Tensor | None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """out [b, h, n, e] and the states [b, h, d, e] of [b, h, n, d|e] tensors."""
        b, h, n, d = q.shape
        e = v.shape[3]
        out, kv = self._guarded((b, h, n, e), q.dtype), self._guarded((b, h, 1, d, e), torch.float32)
        tensors = (q, k, v, ed, history, out.tensor, kv.tensor)
        self.call("attention", tensors, scale, plan=plan)
        for result in (out, kv):
            result.check(written=True)
        return out.tensor, kv.tensor[:, :, 0]

    def gradients(
        self, plan: Any, q: Tensor, k: Tensor, v: Tensor, ed: Tensor, history: Tensor | None, d_out: Tensor,
        d_state: Tensor | None, scale: float = 1.0,
    ) -> list[Tensor]:  # fmt: skip
        """dq, dk, dv and, where states come in, the gradient of the history [b, h, d, e]."""
        results = [self._guarded(x.shape, q.dtype) for x in (q, k, v)]
        if history is not None or d_state is not None:
            results.append(self._guarded((*q.shape[:2], q.shape[3], v.shape[3]), torch.float32))
        d_kv = None if d_state is None else d_state[:, :, None]
        tensors = (q, k, v, ed, history, d_out, d_kv, *(result.tensor for result in results))
        self.call("attention_backward", tensors, scale, plan=plan)
        for result in results:
            result.check(written=True)
        return [result.tensor for result in results]

    def _guarded(self, shape: Sequence[int], dtype: torch.dtype) -> Canaried:
        return canaried(tuple(shape), dtype, self.device, row_padding=8)


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> Kernels:
    return Kernels(device)
