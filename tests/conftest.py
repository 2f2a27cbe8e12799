"""Fixtures of the tests across distributions."""

import importlib.util
import pathlib

import pytest


def load(name):
    """Import a module that lies beside this file."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def bridge():
    """Return `bridge_helpers`."""
    return load("bridge_helpers")


@pytest.fixture(scope="session")
def pretend_cuda():
    """Return a context in which torch has a GPU that is not there, with its rules."""
    return load("pretend_cuda").pretend_cuda
