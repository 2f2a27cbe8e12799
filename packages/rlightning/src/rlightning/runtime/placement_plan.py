"""What a placement plan is: nodes, workers on them, and the bundles of GPUs that workers share.

Plain frozen values, as a table for people (`Plan.describe`) and as plain data (`Plan.to_dict`).
Knows nothing about how a plan is made (`rlightning.runtime.placement`) or carried out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ROLES", "Bundle", "Node", "Plan", "Worker", "number_ranges"]

ROLES = ("train", "eval", "env", "buffer")
"""The kinds of workers, in the order in which they are listed."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster, and what it has in all."""

    name: str
    """Unique in the cluster: what pools call it, and what `Worker.node` refers to."""
    cpus: float
    """Cores."""
    gpus: int = 0
    """GPUs."""
    memory_bytes: int = 0
    """Memory that workers may reserve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """GPUs of one node that are reserved together; the workers in it share them."""

    node: str
    """The node's name."""
    gpu_ids: tuple[int, ...]
    """Which GPUs of the node the plan means; a scheduler may give others of that node."""
    cpus: float
    """Cores of the workers in it together."""
    memory_bytes: int
    """Reserved memory of the workers in it together."""

    @property
    def gpus(self) -> int:
        """How many GPUs it reserves."""
        return len(self.gpu_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One remote worker, where it goes and what it asks the scheduler for."""

    role: str
    """``train``, ``eval``, ``env`` or ``buffer``."""
    index: int
    """Its number among the workers of its role; for environments over all ``env`` entries."""
    node: str | None
    """The node it is pinned to; None leaves that to the scheduler."""
    bundle: int | None
    """Index into `Plan.bundles` of the GPUs it uses; None without GPUs, or where unpinned."""
    cpus: float
    """Cores to ask for; less than configured where workers share cores."""
    gpus: float
    """GPUs to ask for; less than configured where workers share a GPU, 0 where there is none."""
    memory_bytes: int = 0
    """Memory to reserve."""
    extra_gpus: float = 0.0
    """GPUs for each of the two further processes that an environment worker has for a while: one
    for evaluation, one for recording. They share its GPU, of which it asks for half."""

    @property
    def name(self) -> str:
        """What logs call it, for example ``eval-3``."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every remote worker of a run goes."""

    strategy: str
    """``default``, ``disaggregate``, ``colocate`` or ``manual``."""
    nodes: tuple[Node, ...]
    """The nodes that were planned for."""
    workers: tuple[Worker, ...]
    """All remote workers, by role and index."""
    bundles: tuple[Bundle, ...]
    """The reserved groups of GPUs."""
    notes: tuple[str, ...]
    """Where the plan is not word for word what was asked, one sentence each."""

    def of(self, role: str) -> list[Worker]:
        """Return the workers of a role, in the order of their indices."""
        return [worker for worker in self.workers if worker.role == role]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, to be written as YAML or JSON."""
        plain = asdict(self)
        for section in ("nodes", "workers", "bundles", "notes"):
            plain[section] = list(plain[section])
        for bundle in plain["bundles"]:
            bundle["gpu_ids"] = list(bundle["gpu_ids"])
        return plain

    def describe(self) -> str:
        """Return the plan as a table, one row per node, followed by the notes."""
        cpus = sum(node.cpus for node in self.nodes)
        gpus = sum(node.gpus for node in self.nodes)
        count = f"{len(self.nodes)} node{'s' if len(self.nodes) != 1 else ''}"
        lines = [f"placement {self.strategy}: {count}, {cpus:g} CPUs, {gpus} GPUs"]
        rows = [("node", "CPUs", "GPUs", "memory", "workers")]
        for node in self.nodes:
            mine = [worker for worker in self.workers if worker.node == node.name]
            asked = round(sum(worker.cpus for worker in mine), 2)
            used = {i for b in self.bundles if b.node == node.name for i in b.gpu_ids}
            memory = f"{node.memory_bytes / _GIB:.0f} GiB" if node.memory_bytes else "-"
            counts = (f"{asked:g}/{node.cpus:g}", f"{len(used)}/{node.gpus}", memory)
            rows.append((node.name, *counts, self._listed(mine)))
        anywhere = [worker for worker in self.workers if worker.node is None]
        if anywhere:
            asked = round(sum(worker.cpus for worker in anywhere), 2)
            shares = round(sum(w.gpus + 2 * w.extra_gpus for w in anywhere), 2)
            counts = (f"{asked:g}/{cpus:g}", f"{shares:g}/{gpus}", "-")
            rows.append(("anywhere", *counts, self._listed(anywhere)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[4]]).rstrip())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _listed(self, workers: Sequence[Worker]) -> str:
        parts = []
        for role in ROLES:
            mine = [worker for worker in workers if worker.role == role]
            if not mine:
                continue
            text = f"{role} {number_ranges(worker.index for worker in mine)}"
            bundles = {worker.bundle for worker in mine if worker.bundle is not None}
            used = {gpu for bundle in bundles for gpu in self.bundles[bundle].gpu_ids}
            parts.append(f"{text} (GPU {number_ranges(used)})" if used else text)
        return ", ".join(parts) or "-"


def number_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: ``{0, 1, 2, 5}`` is ``"0-2 5"``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
