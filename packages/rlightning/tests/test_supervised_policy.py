"""Behaviour cloning: losses by hand, learning from a dataset by configuration, what follows it."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.checkpoint import list_checkpoints
from rlightning.config import MainConfig
from rlightning.datasets import Episode, write_lerobot, write_minari
from rlightning.errors import CheckpointError, ConfigError, ContractError
from rlightning.policy.off_policy import OffPolicy
from rlightning.policy.supervised_policy import SimpleSupervisedPolicy
from rlightning.runtime import open_run
from rlightning.testing import TargetEnv
from rlightning.types import EnvRet
from rlightning.utils.logger import close_logger

pytest.importorskip("h5py")
pytest.importorskip("pyarrow")

gym.register("SupervisedDiscreteTarget-v0", TargetEnv)
gym.register("SupervisedContinuousTarget-v0", TargetEnv, kwargs={"continuous": True})

BOX = spaces.Box(np.float32([0.0, -3.0]), np.float32([5.0, -1.0]))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    yield
    close_logger()


def cart_pole_episode(env, seed, steps=150):
    """A linear controller that balances the pole."""
    rows, actions = [env.reset(seed=seed)[0]], []
    ends = (False, False)
    while not any(ends) and len(actions) < steps:
        actions.append(int(rows[-1] @ [0.05, 0.1, 1.0, 0.5] > 0))
        observation, _, *ends, _ = env.step(actions[-1])
        rows.append(observation)
    flags = np.zeros((2, len(actions)), bool)
    flags[:, -1] = ends
    return Episode(np.stack(rows), np.array(actions), np.ones(len(actions)), *flags)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    """A folder with the controller's episodes in both layouts."""
    folder = tmp_path_factory.mktemp("demonstrations")
    env = gym.make("CartPole-v1")
    episodes = [cart_pole_episode(env, seed) for seed in range(6)]
    spaces_of = {"observation_space": env.observation_space, "action_space": env.action_space}
    write_minari(folder / "minari", episodes, **spaces_of)
    write_lerobot(folder / "lerobot", episodes, fps=50, task="balance")
    return folder


def configuration(folder, dataset, *, policy=None, buffer=None, env=None, **train):
    config = MainConfig.from_dict(
        {
            "engine": "supervised",
            "debug": False,
            "verbose": False,
            "env": {"name": "c", "backend": "gymnasium", "task": "CartPole-v1", **(env or {})},
            "buffer": {"type": "DatasetBuffer", "capacity": 1000, "dataset": str(dataset)}
            | (buffer or {}),
            "policy": {"type": "SimpleSupervisedPolicy", "optim_cfg": {"lr": 0.01}}
            | (policy or {}),
            "train": {
                "max_epochs": 30,
                "batch_size": 256,
                "minibatch_size": 64,
                "eval_episodes": 4,
                "seed": 0,
                "torch_threads": 1,
            }
            | train,
            "log": {"level": "ERROR", "log_dir": str(folder)},
        }
    )
    check_config(config)
    return config


def build(config):
    config.attach_run(open_run(config, overwrite=True))
    return build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer),
    )


@pytest.mark.parametrize("layout", ["minari", "lerobot"])
def test_a_clone_acts_like_its_demonstrator(tmp_path, demonstrations, layout):
    """The controller balances for ever; four evaluation episodes of 500 steps say that too."""
    config = configuration(tmp_path, demonstrations / layout, max_eval_rollout_steps=500)
    engine = build(config)
    assert len(engine.buffer) == (900 if layout == "minari" else 894)  # last outcomes are unknown
    engine.run()
    assert engine.last_metrics["train/accuracy"] > 0.9
    assert engine.last_metrics["eval/episode_return"] >= 450
    assert engine.env_steps == 30 * 256


def test_ppo_goes_on_from_a_clone(tmp_path, demonstrations):
    """The checkpoint's network, normaliser included, is what PPO starts with; resuming is not."""
    model = {"hidden_sizes": [16], "normalize_observations": True}
    clone = build(
        configuration(
            tmp_path / "a", demonstrations / "minari", policy={"model_cfg": model}, max_epochs=4
        )
    )
    clone.run()
    (checkpoint,) = list_checkpoints(clone.run_context.checkpoint_dir)[-1:]
    learned = clone.policy_group.train_list[0]
    for path in (checkpoint, f"{checkpoint}.pt", clone.run_context.run_dir):
        policy = {"type": "PPOPolicy", "model_cfg": model, "init_from": str(path)}
        config = configuration(tmp_path / "b", "-", policy=policy, max_rollout_steps=8)
        config.engine, config.buffer.type = "syncrl", "RolloutBuffer"
        del config.buffer.dataset, config.buffer.dataset_kind
        group = build_policy_group("PPOPolicy", config.policy)
        env_group = build_env_group(config.env)
        group.init_train(config.train, env_group.init(seed=0)[0])
        started = group.train_list[0]
        for name, tensor in learned.actor_critic.state_dict().items():
            assert torch.equal(tensor, started.actor_critic.state_dict()[name]), name
        statistics = learned.observation_normalizer.state_dict()
        assert statistics
        for name, tensor in statistics.items():
            assert torch.equal(tensor, started.observation_normalizer.state_dict()[name]), name
        env_group.close()


def cloning_policy(off_policy, space=BOX, *, network="actor_critic", **train):
    return off_policy.make(
        "SimpleSupervisedPolicy", space=space, model={"network": network}, **train
    ).train_list[0]


def test_sac_goes_on_from_a_squashed_clone_without_random_actions(tmp_path, off_policy):
    clone = cloning_policy(off_policy, network="squashed")
    path = tmp_path / "clone.pt"
    clone.save_checkpoint(str(path))
    from rlightning.config import PolicyConfig, TrainConfig
    from rlightning.policy.sac_policy import SACPolicy
    from rlightning.types import EnvMeta

    config = PolicyConfig.from_dict(
        {"type": "SACPolicy", "model_cfg": {"hidden_sizes": [8]}, "init_from": str(path)}
    )
    config.train_config = TrainConfig(max_epochs=1)
    policy = SACPolicy(config, "train")
    policy.init_train(config.train_config, EnvMeta("e", BOX, off_policy.VECTOR, 2))
    for name, tensor in clone.actor.state_dict().items():
        assert torch.equal(tensor, policy.actor.state_dict()[name]), name
    assert isinstance(policy, OffPolicy)
    assert not policy.acts_randomly


@pytest.mark.parametrize(
    ("network", "message"),
    [("squashed", r"holds the modules \['actor'\]; PPOPolicy has \['actor_critic'\]"),
     ("actor_critic", "another network than this run's")],
)  # fmt: skip
def test_weights_of_another_network_are_refused(tmp_path, off_policy, network, message):
    path = tmp_path / "clone.pt"
    cloning_policy(off_policy, network=network).save_checkpoint(str(path))
    config = configuration(tmp_path, "-", policy={"type": "PPOPolicy", "init_from": str(path)})
    group = build_policy_group("PPOPolicy", config.policy)
    envs = build_env_group(config.env)
    with pytest.raises(CheckpointError, match=message):
        group.init_train(config.train, envs.init(seed=0)[0])
    envs.close()
    config.policy.init_from = str(tmp_path / "no.pt")
    with pytest.raises(CheckpointError, match="does not exist"):
        build_policy_group("PPOPolicy", config.policy).init_train(
            config.train, build_env_group(config.env).init(seed=0)[0]
        )


# ---- losses ----------------------------------------------------------------------------------


def test_the_mean_squared_error_is_that_of_the_mean(off_policy):
    """Means are 1 and -2; actions differ by 1 and 2, 0 and 1: (1 + 4 + 0 + 1) / 4."""
    policy = cloning_policy(off_policy)
    off_policy.constant(policy.actor_critic.action_head, [1.0, -2.0])
    loss, error = policy._loss(torch.zeros(2, 3), torch.tensor([[2.0, -4.0], [1.0, -3.0]]))
    assert loss.item() == pytest.approx(1.5)
    assert error.item() == pytest.approx(1.5)


def test_the_likelihood_of_a_gaussian(off_policy):
    """Both dimensions one standard deviation off, log_std 0: 1 + log(2 pi)."""
    policy = cloning_policy(off_policy, loss="nll")
    off_policy.constant(policy.actor_critic.action_head, [1.0, -2.0])
    loss, _ = policy._loss(torch.zeros(1, 3), torch.tensor([[2.0, -3.0]]))
    assert loss.item() == pytest.approx(1.0 + math.log(2 * math.pi))


def test_cross_entropy_of_discrete_actions(off_policy):
    """Logits log 1, log 2, log 1 for actions 2, 3, 4: action 3 has probability one half."""
    policy = cloning_policy(off_policy, spaces.Discrete(3, start=2))
    off_policy.constant(policy.actor_critic.action_head, [0.0, math.log(2), 0.0])
    loss, accuracy = policy._loss(torch.zeros(2, 3), torch.tensor([3, 2]))
    assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert accuracy.item() == 0.5


@pytest.mark.parametrize("loss", ["mse", "nll"])
def test_a_squashed_clone_reaches_actions_in_the_environment_s_units(off_policy, loss):
    """Including one at the bound, whose tanh no sample has."""
    optim = {"lr": 0.01}
    policy = cloning_policy(off_policy, network="squashed", loss=loss, batch_size=64, optim=optim)
    wanted = torch.tensor([[5.0, -1.5]]).repeat(64, 1)
    for _ in range(150):
        policy.update_dataset({"observation": torch.randn(64, 3), "action": wanted})
        metrics = policy.train()
    policy.deterministic = True
    no = np.zeros(1, bool)
    env_ret = EnvRet("e-0", torch.zeros(1, 3), np.zeros(1, np.float32), no, no)
    action = policy._rollout(env_ret).action[0]
    assert action.tolist() == pytest.approx([5.0, -1.5], abs=0.2)
    assert metrics["action_error"] < 0.1


@pytest.mark.parametrize(
    ("space", "loss", "message"),
    [(BOX, "cross_entropy", "take mse or nll"), (spaces.Discrete(2), "mse", "take cross_entropy")],
)
def test_a_loss_that_does_not_go_with_the_actions_is_refused(off_policy, space, loss, message):
    with pytest.raises(ConfigError, match=message):
        cloning_policy(off_policy, space, loss=loss)


def test_a_batch_without_actions_is_refused(off_policy):
    with pytest.raises(ContractError, match="learns from a DatasetBuffer"):
        cloning_policy(off_policy).update_dataset({"observation": torch.zeros(2, 3)})
    assert SimpleSupervisedPolicy.batched_rollout


# ---- the buffer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "env", "message"),
    [
        ({"capacity": 500}, {}, "buffer.capacity is 500; .* needs 900"),
        ({"dataset": None}, {}, "buffer.dataset is not set"),
        ({"dataset": "nowhere"}, {}, "there is no dataset in nowhere"),
        ({}, {"task": "Pendulum-v1"}, r"observes Box.*\(3,\).*float32\[4\]"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(tmp_path, demonstrations, buffer, env, message):
    config = configuration(tmp_path, demonstrations / "minari", buffer=buffer, env=env)
    with pytest.raises(ConfigError, match=message):
        build(config)


def test_a_dataset_may_live_in_files(tmp_path, demonstrations):
    """Two buffers, one mapped to disk, draw the same rows."""
    batches = []
    for more in ({}, {"memmap_dir": str(tmp_path / "columns")}):
        config = configuration(tmp_path, demonstrations / "minari", buffer=more)
        envs = build_env_group(config.env)
        buffer = build_data_buffer("DatasetBuffer", config.buffer, seed=1)
        buffer.init(envs.init(seed=0), envs.env_ids)
        batches.append(buffer.sample(64)[0])
        assert len(buffer.sample(2048)[0]) == 2048  # more than there are: drawn with replacement
        envs.close()
    assert list((tmp_path / "columns").iterdir())
    for name in ("observation", "action", "next_observation", "terminated", "truncated"):
        assert torch.equal(batches[0][name], batches[1][name]), name
