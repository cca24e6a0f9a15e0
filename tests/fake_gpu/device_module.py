"""What torch expects of ``torch.fakegpu``: the module of a device type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

NAME = "fakegpu"


def index_of(device: Any = None) -> int:
    """Index of a device given as None (the current one), number, string or ``torch.device``."""
    if device is None:
        return int(torch.accelerator.current_device_index())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.accelerator.current_device_index()) if index is None else int(index)


class DeviceContext:
    """``with torch.fakegpu.device(1):``"""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = index_of()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.before)


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def make(native: Any) -> ModuleType:
    """The module, for ``torch._register_device_module``."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: native.DEVICES
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(index_of(device))
    module.device = DeviceContext
    module.get_device_name = lambda device=None: "Fake GPU"
    module.get_device_capability = lambda device=None: (0, 0)
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(
        torch.device(NAME, index_of(device))
    )
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0,
        device_index=index_of(device),
        device_type=int(torch._C._autograd.DeviceType.PrivateUse1),
    )
    module.set_stream = torch.accelerator.set_stream
    module.stream = _on_stream
    module.Stream = lambda device=None, priority=0: torch.Stream(
        device=torch.device(NAME, index_of(device)), priority=priority
    )
    module.Event = lambda enable_timing=False, blocking=False, interprocess=False: torch.Event(
        device=NAME, enable_timing=enable_timing
    )
    module.is_current_stream_capturing = native.is_capturing
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.initial_seed = torch.initial_seed
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    module.is_bf16_supported = lambda: True
    module.empty_cache = lambda: None
    module.memory_allocated = lambda device=None: native.memory_in_use(index_of(device))[0]
    module.max_memory_allocated = lambda device=None: native.memory_in_use(index_of(device))[1]
    module.memory_reserved = module.memory_allocated
    module.max_memory_reserved = module.max_memory_allocated
    module.reset_peak_memory_stats = lambda device=None: None
    return module
