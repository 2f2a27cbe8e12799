"""One checkpoint format, one set of names: what one side saved, the other side acts with."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from plugrl_server.algorithm.torch_state import copy_weights
from plugrl_server.cli import build_server
from plugrl_server.cli_args import parse
from plugrl_server.common.checkpoint import Checkpoint
from plugrl_server.common.checkpoint_manager import CheckpointManager
from plugrl_server.errors import PolicyContractError, UsageError
from plugrl_server.policy.categorical import CategoricalPolicyConfig
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.policy.sac import SACPolicyConfig
from rlightning.checkpoint import Checkpoint as Saved
from rlightning.checkpoint import find_checkpoint, load_weights, save_checkpoint
from rlightning.cli.main import main as rlightning
from rlightning.config import PolicyConfig, TrainConfig
from rlightning.types import EnvMeta, EnvRet, PolicyRole
from rlightning.utils.registry import POLICIES

BOX = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
SEEN = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
PAIRS = {
    "gaussian": (
        "gaussian-policy",
        GaussianPolicyConfig(
            obs_dim=3, action_dim=2, action_clip=9.0, hidden_dims=(8, 8), deterministic=True,
            device="cpu",
        ),
        "PPOPolicy",
        {"hidden_sizes": [8, 8], "normalize_observations": True},
        BOX,
    ),
    "categorical": (
        "categorical-policy",
        CategoricalPolicyConfig(
            obs_dim=3, num_actions=4, hidden_dims=(8, 8), deterministic=True, device="cpu",
            normalize_observations=False,
        ),
        "PPOPolicy",
        {"hidden_sizes": [8, 8]},
        gym.spaces.Discrete(4),
    ),
    "sac": (
        "sac-policy",
        SACPolicyConfig(
            state_dim=3, action_dim=2, action_low=-2.0, action_high=2.0, hidden_dims=(8, 8),
            deterministic=True, device="cpu",
        ),
        "SACPolicy",
        {"hidden_sizes": [8, 8]},
        BOX,
    ),
}  # fmt: skip
OBSERVATIONS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)) * 3 + 1


def served_policy(pair):
    torch.manual_seed(1)
    uid, config, *_ = PAIRS[pair]
    policy = make_policy(uid, config)
    if hasattr(policy, "update_obs_stats"):
        policy.update_obs_stats(torch.randn(64, 3) * 2 + 1)
    return policy


def trained_policy(pair):
    torch.manual_seed(2)
    *_, name, model_cfg, space = PAIRS[pair]
    config = PolicyConfig.from_dict({"type": name, "model_cfg": model_cfg})
    config.train_config = TrainConfig(max_epochs=1)
    policy = POLICIES.get(name)(config, PolicyRole.EVAL)
    policy.init_eval(env_meta=EnvMeta("e-0", space, SEEN, 5))
    policy.deterministic = True
    if getattr(policy, "observation_normalizer", None) is not None:
        policy.observation_normalizer.train()
        policy.observation_normalizer.update(torch.randn(64, 3) * 4 - 2)
        policy.observation_normalizer.eval()
    return policy


def served_action(policy):
    obs = {"images": {}, "states": {"obs": OBSERVATIONS.numpy()}, "text": np.full(5, "")}
    return policy.get_action_and_runtime_state(obs)[0][:, 0]


def trained_action(policy):
    zeros = np.zeros(5, np.float32)
    env_ret = EnvRet("e-0", OBSERVATIONS.numpy(), zeros, zeros > 0, zeros > 0)
    return policy._rollout(env_ret).action.numpy()


@pytest.mark.parametrize("pair", PAIRS)
def test_what_the_server_saved_acts_in_rlightning(pair, tmp_path):
    policy, other = served_policy(pair), trained_policy(pair)
    manager = CheckpointManager(tmp_path / "run", config={}, overwrite=False, resume=False)
    manager.save_checkpoint(Checkpoint(step=7, model=copy_weights(policy)))
    assert not np.allclose(trained_action(other), served_action(policy), atol=1e-4)
    other.import_weights(0, load_weights(find_checkpoint(tmp_path / "run")))
    assert np.allclose(trained_action(other), served_action(policy), atol=1e-6)


@pytest.mark.parametrize("pair", PAIRS)
def test_what_rlightning_saved_is_served(pair, tmp_path):
    policy, other = trained_policy(pair), served_policy(pair)
    saved = Saved(
        policy="x:Y", epoch=1, env_steps=5, weights=policy.export_weights(), training={"rng": 1}
    )
    save_checkpoint(tmp_path, "epoch_last", saved, write_policy_file=policy.save_checkpoint)
    assert not np.allclose(served_action(other), trained_action(policy), atol=1e-4)
    uid, *_ = PAIRS[pair]
    flags = [uid, "default", "eval", "default", "--policy.device", "cpu", "--port", "0"]
    flags += ["--serve-only", str(tmp_path / "epoch_last"), "--policy.deterministic"]
    sizes = {
        "gaussian": ["--policy.obs-dim", "3", "--policy.action-dim", "2",
                     "--policy.action-clip", "9"],
        "categorical": ["--policy.obs-dim", "3", "--policy.num-actions", "4",
                        "--policy.no-normalize-observations"],
        "sac": ["--policy.state-dim", "3", "--policy.action-dim", "2",
                "--policy.action-low", "-2", "--policy.action-high", "2"],
    }[pair]  # fmt: skip
    server = build_server(parse([*flags, *sizes, "--policy.hidden-dims", "8", "8"]))
    served = server.trainer.algorithm.policy
    assert np.allclose(served_action(served), trained_action(policy), atol=1e-6)


def test_a_checkpoint_of_another_shape_is_refused_and_names_both(tmp_path):
    policy = trained_policy("sac")
    saved = Saved(policy="x:Y", epoch=1, env_steps=5, weights=policy.export_weights(), training={})
    save_checkpoint(tmp_path, "epoch_last", saved, write_policy_file=policy.save_checkpoint)
    flags = ["gaussian-policy", "default", "eval", "default", "--policy.device", "cpu"]
    with pytest.raises(PolicyContractError, match="do not fit GaussianPolicy"):
        build_server(parse([*flags, "--serve-only", str(tmp_path / "epoch_last")]))


def test_a_served_runs_checkpoint_is_measured_by_rlightning(tmp_path, bridge, capsys):
    bridge.train_served("cartpole_ppo", tmp_path, "env.num_envs=1", "train.max_epochs=1",
                        "train.max_rollout_steps=32", "train.minibatch_size=32")  # fmt: skip
    rlightning(["eval", str(tmp_path / "server"), "--episodes", "2"])
    assert "episode_return" in capsys.readouterr().out


def test_what_rlightning_trained_is_served_as_it_is_configured(tmp_path, bridge):
    small = ["env.num_envs=1", "train.max_epochs=1", "train.max_rollout_steps=32"]
    weights = bridge.train_in_process("cartpole_ppo", tmp_path, *small, "train.eval_episodes=1")
    (run,) = tmp_path.glob("*/run")
    server = build_server(
        parse(["--rlightning", "cartpole_ppo", *small, "--serve-only", str(run), "--port", "0"])
    )
    algorithm = server.trainer.algorithm
    assert algorithm.should_learn() is False
    assert algorithm.served.deterministic
    bridge.assert_same_weights(weights, algorithm.served.group.eval_list[0].export_weights())


def test_a_servers_checkpoint_needs_a_configuration_to_be_measured(tmp_path, capsys):
    policy = served_policy("gaussian")
    config = {"policy_uid": "gaussian-policy"}
    manager = CheckpointManager(tmp_path / "run", config=config, overwrite=False, resume=False)
    manager.save_checkpoint(Checkpoint(step=7, model=copy_weights(policy)))
    with pytest.raises(SystemExit):
        rlightning(["eval", str(tmp_path / "run")])
    assert "give a configuration with --config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rlightning"], "--rlightning needs a configuration"),
        (["--rlightning", "cartpole_pp"], "Did you mean 'cartpole_ppo'"),
        (["--rlightning", "cartpole_ppo", "train.max_epoch=1"], "Did you mean .max_epochs"),
        (["--rlightning", "cartpole_ppo", "policy.type=PPOPolcy"], "Did you mean 'PPOPolicy'"),
        (["--rlightning", "cartpole_ppo", "env.action_horizon=0"], "action_horizon"),
        (["--rlightning", "cartpole_ppo", "env.task=Nothing-v0"], "what acts is not known here"),
        (["--rlightning", "cartpole_ppo", "buffer.capacity=10"], "buffer.capacity is 10"),
    ],
)
def test_a_command_line_that_cannot_be_meant_says_so(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        build_server(parse(argv))
