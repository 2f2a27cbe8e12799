"""Policies behind the server. Importing this registers the built-in ones, and loads no torch."""

import plugrl_server.policy.categorical
import plugrl_server.policy.dummy
import plugrl_server.policy.gaussian
import plugrl_server.policy.sac  # noqa: F401  # each registers its configuration and its class
