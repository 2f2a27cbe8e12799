"""``eval``: runs a policy and counts its episodes; learns nothing."""

from plugrl_server.algorithm.eval.eval_config import EvalConfig
from plugrl_server.algorithm.registration import register_builtin_algo

__all__ = ["EvalConfig"]

register_builtin_algo("eval", "plugrl_server.algorithm.eval.eval_algorithm:EvalAlgorithm")
