"""Pictures as datasets keep them: PNG, or what else Pillow reads, in a cell or in a file.

Decoded, a picture is uint8 ``[height, width, channels]`` with 1, 3 or 4 channels.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.datasets.episode import Field
from rlightning.datasets.requirements import require
from rlightning.errors import ContractError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

__all__ = ["decode", "encode", "is_picture", "picture_field", "read_cell"]

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def is_picture(field: Field) -> bool:
    """Return whether one step's entry is a picture."""
    return field.dtype == np.uint8 and len(field.shape) == 3 and field.shape[-1] in _MODES


def picture_field(shape: Sequence[int]) -> Field:
    """Return what pictures are like that a dataset says to be of `shape`, channels last or first.

    Raises:
        ContractError: it is the shape of no picture.
    """
    sizes = tuple(int(size) for size in shape)
    if len(sizes) == 3 and sizes[-1] not in _MODES and sizes[0] in _MODES:
        sizes = (*sizes[1:], sizes[0])
    field = Field(sizes, np.dtype(np.uint8))
    if not is_picture(field):
        raise ContractError(
            f"a picture of shape {list(shape)}; expected height, width and 1, 3 or 4 channels"
        )
    return field


def encode(pictures: np.ndarray[Any, Any]) -> list[bytes]:
    """Return each of ``[T, h, w, c]`` as PNG, which loses nothing."""
    image = require("PIL.Image", "LeRobot with pictures")
    encoded = []
    for picture in pictures:
        buffer = io.BytesIO()
        image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    return encoded


def decode(encoded: bytes, field: Field) -> np.ndarray[Any, Any]:
    """Return a picture.

    Raises:
        ContractError: it is none, or has another height or width than `field`.
    """
    image = require("PIL.Image", "LeRobot with pictures")
    try:
        with image.open(io.BytesIO(encoded)) as opened:
            pixels = np.asarray(opened.convert(_MODES[field.shape[-1]]))
    except OSError as error:  # what Pillow raises for bytes of any other kind
        raise ContractError(f"a picture that cannot be read: {error}") from error
    picture = pixels.reshape(*pixels.shape[:2], field.shape[-1])
    if picture.shape != field.shape:
        raise ContractError(
            f"a picture of {list(picture.shape)}; meta/info.json says {list(field.shape)}"
        )
    return picture


def read_cell(cell: Any, folders: Sequence[pathlib.Path]) -> bytes:
    """Return the encoded picture that a cell of a table holds or names.

    Args:
        cell: bytes, the path of a file, or ``{"bytes": ..., "path": ...}`` with either.
        folders: where the path may start from.

    Raises:
        ContractError: there is no such file.
    """
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, bytes):
        return cell
    for folder in folders:
        file = folder / str(cell)
        if cell and file.is_file():
            return file.read_bytes()
    listed = ", ".join(map(str, folders))
    raise ContractError(f"the picture {cell!r} is neither in its cell nor a file in {listed}")
