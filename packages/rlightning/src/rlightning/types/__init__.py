"""Values that travel between stages. Importing this loads no torch."""

from rlightning.types.batched_data import BatchedData
from rlightning.types.convert import is_tensor, map_leaves, to_device, to_numpy
from rlightning.types.env_ret import EnvRet, MultiAgentEnvRet, Processed_EnvRet_fields
from rlightning.types.meta import EnvMeta, PolicyRole
from rlightning.types.policy_response import MultiAgentPolicyResponse, PolicyResponse
from rlightning.types.protocols import Saveable, WeightSink, WeightSource, WeightStore

__all__ = [
    "BatchedData",
    "EnvMeta",
    "EnvRet",
    "MultiAgentEnvRet",
    "MultiAgentPolicyResponse",
    "PolicyResponse",
    "PolicyRole",
    "Processed_EnvRet_fields",
    "Saveable",
    "WeightSink",
    "WeightSource",
    "WeightStore",
    "is_tensor",
    "map_leaves",
    "to_device",
    "to_numpy",
]
