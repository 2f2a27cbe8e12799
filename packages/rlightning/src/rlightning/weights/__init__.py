"""How weights travel from learner to actors: versioned, whole, pulled by who needs them.

Which buffer, by ``policy.weight_buffer.buffer_strategy``:

* ``None``: none; weights go over directly, on a cluster packed by `rlightning.weights.transfer`.
* ``Double``: `WeightBuffer`, one per process that acts; the published copy beside the live network.
* ``Shared``: `CPUWeightBuffer`, one per machine, in shared memory, for all processes on it.
* ``Sharded``: `ShardedWeightBuffer`, the same, published in parts by all train workers at once.

All have ``publish``, ``read`` (lend for a ``with`` block), ``get`` (to keep), ``wait_for``,
``version``, ``staleness`` and ``close``; those in shared memory have an ``address`` too, and
``pack`` for readers on other machines. `Offload` is for workers that share a GPU and take turns.
"""

from rlightning.weights.address import WeightAddress
from rlightning.weights.cpu_weight_buffer import CPUWeightBuffer
from rlightning.weights.offload import Offload
from rlightning.weights.sharded_weight_buffer import ShardedWeightBuffer
from rlightning.weights.transfer import PackedWeights, pack, unpack
from rlightning.weights.weight_buffer import WeightBuffer

__all__ = [
    "CPUWeightBuffer",
    "Offload",
    "PackedWeights",
    "ShardedWeightBuffer",
    "WeightAddress",
    "WeightBuffer",
    "pack",
    "unpack",
]
