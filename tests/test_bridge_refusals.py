"""What does not fit is refused with both sides named (1008), and the run goes on for the others.

Three trainers are asked by the same clients: a policy of the server's own, a policy of rlightning
behind the server, and a remote environment.
"""

import contextlib
import dataclasses
import logging
import threading

import gymnasium as gym
import numpy as np
import pytest

from plugrl_env_client.cli import main as run_env_client
from plugrl_protocol import (
    Backoff,
    ConnectionReplaced,
    EnvClient,
    Feedback,
    Infer,
    ObservationRefusedError,
    ServerStopped,
    make_observation,
)
from plugrl_server.algorithm.eval import EvalConfig
from plugrl_server.algorithm.ppo import PPOConfig
from plugrl_server.algorithm.registration import make_algo
from plugrl_server.algorithm.rlightning.rlightning_algorithm import (
    RLightningAlgorithm,
    RLightningConfig,
)
from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy
from plugrl_server.algorithm.sac import SACConfig
from plugrl_server.cli import build_server
from plugrl_server.cli_args import parse
from plugrl_server.errors import UsageError
from plugrl_server.policy.base_policy import BasePolicy
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.policy.sac import SACPolicyConfig
from plugrl_server.testing import serve
from rlightning.config import EnvConfig
from rlightning.datasets import Episode, write_minari
from rlightning.env.remote_env import RemoteEnv, RemoteEnvClient
from rlightning.errors import ContractError
from rlightning.types import PolicyResponse

LIMIT_S = 30
HORIZON = 2
FRONT, POSE = (36, 36, 3), 2
SHOWN = {"images": {"front": list(FRONT)}, "states": {"pose": POSE}}
SPACE = {"low": -1.0, "high": 1.0, "shape": [1]}


@dataclasses.dataclass
class CameraConfig:
    """The policy below has no options."""


class CameraPolicy(BasePolicy):
    """Acts on one camera and on one vector, as somebody would write it who thinks of no other."""

    def __init__(self, config):
        super().__init__(config)
        self.action_dim, self.action_horizon = 1, HORIZON

    def get_action_and_runtime_state(self, _obs):
        picture = _obs["images"]["front"].reshape(-1, np.prod(FRONT)).mean(axis=1)
        one = picture / 255 + _obs["states"]["pose"] @ np.ones(POSE)
        return np.repeat(one[:, None, None], HORIZON, axis=1), None

    def fake_runtime_state(self, batch_size):
        return None


@contextlib.contextmanager
def own_policy(folder, bridge):
    with serve(make_algo("eval", CameraPolicy(CameraConfig()), config=EvalConfig())) as running:
        yield running.server.port


@contextlib.contextmanager
def rlightning_policy(folder, bridge):
    config = bridge.config_of(
        "cartpole_ppo", folder, "env.task=none",
        "+env.observation={images: {front: [36, 36, 3]}, states: {pose: 2}}",
        "+env.action_space={low: -1.0, high: 1.0, shape: [1]}", f"+env.action_horizon={HORIZON}",
        "+policy.model_cfg={image_encoder: resnet, image_size: [36, 36], image_features: 8}",
    )  # fmt: skip
    algorithm = RLightningAlgorithm(RLightningConfig(), ServedPolicy(config))
    with serve(algorithm) as running:
        yield running.server.port


@contextlib.contextmanager
def remote_environment(folder, bridge):
    env = RemoteEnv(
        EnvConfig.from_dict(
            {
                "name": "far", "backend": "env_server", "task": "none", "port": 0,
                "action_space": SPACE, "observation": SHOWN, "action_horizon": HORIZON,
            }
        )
    )  # fmt: skip
    env.init()
    over = threading.Event()

    def trainer():
        env.reset()
        while not over.is_set():
            env.step(PolicyResponse(env.env_id, action=np.zeros((HORIZON, 1), np.float32)))

    thread = threading.Thread(target=trainer, daemon=True)
    thread.start()
    try:
        yield env.port
    finally:
        over.set()  # the last step waits for a client
        last = threading.Thread(target=play, args=(env.port,), daemon=True)
        last.start()
        thread.join(LIMIT_S)
        env.close()
        last.join(LIMIT_S)
        assert [thread.is_alive(), last.is_alive()] == [False, False]


TRAINERS = [own_policy, rlightning_policy, remote_environment]


class Player:
    """A client of one environment, which shows what it is told to; as a context, a connection."""

    def __init__(self, port, *, images=None, states=None):
        shapes = {"front": FRONT} if images is None else images
        widths = {"pose": POSE} if states is None else states
        self.seen = make_observation(
            num_envs=1,
            images={name: np.zeros((1, *shape), np.uint8) for name, shape in shapes.items()},
            states={name: np.zeros((1, width), np.float32) for name, width in widths.items()},
        )
        backoff = Backoff(first_s=0.01, limit_s=LIMIT_S)
        self.wire = EnvClient(f"ws://127.0.0.1:{port}", backoff=backoff)
        self.step = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.wire.close()

    def round(self):
        ids, steps = np.zeros(1, np.int64), np.array([self.step])
        request = Infer(env_indices=ids, step_ids=steps, observation=self.seen)
        action = self.wire.infer(request, timeout_s=LIMIT_S).action
        no = np.zeros(1, bool)
        self.step += 1
        self.wire.feedback(
            Feedback(
                env_indices=ids, step_ids=steps, observation=self.seen, terminated=no,
                truncated=no, rewards=np.ones(1, np.float32), steps=np.array([len(action)]),
            )
        )  # fmt: skip
        return action


def play(port, *, rounds=10**6, **shows):
    with contextlib.suppress(ServerStopped, ConnectionReplaced), Player(port, **shows) as player:
        for _ in range(rounds):
            player.round()


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    "images",
    [{"top": FRONT}, {"front": (24, 24, 3)}, {}],
    ids=["another name", "another size", "no camera"],
)
def test_a_client_with_other_cameras(trainer, images, tmp_path, bridge):
    with trainer(tmp_path, bridge) as port, Player(port) as good:
        assert good.round().shape == (HORIZON, 1, 1)
        with Player(port, images=images) as bad:
            with pytest.raises(ObservationRefusedError) as refused:
                bad.round()
            close = refused.value.close
        assert close.code == 1008
        sent = [f"{name}:{'x'.join(map(str, shape))}" for name, shape in images.items()]
        assert ",".join([*sent, f"pose:{POSE}"]) in close.reason
        assert "policy has front:36x36x3,pose:2" in close.reason
        for _ in range(3):
            good.round()


def ppo_on_vectors():
    policy = make_policy("gaussian-policy", GaussianPolicyConfig(
        obs_dim=POSE, action_dim=1, state_keys=("pose",), hidden_dims=(8,), device="cpu",
    ))  # fmt: skip
    config = PPOConfig(buffer_size=16, batch_size=16, update_epochs=1, global_steps=64)
    return make_algo("ppo", policy, config=config)


def sac_on_vectors():
    policy = make_policy("sac-policy", SACPolicyConfig(
        state_dim=POSE, action_dim=1, state_keys=("pose",), hidden_dims=(8,), device="cpu",
    ))  # fmt: skip
    return make_algo("sac", policy, config=SACConfig(
        buffer_size=100, batch_size=16, learning_starts=16, global_steps=64,
    ))  # fmt: skip


@pytest.mark.parametrize("make", [ppo_on_vectors, sac_on_vectors])
def test_a_policy_without_cameras_learns_from_clients_with_and_without_some(make):
    algorithm = make()
    algorithm.init_optimizers()
    with serve(algorithm) as running:
        port = running.server.port
        with (
            Player(port, states={"other": POSE}) as bad,
            pytest.raises(ObservationRefusedError, match=r"states other:2.*pose:2"),
        ):
            bad.round()
        players = [
            threading.Thread(target=play, args=(port,), kwargs={"images": images}, daemon=True)
            for images in ({}, {"top": (4, 4, 3)})
        ]
        for player in players:
            player.start()
        running.join(LIMIT_S)
    assert algorithm.global_step >= 64


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_client_of_another_horizon(trainer, tmp_path, bridge, caplog, monkeypatch):
    """No message of the wire says it: the client knows, closes with 1008 and exits with 1."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING)
    with trainer(tmp_path, bridge) as port, Player(port) as good:
        good.round()
        code = run_env_client(
            ["classic-v1", "--env.name", "MountainCarContinuous-v0", "--server-port", str(port),
             "--runner.action-horizon", "8", "--num-episodes", "1", "--give-up-after", "30"]
        )  # fmt: skip
        good.round()
        good.round()
    both = "--runner.action-horizon is 8; the server says 2"
    said = {record.name: record.getMessage() for record in caplog.records if both in record.message}
    assert code == 1
    assert said.pop("plugrl_env_client.runner.run") == both
    assert [message.partition(">: ")[2] for message in said.values()] == [
        f"the client refuses this server, {both}"
    ]


def test_an_environment_of_ones_own_that_takes_other_actions(tmp_path, bridge, caplog):
    config = bridge.config_of(
        "cartpole_ppo", tmp_path, "env.task=none", "+env.observation={states: {obs: 3}}",
        "+env.action_space={low: -1.0, high: 1.0, shape: [4]}",
    )  # fmt: skip
    algorithm = RLightningAlgorithm(RLightningConfig(), ServedPolicy(config))
    with serve(algorithm) as running:
        port = running.server.port
        with Player(port, images={}, states={"obs": 3}) as good:
            good.round()
            client = RemoteEnvClient(gym.make("Pendulum-v1"), "127.0.0.1", port)
            with pytest.raises(ContractError, match=r"shape \(4,\), this environment takes \(1,\)"):
                client.run(num_episodes=1)
            good.round()
    assert (
        "the client refuses this server, the trainer's actions have the shape (4,)" in caplog.text
    )


def test_a_dataset_of_other_actions_ends_a_server_before_it_listens(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    flags = np.zeros((2, 5), bool)
    episode = Episode(np.zeros((6, 3), np.float32), np.zeros((5, 2), np.float32), [1.0] * 5, *flags)
    box = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
    seen = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    write_minari(tmp_path / "d", [episode], observation_space=seen, action_space=box)
    argv = ["--rlightning", "pendulum_rlpd", f"buffer.dataset={tmp_path / 'd'}"]
    with pytest.raises(UsageError, match=r"takes actions .*float32\[1\].* has actions float32.2."):
        build_server(parse(argv))
