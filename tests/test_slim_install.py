"""The wheels, each installed alone: what they bring, what they load, how fast they start.

Static import contracts do not see what a package's ``__init__`` pulls in; only a fresh environment
shows what a robot would really get.
"""

import json
import os
import pathlib
import re
import resource
import shutil
import site
import subprocess
import sys

import pytest
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
DISTRIBUTIONS = (
    "plugrl-protocol",
    "plugrl-envs",
    "plugrl-env-client",
    "rlightning",
    "plugrl-server",
)
HEAVY = ("torch", "ray", "tensordict", "hydra", "omegaconf", "matplotlib", "rlightning")
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")

pytestmark = [pytest.mark.slim, pytest.mark.timeout(600)]


def run(*command, **options):
    """Run a command outside the repository and return its output; show it where it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        **options,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def find_interpreters():
    """Return the supported interpreters on this machine, by version: on PATH or under pyenv."""
    candidates = [shutil.which(f"python{version}") for version in SUPPORTED]
    candidates += sorted(pathlib.Path.home().glob(".pyenv/versions/*/bin/python"))
    found = {}
    for candidate in filter(None, [sys.executable, *candidates]):
        asked = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        version = asked.stdout.strip()
        if asked.returncode == 0 and version in SUPPORTED:
            found.setdefault(version, candidate)
    return found


INTERPRETERS = find_interpreters()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The five wheels, built from the source tree."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / "packages" / name for name in DISTRIBUTIONS]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, *sources)
    return folder


@pytest.fixture(scope="module")
def make_environment(wheels, tmp_path_factory):
    """Returns a fresh environment's python, with the wheels named installed and what they need."""

    def make(interpreter, *names, no_deps=False, constraints=()):
        folder = tmp_path_factory.mktemp("environment")
        run(interpreter, "-m", "venv", folder)
        python = folder / "bin" / "python"
        options = ["--no-deps"] if no_deps else []
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *options,
        ]
        limits = folder / "constraints.txt"
        limits.write_text("".join(f"{line}\n" for line in constraints))
        found = [find_wheel(wheels, name) for name in names]
        run(*install, "--find-links", wheels, "--constraint", limits, *found)
        return python

    return make


def find_wheel(wheels, name):
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def lowest_versions(*names):
    """Return what packages ask for at least, as ``name==version`` of what they do not bring."""
    least = {}
    for name in names:
        text = (ROOT / "packages" / name / "pyproject.toml").read_text()
        needed = tomllib.loads(text)["project"]["dependencies"]
        for found in (re.match(r"([\w-]+)>=([\d.]+)", line) for line in needed):
            if found:
                least[found[1]] = found[2]
    return [f"{name}=={version}" for name, version in least.items()]


def installed(python):
    """Return the names of the distributions in an environment, without what venv puts there."""
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    return {re.sub(r"[-_.]+", "-", row["name"]).lower() for row in listed} - {"pip", "setuptools"}


def loaded_by(python, statement):
    """Return the top-level modules that a statement loads."""
    code = (
        f"{statement}\nimport sys, json\nprint(json.dumps([n.split('.')[0] for n in sys.modules]))"
    )
    return set(json.loads(run(python, "-c", code).splitlines()[-1]))


def import_all_but_optional(package):
    """Return a statement that imports every module whose optional dependency is installed."""
    return (
        f"import pkgutil, importlib, {package}\n"
        f"for found in pkgutil.walk_packages({package}.__path__, '{package}.'):\n"
        "    try:\n"
        "        importlib.import_module(found.name)\n"
        "    except ModuleNotFoundError as error:\n"
        f"        assert not error.name.startswith('{package}'), found.name\n"
        "        print('needs an extra:', found.name, error.name)"
    )


def test_the_interpreters_of_this_machine_are_named(capsys):
    """At least one runs; which ones did is part of the result."""
    with capsys.disabled():
        missing = [version for version in SUPPORTED if version not in INTERPRETERS]
        print(
            f"\nslim: Python {', '.join(sorted(INTERPRETERS))} found; missing: {missing or 'none'}"
        )
    assert INTERPRETERS


@pytest.mark.parametrize("version", sorted(INTERPRETERS))
def test_the_protocol_brings_three_packages_and_nothing_else(make_environment, version):
    python = make_environment(INTERPRETERS[version], "plugrl-protocol")
    assert installed(python) == {"plugrl-protocol", "numpy", "msgpack", "websockets"}
    loaded = loaded_by(python, import_all_but_optional("plugrl_protocol"))
    assert not loaded & {*HEAVY, "gymnasium", "pytest"}


CLIENT_SIDE = ("plugrl-protocol", "plugrl-envs", "plugrl-env-client")
A_ROLLOUT = """
import numpy as np
from plugrl_env_client.agent import WebSocketEnvClientAgent
from plugrl_env_client.runner import rollout
from plugrl_env_client.utils import make_vec
from plugrl_protocol.testing import NotingApplication, serve_in_thread

left = NotingApplication(lambda request: np.zeros((1, len(request.env_indices)), np.int64))
with serve_in_thread(left) as server:
    agent = WebSocketEnvClientAgent(server.url)
    env = make_vec("classic-v1", 2)
    print(rollout(env, agent, num_episodes=4, num_envs=2, seed=0).episodes)
    agent.close()
    env.close()
"""


@pytest.mark.parametrize("version", sorted(INTERPRETERS))
def test_the_client_side_installs_and_runs_without_a_trainer(make_environment, version):
    python = make_environment(INTERPRETERS[version], *CLIENT_SIDE)
    assert not installed(python) & set(HEAVY)
    for package in ("plugrl_envs", "plugrl_env_client"):
        assert not loaded_by(python, import_all_but_optional(package)) & set(HEAVY)
    assert run(python, "-c", A_ROLLOUT).split() == ["4"]


def test_the_client_side_runs_on_the_lowest_versions_it_asks_for(make_environment):
    """A simulator brings its own Gymnasium and numpy, often old ones."""
    oldest = min(INTERPRETERS, key=SUPPORTED.index)
    if SUPPORTED.index(oldest) > SUPPORTED.index("3.11"):
        pytest.skip(f"the oldest Python here is {oldest}, newer than the lowest versions")
    least = lowest_versions(*CLIENT_SIDE)
    assert len(least) == 6
    python = make_environment(INTERPRETERS[oldest], *CLIENT_SIDE, constraints=least)
    assert run(python, "-c", A_ROLLOUT).split() == ["4"]
    run(python.parent / "plugrl-run-env-client", "classic-v1", "--help")


TRAINER_SIDE = ("plugrl-protocol", "plugrl-envs", "rlightning", "plugrl-server")


def lend(python):
    """Let an environment see the running interpreter's packages after its own; return its own."""
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(f"{site.getsitepackages()[0]}\n")
    return packages


@pytest.fixture(scope="module")
def trainer(make_environment):
    """An environment with the trainer's wheels, over the packages of the running interpreter.

    A path file lends it torch and the rest without installing them again; editable installs are not
    seen through it, so that the wheels are what is imported.
    """
    python = make_environment(sys.executable, *TRAINER_SIDE, no_deps=True)
    packages = lend(python)
    where = run(python, "-c", "import rlightning; print(rlightning.__file__)").strip()
    assert where.startswith(str(packages))
    return python


def test_the_trainer_runs_on_the_lowest_versions_it_asks_for(make_environment, tmp_path):
    """Beside the torch of the running interpreter: there is one build of it for every machine."""
    least = [item for item in lowest_versions(*TRAINER_SIDE) if not item.startswith("torch==")]
    python = make_environment(sys.executable, *TRAINER_SIDE, no_deps=True)
    lend(python)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, *least)
    version = run(python, "-c", "import tensordict; print(tensordict.__version__)").strip()
    assert f"tensordict=={version.removesuffix('.0')}" in least, "its own, not the lent one"
    program = python.parent / "rlightning"
    small = ("train.max_epochs=1", "train.eval_episodes=1", "verbose=false", "log.name=least")
    run(program, "train", "cartpole_ppo", *small, f"log.log_dir={tmp_path}")
    run(program, "eval", tmp_path / "cartpole" / "least", "--episodes", "1")
    run(python.parent / "plugrl-run-server", "--help")


@pytest.mark.parametrize(
    "module",
    ["rlightning", "rlightning.errors", "rlightning.types", "rlightning.utils.registry"],
)
def test_values_and_registries_load_no_torch(trainer, module):
    assert "torch" not in loaded_by(trainer, f"import {module}")


def test_the_configuration_loads_no_torch(trainer):
    assert "torch" not in loaded_by(trainer, "import rlightning.config, rlightning.utils.config")


def test_values_import_where_torch_is_not_installed(make_environment):
    """Types need numpy alone, so that tools on a slim machine can read what a trainer sends."""
    python = make_environment(sys.executable, "rlightning", no_deps=True)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "numpy")
    run(python, "-c", "from rlightning.types import EnvRet, PolicyResponse; EnvRet('e-0', 1)")


@pytest.mark.parametrize("command", ["rlightning", "plugrl-run-server"])
def test_help_answers_within_a_second_of_processor_time(trainer, command):
    program = trainer.parent / command
    run(program, "--help")  # the first start compiles the modules
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "usage" in run(program, "--help").lower()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_ships_its_types_and_its_licence_field(wheels, name):
    import zipfile

    with zipfile.ZipFile(find_wheel(wheels, name)) as archive:
        names = archive.namelist()
        (metadata_name,) = [entry for entry in names if entry.endswith(".dist-info/METADATA")]
        metadata = archive.read(metadata_name).decode()
    assert f"{name.replace('-', '_')}/py.typed" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert not [entry for entry in names if "/tests/" in entry]


def test_the_trainer_wheel_ships_its_configurations(wheels):
    import zipfile

    with zipfile.ZipFile(find_wheel(wheels, "rlightning")) as archive:
        assert "rlightning/configs/cartpole_ppo.yaml" in archive.namelist()
