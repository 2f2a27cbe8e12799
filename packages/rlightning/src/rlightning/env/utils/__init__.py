"""Helpers under the import path that users of RLightning know."""

from rlightning.env.utils.utils import default_env_preprocess_fn

__all__ = ["default_env_preprocess_fn"]
