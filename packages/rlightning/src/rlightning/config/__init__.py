"""A run's configuration: sections as typed models, composed from YAML and overrides."""

from rlightning.config.base import Config, ExtensibleConfig, StrictConfig, resolve_extras
from rlightning.config.cluster import ClusterConfig, PlacementConfig, ResourcePoolConfig
from rlightning.config.compose import compose, compose_main
from rlightning.config.schema import (
    BufferConfig,
    EnvConfig,
    LogConfig,
    MainConfig,
    MultitaskConfig,
    PolicyConfig,
    SamplerConfig,
    StorageConfig,
    TrainConfig,
    WeightBufferConfig,
)

__all__ = [
    "BufferConfig",
    "ClusterConfig",
    "Config",
    "EnvConfig",
    "ExtensibleConfig",
    "LogConfig",
    "MainConfig",
    "MultitaskConfig",
    "PlacementConfig",
    "PolicyConfig",
    "ResourcePoolConfig",
    "SamplerConfig",
    "StorageConfig",
    "StrictConfig",
    "TrainConfig",
    "WeightBufferConfig",
    "compose",
    "compose_main",
    "resolve_extras",
]
