"""The ``cluster`` section: how many workers of each kind a run has, what each takes, where they go.

One GPU setting per role: `ClusterConfig.train_each_gpu_num` and ``policy.train_num_gpus`` are the
same number (and so for eval workers); see `MainConfig`. Knows nothing about Ray.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlightning.config.base import StrictConfig

__all__ = ["ClusterConfig", "PlacementConfig", "ResourcePoolConfig", "check_gpus", "read_indices"]

ROLES = ("train", "eval", "env", "buffer")

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def read_indices(text: str) -> list[int]:
    """Return the numbers in an index string: ``"0-3, 8"`` is ``[0, 1, 2, 3, 8]``.

    Raises:
        ValueError: the text is no list of numbers and ranges, or names one twice.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"found {text!r}; expected numbers and ranges such as '0-3, 8'")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"found the range {part.strip()!r}; expected its smaller end first")
        found += range(first, last + 1)
    if len(set(found)) != len(found):
        raise ValueError(f"found {text!r}; expected each number once")
    return found


def check_gpus(value: float) -> float:
    """Return `value` where a worker can have that many GPUs.

    Raises:
        ValueError: it is negative, or above one and not whole.
    """
    if value < 0 or (value > 1 and not value.is_integer()):
        raise ValueError(f"found {value}; expected a share of one GPU, or a whole number of GPUs")
    return value


class ResourcePoolConfig(StrictConfig):
    """A named pool of nodes for manual placement, and the GPUs of it that each role gets.

    The GPUs of a pool are numbered from 0 over its nodes in their order; without GPUs, what is
    numbered are places for workers, one on each node in turn. An index string such as
    ``"0-3, 8"`` gives one worker to each index (to each n where a worker has n GPUs).
    """

    name: str
    """The pool's name."""
    num_node: int = Field(ge=1)
    """How many nodes it takes."""
    num_gpus: int | list[int]
    """GPUs of each node that the pool may use, or a list with a number per node."""
    node_ids: list[str] | None = None
    """Which nodes, by name, where it matters; otherwise those that no other pool took, by name."""
    train: str | None = None
    """Where train workers go."""
    eval: str | None = None
    """Where eval workers go."""
    env: str | None = None
    """Where environment workers go."""
    buffer: str | None = None
    """Where storage workers go."""

    @field_validator(*ROLES, mode="before")
    @classmethod
    def _one_number_is_a_list_of_one(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    @field_validator(*ROLES)
    @classmethod
    def _readable_indices(cls, value: str | None) -> str | None:
        if value is not None:
            read_indices(value)
        return value

    @model_validator(mode="after")
    def _a_number_per_node(self) -> Self:
        lengths = {"num_gpus": self.num_gpus, "node_ids": self.node_ids}
        for name, given in lengths.items():
            if isinstance(given, list) and len(given) != self.num_node:
                raise ValueError(
                    f"{name} has {len(given)} entries and num_node is {self.num_node}; give one "
                    "per node"
                )
        if any(number < 0 for number in self.gpus_per_node()):
            raise ValueError(f"num_gpus is {self.num_gpus}; expected no negative number")
        return self

    def gpus_per_node(self) -> list[int]:
        """Return the GPUs of each node that the pool may use."""
        if isinstance(self.num_gpus, list):
            return list(self.num_gpus)
        return [self.num_gpus] * self.num_node

    def indices(self, role: str) -> list[int]:
        """Return the pool's indices of a role: ``train``, ``eval``, ``env`` or ``buffer``."""
        text = self.get(role)
        return [] if text is None else read_indices(text)


class ClusterConfig(StrictConfig):
    """The section that moves a run to a Ray cluster; without it everything is local."""

    class PlacementConfig(StrictConfig):
        """How workers are placed on a cluster."""

        mode: Literal["auto", "manual"] = "auto"
        """Plan automatically, or as `resource_pool` says."""
        strategy: Literal["default", "disaggregate", "colocate"] = "default"
        """Leave it to Ray, keep train apart from eval and env, or put train and eval together."""
        env_strategy: Literal["default", "device-colocate"] = "default"
        """Whether environments have GPUs of their own, or share those of eval workers."""

    ray_address: str = "auto"
    """``auto`` joins a running cluster and otherwise starts one on this machine; ``local`` always
    starts one; anything else is the address of the cluster to join."""
    train_worker_num: int = Field(default=1, ge=1)
    """TRAIN policies; several learn data-parallel."""
    eval_worker_num: int = Field(default=1, ge=1)
    """EVAL policies."""
    train_each_gpu_num: float = 1.0
    """GPUs of one TRAIN worker, or a share of one; 0 on a cluster that has none."""
    eval_each_gpu_num: float = 1.0
    """GPUs of one EVAL worker, or a share of one; 0 on a cluster that has none."""
    train_each_cpu_num: float = Field(default=1.0, ge=0)
    """CPU cores of one TRAIN worker."""
    eval_each_cpu_num: float = Field(default=1.0, ge=0)
    """CPU cores of one EVAL worker."""
    buffer_each_cpu_num: float = Field(default=1.0, ge=0)
    """CPU cores of one storage worker."""
    buffer_each_memory_gb: float = Field(default=0.0, ge=0)
    """Memory that one storage worker reserves, in gigabytes; 0 reserves none."""
    share_cpus: bool = True
    """Where workers ask for more cores than there are, let them share; false refuses to start."""
    buffer_worker_num: int | Literal["auto"] = 1
    """Storage workers; ``auto`` is one per node that has train workers."""
    remote_train: bool = True
    """Whether TRAIN policies are remote."""
    remote_eval: bool = True
    """Whether EVAL policies are remote."""
    remote_storage: bool = True
    """Whether storages are remote."""
    remote_env: bool = True
    """Whether environments are remote."""
    is_colocated: bool = False
    """Whether TRAIN and EVAL share GPUs; `placement.strategy` decides where it is not default."""
    enable_offload: bool = False
    """Whether models leave the GPU between phases."""
    rollout_env_interaction: Literal["batched", "streaming"] | None = None
    """Accepted, and changes nothing: environments and eval workers exchange data in one way."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Where workers go."""
    resource_pool: list[ResourcePoolConfig] | None = None
    """The pools of manual placement."""
    max_restarts: int = Field(default=3, ge=0)
    """How often one environment or eval worker that died is started again before the run ends."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the workers to start, in seconds."""
    env_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for one call of an environment worker; after it the worker counts as dead."""
    infer_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for one call of an eval or storage worker; after it, it counts as dead."""
    train_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for one update of the train workers, and for what they exchange meanwhile."""

    @field_validator("train_each_gpu_num", "eval_each_gpu_num")
    @classmethod
    def _possible_gpus(cls, value: float) -> float:
        return check_gpus(value)

    @field_validator("buffer_worker_num")
    @classmethod
    def _at_least_one_storage(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"found {value}; expected at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _manual_placement_has_pools(self) -> Self:
        if self.placement.mode == "manual" and not self.resource_pool:
            raise ValueError("placement.mode: manual needs `resource_pool`, a list of pools")
        names = [pool.name for pool in self.resource_pool or ()]
        if len(set(names)) != len(names):
            raise ValueError(f"resource_pool has the names {names}; give each pool its own")
        return self

    @property
    def strategy(self) -> str:
        """``default``, ``disaggregate``, ``colocate`` or ``manual``."""
        return "manual" if self.placement.mode == "manual" else self.placement.strategy

    @property
    def colocated(self) -> bool:
        """Whether TRAIN and EVAL share GPUs: the strategy says so, or leaves it to the user."""
        return {"colocate": True, "disaggregate": False}.get(self.strategy, self.is_colocated)

    @property
    def asks_for_workers(self) -> bool:
        """Whether anything is remote."""
        return any(self.is_remote(role) for role in ROLES)

    def is_remote(self, role: str) -> bool:
        """Return whether workers of ``train``, ``eval``, ``env`` or ``buffer`` are remote."""
        flags = {
            "train": self.remote_train,
            "eval": self.remote_eval,
            "env": self.remote_env,
            "buffer": self.remote_storage,
        }
        return flags[role]


PlacementConfig = ClusterConfig.PlacementConfig
