"""PPO: what it answers, what it learns from, and that both gradient steps agree."""

import pathlib

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

import rlightning
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.config import BufferConfig, PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.errors import ConfigError, ContractError, NonFiniteError
from rlightning.policy.policy_group import PolicyGroup
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.types import BatchedData, EnvMeta, EnvRet
from rlightning.utils.registry import POLICIES

CONFIGS = pathlib.Path(rlightning.__file__).parent / "configs"
VECTOR, BOX = spaces.Box(-np.inf, np.inf, (3,)), spaces.Box(-1, 1, (2,))
IMAGE = spaces.Box(0, 255, (36, 38, 3), np.uint8)
SMALL_IMAGES = {"image_size": [36, 36], "image_features": 8}


def make_group(observation_space, action_space, *, n_envs=4, model=None, optim=None, **train):
    """One TRAIN and one EVAL instance with equal weights, and their meta."""
    train_config = TrainConfig.from_dict({"max_epochs": 10, "seed": 0} | train)
    config = PolicyConfig.from_dict({"type": "PPOPolicy", "model_cfg": model, "optim_cfg": optim})
    config.train_config = train_config
    resolve_extras(train_config, [PPOPolicy.TrainExtras], path="train", owner="PPOPolicy")
    torch.manual_seed(0)
    group = PolicyGroup([PPOPolicy(config, "train")], [PPOPolicy(config, "eval")], config)
    meta = EnvMeta("e-0", action_space, observation_space, n_envs)
    group.init(train_config, meta)
    group.sync_weights()
    return group, meta


class RandomEnv:
    """Observations from the space, a reward per row, ends of both kinds now and then."""

    def __init__(self, meta, seed=0, p_end=0.15):
        self.space, self.n, self.p_end = meta.observation_space, meta.num_envs, p_end
        self.space.seed(seed)
        self.rng = np.random.default_rng(seed)

    def observe(self):
        samples = [self.space.sample() for _ in range(self.n)]
        return gym.vector.utils.concatenate(
            self.space, samples, gym.vector.utils.create_empty_array(self.space, self.n)
        )

    def step(self, _action=None):
        terminated = self.rng.random(self.n) < self.p_end
        truncated = (self.rng.random(self.n) < self.p_end) & ~terminated
        info = {}
        if (terminated | truncated).any():
            info = {"final_obs": self.observe(), "_final_obs": terminated | truncated}
        reward = self.rng.normal(size=self.n).astype(np.float32)
        return EnvRet("e-0", self.observe(), reward, terminated, truncated, info)


def collect(group, meta, env, n_steps, gamma=0.99):
    """Roll out n_steps and return the buffer's batch."""
    buffer = RolloutBuffer(
        BufferConfig.from_dict(
            {"type": "RolloutBuffer", "capacity": 10_000, "gamma": gamma, "gae_lambda": 0.95}
        ),
        seed=0,
    )
    buffer.init([meta])
    env_ret = env.step()
    for t in range(n_steps + 1):
        batch = BatchedData(["e-0"], [env_ret])
        response = group.rollout_batch(batch)
        buffer.add_batched_transition(batch, response, [t == n_steps])
        env_ret = env.step(response.values()[0].action)
    return buffer.sample()


def update(group, data):
    group.update_dataset(data)
    metrics = group.train()
    group.sync_weights()
    return metrics


def update_recording_rows(group, data):
    """Update, and return the value targets of every minibatch side by side."""
    policy, seen = group.train_list[0], []
    owner = policy if policy._fused is None else policy._fused
    name = "_autograd_step" if policy._fused is None else "step"
    original = getattr(owner, name)

    def spy(minibatch):
        seen.extend(minibatch.value_target.tolist())
        return original(minibatch)

    setattr(owner, name, spy)
    return update(group, data), seen


def parameters_of(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


# ---- acting ------------------------------------------------------------------------------------


def test_both_names_are_registered():
    assert POLICIES.get("PPOPolicy") is PPOPolicy
    assert POLICIES.get("SimplePPOPolicy") is PPOPolicy


@pytest.mark.parametrize(
    "action_space",
    [BOX, spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)],
    ids=str,
)
def test_a_response_has_one_entry_per_row_and_only_the_documented_fields(action_space):
    group, meta = make_group(VECTOR, action_space)
    response = group.eval_list[0]._rollout(RandomEnv(meta).step())
    assert set(response.extras) == {"action", "log_prob", "value", "final_value"}
    assert response.action.shape == (4, *action_space.shape)
    assert response.log_prob.shape == response.value.shape == response.final_value.shape == (4,)


def test_deterministic_actions_are_the_mode_and_repeat():
    group, meta = make_group(VECTOR, BOX)
    batch = BatchedData(["e-0"], [RandomEnv(meta).step()])
    first, second = (group.rollout_batch(batch, deterministic=True)["e-0"] for _ in range(2))
    assert torch.equal(first.action, second.action)
    assert not torch.equal(first.action, group.rollout_batch(batch)["e-0"].action)


def test_the_stored_action_is_the_sampled_one_before_any_clipping():
    group, meta = make_group(VECTOR, BOX, model={"log_std_init": 1.0})
    data = collect(group, meta, RandomEnv(meta), 64)[0]
    assert (data["action"].abs() > 1).any()
    with torch.no_grad():
        distribution, _ = group.train_list[0].actor_critic(data["observation"])
    assert torch.allclose(distribution.log_prob(data["action"]), data["log_prob"], atol=1e-5)


def test_only_truncated_rows_get_the_value_of_their_last_observation():
    group, _ = make_group(VECTOR, BOX, model={"normalize_observations": True})
    policy = group.eval_list[0]
    observation, final_obs = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    env_ret = EnvRet(
        "e-0",
        observation,
        np.zeros(4, np.float32),
        np.array([True, False, False, False]),
        np.array([False, True, False, False]),
        {"final_obs": final_obs, "_final_obs": np.array([True, True, False, False])},
    )
    response = policy._rollout(env_ret)
    with torch.no_grad():
        expected = policy.actor_critic.value(torch.as_tensor(final_obs[1:2]))
    assert response.final_value[1].item() == pytest.approx(expected.item(), abs=1e-6)
    assert response.final_value[[0, 2, 3]].tolist() == [0, 0, 0]


# ---- learning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", ["auto", "off"])
def test_the_first_minibatch_sees_ratios_of_one_epoch_after_epoch(fused):
    """Normalisers move between epochs, yet collecting and learning always use the same ones."""
    group, meta = make_group(
        VECTOR,
        BOX,
        model={"normalize_observations": True, "normalize_returns": True},
        fused_update=fused,
        minibatch_size=32,
    )
    env, policy = RandomEnv(meta), group.train_list[0]
    assert (policy._fused is not None) is (fused == "auto")
    for _ in range(3):
        data = collect(group, meta, env, 32)
        seen = []
        owner = policy if policy._fused is None else policy._fused
        name = "_autograd_step" if policy._fused is None else "step"
        original = getattr(owner, name)

        def spy(minibatch, original=original, seen=seen):
            outputs = original(minibatch)
            seen.append((outputs.log_prob - minibatch.log_prob).abs().max().item())
            return outputs

        setattr(owner, name, spy)
        update(group, data)
        setattr(owner, name, original)
        assert seen[0] < 1e-5
        assert seen[-1] > 1e-4


@pytest.mark.parametrize("action_space", [BOX, spaces.Discrete(3, start=2)], ids=str)
def test_the_fused_and_the_plain_update_end_with_the_same_weights(action_space):
    results = []
    for fused in ("auto", "off"):
        group, meta = make_group(
            VECTOR, action_space, fused_update=fused, entropy_coef=0.01, minibatch_size=50
        )
        metrics = update(group, collect(group, meta, RandomEnv(meta), 64))
        results.append((parameters_of(group.train_list[0]), metrics))
    (fused_weights, fused_metrics), (plain_weights, plain_metrics) = results
    assert torch.allclose(fused_weights, plain_weights, atol=1e-5)
    assert fused_metrics.keys() == plain_metrics.keys()
    for name, value in fused_metrics.items():
        assert value == pytest.approx(plain_metrics[name], rel=1e-3, abs=1e-5), name


def test_what_the_fused_step_cannot_do_is_left_to_autograd():
    for model, train in [
        ({"activation": "relu"}, {}),
        ({"shared_encoder": True}, {}),
        ({"hidden_sizes": []}, {}),
        (None, {"clip_value_loss": True}),
    ]:
        group, meta = make_group(VECTOR, BOX, model=model, fused_update="auto", **train)
        assert group.train_list[0]._fused is None, (model, train)
        before = parameters_of(group.train_list[0])
        update(group, collect(group, meta, RandomEnv(meta), 16))
        assert not torch.equal(before, parameters_of(group.train_list[0]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_ppo*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_take_the_fused_step_where_it_applies(path):
    shipped = yaml.safe_load(path.read_text())
    policy, train = shipped["policy"], shipped["train"]
    if policy["type"] == "PPOPolicy" and "multitask" not in shipped:
        options = {"model": policy.get("model_cfg"), "optim": policy["optim_cfg"], **train}
        taken, possible = (
            make_group(VECTOR, BOX, **options | changes)[0].train_list[0]._fused is not None
            for changes in ({}, {"fused_update": "auto"})
        )
        assert taken == possible


def test_autograd_is_the_default():
    assert make_group(VECTOR, BOX)[0].train_list[0]._fused is None
    assert make_group(VECTOR, BOX, fused_update=None)[0].train_list[0]._fused is None


@pytest.mark.parametrize(
    ("observation_space", "model"),
    [
        (spaces.Discrete(5), None),
        (IMAGE, SMALL_IMAGES),
        (
            spaces.Dict({"state": VECTOR, "view": spaces.Tuple([IMAGE, spaces.MultiBinary(2)])}),
            SMALL_IMAGES | {"normalize_observations": True},
        ),
    ],
    ids=["discrete", "image", "nested"],
)
def test_every_kind_of_observation_goes_through_buffer_and_update(observation_space, model):
    group, meta = make_group(
        observation_space, spaces.Discrete(2), model=model, ppo_epochs=2, n_envs=2
    )
    data = collect(group, meta, RandomEnv(meta), 12)
    metrics = update(group, data)
    assert all(np.isfinite(value) for value in metrics.values())
    assert torch.equal(parameters_of(group.train_list[0]), parameters_of(group.eval_list[0]))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("fused", ["off", "auto"])
def test_an_environment_without_anything_to_observe_is_learned_too(fused):
    group, meta = make_group(
        spaces.Box(-1, 1, (0,)), spaces.Discrete(2), n_envs=2, fused_update=fused
    )
    update(group, collect(group, meta, RandomEnv(meta), 8))
    assert torch.isfinite(parameters_of(group.train_list[0])).all()


@pytest.mark.parametrize("fused", ["auto", "off"])
@pytest.mark.parametrize(("n_rows", "size"), [(65, 64), (33, 16), (10, 64), (1, 64), (12, 1)])
def test_every_row_is_used_once_per_pass_whatever_is_left_over(fused, n_rows, size):
    group, meta = make_group(
        VECTOR, BOX, n_envs=1, fused_update=fused, minibatch_size=size, ppo_epochs=2
    )
    policy = group.train_list[0]
    data = collect_single(group, meta, n_rows)
    sizes = [part.stop - part.start for part in policy._minibatches(n_rows)]
    assert sum(sizes) == n_rows
    assert min(sizes) >= min(size, n_rows)
    assert max(sizes) - min(sizes) <= 1
    metrics, seen = update_recording_rows(group, data)
    assert sorted(seen) == sorted(data[0]["return"].tolist() * 2)
    assert all(np.isfinite(value) for value in metrics.values())
    assert torch.isfinite(parameters_of(policy)).all()


def collect_single(group, meta, n_rows):
    """Rows of a worker with one environment, which has no leading axis."""
    buffer = RolloutBuffer(BufferConfig.from_dict({"type": "RolloutBuffer", "capacity": 500}))
    buffer.init([meta])
    for t in range(n_rows + 1):
        observation = meta.observation_space.sample()
        batch = BatchedData(["e-0"], [EnvRet("e-0", observation, 1.0, False, False)])
        buffer.add_batched_transition(batch, group.rollout_batch(batch), [t == n_rows])
    return buffer.sample()


def test_target_kl_ends_an_update_early():
    free, meta = make_group(VECTOR, BOX, optim={"lr": 0.05})
    held, _ = make_group(VECTOR, BOX, optim={"lr": 0.05}, target_kl=0.01)
    data = collect(free, meta, RandomEnv(meta), 64)
    free_kl, held_kl = update(free, data)["approx_kl"], update(held, data)["approx_kl"]
    assert held_kl < 0.1 < free_kl


def test_the_learning_rate_falls_to_zero_over_max_epochs():
    group, meta = make_group(VECTOR, BOX, optim={"lr": 0.01}, anneal_lr=True, max_epochs=4)
    data = collect(group, meta, RandomEnv(meta), 8)
    rates = [update(group, data)["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.0])


def test_clipping_the_value_keeps_it_nearer_to_the_collected_one():
    moved = {}
    for clip in (False, True):
        group, meta = make_group(
            VECTOR, BOX, fused_update="off", clip_value_loss=clip, optim={"lr": 0.01}
        )
        data = collect(group, meta, RandomEnv(meta), 64)[0]
        update(group, [data])
        with torch.no_grad():
            value = group.train_list[0].actor_critic.value(data["observation"])
        moved[clip] = (value - data["value"]).abs().mean().item()
    assert moved[True] < moved[False]


def test_returns_are_predicted_in_units_of_their_deviation_and_answered_in_reward_units():
    group, meta = make_group(VECTOR, BOX, model={"normalize_returns": True})
    env = RandomEnv(meta)
    data = collect(group, meta, env, 64)[0]
    data["return"] *= 1000.0
    update(group, [data])
    std = data["return"].double().std(correction=0)
    assert group.eval_list[0].return_scale.std.item() == pytest.approx(std.item(), rel=1e-5)
    env_ret = env.step()
    response = group.eval_list[0]._rollout(env_ret)
    with torch.no_grad():
        raw = group.eval_list[0].actor_critic.value(torch.as_tensor(env_ret.observation))
    assert torch.allclose(response.value, raw * std.float(), rtol=1e-4)


def test_normalisers_reach_eval_workers_and_stay_frozen_there():
    group, meta = make_group(VECTOR, BOX, model={"normalize_observations": True})
    update(group, collect(group, meta, RandomEnv(meta), 16))
    trained, acting = (p.observation_normalizer for p in (group.train_list[0], group.eval_list[0]))
    assert trained.statistics[0].count.item() == 64
    assert torch.equal(trained.statistics[0].mean, acting.statistics[0].mean)
    acting.update(torch.ones(10, 3))
    assert acting.statistics[0].count.item() == 64


@pytest.mark.parametrize("fused", ["auto", "off"])
def test_a_resumed_policy_learns_exactly_what_an_uninterrupted_one_does(fused):
    options = {
        "model": {"normalize_observations": True, "normalize_returns": True},
        "anneal_lr": True,
        "fused_update": fused,
    }
    whole, meta = make_group(VECTOR, BOX, **options)
    data = [collect(whole, meta, RandomEnv(meta, seed), 16) for seed in range(2)]
    update(whole, data[0])
    state = whole.export_state()
    saved = {
        "version": state["version"],
        "weights": torch.utils._pytree.tree_map(lambda x: x.clone(), state["weights"]),
        "training": [clone_state(part) for part in state["training"]],
    }
    update(whole, data[1])
    resumed, _ = make_group(VECTOR, BOX, **options)
    torch.nn.init.zeros_(resumed.train_list[0].actor_critic.value_head.weight)
    resumed.import_state(saved)
    update(resumed, data[1])
    assert torch.equal(parameters_of(whole.train_list[0]), parameters_of(resumed.train_list[0]))


def clone_state(value):
    if isinstance(value, dict):
        return {key: clone_state(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(clone_state(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


# ---- errors ------------------------------------------------------------------------------------


def test_unknown_keys_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"hiden_sizes.*hidden_sizes"):
        make_group(VECTOR, BOX, model={"hiden_sizes": [8]})
    with pytest.raises(ConfigError, match=r"learning_rate"):
        make_group(VECTOR, BOX, optim={"learning_rate": 1.0})
    with pytest.raises(ConfigError, match=r"clip_ration.*clip_ratio"):
        make_group(VECTOR, BOX, clip_ration=0.1)


def test_a_batch_without_advantages_says_where_they_come_from():
    group, meta = make_group(VECTOR, BOX)
    data = collect(group, meta, RandomEnv(meta), 4)[0]
    with pytest.raises(ContractError, match=r"lacks advantage, return.*RolloutBuffer"):
        group.update_dataset([data.exclude("advantage", "return")])


def test_a_nan_reward_stops_before_anything_is_learned():
    group, meta = make_group(VECTOR, BOX)
    data = collect(group, meta, RandomEnv(meta), 4)[0]
    data["reward"][3] = float("nan")
    before = parameters_of(group.train_list[0])
    with pytest.raises(NonFiniteError, match="reward"):
        update(group, [data])
    assert torch.equal(before, parameters_of(group.train_list[0]))


@pytest.mark.parametrize(
    ("fused", "culprit"),
    [("auto", r"gradient of actor_critic\.critic_trunk"), ("off", "value loss")],
)
def test_a_nan_inside_the_network_is_named_and_changes_no_parameter(fused, culprit):
    group, meta = make_group(VECTOR, BOX, fused_update=fused)
    data = collect(group, meta, RandomEnv(meta), 4)
    policy = group.train_list[0]
    with torch.no_grad():
        policy.actor_critic.value_head.weight[0, 0] = float("nan")
    before = parameters_of(policy)
    with pytest.raises(NonFiniteError, match=culprit):
        update(group, data)
    assert torch.equal(before.nan_to_num(7.0), parameters_of(policy).nan_to_num(7.0))


# ---- learning something ------------------------------------------------------------------------


class TargetEnv:
    """Reward is minus the squared distance of the action to the observation; lasts 10 steps."""

    def __init__(self, n=8, seed=0):
        self.rng, self.n, self.t = np.random.default_rng(seed), n, 0
        self.observation = self._new()

    def _new(self):
        return self.rng.uniform(-1, 1, (self.n, 2)).astype(np.float32)

    def step(self, action=None):
        reward = np.zeros(self.n, np.float32)
        if action is not None:
            reward = -((np.asarray(action) - self.observation) ** 2).sum(1)
        self.t += 1
        self.observation, over = self._new(), self.t % 10 == 0
        info = {}
        if over:
            info = {"final_obs": self._new(), "_final_obs": np.ones(self.n, bool)}
        return EnvRet(
            "e-0", self.observation, reward, np.zeros(self.n, bool), np.full(self.n, over), info
        )


def test_it_learns_to_follow_a_target():
    space = spaces.Box(-1, 1, (2,))
    group, meta = make_group(
        space, space, n_envs=8, optim={"lr": 3e-3}, model={"normalize_returns": True}
    )
    env = TargetEnv()
    for _ in range(15):
        update(group, collect(group, meta, env, 64, gamma=0.5))
    distances = []
    for _ in range(20):
        env_ret = env.step()
        response = group.rollout_batch(BatchedData(["e-0"], [env_ret]), deterministic=True)
        distances.append((response["e-0"].action - torch.as_tensor(env_ret.observation)) ** 2)
    assert torch.stack(distances).sum(-1).mean().item() < 0.05


class ForeverOneEnv:
    """Nothing happens, reward 1 for ever, cut by a time limit every 5 steps."""

    def __init__(self, n=8):
        self.n, self.t = n, 0

    def step(self, _action=None):
        self.t += 1
        observation = np.ones((self.n, 1), np.float32)
        over = np.full(self.n, self.t % 5 == 0)
        info = {"final_obs": observation, "_final_obs": over} if over[0] else {}
        reward = np.ones(self.n, np.float32)
        return EnvRet("e-0", observation, reward, np.zeros(self.n, bool), over, info)


def test_a_time_limit_does_not_bias_values():
    """gamma 0.9: the value of reward 1 for ever is 10, whatever the time limit."""
    group, meta = make_group(
        spaces.Box(-1, 1, (1,)), spaces.Discrete(2), n_envs=8, optim={"lr": 1e-2}
    )
    env = ForeverOneEnv()
    for _ in range(20):
        update(group, collect(group, meta, env, 64, gamma=0.9))
    response = group.rollout_batch(BatchedData(["e-0"], [env.step()]))
    assert response["e-0"].value.mean().item() == pytest.approx(10.0, abs=0.3)


# ---- options for large networks


def weights_after(data, **options):
    group, _ = make_group(VECTOR, BOX, **options)
    update(group, data)
    parameters = group.train_list[0].actor_critic.state_dict()
    return {name: tensor.clone() for name, tensor in parameters.items()}, group


@pytest.fixture
def data():
    group, meta = make_group(VECTOR, BOX)
    return collect(group, meta, RandomEnv(meta), 32)


def test_gradients_of_micro_batches_add_up_to_the_minibatch(data):
    """128 rows in minibatches of 64, forward passes of 24, 20 and 20 rows."""
    whole, _ = weights_after(data, fused_update="off", minibatch_size=64)
    parts, _ = weights_after(data, minibatch_size=64, micro_batch_size=24)
    for name, tensor in whole.items():
        assert torch.allclose(parts[name], tensor, atol=2e-5), name


def test_a_micro_batch_bounds_the_rows_of_a_forward_pass(data):
    group, _ = make_group(VECTOR, BOX, minibatch_size=64, micro_batch_size=24, ppo_epochs=1)
    rows = []
    network = group.train_list[0].actor_critic
    network.register_forward_hook(lambda module, inputs, outputs: rows.append(len(outputs[1])))
    update(group, data)
    assert max(rows) <= 24
    assert sum(rows) == 128


def test_actor_and_critic_learn_at_rates_of_their_own_and_anneal_together(data):
    rates = {"lr": 0.001, "critic_lr": 0.004}
    group, _ = make_group(VECTOR, BOX, optim=rates, anneal_lr=True, max_epochs=4)
    policy = group.train_list[0]
    for left in (1.0, 0.75):
        update(group, data)
        found = [param_group["lr"] for param_group in policy.optimizer.param_groups]
        assert found == pytest.approx([0.001 * left, 0.004 * left])
    counts = [len(param_group["params"]) for param_group in policy.optimizer.param_groups]
    assert sum(counts) == len(list(policy.actor_critic.parameters()))


def test_a_critic_without_a_rate_stays_where_it_is(data):
    before, _ = make_group(VECTOR, BOX)
    start = before.train_list[0].actor_critic.state_dict()
    after, _ = weights_after(data, optim={"lr": 0.01, "critic_lr": 1e-12}, entropy_coef=0.1)
    moved = {name: not torch.allclose(after[name], start[name], atol=1e-7) for name in start}
    assert not any(moved[name] for name in moved if "critic" in name or "value" in name)
    assert all(moved[name] for name in moved if "actor_trunk" in name)


def test_mixed_precision_learns_nearly_the_same(data):
    exact, _ = weights_after(data, fused_update="off", ppo_epochs=1)
    mixed, _ = weights_after(data, precision="bf16", ppo_epochs=1)
    same = all(torch.equal(exact[name], mixed[name]) for name in exact)
    assert not same
    for name, tensor in exact.items():
        assert mixed[name].dtype == torch.float32
        assert torch.allclose(mixed[name], tensor, atol=5e-3), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_compiling_changes_nothing_but_the_speed(data):
    plain, _ = weights_after(data, fused_update="off", ppo_epochs=1)
    compiled, _ = weights_after(data, compile=True, ppo_epochs=1)
    assert plain.keys() == compiled.keys()
    for name, tensor in plain.items():
        assert np.allclose(compiled[name], tensor, atol=1e-5), name


def test_discrete_actions_take_the_same_options(data):
    group, meta = make_group(VECTOR, spaces.Discrete(3), micro_batch_size=16, precision="bf16")
    metrics = update(group, collect(group, meta, RandomEnv(meta), 16))
    assert np.isfinite(list(metrics.values())).all()
