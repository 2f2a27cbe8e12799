"""Policies of rlightning behind the server: ``plugrl-run-server --rlightning CONFIG``."""
