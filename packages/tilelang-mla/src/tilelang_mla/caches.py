"""Latent caches of 8 bits: their formats, and how tokens come into them and out of them. Torch only.

========  ==========================================================================================================
"e4m3"    float8_e4m3fn, latent and rope alike, and one scale of the whole cache
"656"     records of 656 bytes a token, uint8, as FlashMLA and vLLM keep DeepSeek's: 512 latents of e4m3, the float32
          scales of each 128 of them, and 64 elements of rope in bfloat16
========  ==========================================================================================================
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kernel_reference.checks import check_dense, check_float, check_same_device, describe, fail, known

Tensor = torch.Tensor
Format = Literal["e4m3", "656"]

E4M3 = torch.float8_e4m3fn
# The largest number of e4m3, and the smallest scale: tiles of zeros have one too.
_MOST, _LEAST = 448.0, torch.finfo(torch.float32).tiny
# Of a record: latents, how many of them share a scale, elements of rope, and bytes.
LATENT, TILE, ROPE = 512, 128, 64
RECORD = LATENT + LATENT // TILE * 4 + ROPE * 2
_FORMATS = ("e4m3", "656")


class Views(NamedTuple):
    """A cache of 8 bits by its parts: latents of e4m3, ropes of e4m3 or bfloat16, and the scales that records hold."""

    latent: Tensor
    rope: Tensor
    scales: Tensor | None


def quantize_kv(kv: Tensor, format: Format = "e4m3", kv_scale: float | Tensor | None = None) -> Tensor:
    """Tokens of a latent cache in 8 bits: what :func:`tilelang_mla.flash_mla_with_kvcache` takes as ``kv``.

    A new token is quantised as it is written to its page. Numbers beyond the largest of e4m3, 448 times the scale, are
    clamped to it; NaN stays. Source: the e4m3 of "FP8 Formats for Deep Learning" (arXiv 2209.05433); the record is
    FlashMLA's, with a scale of each 128 latents as DeepSeek-V3 (arXiv 2412.19437, section 3.3) quantises activations.

    Args:
        kv: [..., dim_nope + dim_rope], floating, the latent first; of format "656" [..., 512 + 64].
        format: "e4m3" or "656".
        kv_scale: of "e4m3", what its numbers are multiplied by when they are read: a float, or one float32 on kv's
            device; 1 when None. Records have scales of their own: None.

    Returns:
        float8_e4m3fn of kv's shape, or uint8 [..., 656].

    Raises TypeError or ValueError, naming the argument, for what is not as said above.
    """
    _check_format(format)
    check_dense(kv=kv)
    if not kv.is_floating_point():
        fail("kv", "floating", describe(kv), TypeError)
    if format == "e4m3":
        return (kv.float() / _scale(kv, kv_scale)).clamp(-_MOST, _MOST).to(E4M3)
    _check_records(kv, kv_scale, LATENT + ROPE)
    tiles = kv[..., :LATENT].float().unflatten(-1, (-1, TILE))
    scales = (tiles.abs().amax(-1) / _MOST).clamp(min=_LEAST)
    latent = (tiles / scales[..., None]).clamp(-_MOST, _MOST).to(E4M3).flatten(-2)
    pieces = (latent, scales.contiguous(), kv[..., LATENT:].to(torch.bfloat16).contiguous())
    return torch.cat([piece.view(torch.uint8) for piece in pieces], -1)


def dequantize_kv(
    cache: Tensor, format: Format = "e4m3", kv_scale: float | Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The tokens that a cache of 8 bits holds.

    Args:
        cache: [..., dim_nope + dim_rope] of float8_e4m3fn, or [..., 656] of uint8, rows contiguous; as
            :func:`quantize_kv` gives it.
        format: "e4m3" or "656".
        kv_scale: as there.
        dtype: of the result; a latent times its scale is a float32, rounded to it once.

    Returns:
        [..., dim_nope + dim_rope] of ``dtype``.

    Raises TypeError or ValueError, naming the argument, for what is not as said above.
    """
    _check_format(format)
    check_dense(cache=cache)
    if format == "e4m3":
        if cache.dtype != E4M3:
            fail("cache", f"of {E4M3}", describe(cache), TypeError)
        return (cache.float() * _scale(cache, kv_scale)).to(dtype)
    if cache.dtype != torch.uint8:
        fail("cache", "of torch.uint8", describe(cache), TypeError)
    _check_records(cache, kv_scale, RECORD)
    check_begin("cache", cache)
    if known(cache.stride(-1) != 1) or any([known(step % 4 != 0) for step in cache.stride()[:-1]]):
        fail("cache", "of contiguous rows 4 bytes apart or a multiple of that", describe(cache))
    latent, rope, scales = views_of(cache, LATENT)
    tiles = latent.float().unflatten(-1, (-1, TILE)) * scales[..., None]  # type: ignore[index]
    return torch.cat([tiles.flatten(-2).to(dtype), rope.to(dtype)], -1)


def format_of(kv: Tensor) -> Format | None:
    """The format of a cache by its dtype; None of one that is not of 8 bits as we know them."""
    return "e4m3" if kv.dtype == E4M3 else "656" if kv.dtype == torch.uint8 else None


def views_of(cache: Tensor, dim_nope: int) -> Views:
    """Parts of a cache of either format, in its own memory."""
    if cache.dtype == E4M3:
        return Views(cache[..., :dim_nope], cache[..., dim_nope:], None)
    end = RECORD - 2 * ROPE
    latent, scales, rope = cache[..., :LATENT], cache[..., LATENT:end], cache[..., end:]
    return Views(latent.view(E4M3), rope.view(torch.bfloat16), scales.view(torch.float32))


def _check_format(format: object) -> None:
    if format not in _FORMATS:
        fail("format", " or ".join(map(repr, _FORMATS)), repr(format))


def _check_records(tensor: Tensor, kv_scale: object, width: int) -> None:
    if kv_scale is not None:
        fail("kv_scale", 'None with format "656", whose records have scales of their own', kv_scale)
    if tensor.ndim < 1 or tensor.shape[-1] != width:
        fail("kv" if width != RECORD else "cache", f"[..., {width}]", describe(tensor))


def check_begin(name: str, cache: Tensor) -> None:
    """Bytes whose scales torch views as float32, which it does at multiples of 4 bytes of a storage alone."""
    if known(cache.storage_offset() % 4 != 0):
        fail(name, "a view that begins at a multiple of 4 bytes of its storage", f"offset {cache.storage_offset()}")


def _scale(tensor: Tensor, kv_scale: float | Tensor | None) -> float | Tensor:
    if isinstance(kv_scale, Tensor):
        check_scale(tensor, kv_scale)
        return kv_scale.reshape(())
    return _number(kv_scale)


def _number(kv_scale: float | None) -> float:
    if kv_scale is None:
        return 1.0
    check_float("kv_scale", kv_scale, "a float, one torch.float32, or None")
    if known(kv_scale <= 0):
        fail("kv_scale", "above 0", kv_scale)
    return kv_scale


def check_scale(kv: Tensor, kv_scale: Tensor) -> None:
    """One float32 where the cache is."""
    if kv_scale.dtype != torch.float32 or kv_scale.numel() != 1 or kv_scale.device != kv.device:
        fail("kv_scale", f"a float, or one torch.float32 on {kv.device}", describe(kv_scale))


def scale_of(kv: Tensor, kv_scale: float | Tensor | None) -> Tensor | None:
    """The scale of a cache as its op takes it: one float32 on the device; None with records."""
    format = format_of(kv)
    if format != "e4m3":
        # Of a cache of no format its dtype is what is wrong.
        if kv_scale is not None and (format or kv.dtype.itemsize > 1):
            what = "records, which have scales of their own" if format else f"a cache of {kv.dtype}"
            fail("kv_scale", f"None with {what}", describe(kv_scale))
        return None
    if isinstance(kv_scale, Tensor):
        check_scale(kv, kv_scale)
        return kv_scale
    return kv.new_full((1,), _number(kv_scale), dtype=torch.float32)


def check_8bit_cache(q: Tensor, kv: Tensor, dim_nope: int, kv_scale: Tensor | None, name: str) -> str:
    """A paged cache of 8 bits for these queries; its format."""
    width, format = q.shape[3], format_of(kv)
    if format is None:
        fail(f"{name}.dtype", f"{E4M3}, or torch.uint8 for records of {RECORD} bytes", describe(kv), TypeError)
    if format == "656":
        if q.dtype != torch.bfloat16 or (dim_nope, width) != (LATENT, LATENT + ROPE):
            wanted = f"torch.bfloat16 of {LATENT} + {ROPE} elements with a cache of records of {RECORD} bytes"
            fail("q", wanted, describe(q))
        if kv_scale is not None:
            fail("kv_scale", "None with records, which have scales of their own", describe(kv_scale))
        width = RECORD
    elif kv_scale is None:
        fail("kv_scale", "given with a cache of e4m3", None)
    else:
        check_scale(kv, kv_scale)
    check_same_device(name, kv, "q", q)
    right = kv.ndim == 4 and not (known(kv.shape[2] != 1) or known(kv.shape[3] != width) or known(kv.shape[1] < 1))
    if not right:
        fail(name, f"[pages, page_size, 1, {width}], of 1 kv head", describe(kv))
    if format == "656":
        check_begin(name, kv)
    return format
