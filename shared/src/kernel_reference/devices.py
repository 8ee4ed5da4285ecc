"""What plans ask of a device, and of the Triton that is installed, which is imported only where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceProperties:
    """What a package's DeviceLimits are made of.

    kind: "cuda", "hip" or "npu". cores: SMs, compute units or an NPU's vector cores. shared_memory: bytes that a
    program may have at most; 0 where the driver does not say. capability: NVIDIA's compute capability, else (0, 0).
    """

    kind: str
    cores: int
    shared_memory: int
    capability: tuple[int, int] = (0, 0)


@lru_cache
def device_properties(device: torch.device) -> DeviceProperties:
    """Of the device a tensor is on; asked once. NVIDIA's from torch, others' from their Triton driver."""
    if device.type == "cuda" and torch.version.hip is None:
        found: Any = torch.cuda.get_device_properties(device)
        capability = torch.cuda.get_device_capability(device)
        return DeviceProperties("cuda", found.multi_processor_count, found.shared_memory_per_block_optin, capability)
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    if "num_vectorcore" in properties:
        return DeviceProperties("npu", properties["num_vectorcore"], 0)
    return DeviceProperties("hip", properties["multiprocessor_count"], properties["max_shared_mem"])


@lru_cache
def has_gluon() -> bool:
    """Whether the Triton that is installed brings Gluon with sm_90's barriers, TMA and WGMMA."""
    try:
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401
    except ImportError:
        return False
    return True
