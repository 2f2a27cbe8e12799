"""Recurrent PPO: what it remembers, when it forgets, and that learning replays what acting did."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.config import BufferConfig, MainConfig, PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.errors import ConfigError, ContractError
from rlightning.policy.policy_group import PolicyGroup
from rlightning.policy.recurrent_ppo_policy import RecurrentPPOPolicy
from rlightning.runtime import open_run
from rlightning.types import BatchedData, EnvMeta, EnvRet
from rlightning.utils.logger import close_logger

VECTOR = spaces.Box(-np.inf, np.inf, (3,))
GAMMA, LAMBDA = 0.9, 0.8


@pytest.fixture(autouse=True)
def _one_thread_and_no_open_logs():
    torch.set_num_threads(1)
    yield
    close_logger()


def make_group(action_space=None, *, n_envs=4, evals=1, model=None, optim=None, **train):
    """One TRAIN instance and EVAL instances with equal weights, and their meta."""
    train_config = TrainConfig.from_dict({"max_epochs": 10, "seed": 0} | train)
    model = {"memory_size": 6, "hidden_sizes": [5]} | (model or {})
    config = PolicyConfig.from_dict(
        {"type": "RecurrentPPOPolicy", "model_cfg": model, "optim_cfg": optim}
    )
    config.train_config = train_config
    kinds = [RecurrentPPOPolicy.TrainExtras]
    resolve_extras(train_config, kinds, path="train", owner="RecurrentPPOPolicy")
    torch.manual_seed(0)
    instances = [RecurrentPPOPolicy(config, role) for role in ("train", *["eval"] * evals)]
    group = PolicyGroup(instances[:1], instances[1:], config)
    meta = EnvMeta("e-0", action_space or spaces.Discrete(3), VECTOR, n_envs)
    group.init(train_config, meta)
    with torch.no_grad():  # so that what is remembered shows in the probabilities
        group.train_list[0].actor_critic.action_head.logits.weight.mul_(100)
    group.sync_weights()
    return group, meta


class RandomEnv:
    """Random observations of several workers, with ends of both kinds now and then."""

    def __init__(self, rows=(4,), seed=0):
        self.rows = rows
        self.rng = np.random.default_rng(seed)

    def observe(self, n):
        return self.rng.normal(size=(n, 3)).astype(np.float32)

    def step(self):
        env_rets = []
        for index, n in enumerate(self.rows):
            terminated = self.rng.random(n) < 0.1
            truncated = (self.rng.random(n) < 0.15) & ~terminated
            info = {}
            if (terminated | truncated).any():
                info = {"final_obs": self.observe(n), "_final_obs": terminated | truncated}
            reward = self.rng.normal(size=n).astype(np.float32)
            fields = [self.observe(n), reward, terminated, truncated]
            if n == 1:  # no leading axis
                fields = [field[0] for field in fields]
                info = {name: value[0] for name, value in info.items()}
            env_rets.append(EnvRet(f"e-{index}", *fields, info))
        return BatchedData([env_ret.env_id for env_ret in env_rets], env_rets)


def new_buffer(meta, rows=(4,)):
    config = {"type": "RolloutBuffer", "capacity": 10_000, "gamma": GAMMA, "gae_lambda": LAMBDA}
    buffer = RolloutBuffer(BufferConfig.from_dict(config), seed=0)
    metas = [EnvMeta(f"e-{i}", meta.action_space, VECTOR, n) for i, n in enumerate(rows)]
    buffer.init(metas)
    return buffer


def collect(group, buffer, env, env_rets, n_steps, seen=None):
    """Roll out as the engine does, from where the last rollout ended; return where this one did."""
    for _ in range(n_steps):
        responses = group.rollout_batch(env_rets)
        buffer.add_batched_transition(env_rets, responses)
        if seen is not None:
            seen.append((env_rets, responses))
        env_rets = env.step()
    with group.memory_kept():
        responses = group.rollout_batch(env_rets)
    buffer.add_batched_transition(env_rets, responses, [True] * len(env_rets))
    return env_rets


def update(group, data):
    """Learn, and return the log-probabilities and values of every gradient step with the rows'."""
    policy, seen = group.train_list[0], []
    original = policy._autograd_step

    def spy(minibatch):
        outputs = original(minibatch)
        seen.append((outputs, minibatch))
        return outputs

    policy._autograd_step = spy
    group.update_dataset(data)
    metrics = group.train()
    policy._autograd_step = original
    group.sync_weights()
    return metrics, seen


# ---- a naive twin ------------------------------------------------------------------------------


class StepByStep:
    """The network of a policy, one observation after the other, with Python lists as memory."""

    def __init__(self, network):
        self.network = network
        self.memory = {}

    def _cell(self, layer, x, memory):
        core = layer.core
        if isinstance(core, torch.nn.GRU):
            gates_x = x @ core.weight_ih_l0.T + core.bias_ih_l0
            gates_h = memory @ core.weight_hh_l0.T + core.bias_hh_l0
            (rx, zx, nx), (rh, zh, nh) = gates_x.chunk(3), gates_h.chunk(3)
            r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
            hidden = (1 - z) * torch.tanh(nx + r * nh) + z * memory
            return hidden, hidden
        hidden, cell = memory.chunk(2)
        gates = x @ core.weight_ih_l0.T + hidden @ core.weight_hh_l0.T
        i, f, g, o = (gates + core.bias_ih_l0 + core.bias_hh_l0).chunk(4)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        return hidden, torch.cat([hidden, cell])

    def read(self, observation, memory):
        """Return the logits and the value of one observation, and the memory after it."""
        network, x = self.network, torch.as_tensor(observation)[None]
        actor, critic = memory
        actor_out, actor = self._cell(network.actor_memory, network.actor_trunk(x)[0], actor)
        critic_out, critic = self._cell(network.critic_memory, network.critic_trunk(x)[0], critic)
        logits = network.action_head.logits(actor_out)
        return torch.log_softmax(logits, -1), network.value_head(critic_out)[0], (actor, critic)

    def empty(self):
        sizes = (self.network.actor_memory.memory_size, self.network.critic_memory.memory_size)
        return tuple(torch.zeros(size) for size in sizes)

    def act(self, name, observation, terminated, truncated, final_obs):
        """Return what a policy should have answered to one row, but for the drawn action."""
        before, final = self.memory.get(name, self.empty()), torch.zeros(())
        if truncated:
            final = self.read(final_obs, before)[1]
        if terminated or truncated:
            before = self.empty()
        log_p, value, self.memory[name] = self.read(observation, before)
        return log_p, value, final


def rows_of(env_ret, response):
    """Yield each row: what it is called, what happened, and what was answered."""
    final_obs = env_ret.info.get("final_obs", env_ret.observation)
    columns = [env_ret.observation, env_ret.last_terminated, env_ret.last_truncated, final_obs]
    answers = [response.action, response.log_prob, response.value, response.final_value]
    if np.ndim(env_ret.last_terminated) == 0:
        columns, answers = [[c] for c in columns], [[a] for a in answers]
    for row in range(len(columns[0])):
        name = f"{env_ret.env_id}/{row}"
        yield name, [c[row] for c in columns], [a[row] for a in answers]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_acting_equals_the_naive_twin_across_episodes_cuts_and_evaluations(kind):
    rows = (3, 1)
    group, meta = make_group(model={"memory": kind})
    env, buffer, seen = RandomEnv(rows), new_buffer(meta, rows), []
    env_rets = env.step()
    for _ in range(3):
        env_rets = collect(group, buffer, env, env_rets, 7, seen)
        other = RandomEnv(rows, seed=5)
        with group.memory_kept(empty=True):  # as an evaluation does
            for _ in range(4):
                group.rollout_batch(other.step(), deterministic=True)
    twin, ends = StepByStep(group.eval_list[0].actor_critic), 0
    with torch.no_grad():
        for env_rets, responses in seen:
            for env_ret, response in zip(env_rets.values(), responses.values(), strict=True):
                for name, happened, (action, *got) in rows_of(env_ret, response):
                    log_p, value, final = twin.act(name, *happened)
                    want = torch.stack([log_p[action], value, final])
                    assert torch.allclose(torch.stack(got), want, atol=1e-6)
                    ends += int(happened[2])
    assert ends > 3


# ---- replay ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_the_first_gradient_step_replays_the_log_probabilities_of_the_rollout(kind, shared, length):
    rows = (3, 1)
    group, meta = make_group(
        model={"memory": kind, "shared_encoder": shared, "normalize_observations": True},
        minibatch_size=16,
        ppo_epochs=2,
        sequence_length=length,
    )
    env, buffer = RandomEnv(rows), new_buffer(meta, rows)
    env_rets = env.step()
    for _ in range(3):
        env_rets = collect(group, buffer, env, env_rets, 13)
        (metrics, seen), n_rows = update(group, buffer.sample(shuffle=False)), 13 * 4
        outputs, minibatch = seen[0]
        assert (outputs.log_prob - minibatch.log_prob).abs().max() < 1e-6
        assert (outputs.value - minibatch.old_value).abs().max() < 1e-6
        assert (seen[-1][0].log_prob - seen[-1][1].log_prob).abs().max() > 1e-4
        assert sum(len(batch.log_prob) for _, batch in seen) == 2 * n_rows
        assert 1 < metrics["sequence_length"] <= (length or 13)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 3), (3, 2), (3, 1)])
def test_a_memory_goes_to_the_instance_that_answers_its_environment_now(before, after):
    """A resumed run may have another number of them, and its environments have other names."""
    world = RandomEnv(rows=(2, 1, 3, 1))
    group, _ = make_group(evals=before)
    env_rets = world.step()
    for _ in range(4):
        group.rollout_batch(env_rets)
        env_rets = world.step()
    saved = group.episode_memories(env_rets.ids())
    for env_ret in env_rets.values():
        env_ret.env_id += "-resumed"
    resumed, _ = make_group(evals=after)
    resumed.load_episode_memories(saved, env_rets)
    answers = resumed.rollout_batch(env_rets)
    for env_ret in env_rets.values():
        env_ret.env_id = env_ret.env_id.removesuffix("-resumed")
    expected = group.rollout_batch(env_rets)
    for answer, one in zip(answers.values(), expected.values(), strict=True):
        assert one.memory.abs().sum() > 0, "each environment is in the middle of an episode"
        assert torch.equal(answer.memory, one.memory)
    kept = resumed.episode_memories([f"{name}-resumed" for name in env_rets.ids()])
    assert [sum(item is not None for item in found) for found in zip(*kept, strict=True)] == [1] * 4


def test_a_checkpoint_without_memories_makes_every_environment_start_with_an_empty_one():
    group, _ = make_group(evals=2)
    env_rets = RandomEnv(rows=(2, 1)).step()
    group.rollout_batch(env_rets)
    group.load_episode_memories([], env_rets)
    assert group.episode_memories(env_rets.ids()) == [[None, None], [None, None]]


def test_a_rollout_that_begins_inside_an_episode_is_replayed_from_the_stored_memory():
    """Without the stored memory the replay would differ: the test would notice an empty start."""
    group, meta = make_group()
    env, buffer = RandomEnv(), new_buffer(meta)
    env_rets = collect(group, buffer, env, env.step(), 9)
    buffer.sample(shuffle=False)
    collect(group, buffer, env, env_rets, 9)
    data = buffer.sample(shuffle=False)[0]
    begins = data["memory"].reshape(4, 9, -1)[:, 0]
    assert (begins.abs().sum(-1) > 0).sum() >= 2
    data["memory"] = torch.zeros_like(data["memory"])
    (outputs, minibatch), *_ = update(group, [data])[1]
    assert (outputs.log_prob - minibatch.log_prob).abs().max() > 1e-2


def test_the_gradient_flows_back_through_a_sequence_and_no_further():
    group, meta = make_group(minibatch_size=1000, ppo_epochs=1, entropy_coef=0.01)
    env, buffer = RandomEnv(), new_buffer(meta)
    collect(group, buffer, env, env.step(), 12)
    data = buffer.sample(shuffle=False)[0]
    policy = group.train_list[0]
    gradients = []
    policy.optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in policy.actor_critic.parameters())
    )
    twin = StepByStep(policy.actor_critic)
    ended = data["terminated"] | data["truncated"]
    log_probs, values, entropies = [], [], []
    for row in range(len(data["action"])):
        if row % 12 == 0 or ended[row - 1]:
            memory = twin.empty()
        log_p, value, memory = twin.read(data["observation"][row], memory)
        log_probs.append(log_p[data["action"][row]])
        values.append(value)
        entropies.append(-(log_p.exp() * log_p).sum())
    advantage = data["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (torch.stack(log_probs) - data["log_prob"]).exp()
    loss = -(ratio * advantage).mean() - 0.01 * torch.stack(entropies).mean()
    loss = loss + 0.5 * (torch.stack(values) - data["return"]).square().mean()
    loss.backward()
    parameters = list(policy.actor_critic.parameters())
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    expected = [parameter.grad.clone() for parameter in parameters]
    update(group, [data])
    for want, got in zip(expected, gradients, strict=True):
        assert torch.allclose(want, got, atol=1e-6)


def test_rows_that_do_not_follow_each_other_are_refused():
    group, meta = make_group()
    env, buffer = RandomEnv(), new_buffer(meta)
    collect(group, buffer, env, env.step(), 8)
    data = buffer.sample(shuffle=False)[0]
    with pytest.raises(ContractError, match="no two of the 4 rows follow each other"):
        group.update_dataset([data[torch.tensor([1, 0, 9, 8])]])


def test_dropped_rows_end_a_sequence_and_the_rest_is_replayed_as_it_was():
    """As an engine leaves them out that are too old to learn from."""
    group, meta = make_group(minibatch_size=1000)
    env, buffer = RandomEnv(), new_buffer(meta)
    collect(group, buffer, env, env.step(), 10)
    data = buffer.sample(shuffle=False)[0]
    keep = torch.arange(40) % 10 >= 3
    keep[:10] = False
    (outputs, minibatch), *_ = update(group, [data[keep]])[1]
    assert (outputs.log_prob - minibatch.log_prob).abs().max() < 1e-6


def test_micro_batches_are_refused():
    with pytest.raises(ConfigError, match=r"micro_batch_size is set.*whole sequences"):
        make_group(micro_batch_size=4)


# ---- in a run ----------------------------------------------------------------------------------


def configuration(folder, **train):
    return MainConfig.from_dict(
        {
            "engine": train.pop("engine", "syncrl"),
            "debug": False,
            "verbose": False,
            "env": {
                "name": "cp",
                "backend": "gymnasium",
                "task": "CartPole-v1",
                "num_envs": 2,
                "wrappers": ["plugrl_envs.masking:without_velocities"],
            },
            "buffer": {"type": "RolloutBuffer", "capacity": 64},
            "policy": {"type": "RecurrentPPOPolicy", "model_cfg": {"memory_size": 8}},
            "train": {
                "max_epochs": 4,
                "max_rollout_steps": 16,
                "eval_episodes": 2,
                "seed": 7,
                "ppo_epochs": 2,
                "minibatch_size": 16,
                **train,
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
        }
    )


def engine_for(config, *, resume_from=None):
    check_config(config)
    open_run(config, resume_from=resume_from)
    return build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed),
    )


def run(folder, *, resume_from=None, **train):
    engine = engine_for(configuration(folder, **train), resume_from=resume_from)
    engine.run()
    close_logger()
    return engine


def weights(engine):
    state = engine.policy_group.train_list[0].actor_critic.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_a_resumed_run_ends_bit_for_bit_like_one_that_never_stopped(tmp_path):
    through = run(tmp_path / "through")
    first = run(tmp_path / "parts", max_epochs=2)
    resumed = run(
        tmp_path / "parts",
        resume_from=first.run_context.checkpoint_dir / "epoch_last",
    )
    assert_same(weights(through), weights(resumed))


def test_evaluations_do_not_touch_training(tmp_path):
    without = run(tmp_path / "a", eval_interval=-1)
    often = run(tmp_path / "b", eval_interval=1, eval_at_start=True)
    assert_same(weights(without), weights(often))


def test_the_bootstrap_answer_is_not_remembered(tmp_path):
    """The next rollout acts on the same observation again, from the same memory."""
    engine = engine_for(configuration(tmp_path))
    network = engine.policy_group.eval_list[0].actor_critic
    inside, after = torch.zeros(2, dtype=torch.bool), torch.zeros(2, network.memory_size)
    goes_on = 0
    for _ in range(3):
        engine.collect(16)
        data = engine.buffer.sample(shuffle=False)[0].reshape(2, 16)
        assert torch.allclose(data["memory"][:, 0][inside], after[inside], atol=1e-6)
        inside = ~(data["terminated"] | data["truncated"])[:, -1]
        after = network.step(data["observation"][:, -1], data["memory"][:, -1]).memory
        goes_on += int(inside.sum())
    assert goes_on >= 3
    engine.close()


def test_every_evaluation_starts_with_empty_memories(tmp_path):
    engine = engine_for(configuration(tmp_path))
    policy, starts = engine.policy_group.eval_list[0], []
    original = policy.rollout_step

    def spy(env_ret, **kwargs):
        response = original(env_ret, **kwargs)
        starts.append(response.memory)
        return response

    policy.rollout_step = spy
    for _ in range(2):
        starts.clear()
        engine.evaluate()
        assert not starts[0].any()
        assert starts[1].any()
    engine.close()


def test_a_reset_of_all_environments_empties_every_memory(tmp_path):
    engine = engine_for(configuration(tmp_path, reset_each_rollout=True))
    for _ in range(2):
        engine.rollout()
        assert (
            engine.buffer.sample(shuffle=False)[0]["memory"].reshape(2, 16, -1)[:, 0].abs().sum()
            == 0
        )
    engine.close()


def test_one_fresh_row_of_each_environment_is_learned_from():
    """Data that is too old is dropped row by row; what is left may be one step."""
    group, meta = make_group()
    env, buffer = RandomEnv(), new_buffer(meta)
    collect(group, buffer, env, env.step(), 1)
    update(group, buffer.sample())


def test_it_learns_while_it_acts(tmp_path):
    engine = run(tmp_path, engine="asyncrl", batch_size=32, max_staleness=1)
    assert engine.epoch == 4
    assert np.isfinite(engine.last_metrics["train/policy_loss"])


class Recall(gym.Env):
    """A bit is shown once; four steps later, and only then, naming it is rewarded."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bit, self.time = int(self.np_random.integers(2)), 0
        return np.array([2 * self.bit - 1, 0], np.float32), {}

    def step(self, action):
        self.time += 1
        over = self.time == 5
        reward = float(action == self.bit) if over else 0.0
        return np.array([0, self.time == 4], np.float32), reward, over, False, {}


def test_what_was_seen_only_once_is_acted_on_later(tmp_path):
    """Without a memory the best policy gets one half."""
    if "Recall-v0" not in gym.registry:
        gym.register("Recall-v0", Recall)
    config = configuration(
        tmp_path,
        max_epochs=10,
        max_rollout_steps=32,
        ppo_epochs=8,
        minibatch_size=256,
        eval_episodes=40,
    )
    config.env[0].task, config.env[0].wrappers, config.env[0].num_envs = "Recall-v0", [], 16
    config.buffer.capacity = 512
    config.policy.model_cfg = type(config.policy.model_cfg)(memory_size=16, hidden_sizes=[16])
    config.policy.optim_cfg = type(config.policy.model_cfg)(lr=0.01)
    engine = engine_for(config)
    engine.run()
    assert engine.last_metrics["eval/episode_return"] >= 0.95
