"""`ShardedWeightBuffer`: one version of the weights, published in parts by several processes.

Where every train worker holds all weights (data parallelism), each publishes its part of them at
the same time as the others: n workers, a n-th of the time. A part is whole tensors, dealt out so
that parts are of similar size. A version is visible when all its parts are. Like
`CPUWeightBuffer`, of which each part is one, it serves the processes of one machine.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rlightning.weights import shared_memory
from rlightning.weights.address import WeightAddress
from rlightning.weights.cpu_weight_buffer import CPUWeightBuffer
from rlightning.weights.layout import Layout
from rlightning.weights.transfer import PackedWeights, pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

__all__ = ["ShardedWeightBuffer", "deal"]


class ShardedWeightBuffer:
    """Holds the newest version of the weights in shared memory, in parts.

    Args:
        shards: parts, one for each process that publishes.
        timeout_s: how long to wait for the other parts of a version, and for readers.
    """

    def __init__(self, shards: int = 1, *, timeout_s: float = 30.0) -> None:
        if shards < 1:
            raise ValueError(f"found {shards} shards; expected at least 1")
        self.timeout_s = timeout_s
        self.parts = [CPUWeightBuffer(timeout_s=timeout_s) for _ in range(shards)]
        self._layout: tuple[str, Layout] | None = None

    @classmethod
    def attach(cls, names: Sequence[str], *, timeout_s: float = 30.0) -> ShardedWeightBuffer:
        """Return the buffer that another process of this machine made, by its `names`.

        Raises:
            RuntimeError: it does not exist, or no longer.
        """
        self = cls.__new__(cls)
        self.timeout_s = timeout_s
        self.parts = [CPUWeightBuffer.attach(name, timeout_s=timeout_s) for name in names]
        self._layout = None
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.names, self.timeout_s)

    @property
    def names(self) -> list[str]:
        """The names of its parts, for `attach`."""
        return [part.name for part in self.parts]

    @property
    def address(self) -> WeightAddress:
        """What another process of this machine opens it by."""
        return WeightAddress(type(self), self.names, shards=len(self.parts))

    @property
    def version(self) -> int:
        """The newest version of which all parts are there, or -1 before the first."""
        return min(part.version for part in self.parts)

    def staleness(self, version: int) -> int:
        """Return by how many versions `version` is older than the newest."""
        return self.version - version

    def close(self) -> None:
        """Remove what this process created of it; done anyway where the process ends."""
        for part in self.parts:
            part.close()

    def publish(self, version: int, weights: Any) -> None:
        """Publish all parts, where one process holds all weights; see `publish_shard`."""
        for shard in range(len(self.parts)):
            self.publish_shard(version, shard, weights)

    def publish_shard(self, version: int, shard: int, weights: Any) -> None:
        """Publish one part of `weights`; all publishers give the same versions and layouts.

        A publisher may be one version ahead of the others, not two: it waits for them.

        Raises:
            ValueError: `version` is not newer than the published one.
            ContractError: `weights` holds something that does not travel between processes.
            TimeoutError: another part has not been published for too long, or was read too long.
        """
        own = self.parts[shard]
        for other, part in enumerate(self.parts):
            if not part.wait_for(own.version, self.timeout_s):
                raise TimeoutError(
                    f"part {other} of the weights is at version {part.version}, and part {shard} "
                    f"wants to go on from version {own.version} to {version}; has the worker that "
                    f"publishes part {other} ended?"
                )
        layout, tensors = Layout.of(weights)
        mine = deal([entry.size_bytes for entry in layout.entries], len(self.parts))[shard]
        outline = layout.to_json().decode() if shard == 0 else None
        own.publish(version, {"layout": outline, "tensors": [tensors[index] for index in mine]})

    def get(self) -> tuple[int, Any]:
        """Return the newest version and a copy of its weights; see `read`."""
        version, packed = self.pack()
        return version, packed.unpack()

    def pack(self) -> tuple[int, PackedWeights]:
        """Return the newest version and a copy of its weights, ready for another machine."""
        with self.read() as (version, weights):
            return version, pack(weights)

    @contextlib.contextmanager
    def read(self) -> Iterator[tuple[int, Any]]:
        """Lend the newest whole version and its weights, for the length of a ``with`` block.

        The tensors lie in the shared memory; they are another version's soon after the block.

        Raises:
            RuntimeError: nothing has been published, or a publisher has ended.
        """
        with contextlib.ExitStack() as lent:
            version, parts = self._lend(lent)
            yield version, self._join(parts)

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait until at least `version` is visible; return whether it is."""
        deadline = time.monotonic() + timeout_s
        return all(
            part.wait_for(version, max(0.0, deadline - time.monotonic())) for part in self.parts
        )

    def _lend(self, lent: contextlib.ExitStack) -> tuple[int, list[Any]]:
        for _ in shared_memory.until(self.timeout_s):
            for part in self.parts:
                part.check()
            version = self.version
            with contextlib.ExitStack() as attempt:
                parts: list[Any] = []
                for part in self.parts:
                    content = part.lend(version, attempt)
                    if content is None:  # its publisher is two versions on by now
                        break
                    parts.append(content)
                else:
                    lent.enter_context(attempt.pop_all())
                    return version, parts
        raise TimeoutError(f"no version was whole for {self.timeout_s:g} s")

    def _join(self, parts: Sequence[Any]) -> Any:
        text = parts[0]["layout"]
        known = self._layout  # one reference: threads may come here at once
        if known is None or known[0] != text:
            known = self._layout = (text, Layout.from_json(text.encode()))
        layout = known[1]
        tensors: dict[int, torch.Tensor] = {}
        dealt = deal([entry.size_bytes for entry in layout.entries], len(parts))
        for indices, part in zip(dealt, parts, strict=True):
            tensors |= zip(indices, part["tensors"], strict=True)
        return layout.build([tensors[index] for index in range(len(layout.entries))])


def deal(sizes: Sequence[int], shares: int) -> list[list[int]]:
    """Return which items each share gets: the largest first, each to the smallest share so far."""
    dealt: list[list[int]] = [[] for _ in range(shares)]
    totals = [0] * shares
    for index in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        share = totals.index(min(totals))
        dealt[share].append(index)
        totals[share] += sizes[index]
    return dealt


def _attach(names: Sequence[str], timeout_s: float) -> ShardedWeightBuffer:
    return ShardedWeightBuffer.attach(names, timeout_s=timeout_s)
