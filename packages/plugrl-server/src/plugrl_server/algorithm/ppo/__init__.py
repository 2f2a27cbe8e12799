"""``ppo``: proximal policy optimisation."""

from plugrl_server.algorithm.ppo.ppo_config import PPOConfig
from plugrl_server.algorithm.registration import register_builtin_algo

__all__ = ["PPOConfig"]

register_builtin_algo("ppo", "plugrl_server.algorithm.ppo.ppo_algorithm:PPOAlgorithm")
