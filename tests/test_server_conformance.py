"""The protocol's checker against the training server, with states and with images."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from plugrl_protocol.conformance.server_cli import main as check_server
from plugrl_server.algorithm.eval import EvalConfig
from plugrl_server.algorithm.ppo import PPOConfig
from plugrl_server.algorithm.registration import make_algo
from plugrl_server.policy.base_policy import BasePolicy, BasePolicyConfig
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.server.trainer import TrainerConfig
from plugrl_server.server.websocket_agent_server import SocketConfig
from plugrl_server.testing import serve

STATES = ["--state-key", "state", "--state-dim", "4"]


def examine(capsys, running, *flags):
    """Run the checker; its report is the failure's message."""
    url = running.url
    code = check_server([url, "--timeout", "20", *STATES, *flags])
    report = capsys.readouterr().out
    assert code == 0, report
    assert " 0 failed" in report
    return report


def gaussian():
    config = GaussianPolicyConfig(obs_dim=4, action_dim=2, state_keys=("state",), device="cpu")
    return make_policy("gaussian-policy", config)


@pytest.mark.parametrize("library", ["websockets", "picows"])
def test_ppo_on_states_keeps_every_clause(capsys, library):
    if library == "picows":
        pytest.importorskip("picows")
    torch.manual_seed(0)
    config = PPOConfig(buffer_size=64, batch_size=32, update_epochs=1, train_itrs=10_000)
    algorithm = make_algo("ppo", gaussian(), config=config)
    algorithm.init_optimizers()
    socket = SocketConfig(api_key="key", max_message_mb=4.0, library=library)
    with serve(algorithm, socket_config=socket, feedback_wait_timeout=1.0) as running:
        flags = ["--api-key", "key", "--max-message-mb", "4", "--feedback-timeout", "1"]
        report = examine(capsys, running, *flags)
    assert "pass  api-key" in report
    assert "pass  frame-cap" in report


@dataclasses.dataclass
class EchoConfig(BasePolicyConfig):
    """Nothing to set."""


class Echo(BasePolicy):
    """The action is the state's first entry; an image must be there."""

    def __init__(self, config):
        super().__init__(config)
        self.action_dim, self.action_horizon = 1, 3

    def get_action_and_runtime_state(self, _obs):
        image = _obs["images"]["camera"]
        first = _obs["states"]["state"][:, :1]
        assert len(image) == len(first)
        return np.repeat(first[:, None, :], 3, axis=1), None

    def fake_runtime_state(self, batch_size):
        return None


@pytest.mark.parametrize("inline_limit_ms", [0.0, 1e6], ids=["thread", "event loop"])
def test_images_and_the_routing_of_every_row_keep_every_clause(capsys, inline_limit_ms):
    algorithm = make_algo("eval", Echo(EchoConfig()), config=EvalConfig())
    config = TrainerConfig(inline_limit_ms=inline_limit_ms)
    with serve(algorithm, trainer_config=config) as running:
        report = examine(capsys, running, "--image-key", "camera", "--echo")
    assert re.search(r"^pass  routing", report, re.MULTILINE), report


def test_a_run_that_ends_says_so(capsys):
    torch.manual_seed(0)
    config = PPOConfig(buffer_size=16, batch_size=16, update_epochs=1, global_steps=64)
    algorithm = make_algo("ppo", gaussian(), config=config)
    algorithm.init_optimizers()
    with serve(algorithm) as running:
        examine(capsys, running, "--until-stop", "--only", "stop")
