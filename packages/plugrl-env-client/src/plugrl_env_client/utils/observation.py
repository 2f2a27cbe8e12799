"""What a batch of rows sees. Knows nothing of environments and servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from plugrl_env_client.errors import EnvContractError
from plugrl_protocol import messages

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ImageArray", "Observation", "StateArray", "TextArray"]

ImageArray: TypeAlias = npt.NDArray[np.uint8]
"""``[n, h, w, c]``"""
StateArray: TypeAlias = npt.NDArray[Any]
"""``[n, d]``, floating or integer"""
TextArray: TypeAlias = npt.NDArray[np.str_]
"""``[n]``"""


class Observation:
    """What a batch of rows sees.

    Args:
        images: name to ``uint8 [n, h, w, c]``; may be empty.
        states: name to numbers ``[n, d]``; may be empty.
        text: one instruction for all rows, or n of them; None means none.

    Attributes:
        images: and `states`: as given.
        text: ``<U [n]``.

    Raises:
        EnvContractError: a `ValueError`: the leading axes do not agree, or nothing tells n.
    """

    __slots__ = ("images", "states", "text")

    def __init__(
        self,
        images: Mapping[str, ImageArray] | None = None,
        states: Mapping[str, StateArray] | None = None,
        text: str | list[str] | npt.NDArray[Any] | None = None,
    ) -> None:
        self.images = dict(images or {})
        self.states = dict(states or {})
        sizes = {
            f"{group}[{name!r}]": np.shape(array)[0] if np.ndim(array) else None
            for group, arrays in (("images", self.images), ("states", self.states))
            for name, array in arrays.items()
        }
        if text is not None and not isinstance(text, str):
            text = np.asarray(text, dtype=np.str_)
            sizes["text"] = len(text) if text.ndim == 1 else None
        if len(set(sizes.values())) != 1 or None in sizes.values():
            raise EnvContractError(
                f"an observation needs arrays with one common leading axis [n]; found {sizes}"
            )
        if text is None or isinstance(text, str):
            text = np.full(next(iter(sizes.values())) or 0, text or "")
        self.text: TextArray = text

    def __len__(self) -> int:
        return len(self.text)

    def __repr__(self) -> str:
        arrays = [f"{k}: {v.dtype} {list(v.shape)}" for k, v in (*self.images.items(),
                                                                 *self.states.items())]  # fmt: skip
        return f"Observation({', '.join(arrays)}, {len(self)} rows)"

    def rows(self, index: npt.NDArray[Any]) -> Observation:
        """Return a copy of the rows in `index`, indices or a mask."""
        taken = Observation.__new__(Observation)
        taken.images = {name: array[index] for name, array in self.images.items()}
        taken.states = {name: array[index] for name, array in self.states.items()}
        taken.text = self.text[index]
        return taken

    def with_rows(self, index: npt.NDArray[Any], source: Observation) -> Observation:
        """Return a copy in which the rows of `index` are those of `source`, in order.

        Raises:
            EnvContractError: `source` has other names, shapes or more rows.
        """
        if self.images.keys() != source.images.keys() or self.states.keys() != source.states.keys():
            raise EnvContractError(
                f"a reset shows {source}, a step {self}; the names must be the same"
            )
        merged = Observation.__new__(Observation)
        merged.images = {k: _replaced(v, index, source.images[k]) for k, v in self.images.items()}
        merged.states = {k: _replaced(v, index, source.states[k]) for k, v in self.states.items()}
        width = max(self.text.dtype, source.text.dtype, key=lambda dtype: dtype.itemsize)
        merged.text = _replaced(self.text.astype(width), index, source.text)
        return merged

    def to_wire(self) -> messages.Observation:
        """Return it as a message carries it; the protocol checks it when it is sent."""
        return messages.Observation(images=self.images, states=self.states, text=self.text)


def _replaced(array: npt.NDArray[Any], index: npt.NDArray[Any], rows: Any) -> npt.NDArray[Any]:
    merged = np.array(array)
    merged[index] = rows
    return merged
