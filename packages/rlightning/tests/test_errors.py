"""Errors carry data, render sentences, and are caught as their documented built-in kinds."""

import inspect
import pickle

import pytest

from rlightning import errors


def test_every_error_stands_in_the_tree_of_the_module():
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, Exception):
            assert name in errors.__doc__
            assert issubclass(kind, errors.RLightningError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("UnknownNameError", KeyError),
        ("DuplicateNameError", KeyError),
        ("ContractError", ValueError),
        ("NonFiniteError", ValueError),
        ("EnvWorkerError", RuntimeError),
        ("PlacementError", ValueError),
        ("CheckpointError", RuntimeError),
        ("RunDirectoryError", RuntimeError),
    ],
)
def test_errors_are_caught_as_their_built_in_kind(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_unknown_name_suggests_whatever_the_case_and_lists_all():
    error = errors.UnknownNameError(
        "ppopolicy", kind="policy registry", known=["Random", "PPOPolicy"]
    )
    assert str(error) == (
        "'ppopolicy' is not in the policy registry. Did you mean 'PPOPolicy'? "
        "Known: PPOPolicy, Random."
    )
    nothing = errors.UnknownNameError("x", kind="env registry", known=[], hint="Register one.")
    assert str(nothing) == "'x' is not in the env registry. Known: none. Register one."


def test_duplicate_name_shows_its_message_without_quotes():
    assert str(errors.DuplicateNameError("twice")) == "twice"


def test_non_finite_error_says_what_where_and_what_happened():
    error = errors.NonFiniteError("reward", source="env-0", step=7, where="1 of 4 numbers")
    assert str(error) == (
        "reward of env-0 is not finite at step 7 (1 of 4 numbers). "
        "The run stopped before it could reach the parameters."
    )
    error.dump = "/x/update_7.pt"
    assert str(error).endswith("The tensor and its batch were saved to /x/update_7.pt.")
    assert str(errors.NonFiniteError("loss", source="P")) == (
        "loss of P is not finite. The run stopped before it could reach the parameters."
    )


@pytest.mark.parametrize(
    "error",
    [
        errors.NonFiniteError("reward", source="env-0", step=7, where="row 1"),
        errors.UnknownNameError("a", kind="policy registry", known=["b"], hint="h"),
        errors.ConfigError("wrong"),
    ],
)
def test_errors_survive_pickling_between_processes(error):
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)


def test_nothing_close_is_not_suggested():
    assert errors.did_you_mean("zzz", ["abc"]) == ""
