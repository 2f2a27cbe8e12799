"""The guide "Custom policy", one test per statement and snippet.

The bodies that the guide leaves open are filled in once, in `FILLED`.
"""

import dataclasses
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAC_EXAMPLE = ROOT / "packages/plugrl-server/examples/sac/sac_policy.py"

QUICKSTART = """
import dataclasses

from plugrl_server.policy.base_policy import (
    BasePolicy,
    BasePolicyConfig,
    PolicyRuntimeState,
)
from plugrl_server.policy.registration import register_policy, register_policy_config

UID = "your-policy"


@register_policy_config(UID)
@dataclasses.dataclass
class YourPolicyConfig(BasePolicyConfig):
    ...


@register_policy(UID)
class YourPolicy(BasePolicy):
    def __init__(self, config: YourPolicyConfig):
        super().__init__(config)
        self.action_dim = ...
        self.action_horizon = ...

    def prepare_observation(self, obs: dict):
        ...

    def get_action_and_runtime_state(self, obs: dict):
        ...

    def fake_runtime_state(self, batch_size: int) -> PolicyRuntimeState:
        ...
"""

FILLED = """
import dataclasses

import numpy as np

from plugrl_server.policy.base_policy import BasePolicy, BasePolicyConfig, PolicyRuntimeState
from plugrl_server.policy.registration import register_policy, register_policy_config

UID = "your-policy"


@register_policy_config(UID)
@dataclasses.dataclass
class YourPolicyConfig(BasePolicyConfig):
    gain: float = 2.0


@register_policy(UID)
class YourPolicy(BasePolicy):
    def __init__(self, config: YourPolicyConfig):
        super().__init__(config)
        self.action_dim = 2
        self.action_horizon = 1

    def prepare_observation(self, obs: dict):
        return obs["states"]["position"]

    def get_action_and_runtime_state(self, obs: dict):
        position = self.prepare_observation(obs)
        return self.config.gain * position[:, None, :], {"position": position}

    def fake_runtime_state(self, batch_size: int) -> PolicyRuntimeState:
        return {"position": np.zeros((batch_size, 2), np.float32)}
"""


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory):
    """A package of the reader's own, ``my_pkg.plugrl_policies``, on the path."""
    folder = tmp_path_factory.mktemp("plug_in")
    (folder / "my_pkg").mkdir()
    (folder / "my_pkg" / "__init__.py").write_text("")
    (folder / "my_pkg" / "plugrl_policies.py").write_text(FILLED)
    return folder


def server(plug_in, *arguments):
    code = "import my_pkg.plugrl_policies; from plugrl_server.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=plug_in,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def observation(rows):
    position = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
    return {"images": {}, "states": {"position": position}, "text": [""] * rows}


@pytest.fixture(scope="module")
def policy():
    """The quickstart's policy with its bodies filled in."""
    namespace = {"__name__": "seed_filled"}
    exec(FILLED.replace("your-policy", "seed-filled"), namespace)
    return namespace["YourPolicy"](namespace["YourPolicyConfig"]())


# --- Quickstart -----------------------------------------------------------------------------------


def test_snippet_the_quickstart_runs_as_written():
    from plugrl_server.policy.registration import REGISTERED_POLICIES, REGISTERED_POLICY_CONFIGS

    exec(QUICKSTART.replace('"your-policy"', '"seed-as-written"'), {"__name__": "seed_as_written"})
    assert "seed-as-written" in REGISTERED_POLICIES
    assert "default" in REGISTERED_POLICY_CONFIGS["seed-as-written"]


def test_statement_a_registered_policy_is_made_by_its_uid(policy):
    from plugrl_server.policy.registration import make_policy

    made = make_policy("seed-filled", type(policy.config)())
    assert type(made) is type(policy)


def test_statement_a_torch_policy_is_a_module_with_a_state_dict():
    import torch

    from plugrl_server.policy.base_torch_policy import BaseTorchPolicy, BaseTorchPolicyConfig

    class Linear(BaseTorchPolicy):
        def __init__(self, config):
            super().__init__(config)
            self.layer = torch.nn.Linear(2, 2)

        def prepare_observation(self, obs):
            return obs["states"]["position"]

        def get_action_and_runtime_state(self, obs):
            return self.layer(self.extract_model_obs_tensor(obs))[:, None, :], None

        def fake_runtime_state(self, batch_size):
            return None

    made = Linear(BaseTorchPolicyConfig(device="cpu"))
    assert isinstance(made, torch.nn.Module)
    assert set(made.state_dict()) == {"layer.weight", "layer.bias"}
    assert made.extract_model_obs_tensor(observation(3)).shape == (3, 2)


def test_statement_a_torch_policy_has_a_device_flag():
    from plugrl_server.policy.base_policy import BasePolicyConfig
    from plugrl_server.policy.base_torch_policy import BaseTorchPolicyConfig

    assert "device" in {field.name for field in dataclasses.fields(BaseTorchPolicyConfig)}
    assert "device" not in {field.name for field in dataclasses.fields(BasePolicyConfig)}


def test_statement_the_reference_implementation_is_where_the_guide_says():
    assert SAC_EXAMPLE.is_file()


def test_statement_the_reference_implementation_keeps_the_contract_and_trains():
    import torch

    from plugrl_server.algorithm.registration import make_algo
    from plugrl_server.algorithm.sac import SACConfig
    from plugrl_server.testing import IdentityTask, check_policy, train_in_process

    torch.manual_seed(0)
    np.random.seed(0)
    namespace = {"__name__": "sac_example"}
    exec(compile(SAC_EXAMPLE.read_text(), SAC_EXAMPLE, "exec", dont_inherit=True), namespace)
    config = namespace["SACPolicyConfig"](state_dim=2, action_dim=2, hidden_dim=32, device="cpu")
    sac_policy = namespace["SACPolicy"](config)
    task = IdentityTask(4, discrete=False)
    check_policy(sac_policy, lambda rows: IdentityTask(rows, discrete=False).observe())
    settings = SACConfig(
        global_steps=1200,
        batch_size=64,
        learning_starts=100,
        gamma=0.5,
        q_lr=3e-3,
        policy_lr=3e-3,
        update_every=4,
        update_to_data_ratio=0.5,
        buffer_size=2000,
    )
    algorithm = make_algo("sac", sac_policy, config=settings)
    algorithm.init_optimizers()
    rewards = train_in_process(algorithm, task)
    assert np.mean(rewards[-50:]) > np.mean(rewards[:25]) + 0.2


# --- File layout ----------------------------------------------------------------------------------


def test_statement_a_built_in_has_its_folder_and_is_imported_by_the_package():
    import plugrl_server.policy

    folder = pathlib.Path(plugrl_server.policy.__file__).parent
    assert (folder / "gaussian" / "__init__.py").is_file()
    assert "plugrl_server.policy.gaussian" in sys.modules


def test_statement_a_plug_in_is_found_once_its_module_is_imported(plug_in):
    shown = server(plug_in, "--help")
    assert shown.returncode == 0
    assert "your-policy" in shown.stdout


# --- Verify ---------------------------------------------------------------------------------------


def test_snippet_the_command_line_answers_help():
    program = pathlib.Path(sys.executable).parent / "plugrl-run-server"
    shown = subprocess.run([program, "--help"], capture_output=True, timeout=60, check=False)
    assert shown.returncode == 0


def test_snippet_a_plug_in_policy_is_selected_on_the_command_line(plug_in):
    shown = server(plug_in, "your-policy", "default", "dummy", "default", "--help")
    assert shown.returncode == 0
    assert "--policy.gain" in shown.stdout


def test_snippet_the_plug_in_is_served_to_a_client(plug_in):
    """The whole command line of the guide, with a client that asks once."""
    from plugrl_protocol.env_client import EnvClient
    from plugrl_server.testing import PolicyClient

    code = "import my_pkg.plugrl_policies; from plugrl_server.cli import main; main()"
    names = ["your-policy", "default", "dummy", "default"]
    command = [sys.executable, "-c", code, *names, "--port", "0"]
    with subprocess.Popen(command, cwd=plug_in, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = next(text for text in process.stderr if "listening on" in text)
            with EnvClient(f"ws://{line.split()[-1]}") as client:
                action = PolicyClient(client).infer(observation(3))
            assert action.shape == (1, 3, 2)
        finally:
            process.terminate()
        process.stderr.read()
        assert process.wait(30) == 0


# --- Contract -------------------------------------------------------------------------------------


def test_statement_prepare_observation_gives_a_numpy_state(policy):
    assert isinstance(policy.prepare_observation(observation(3)), np.ndarray)


def test_statement_an_action_and_a_runtime_state_are_returned(policy):
    action, state = policy.get_action_and_runtime_state(observation(3))
    assert action.shape == (3, 1, 2)
    assert state["position"].shape == (3, 2)


def test_statement_a_one_step_policy_returns_one_horizon_step():
    from plugrl_server.policy.gaussian import GaussianPolicyConfig
    from plugrl_server.policy.registration import make_policy

    gaussian = make_policy(
        "gaussian-policy", GaussianPolicyConfig(obs_dim=2, state_keys=("position",))
    )
    action, _ = gaussian.get_action_and_runtime_state(observation(3))
    assert action.shape == (3, 1, gaussian.action_dim)


def test_statement_the_server_swaps_the_first_two_axes_before_it_sends():
    from plugrl_server.testing import serve_policy

    with serve_policy("seed-filled") as client:
        action = client.infer(observation(3))
    assert action.shape == (1, 3, 2)
    assert action[0].tolist() == (2.0 * observation(3)["states"]["position"]).tolist()


def test_statement_the_shape_of_actions_is_in_the_metadata(policy):
    from plugrl_server.testing import serve_policy

    with serve_policy("seed-filled") as client:
        assert client.metadata["action_dim"] == 2
        assert client.metadata["action_horizon"] == 1


def test_statement_a_policy_without_action_shape_runs_and_leaves_it_out_of_the_metadata(policy):
    from plugrl_server.policy.registration import register_policy, register_policy_config
    from plugrl_server.testing import serve_policy

    @register_policy("seed-shapeless")
    class Shapeless(type(policy)):
        def __init__(self, config):
            super().__init__(config)
            del self.action_dim, self.action_horizon

    register_policy_config("seed-shapeless")(type(policy.config))
    with serve_policy("seed-shapeless") as client:
        assert not {"action_dim", "action_horizon"} & client.metadata.keys()
        assert client.infer(observation(3)).shape == (1, 3, 2)


@dataclasses.dataclass
class State:
    """A runtime state as a dataclass."""

    value: np.ndarray
    nothing: None = None


@pytest.mark.parametrize("kind", ["dataclass", "dict", "array", "tensor", "none"])
def test_statement_a_runtime_state_is_sliced_by_environment(kind):
    import torch

    from plugrl_server.policy.state import slice_batched_state

    array = np.arange(6.0).reshape(3, 2)
    states = {
        "dataclass": State(array),
        "dict": {"value": array},
        "array": array,
        "tensor": torch.from_numpy(array),
        "none": None,
    }
    piece = slice_batched_state(states[kind], 1)
    if kind == "none":
        assert piece is None
        return
    value = {"dataclass": lambda: piece.value, "dict": lambda: piece["value"]}.get(
        kind, lambda: piece
    )()
    assert np.asarray(value).tolist() == [[2.0, 3.0]]


def test_statement_a_fake_runtime_state_sizes_the_buffers(policy):
    assert policy.fake_runtime_state(5)["position"].shape == (5, 2)
    assert policy.fake_runtime_state(5)["position"].dtype == np.float32


def test_statement_algorithms_ask_for_it_through_example_train_state(policy):
    from plugrl_server.algorithm.base_algorithm import BaseAlgoConfig, BaseAlgorithm

    class Keeps(BaseAlgorithm):
        def derive_train_state(self, runtime_state):
            return runtime_state

    Keeps.__abstractmethods__ = frozenset()
    assert Keeps(BaseAlgoConfig(), policy).example_train_state(4)["position"].shape == (4, 2)


def test_statement_the_runtime_state_is_an_alias_and_no_base_class():
    from plugrl_server.policy.base_policy import PolicyRuntimeState

    assert not isinstance(PolicyRuntimeState, type)


# --- Troubleshooting ------------------------------------------------------------------------------


def test_statement_a_uid_is_not_listed_when_its_module_was_not_imported():
    code = "from plugrl_server.cli import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", code, "your-policy", "default", "dummy", "default"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 2
    assert "your-policy" in shown.stderr


def test_statement_an_action_that_changes_its_shape_fails_with_that_reason(policy):
    from plugrl_server.testing import check_policy

    class Unstable(type(policy)):
        def get_action_and_runtime_state(self, obs):
            action, state = super().get_action_and_runtime_state(obs)
            return np.concatenate([action] * len(action), axis=1), state

    with pytest.raises(ValueError, match="shape"):
        check_policy(Unstable(policy.config), observation)


def test_statement_missing_runtime_state_fields_are_named(policy):
    from plugrl_server.testing import check_policy

    class Missing(type(policy)):
        def get_action_and_runtime_state(self, obs):
            return super().get_action_and_runtime_state(obs)[0], {}

    with pytest.raises(ValueError, match="position"):
        check_policy(Missing(policy.config), observation)


def test_statement_dtypes_that_drift_are_named(policy):
    from plugrl_server.testing import check_policy

    class Drifting(type(policy)):
        def get_action_and_runtime_state(self, obs):
            action, state = super().get_action_and_runtime_state(obs)
            return action, {"position": state["position"].astype(np.float64)}

    with pytest.raises(ValueError, match="float64"):
        check_policy(Drifting(policy.config), observation)
