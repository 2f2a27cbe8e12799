"""The states that travel with an action: what a policy hands over, what an algorithm keeps of it.

A *runtime state* is whatever a policy returns beside its action. A *train state* is the part that
an algorithm stores, as a nested map of numpy arrays. Both have the batch first. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from plugrl_server.common.trees import map_tree
from plugrl_server.errors import PolicyContractError
from rlightning.types.convert import is_tensor, to_numpy

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "ArraySpec",
    "LazyTensors",
    "NumpyState",
    "PolicyRuntimeState",
    "PolicyStateArray",
    "PolicyStepState",
    "PolicyTrainState",
    "TrainStateSpec",
    "infer_numpy_state_spec",
    "infer_train_state_spec",
    "is_numpy_state_mapping",
    "pick_fields",
    "slice_batched_state",
    "slice_policy_step_state",
    "to_numpy_state",
]

PolicyStateArray: TypeAlias = "np.ndarray[Any, Any]"
NumpyState: TypeAlias = "PolicyStateArray | Mapping[str, NumpyState]"
PolicyRuntimeState: TypeAlias = Any | None
PolicyTrainState: TypeAlias = "Mapping[str, NumpyState] | None"
TrainStateSpec: TypeAlias = "dict[str, TrainStateSpec | ArraySpec]"


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape (without the batch) and dtype of one array."""

    shape: tuple[int, ...]
    dtype: str


class LazyTensors:
    """A base of runtime states whose fields are arrays until somebody asks for them.

    Most fields are stored as the arrays that they are; to make tensors of a few numbers takes
    longer than to compute them. A subclass is a dataclass whose fields are tensors on the CPU.

    Attributes:
        arrays: fields that nobody has asked for yet.
    """

    arrays: ClassVar[Mapping[str, PolicyStateArray]] = {}

    @classmethod
    def of_arrays(cls, arrays: dict[str, PolicyStateArray]) -> Self:
        """Make a state of all fields, batch first."""
        state = cls.__new__(cls)
        state.__dict__["arrays"] = arrays
        return state

    def __getattr__(self, name: str) -> Any:
        array = self.arrays.get(name)
        if array is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        import torch

        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        setattr(self, name, tensor)
        return tensor

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in self.arrays:
            own["arrays"] = {key: array for key, array in self.arrays.items() if key != name}
        own[name] = value


@dataclasses.dataclass
class PolicyStepState:
    """What belongs to an action between its sending and its feedback."""

    runtime_state: PolicyRuntimeState = None
    train_state: PolicyTrainState = None


def slice_batched_state(state: Any, index: int) -> Any:
    """Cut one row, keeping the batch axis: dicts and dataclasses field by field; None stays None.

    Args:
        state: anything indexable by batch.
        index: which row.
    """
    return map_tree(lambda leaf: leaf[index : index + 1], state)


def slice_policy_step_state(step_state: PolicyStepState, index: int) -> PolicyStepState:
    """Cut one row of both states."""
    return PolicyStepState(
        runtime_state=slice_batched_state(step_state.runtime_state, index),
        train_state=slice_batched_state(step_state.train_state, index),
    )


def is_numpy_state_mapping(value: Any) -> bool:
    """Whether `value` is a nested map of numpy arrays with string keys."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and (isinstance(item, np.ndarray) or is_numpy_state_mapping(item))
        for key, item in value.items()
    )


def to_numpy_state(value: Any) -> Any:
    """Turn tensors, dataclasses and maps into a nested map of numpy arrays.

    Tensors on the CPU share memory with the result; bfloat16 becomes float32.

    Raises:
        TypeError: a leaf inside a map is None, or is nothing that numpy holds.
    """
    if is_tensor(value) and value.device.type == "cpu" and value.element_size() != 2:
        plain: PolicyStateArray = value.detach().numpy()
        return plain
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        missing = [key for key, item in value.items() if item is None]
        if missing:
            raise TypeError(f"the state's entries {missing} are None; a stored state holds arrays")
        return {str(key): to_numpy_state(item) for key, item in value.items()}
    array = np.asarray(to_numpy(value))
    if array.dtype.kind not in "biufU":
        raise TypeError(f"a state holds {type(value).__name__}; expected arrays or tensors")
    return array


def pick_fields(state: Any, names: Sequence[str], *, needed_by: str) -> dict[str, Any]:
    """Take some fields of a runtime state, as numpy arrays.

    Args:
        state: a mapping, or a dataclass.
        names: of the fields.
        needed_by: how the message names who asks.

    Raises:
        PolicyContractError: a field is missing.
    """
    if isinstance(state, LazyTensors) and state.arrays.keys() >= set(names):
        return {name: state.arrays[name] for name in names}
    is_mapping = isinstance(state, Mapping)
    found = {}
    for name in names:
        value = state.get(name) if is_mapping else getattr(state, name, None)
        if value is None:
            have = list(state) if is_mapping else list(getattr(state, "__dict__", {}))
            raise PolicyContractError(
                f"the runtime state lacks {name!r}, which {needed_by} stores; it has "
                f"{', '.join(map(str, have)) or 'nothing'}"
            )
        found[name] = value if type(value) is np.ndarray else to_numpy_state(value)
    return found


def infer_numpy_state_spec(state: NumpyState) -> Any:
    """Give an `ArraySpec` per array of a batched state."""
    if isinstance(state, Mapping):
        return {key: infer_numpy_state_spec(item) for key, item in state.items()}
    return ArraySpec(shape=tuple(state.shape[1:]), dtype=state.dtype.str)


def infer_train_state_spec(train_state: PolicyTrainState) -> TrainStateSpec:
    """Give the shapes and dtypes of a train state; an empty map for None."""
    return {} if train_state is None else infer_numpy_state_spec(train_state)
