"""Code takes its ways to a GPU and back: every algorithm, under the rules of a GPU without one."""

import pathlib

import numpy as np
import pytest
import torch
from torch import nn

from plugrl_server.algorithm.ppo import PPOConfig
from plugrl_server.algorithm.registration import make_algo
from plugrl_server.algorithm.sac import SACConfig
from plugrl_server.common.checkpoint_manager import CheckpointManager
from plugrl_server.policy.categorical import CategoricalPolicyConfig
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.policy.sac import SACPolicyConfig
from plugrl_server.testing import IdentityTask, train_in_process
from rlightning.cli.main import main
from rlightning.datasets import Episode, write_minari
from rlightning.policy import base_policy

ROOT = pathlib.Path(__file__).resolve().parent.parent

# --- what a GPU refuses ---------------------------------------------------------------------------

HERE = torch.arange(3.0)


@pytest.mark.parametrize(
    "refused",
    [
        lambda there: there + HERE,
        lambda there: HERE + there,
        lambda there: torch.where(there > 1, there, HERE),
        lambda there: nn.Linear(3, 1)(there),
        lambda there: nn.Linear(3, 1).to("cuda")(HERE),
        lambda there: torch.stack([there, HERE]),
        lambda there: HERE[there.long()],
        lambda there: nn.functional.one_hot(there.long()) + nn.functional.one_hot(HERE.long()),
        lambda there: torch.rand(2, device="cuda", generator=torch.Generator()),
        lambda there: there.normal_(generator=torch.Generator("cpu")),
        lambda there: HERE.normal_(generator=torch.Generator("cuda")),
        lambda there: there.numpy(),
        lambda there: np.asarray(there),
        lambda there: there.pin_memory(),
    ],
    ids=[
        "there and here", "here and there", "a choice", "a network here", "a network there",
        "a stack", "an index there", "one-hot", "a generator here", "drawn by one here",
        "drawn by one there", "numpy", "an array", "pinned",
    ],
)  # fmt: skip
def test_what_a_gpu_refuses_is_refused(pretend_cuda, refused):
    with pretend_cuda(), pytest.raises((RuntimeError, TypeError)):
        refused(HERE.to("cuda"))


def test_what_a_gpu_allows_is_allowed(pretend_cuda):
    with pretend_cuda():
        there = torch.tensor(HERE.numpy(), device="cuda")
        network = nn.Linear(3, 1).to("cuda")
        optimizer = torch.optim.Adam(network.parameters())
        network((there * torch.tensor(2.0) + 1)[None]).sum().backward()
        optimizer.step()
        drawn = torch.rand(3, device="cuda", generator=torch.Generator("cuda"))
        made = [
            there[torch.tensor([0, 1])],
            network.weight.grad,
            drawn.new_zeros(2),
            torch.zeros_like(there),
            nn.functional.one_hot(there.long()),
            HERE.to(there),
            there.double(),
        ]
        assert all(tensor.device == torch.device("cuda", 0) for tensor in made)
        back = [there.cpu(), there.to("cpu", torch.float64), HERE.clone().copy_(there)]
        back += [torch.zeros_like(there, device="cpu"), HERE + 1]
        assert not any(tensor.is_cuda for tensor in back)
        assert [tensor.numpy().tolist() for tensor in back[:3]] == [[0.0, 1.0, 2.0]] * 3


# --- rlightning -----------------------------------------------------------------------------------

SHORT = ["train.max_epochs=2", "train.eval_episodes=1", "train.max_eval_rollout_steps=5"]
ON_POLICY = [*SHORT, "train.max_rollout_steps=16"]
OFF_POLICY = ["train.max_epochs=8", *SHORT[1:], "buffer.min_size=16", "train.batch_size=64"]
OFF_POLICY += ["train.minibatch_size=16"]
RUNS = {
    "the README's policy": [
        "cartpole_ppo",
        *ON_POLICY,
        "imports=[policy_on_devices]",
        "policy.type=OnDevicesActorCritic",
    ],
    "PPO": ["cartpole_ppo", *ON_POLICY],
    "SAC": ["pendulum_sac", *OFF_POLICY],
}
MORE_RUNS = {
    "PPO, several threads": ["cartpole_ppo", *ON_POLICY, "engine=asyncrl"],
    "PPO, memory": ["cartpole_masked_recurrent_ppo", *ON_POLICY],
    "SAC, storage there": ["pendulum_sac", *OFF_POLICY, "buffer.storage.device=cuda"],
    "PPO, storage there": ["cartpole_ppo", *ON_POLICY, "buffer.storage.device=cuda"],
    "PPO, normalised, bfloat16": [
        "halfcheetah_ppo",
        *ON_POLICY,
        "train.precision=bf16",
        "buffer.capacity=64",
    ],
    "PPO, pictures": ["minatar_breakout_ppo", *ON_POLICY],
    "PPO, two tasks": ["cartpole_acrobot_ppo", *ON_POLICY],
    "V-trace": [
        "cartpole_ppo",
        *ON_POLICY,
        "policy.type=VTracePPOPolicy",
        "+train.gamma=${buffer.gamma}",
        "+train.trace_lambda=${buffer.gae_lambda}",
        "engine=async_rsl",
    ],
    "A2C": ["cartpole_a2c", *SHORT],
    "TD3": ["pendulum_td3", *OFF_POLICY],
    "DQN": ["cartpole_dqn", *OFF_POLICY],
    "RLPD": ["pendulum_rlpd", *OFF_POLICY, "buffer.dataset=demonstrations"],
    "cloning": [
        "cartpole_bc",
        *SHORT,
        "env.task=Pendulum-v1",
        "buffer.dataset=demonstrations",
        "train.batch_size=64",
        "train.minibatch_size=16",
    ],
}


def demonstrate(folder):
    """Write two episodes of Pendulum-v1 in which nothing is done."""
    import gymnasium

    env = gymnasium.make("Pendulum-v1")
    rows, idle = np.zeros((101, 3), np.float32), np.zeros((100, 1), np.float32)
    flags = np.zeros((2, 100), bool)
    flags[1, -1] = True
    episodes = [Episode(rows, idle, np.zeros(100), *flags)] * 2
    spaces = {name: getattr(env, name) for name in ("observation_space", "action_space")}
    write_minari(folder, episodes, **spaces)


def check_training(pretend_cuda, tmp_path, monkeypatch, arguments):
    """Train on the GPU, go on from the checkpoint there, and evaluate it on the CPU."""
    monkeypatch.chdir(tmp_path)
    demonstrate(tmp_path / "demonstrations")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    own_policy = readme.split("<!-- file: tiny_policy.py -->\n```python\n")[1].split("```")[0]
    own_policy = own_policy.replace("TinyActorCritic", "OnDevicesActorCritic")  # known in one test
    (tmp_path / "policy_on_devices.py").write_text(own_policy, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    trained = set()
    train = base_policy.BasePolicy._train

    def look_and_train(policy, *given, **more):
        trained.update(parameter.device.type for parameter in policy.parameters())
        return train(policy, *given, **more)

    monkeypatch.setattr(base_policy.BasePolicy, "_train", look_and_train)
    place = ["log.log_dir=runs", "log.project=p", "log.name=n", "log.level=WARNING"]
    with pretend_cuda():
        main(["train", *arguments, *place, "train.save_interval=1"])
        main(["train", *arguments, *place, "train.max_epochs=10", "--resume"])
    assert trained == {"cuda"}
    main(["eval", "runs/p/n/checkpoints/epoch_last", "--episodes", "1"])


@pytest.mark.parametrize("name", RUNS)
def test_rlightning_trains_goes_on_and_comes_back(pretend_cuda, tmp_path, monkeypatch, name):
    check_training(pretend_cuda, tmp_path, monkeypatch, RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_RUNS)
def test_every_policy_trains_goes_on_and_comes_back(pretend_cuda, tmp_path, monkeypatch, name):
    check_training(pretend_cuda, tmp_path, monkeypatch, MORE_RUNS[name])


# --- the server -----------------------------------------------------------------------------------

PPO = PPOConfig(global_steps=300, buffer_size=64, batch_size=32, update_epochs=2)
SAC = SACConfig(
    global_steps=100, buffer_size=200, batch_size=16, learning_starts=80, update_every=20
)
SERVED = {
    "gaussian-policy": ("ppo", PPO, GaussianPolicyConfig(obs_dim=2, action_dim=2)),
    "categorical-policy": ("ppo", PPO, CategoricalPolicyConfig(obs_dim=2, num_actions=2)),
    "sac-policy": ("sac", SAC, SACPolicyConfig(state_dim=2, action_dim=2, hidden_dims=(32, 32))),
}


@pytest.mark.parametrize(
    "separate",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["one policy", "a learner's own"],
)
@pytest.mark.parametrize("uid", SERVED)
def test_a_served_policy_learns_and_comes_back(pretend_cuda, tmp_path, uid, separate):
    algo, config, policy_config = SERVED[uid]

    def build():
        algorithm = make_algo(algo, make_policy(uid, policy_config), config=config)
        if separate:
            algorithm.separate_learner()
        algorithm.init_optimizers()
        return algorithm

    task = IdentityTask(4, discrete=uid == "categorical-policy")
    with pretend_cuda():
        algorithm = build()
        assert algorithm.policy.device.type == "cuda"
        train_in_process(algorithm, task)
        checkpoints = CheckpointManager(tmp_path / "run", config={}, overwrite=False, resume=False)
        where = checkpoints.save_checkpoint(algorithm.create_checkpoint())
        there = build()
        there.load_checkpoint(checkpoints.load_checkpoint(where))
        assert all(parameter.is_cuda for parameter in there.policy.parameters())
        there.infer(task.observe())
    here = build()
    here.load_checkpoint(checkpoints.load_checkpoint(where))
    assert not any(parameter.is_cuda for parameter in here.policy.parameters())
    here.infer(task.observe())
    assert here.global_step == config.global_steps


# --- over the wire --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("cartpole_ppo", ON_POLICY), ("pendulum_sac", OFF_POLICY)],
    ids=["PPO", "SAC"],
)
def test_three_ways_end_with_the_same_weights(
    pretend_cuda, bridge, tmp_path, monkeypatch, name, overrides
):
    overrides = [*overrides, "train.seed=0", "env.num_envs=1"]
    with pretend_cuda():
        here = bridge.train_in_process(name, tmp_path / "a", *overrides)
        remotely = bridge.train_remotely(name, tmp_path / "b", monkeypatch, *overrides)
        served = bridge.train_served(name, tmp_path / "c", *overrides)
    bridge.assert_same_weights(here, remotely)
    bridge.assert_same_weights(here, served)
