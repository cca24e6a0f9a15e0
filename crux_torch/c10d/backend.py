"""Registers and makes the ``crux`` backend.

``register()`` adds the name ``crux`` to torch.distributed. ``attach()`` goes further: the script's
own ``init_process_group("nccl" | "gloo" | None)`` gets a backend that records, under the name it
asked for. Neither changes what an operation does: see
``csrc/process_group/delegating_backend.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from crux_torch.c10d import events, inner_backends, stand_ins
from crux_torch.c10d.delegating import delegate, recorder
from crux_torch.c10d.inner_backends import NAME, OWNED_SOCKETS
from crux_torch.c10d.switch import GROUPS
from crux_torch.errors import CruxError


def _create(opts: Any, options: Any) -> Any:
    """The creator behind ``init_process_group("crux")``: Gloo, and what the accelerator has."""
    inners: dict[str, Any] = {}
    born = GROUPS.generation
    if dist.is_gloo_available():
        with OWNED_SOCKETS.watching(opts.store, opts.group_rank, opts.group_size):
            inners["cpu"] = inner_backends.create("gloo", opts, options)
    device = inner_backends.accelerator()
    name = None if device is None else inner_backends.backend_for(device)
    if device is not None and name == "gloo" and inners:
        inners[device] = inners["cpu"]
    elif device is not None and name is not None:
        classed = options
        if inner_backends.takes_class(name, options):
            classed = inner_backends.with_nccl_class(options, opts.group_id)
        inners[device] = inner_backends.create(name, opts, classed)
    if not inners:
        raise CruxError('backend "crux" needs Gloo or NCCL, and this torch has neither')
    if inner_backends.settings().disable and list(inners) == ["cpu"]:
        return inners["cpu"]
    return delegate(NAME, inners, opts.store, born=born, options=options)


def register() -> None:
    """Add the backend ``crux`` to torch.distributed; calling it again changes nothing.

    Raises:
        CruxError: another package holds the name.
    """
    plugin = c10d.Backend._plugins.get(NAME.upper())
    if plugin is None:
        # An accelerator of another package is served, too, but not by default.
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        c10d.Backend.backend_capability[NAME] = inner_backends.Devices(["cpu", "cuda"])
        _accept_in_monitored_barrier()
        _end_with_the_world()
    elif plugin.creator_fn is not _create:
        raise CruxError(
            f'the backend name "{NAME}" is taken by {plugin.creator_fn!r}: '
            "uninstall the other package, or use crux_torch.attach() with a stock backend's name"
        )


def _accept_in_monitored_barrier() -> None:
    """Make ``monitored_barrier`` accept ``crux`` in a torch that accepts only the name ``gloo``.

    Newer torch asks for a CPU backend instead of a name.
    """
    if inner_backends.HAS_CREATORS:
        return
    stock = c10d.monitored_barrier

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        member = not c10d._rank_not_in_group(group)
        if not member or dist.get_backend(group) != NAME:
            return stock(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d._get_default_timeout(dist.Backend("gloo"))
        members: Any = group or c10d._get_default_group()
        return members.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def _end_with_the_world() -> None:
    """Have the threads of this package end within ``destroy_process_group()``."""
    stock = c10d.destroy_process_group

    @functools.wraps(stock)
    def destroy_process_group(group: Any = None) -> None:
        stock(group)
        if not dist.is_initialized():
            GROUPS.groups_ended()
            events.world_ended()

    c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group


def attach(also: Collection[str] = ()) -> None:
    """Make every process group that is created from now on record, under its own backend's name.

    Idempotent; does nothing where ``CRUX_DISABLE`` is set. Groups that exist are left as they are.
    ``also`` names other packages' backends to record.
    """
    register()
    if inner_backends.settings().disable:
        return
    # If the extension is missing, fail now and not when the first group is made.
    recorder()
    stand_ins.install(also)


def is_attached() -> bool:
    """Whether :func:`attach` is in force."""
    return stand_ins.is_installed()
