"""Registration of environments, and the wrappers around them."""

from plugrl_env_client.utils.registration import (
    get_env_config,
    make,
    make_vec,
    register_env,
    register_env_config,
)
from plugrl_env_client.utils.wrappers import TimeLimitWrapper, VectorEpisodeStatsWrapper

__all__ = [
    "TimeLimitWrapper",
    "VectorEpisodeStatsWrapper",
    "get_env_config",
    "make",
    "make_vec",
    "register_env",
    "register_env_config",
]
