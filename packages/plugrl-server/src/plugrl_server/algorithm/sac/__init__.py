"""``sac``: soft actor-critic."""

from plugrl_server.algorithm.registration import register_builtin_algo
from plugrl_server.algorithm.sac.sac_config import SACConfig

__all__ = ["SACConfig"]

register_builtin_algo("sac", "plugrl_server.algorithm.sac.sac_algorithm:SACAlgorithm")
