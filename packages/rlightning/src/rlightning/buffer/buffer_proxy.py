"""`BufferProxy`: a buffer that lives elsewhere, with the surface of its class.

Rows are handed over without waiting, a bounded number ahead; everything else waits for its answer,
and for the rows before it.
"""

from __future__ import annotations

import collections
import functools
import threading
from typing import TYPE_CHECKING, Any

from rlightning.runtime.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlightning.buffer.data_buffer import DataBuffer
    from rlightning.buffer.indexing import Index
    from rlightning.config import BufferConfig
    from rlightning.runtime.base import Future, Handle
    from rlightning.types import BatchedData, EnvRet, PolicyResponse

__all__ = ["BufferProxy", "make_buffer"]

_AHEAD = 16
"""Rows that may be on their way: enough to hide the way, few enough to stay small."""


class _Storage:
    """The buffer where it lives; what is not defined here is the buffer's own."""

    def __init__(self, buffer: DataBuffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        if name == "_buffer":
            raise AttributeError(name)
        return getattr(self._buffer, name)

    def add_rows(
        self,
        ids: list[str],
        env_rets: list[EnvRet],
        responses: list[PolicyResponse],
        truncations: list[bool] | None,
        is_eval: bool,  # noqa: FBT001  # a call between processes
    ) -> None:
        from rlightning.types import BatchedData

        self._buffer.add_batched_transition(
            BatchedData(ids, env_rets), BatchedData(ids, responses), truncations, is_eval=is_eval
        )

    def __len__(self) -> int:
        return len(self._buffer)

    def __getitem__(self, index: Index) -> Any:
        return self._buffer[index]


def make_buffer(
    kind: type[DataBuffer], config: BufferConfig, seed: int | None, stages: dict[str, Any]
) -> _Storage:
    """Return the buffer of a worker; called where it lives."""
    return _Storage(kind(config, seed=seed, **stages))


class BufferProxy(Proxy):
    """A buffer elsewhere.

    Args:
        kind: its class.
        config: the ``buffer`` section.
        seed: seeds the sampler.
        stages: functions that replace stages of the pipeline.
        spawn: starts a worker: gets `make_buffer` and its arguments.
    """

    def __init__(
        self,
        kind: type[DataBuffer],
        config: BufferConfig,
        seed: int | None,
        stages: dict[str, Any],
        spawn: Callable[[Callable[..., Any], tuple[Any, ...]], Handle],
    ) -> None:
        super().__init__(kind, spawn(make_buffer, (kind, config, seed, stages)))
        self.config = config
        self._ahead: collections.deque[Future] = collections.deque()
        self._lock = threading.RLock()

    def add_batched_transition(
        self,
        batched_env_ret: BatchedData[EnvRet],
        batched_policy_resp: BatchedData[PolicyResponse],
        truncations: Sequence[bool] | None = None,
        *,
        is_eval: bool = False,
    ) -> BufferProxy:
        """Append one row of each worker; what is wrong with it is raised by a later call."""
        from rlightning.errors import ContractError

        ids = batched_env_ret.ids()
        if ids != batched_policy_resp.ids():
            raise ContractError(
                f"observations of {ids} and responses to {batched_policy_resp.ids()} do not match"
            )
        flags = list(truncations) if isinstance(truncations, (list, tuple)) else truncations
        with self._lock:
            self._wait_for_rows(_AHEAD - 1)
            future = self.begin(
                "add_rows",
                list(ids),
                list(batched_env_ret.values()),
                list(batched_policy_resp.values()),
                flags,
                is_eval,
            )
            self._ahead.append(future)
        return self

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._wait_for_rows(0)
            return super()._call(method, *args, **kwargs)

    def _wait_for_rows(self, left: int) -> None:
        """Wait until no more than `left` rows are on their way."""
        while len(self._ahead) > left:
            self._ahead.popleft().result()

    def state_dict(self, *, include_data: bool | None = None) -> dict[str, Any]:
        """Return what a checkpoint needs, with the rows that were handed over.

        What is wrong with one of them is left to be raised by another call: a run that ends because
        of it is saved.

        Args:
            include_data: see `DataBuffer.state_dict`.
        """
        asked = {} if include_data is None else {"include_data": include_data}
        state: dict[str, Any] = self.begin("state_dict", **asked).result()
        return state

    @functools.cached_property
    def needs_bootstrap_response(self) -> bool:
        """See `DataBuffer`; not its class but its configuration may decide."""
        return bool(self._read("needs_bootstrap_response"))

    def _read(self, name: str) -> Any:
        return self._call("__getattr__", name)  # of the buffer in the worker

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def __getitem__(self, index: Index) -> Any:
        return self._call("__getitem__", index)

    def close(self) -> None:
        """End the worker."""
        self._handle.stop()
