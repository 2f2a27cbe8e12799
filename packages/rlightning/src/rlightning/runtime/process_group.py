"""The process group of data-parallel learners: who meets where, over which transport, how long.

NCCL where every rank has a GPU of its own, gloo otherwise: on CPUs, and where ranks share a GPU,
which NCCL refuses. The ranks settle that among themselves when they meet. Every wait, here and in
later collective calls, ends with an error after the given time. Knows nothing about policies; what
decides how many steps a rank takes is in `rlightning.policy.over_ranks`.

One process calls `free_address`, all call `init` with what it returned, at about the same time::

    address = free_address()                       # on the machine of rank 0
    group = init(rank, world_size, address, timeout_s=60)
    ...
    destroy()
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["choose_backend", "destroy", "free_address", "init"]

_INTERFACE = "GLOO_SOCKET_IFNAME"


def free_address(host: str = "127.0.0.1") -> str:
    """Return ``host:port`` with a port that is free now, for rank 0 to listen at.

    Args:
        host: a name or number of this machine that all ranks can reach; the default serves ranks
            that are all on this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def init(
    rank: int, world_size: int, address: str, *, timeout_s: float, backend: str | None = None
) -> Any:
    """Meet the other ranks; return the process group of all of them.

    Args:
        rank: this process's number, from 0.
        world_size: how many ranks there are.
        address: ``host:port`` of rank 0, see `free_address`.
        timeout_s: longest wait for the others, here and in every collective call.
        backend: ``nccl`` or ``gloo``; chosen by `choose_backend` where unset.

    Raises:
        ValueError: `rank` or `address` cannot be meant.
        RuntimeError: rank 0 cannot listen there, or the others did not come in time.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"found rank {rank} of {world_size}; expected 0 to {world_size - 1}")
    host, port = _split(address)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # missing in its stubs
            host, port, world_size, is_master=rank == 0, timeout=timeout
        )
        if backend is None:
            backend = choose_backend(_everybodys_gpu(store, rank, world_size))
        with _on_loopback(host):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {rank} of {world_size} did not meet the others at {address} within "
            f"{timeout_s:g} s: {error}"
        ) from error
    return dist.group.WORLD


def destroy() -> None:
    """Leave the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_backend(gpus: list[str]) -> str:
    """Return the transport for ranks with these GPUs: ``nccl`` only where each has its own.

    Args:
        gpus: what identifies the GPU of each rank; empty text for a rank without one.
    """
    own_each = all(gpus) and len(set(gpus)) == len(gpus)
    return "nccl" if own_each else "gloo"


def _everybodys_gpu(store: Any, rank: int, world_size: int) -> list[str]:
    own = ""
    if torch.cuda.is_available():
        own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(f"gpu/{rank}", own)
    return [store.get(f"gpu/{other}").decode() for other in range(world_size)]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"found the address {address!r}; expected host:port")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _on_loopback(host: str) -> Iterator[None]:
    """Let gloo use the loopback interface where the ranks meet there.

    It would otherwise look up this machine's own name, which many machines do not have right; an
    environment variable is the one way to tell it.
    """
    try:
        inside = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        inside = False
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if not inside or _INTERFACE in os.environ or not names:
        yield
        return
    os.environ[_INTERFACE] = names[0]
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
