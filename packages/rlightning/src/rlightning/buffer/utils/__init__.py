"""Parts of buffers that users replace or call: preprocessors, default stages, storage."""

from rlightning.buffer.storage import Storage
from rlightning.buffer.utils.preprocessors import (
    BoxFlattenPreprocessor,
    DiscretePreprocessor,
    NonPreprocessor,
    Preprocessor,
    default_obs_preprocessor,
    default_reward_preprocessor,
    get_preprocessor_cls,
)
from rlightning.buffer.utils.utils import (
    default_compute_gae,
    default_env_ret_preprocess_fn,
    default_gae_no_loop,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
)

__all__ = [
    "BoxFlattenPreprocessor",
    "DiscretePreprocessor",
    "NonPreprocessor",
    "Preprocessor",
    "Storage",
    "default_compute_gae",
    "default_env_ret_preprocess_fn",
    "default_gae_no_loop",
    "default_obs_preprocessor",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
    "default_reward_preprocessor",
    "get_preprocessor_cls",
]
