"""What the tests of the bridge share: clients in threads, and the three ways to train."""

import logging
import pathlib
import re
import threading

import torch

from plugrl_env_client.agent.websocket_env_client_agent import WebSocketEnvClientAgent
from plugrl_env_client.envs.gym_env import GymEnv, GymEnvConfig
from plugrl_env_client.runner.rollout import RolloutLoop, RolloutOptions
from plugrl_env_client.utils.wrappers import VectorEpisodeStatsWrapper
from plugrl_envs import derive_seeds
from plugrl_protocol import Backoff, WireError
from plugrl_server.algorithm.rlightning.parts import load_config
from plugrl_server.algorithm.rlightning.rlightning_algorithm import (
    RLightningAlgorithm,
    RLightningConfig,
)
from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy
from plugrl_server.common.checkpoint_manager import CheckpointManager
from plugrl_server.testing import serve
from rlightning.checkpoint import load_weights
from rlightning.config import ClusterConfig
from rlightning.env.remote_env import RemoteEnv
from rlightning.launch import run_main, train_main
from rlightning.utils.seeding import seed_everything

SEED = derive_seeds(0, 1)[0]
"""Of the first row of the first worker where ``env.seed`` is 0."""
LIMIT_S = 60


class Client(threading.Thread):
    """A Gymnasium environment that dials in from a thread; `error` is why it failed, if it did."""

    def __init__(self, port, task, *, num_envs=1, seed=SEED, episodes=10**6, options=None):
        super().__init__(daemon=True)
        self.agent = WebSocketEnvClientAgent(
            "127.0.0.1", port, backoff=Backoff(first_s=0.02, limit_s=LIMIT_S)
        )
        config = GymEnvConfig(name=task)
        env = VectorEpisodeStatsWrapper(GymEnv(config, num_envs=num_envs))
        options = options or RolloutOptions(num_episodes=episodes, seed=seed)
        self.loop = RolloutLoop(env, self.agent, options)
        self.error = None

    def run(self):
        try:
            self.loop.run()
        except (WireError, ValueError) as error:
            self.error = error
        finally:
            self.agent.close()


def config_of(name, folder, *overrides):
    return load_config(name, [f"log.log_dir={folder}", "log.name=run", "verbose=false", *overrides])


def weights_of(folder):
    (path,) = pathlib.Path(folder).glob("*/run/checkpoints/epoch_last")
    return load_weights(path)


def assert_same_weights(one, other):
    assert one["weights"].keys() == other["weights"].keys()
    for name, state in one["weights"].items():
        for key, tensor in state.items():
            assert torch.equal(tensor, other["weights"][name][key]), (name, key)
    assert one["extra"].keys() == other["extra"].keys()
    for key, tensor in one["extra"].items():
        assert torch.equal(tensor, other["extra"][key]), key


def train_in_process(name, folder, *overrides):
    config = config_of(name, folder, "env.seed=0", *overrides)
    run_main(train_main, config)
    return weights_of(folder)


def train_on_ray(name, folder, *overrides):
    """Train with one worker of each kind on Ray; wants the fixture `ray_cluster`."""
    config = config_of(name, folder, "env.seed=0", *overrides)
    config.cluster = ClusterConfig(ray_address="local")
    run_main(train_main, config)
    return weights_of(folder)


class Dialler(logging.Handler):
    """Starts clients when the run's log says where they are waited for."""

    def __init__(self, make_clients):
        super().__init__()
        self.make_clients = make_clients
        self.clients = []

    def emit(self, record):
        found = re.search(r"listening for environment clients at \S+:(\d+)", record.getMessage())
        if found and not self.clients:
            self.clients += self.make_clients(int(found[1]))
            for client in self.clients:
                client.start()


def train_remotely_on_ray(name, folder, *overrides, make_clients=None, **cluster):
    """Train with ``backend: env_server`` and workers on Ray; return weights and the clients."""
    config = config_of(
        name, folder, "env.backend=env_server", "env.port=0", "env.start_timeout_s=30", *overrides
    )
    config.cluster = ClusterConfig(ray_address="local", **cluster)
    dialler = Dialler(make_clients or (lambda port: [Client(port, config.env[0].task)]))
    log = logging.getLogger("rlightning.env.remote")
    log.addHandler(dialler)
    try:
        run_main(train_main, config)
    finally:
        log.removeHandler(dialler)
    for client in dialler.clients:
        client.join(LIMIT_S)
        assert not client.is_alive()
    return weights_of(folder), dialler.clients


def train_remotely(name, folder, monkeypatch, *overrides, make_clients=None):
    """Train with ``backend: env_server`` and clients that dial in."""
    config = config_of(
        name, folder, "env.backend=env_server", "env.port=0", "env.start_timeout_s=30", *overrides
    )
    clients = []
    make_clients = make_clients or (lambda port: [Client(port, config.env[0].task)])
    join = RemoteEnv._join_hub

    def join_and_dial(self):
        hub = join(self)
        if not clients:
            clients.extend(make_clients(hub.port))
            for client in clients:
                client.start()
        return hub

    with monkeypatch.context() as patch:
        patch.setattr(RemoteEnv, "_join_hub", join_and_dial)
        run_main(train_main, config)
    for client in clients:
        client.join(LIMIT_S)
        assert not client.is_alive()
    return weights_of(folder)


def train_served(name, folder, *overrides):
    """Train behind the training server."""
    config = config_of(name, folder, *overrides)
    seed_everything(config.train.seed)
    algorithm = RLightningAlgorithm(RLightningConfig(), ServedPolicy(config))
    checkpoints = CheckpointManager(
        folder / "server", config=config.model_dump(mode="json"), overwrite=False, resume=False
    )
    with serve(algorithm, checkpoint_manager=checkpoints) as running:
        client = Client(running.server.port, config.env[0].task)
        client.start()
        running.join(LIMIT_S)
        client.join(LIMIT_S)
    assert client.error is None
    path = max((folder / "server").glob("*/manifest.json"), key=lambda p: int(p.parent.name))
    return load_weights(path.parent)
