"""``dummy``: pretends to infer and to learn, for trying servers and clients."""

from plugrl_server.algorithm.dummy.dummy_config import DummyAlgoConfig
from plugrl_server.algorithm.registration import register_builtin_algo

__all__ = ["DummyAlgoConfig"]

register_builtin_algo("dummy", "plugrl_server.algorithm.dummy.dummy_algorithm:DummyAlgorithm")
