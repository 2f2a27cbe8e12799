"""Registries: built-ins on demand, names of one's own, and readable mistakes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlightning.errors import ConfigError, DuplicateNameError, UnknownNameError
from rlightning.utils import registry as registry_module
from rlightning.utils.registry import (
    BUFFERS,
    ENGINE,
    ENVS,
    POLICIES,
    WEIGHTS,
    Registry,
    load_modules_from_config,
)


@pytest.fixture
def registry():
    return Registry("policy", {"Fraction": "fractions:Fraction", "Gone": "no.such.module:X"})


def test_the_five_registries_have_their_documented_names():
    assert [each.name for each in (BUFFERS, WEIGHTS, POLICIES, ENVS, ENGINE)] == [
        "buffer",
        "weights",
        "policy",
        "env",
        "engine",
    ]
    assert "RolloutBuffer" in BUFFERS
    assert "syncrl" in ENGINE
    assert "PPOPolicy" in POLICIES
    assert {"gymnasium", "mujoco", "ale"} <= set(ENVS.names())
    assert "WeightBuffer" in WEIGHTS


def test_listing_names_imports_none_of_them():
    code = (
        "import sys; from rlightning.utils.registry import *; "
        "POLICIES.names(), BUFFERS.names(), 'PPOPolicy' in POLICIES; "
        "print(sorted(m for m in sys.modules if m.startswith('rlightning') or m == 'torch'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(
        ["rlightning", "rlightning.errors", "rlightning.utils", "rlightning.utils.registry"]
    )


def test_a_built_in_is_imported_when_it_is_asked_for(registry):
    from fractions import Fraction

    assert registry.module_dict == {}
    assert "Fraction" in registry
    assert registry.get("Fraction") is Fraction
    assert registry.module_dict == {"Fraction": Fraction}
    assert registry.names() == ["Fraction", "Gone"]


def test_a_built_in_whose_module_is_missing_says_so(registry):
    with pytest.raises(ConfigError, match=r"cannot import 'no\.such\.module:X'"):
        registry.get("Gone")


def test_classes_register_under_their_own_or_a_given_name(registry):
    @registry.register()
    class Mine:
        pass

    @registry.register("other")
    class Another:
        pass

    assert registry.get("Mine") is Mine
    assert registry.get("other") is Another


def test_registering_twice_names_both_modules(registry):
    registry.register("X")(SimpleNamespace)
    with pytest.raises(DuplicateNameError) as caught:
        registry.register("X")(dict)
    assert "types:SimpleNamespace" in str(caught.value)
    assert "builtins:dict" in str(caught.value)
    assert isinstance(caught.value, KeyError)


def test_a_built_in_name_cannot_be_taken(registry):
    with pytest.raises(DuplicateNameError, match="fractions:Fraction already"):
        registry.register("Fraction")(dict)


def test_registering_the_same_class_again_is_allowed(registry):
    """A module that is imported under its own name and again by `imports:` is no mistake."""
    registry.register("X")(dict)
    assert registry.register("X")(dict) is dict


def test_an_unknown_name_suggests_and_says_how_to_add_one(registry):
    with pytest.raises(UnknownNameError) as caught:
        registry.get("fractoin")
    text = str(caught.value)
    assert text.startswith("'fractoin' is not in the policy registry. Did you mean 'Fraction'?")
    assert "Known: Fraction, Gone." in text
    assert "`imports:`" in text
    assert isinstance(caught.value, KeyError)


def test_a_dotted_path_is_imported_on_the_spot(registry):
    from fractions import Fraction

    assert registry.get("fractions:Fraction") is Fraction


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:X", "cannot import 'no_such_module:X'"),
        ("fractions:Fractoin", "has no 'Fractoin'. Did you mean 'Fraction'"),
        ("fractions:math", "is a module; expected a class"),
        ("math:pi", "is a float; expected a class"),
        ("fractions:", "fractions has no ''"),
    ],
)
def test_a_wrong_path_is_a_configuration_error(registry, path, message):
    with pytest.raises(ConfigError, match=message):
        registry.get(path)


def test_a_missing_requirement_of_a_module_is_not_taken_for_a_missing_module(
    registry, tmp_path, monkeypatch
):
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        registry.get("needs_more:X")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_modules_from_config(SimpleNamespace(imports=["needs_more"]))


def test_entry_points_of_installed_packages_are_found(registry, monkeypatch):
    asked = []

    def entry_points(*, group):
        asked.append(group)
        return [SimpleNamespace(name="Plugged", load=lambda: dict)]

    monkeypatch.setattr(registry_module, "entry_points", entry_points)
    assert "Plugged" in registry
    assert registry.get("Plugged") is dict
    assert set(asked) == {"rlightning.policy"}


def test_listed_modules_are_imported_and_register_themselves(tmp_path, monkeypatch):
    (tmp_path / "my_listed_policies.py").write_text(
        "from rlightning.utils.registry import POLICIES\n"
        "@POLICIES.register('Listed')\n"
        "class Listed: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    load_modules_from_config(SimpleNamespace(imports=["my_listed_policies"]))
    try:
        assert POLICIES.get("Listed").__name__ == "Listed"
    finally:
        POLICIES.module_dict.pop("Listed")


def test_a_listed_module_that_does_not_exist_says_where_it_must_be():
    with pytest.raises(ConfigError, match=r"the module 'not_there\.at_all'.*importable"):
        load_modules_from_config(SimpleNamespace(imports=["not_there.at_all"]))
    load_modules_from_config(SimpleNamespace(imports=None))
    load_modules_from_config(SimpleNamespace())
