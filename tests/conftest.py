"""Fixtures of the tests across distributions."""

import importlib.util
import pathlib

import pytest


@pytest.fixture(scope="session")
def bridge():
    """Return `bridge_helpers`, which lies beside the tests."""
    path = pathlib.Path(__file__).with_name("bridge_helpers.py")
    spec = importlib.util.spec_from_file_location("bridge_helpers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
