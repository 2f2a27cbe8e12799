"""V-trace PPO: PPO on its own data, corrected on older data, whatever the rows' layout."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.config import BufferConfig, MainConfig, PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.errors import ContractError
from rlightning.launch import run_main, train_main
from rlightning.policy.policy_group import PolicyGroup
from rlightning.types import BatchedData, EnvMeta, EnvRet
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import POLICIES

VECTOR = spaces.Box(-np.inf, np.inf, (3,))
GAMMA, LAMBDA = 0.9, 0.8
N_ENVS = 4


def make_group(name="VTracePPOPolicy", *, model=None, **train):
    train = {"max_epochs": 10, "seed": 0} | train
    if name == "VTracePPOPolicy":
        train = {"gamma": GAMMA, "trace_lambda": LAMBDA} | train
    train_config = TrainConfig.from_dict(train)
    kind = POLICIES.get(name)
    config = PolicyConfig.from_dict({"type": name, "model_cfg": model})
    config.train_config = train_config
    resolve_extras(train_config, [kind.TrainExtras], path="train", owner=name)
    torch.manual_seed(0)
    group = PolicyGroup([kind(config, "train")], [kind(config, "eval")], config)
    meta = EnvMeta("e-0", spaces.Discrete(3), VECTOR, N_ENVS)
    group.init(train_config, meta)
    group.sync_weights()
    return group, meta


class RandomEnv:
    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def observe(self):
        return self.rng.normal(size=(N_ENVS, 3)).astype(np.float32)

    def step(self):
        terminated = self.rng.random(N_ENVS) < 0.1
        truncated = (self.rng.random(N_ENVS) < 0.15) & ~terminated
        ended = terminated | truncated
        info = {"final_obs": self.observe(), "_final_obs": ended} if ended.any() else {}
        reward = self.rng.normal(size=N_ENVS).astype(np.float32)
        env_ret = EnvRet("e-0", self.observe(), reward, terminated, truncated, info)
        return BatchedData(["e-0"], [env_ret])


def collect(group, meta, n_steps=12, seed=0):
    section = {"type": "RolloutBuffer", "capacity": 1000, "gamma": GAMMA, "gae_lambda": LAMBDA}
    buffer = RolloutBuffer(BufferConfig.from_dict(section), seed=0)
    buffer.init([meta])
    env = RandomEnv(seed)
    for t in range(n_steps + 1):
        batch = env.step()
        buffer.add_batched_transition(batch, group.rollout_batch(batch), [t == n_steps])
    return buffer.sample(shuffle=False)[0]


def disturb(policy, scale=0.3):
    """Move the learner away from the policy that acted."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.actor_critic.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def naive(policy, data, rho_bar, c_bar):
    """V-trace as its sums, one environment after the other; Espeholt et al. 2018, equation 1."""
    with torch.no_grad():
        distribution, value = policy.actor_critic(data["observation"])
        ratio = (distribution.log_prob(data["action"]) - data["log_prob"]).exp().tolist()
        next_value = policy.actor_critic.value(data["next_observation"]).tolist()
    value = value.tolist()
    reward, terminated = data["reward"].tolist(), data["terminated"].tolist()
    ended = (data["terminated"] | data["truncated"]).tolist()
    step = data["row_step"].tolist()
    total = len(reward)
    targets, advantages = [], []

    def delta(t):
        bootstrap = 0.0 if terminated[t] else GAMMA * next_value[t]
        return reward[t] + bootstrap - value[t]

    for s in range(total):
        target, factor, t = value[s], 1.0, s
        while True:
            target += factor * min(rho_bar, ratio[t]) * delta(t)
            if ended[t] or t + 1 == total or step[t + 1] != step[t] + 1:
                break
            factor *= GAMMA * LAMBDA * min(c_bar, ratio[t])
            t += 1
        targets.append(target)
    for s in range(total):
        follows = not ended[s] and s + 1 < total and step[s + 1] == step[s] + 1
        correction = GAMMA * LAMBDA * (targets[s + 1] - value[s + 1]) if follows else 0.0
        advantages.append(delta(s) + correction)
    return torch.tensor(targets), torch.tensor(advantages)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.7)])
@pytest.mark.parametrize("piece", [5, 1000])
def test_targets_and_advantages_are_those_of_the_naive_twin(rho_bar, c_bar, piece):
    group, meta = make_group(rho_bar=rho_bar, c_bar=c_bar, minibatch_size=piece)
    data = collect(group, meta)
    policy = group.train_list[0]
    disturb(policy)
    target, advantage = naive(policy, data, rho_bar, c_bar)
    policy.update_dataset(data)
    ratio = policy._correct(policy.dataset)
    assert torch.allclose(policy.dataset["return"], target, atol=1e-5)
    assert torch.allclose(policy.dataset["advantage"], advantage, atol=1e-5)
    assert torch.equal(policy.dataset["log_prob"], data["log_prob"])
    assert 0 < ratio < rho_bar
    assert policy.actor_critic.training


def test_rows_that_are_left_out_end_the_recursion():
    """As an engine leaves out what is older than ``max_staleness``."""
    group, meta = make_group()
    data, policy = collect(group, meta), group.train_list[0]
    keep = torch.arange(len(data)) % 12 >= 4
    keep[:12] = False
    data = data[keep]
    disturb(policy)
    target, advantage = naive(policy, data, 1.0, 1.0)
    policy.update_dataset(data)
    policy._correct(policy.dataset)
    assert torch.allclose(policy.dataset["return"], target, atol=1e-5)
    assert torch.allclose(policy.dataset["advantage"], advantage, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_on_data_of_its_own_it_is_ppo(normalize):
    model = {"normalize_observations": normalize, "normalize_returns": normalize}
    weights = []
    for name in ("PPOPolicy", "VTracePPOPolicy"):
        group, meta = make_group(name, model=model)
        for seed in range(3):
            data = collect(group, meta, seed=seed)
            group.update_dataset([data])
            metrics = group.train()
            group.sync_weights()
        weights.append(torch.cat([p.detach().flatten() for p in group.train_list[0].parameters()]))
    assert torch.allclose(*weights, atol=1e-5)
    assert metrics["behaviour_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_an_update_on_older_data_learns_and_reports_how_old_it_is():
    group, meta = make_group()
    data, policy = collect(group, meta, 40), group.train_list[0]
    disturb(policy)
    before = copy.deepcopy(policy.actor_critic.state_dict())
    policy._update_dataset(data)
    metrics = policy._train()
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["behaviour_ratio"] < 0.95
    after = policy.actor_critic.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_rows_of_another_policy_are_refused():
    group, _ = make_group()
    other, meta = make_group("PPOPolicy")
    with pytest.raises(ContractError, match=r"lacks row_step.*its own rollout_step"):
        group.update_dataset([collect(other, meta)])


def test_it_learns_while_it_acts_from_rows_of_bounded_age(tmp_path):
    config = MainConfig.from_dict(
        {
            "engine": "asyncrl",
            "debug": False,
            "verbose": False,
            "env": {"name": "c", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 4},
            "buffer": {"type": "RolloutBuffer", "capacity": 256},
            "policy": {"type": "VTracePPOPolicy"},
            "train": {
                "max_epochs": 5,
                "max_rollout_steps": 16,
                "batch_size": 64,
                "ppo_epochs": 2,
                "max_staleness": 2,
                "eval_episodes": 2,
                "seed": 0,
            },
            "log": {"log_dir": str(tmp_path), "project": "p", "name": "n", "level": "ERROR"},
        }
    )
    run_main(train_main, config)
    rows = read_rows(tmp_path / "p" / "n" / "metrics.jsonl")
    ratios = [row["train/behaviour_ratio"] for row in rows if "train/behaviour_ratio" in row]
    assert len(ratios) == 5
    assert all(0 < ratio <= 1 for ratio in ratios)
