"""Seeds that differ by construction, and the state of every global random generator as plain data.

Knows nothing about who uses a seed. Torch is imported only where its generators are touched.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np

__all__ = ["derive_seed", "get_rng_state", "seed_everything", "set_rng_state"]

# A derived seed is a non-negative 31-bit number, which every simulator accepts:
#   bit 30      1 for evaluation, 0 for training, so the two never meet;
#   bits 14-29  the sibling's slot, consecutive for consecutive indices, so siblings never meet;
#   bits 0-13   from the base seed; an environment of N rows seeds row i with seed + i (Gymnasium),
#               which stays below the next sibling for up to 2**14 rows.
_EVAL_BIT = 1 << 30
_ROW_BITS = 14
_SLOTS = (1 << 16) - 1  # the last slot stays empty: seed + row never crosses into another range


def derive_seed(base: int, *path: str | int) -> int:
    """Return the seed for the part of a run that `path` names, for example ``("env", 3)``.

    The same arguments give the same seed on every machine. Indices under one parent give different
    seeds, at least 2**14 apart, for up to 65535 siblings. A path that starts with ``"eval"`` gives
    a seed that no other path can give.

    Args:
        base: the run's seed, non-negative.
        *path: names and non-negative indices; the last index numbers siblings.

    Returns:
        An integer in ``[0, 2**31)``.

    Raises:
        ValueError: `base` or an index is negative, or the last index is 65535 or more.
    """
    if base < 0 or any(isinstance(part, int) and part < 0 for part in path):
        raise ValueError(f"seeds and indices must be non-negative, got {base} and {path}")
    sibling = 0
    parents = path
    if path and isinstance(path[-1], int):
        sibling, parents = path[-1], path[:-1]
    if sibling >= _SLOTS:
        raise ValueError(f"the last index must be below {_SLOTS}, got {sibling}")
    key = [part if isinstance(part, int) else zlib.crc32(part.encode()) for part in parents]
    slot, row = np.random.SeedSequence(base, spawn_key=key).generate_state(2)
    slot = (int(slot) + sibling) % _SLOTS
    seed = slot << _ROW_BITS | int(row) >> (32 - _ROW_BITS)
    return seed | _EVAL_BIT if path and path[0] == "eval" else seed


def seed_everything(seed: int) -> None:
    """Seed the global generators of `random`, numpy and torch (CPU and every CUDA device).

    Raises:
        ValueError: `seed` is not in ``[0, 2**32)``, numpy's range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"a seed must be in [0, 2**32), got {seed}")
    import torch  # loading torch takes a second; who only derives seeds does not pay it

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_rng_state() -> dict[str, Any]:
    """Return the state of the global generators of `random`, numpy and torch.

    Returns:
        Dicts, lists, strings and numbers only, for JSON and ``torch.load(weights_only=True)``.
    """
    import torch

    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": {
            "key": numpy_state["state"]["key"].tolist(),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "torch_cuda": [state.numpy().tobytes().hex() for state in devices],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `get_rng_state` returned.

    CUDA states are restored on as many devices as there are now: a run saved on a machine with
    GPUs resumes on one without.

    Raises:
        KeyError: a part is missing.
    """
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    saved = state["numpy"]
    np.random.set_state(
        (
            "MT19937",
            np.array(saved["key"], np.uint32),
            saved["pos"],
            saved["has_gauss"],
            saved["gauss"],
        )
    )
    torch.set_rng_state(_from_hex(state["torch"]))
    for device in range(min(len(state["torch_cuda"]), torch.cuda.device_count())):
        torch.cuda.set_rng_state(_from_hex(state["torch_cuda"][device]), device)


def _from_hex(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
