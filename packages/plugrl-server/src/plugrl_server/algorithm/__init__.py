"""Algorithms behind the server. Importing this registers the built-in ones, and loads no torch."""

import plugrl_server.algorithm.dummy
import plugrl_server.algorithm.eval
import plugrl_server.algorithm.ppo
import plugrl_server.algorithm.sac  # noqa: F401  # each registers its configuration and its class
