"""What an op without derivatives refuses: gradients, forward-mode tangents, batches of torch.vmap.

Torch would drop a tangent silently, and of a batch say that somebody should write a rule.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from kernel_reference.errors import fail


def are_active() -> bool:
    """Whether a transform of torch.func, or a level of forward-mode derivatives, is round the call.

    Costs 0.1 us. torch.compile takes the answer for a constant, and guards on it by itself.
    """
    # Private, both, and all that tells in no time that there is none.
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


# As torch.compiler.assume_constant_result would have it, whose import of torch._dynamo takes seconds.
are_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_no_tangents(**tensors: object) -> None:
    """Raise ValueError if a tensor carries a forward-mode tangent, which an op without a jvp rule would drop silently.

    ``torch.func.jvp``, ``jacfwd`` and ``torch.autograd.forward_ad`` make such tensors. None is skipped.
    """
    # Private, and the only thing that tells in no time that there is none.
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            fail(name, "without a tangent: it has no forward-mode derivative (jvp, jacfwd)", "a dual tensor")


def check_no_transforms(**tensors: object) -> None:
    """Raise ValueError if a tensor is one of a transform of torch.func for which an op has no rule.

    These are batches of ``torch.vmap`` (the packages' functions take a batch of sequences themselves, and what is
    written in place cannot be batched) and tensors of ``torch.func.functionalize``. What is no tensor is skipped.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if torch._C._functorch.is_batchedtensor(tensor):
            fail(name, "outside torch.vmap (pass all sequences in one call)", "a batched tensor")
        if torch._C._functorch.is_functionaltensor(tensor):
            fail(name, "outside torch.func.functionalize", "a tensor of it")


def refuse_derivatives(**tensors: object) -> None:
    """Raise ValueError, naming the tensor, if a derivative of any kind, or a batch, is asked of an op that has none.

    For the top of a public function, in front of the op. Under ``torch.no_grad`` or ``inference_mode``, and outside
    transforms, it costs 0.2 us however many tensors there are. None, and what is no tensor, is skipped.

    >>> refuse_derivatives(q=torch.ones(3, requires_grad=True), sinks=None)
    Traceback (most recent call last):
    ValueError: q must be without gradient (call under torch.no_grad() or inference_mode()), got requires_grad=True
    """
    if are_active():
        check_no_transforms(**tensors)
        check_no_tangents(**tensors)
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                fail(name, "without gradient (call under torch.no_grad() or inference_mode())", "requires_grad=True")
