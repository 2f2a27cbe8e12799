"""`RolloutBuffer` and what it shares with all buffers: rows in, aligned transitions out."""

import logging

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.buffer import DataBuffer, RolloutBuffer
from rlightning.config import BufferConfig
from rlightning.errors import ContractError
from rlightning.ops.returns import gae
from rlightning.testing import check_buffer
from rlightning.types import BatchedData, EnvMeta, EnvRet, MultiAgentEnvRet, PolicyResponse

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


def make(kind=RolloutBuffer, *, metas=None, num_envs=1, capacity=10_000, seed=0, **keys):
    config = BufferConfig(type=kind.__name__, capacity=capacity, **keys)
    buffer = kind(config, seed=seed)
    metas = metas or [EnvMeta("e-0", gym.spaces.Discrete(5), BOX, num_envs)]
    buffer.init(metas)
    return buffer


def batched(*values):
    return BatchedData([value.env_id for value in values], list(values))


class Script:
    """A random walk through episodes of N environments, and the transitions it really makes."""

    def __init__(self, num_envs, *, env_id="e-0", seed=0, end=0.2):
        self.rng = np.random.default_rng(seed)
        self.n, self.env_id, self.end = num_envs, env_id, end
        self.ids = iter(range(1, 10**9))
        self.now = self._observations()
        self.truth = [[] for _ in range(num_envs)]
        self.row = None

    def _observations(self):
        return np.array([[next(self.ids), -1.0] for _ in range(self.n)], dtype=np.float32)

    def _squeezed(self, value):
        return value if self.n > 1 else value[0]

    def first(self):
        zeros = np.zeros(self.n)
        return self._ret(zeros, zeros > 0, zeros > 0, {})

    def _ret(self, reward, terminated, truncated, info):
        pick = self._squeezed
        return EnvRet(
            self.env_id, pick(self.now), pick(reward), pick(terminated), pick(truncated), info
        )

    def step(self, action):
        before, reward = self.now, self.rng.normal(size=self.n)
        terminated = self.rng.random(self.n) < self.end / 2
        truncated = self.rng.random(self.n) < self.end / 2
        later = self._observations()
        over = terminated | truncated
        self.now = later.copy()
        if over.any():
            self.now[over] = self._observations()[over]
        info = {"final_obs": self._squeezed(later), "_final_obs": self._squeezed(over)}
        for env in range(self.n):
            self.truth[env].append(
                (before[env], action[env], reward[env], later[env], terminated[env], truncated[env])
            )
        return self._ret(reward, terminated, truncated, info if over.any() else {})

    def answer(self, **more):
        action = self.rng.integers(5, size=self.n)
        return action, PolicyResponse(self.env_id, action=self._squeezed(action), **more)


def roll(buffer, script, steps, *, start=None, end=True):
    """Drive `script` for `steps` steps into `buffer`; return the last row's `EnvRet`."""
    env_ret = start or script.first()
    for step in range(steps + 1):
        action, response = script.answer()
        last = step == steps
        buffer.add_batched_transition(batched(env_ret), batched(response), [last and end])
        if not last:
            env_ret = script.step(action)
    return env_ret


def assert_equals_truth(batch, truth):
    rows = [item for env in truth for item in env]
    names = ("observation", "action", "reward", "next_observation", "terminated", "truncated")
    for column, name in enumerate(names):
        expected = np.stack([np.asarray(row[column]) for row in rows])
        np.testing.assert_allclose(batch[name].numpy(), expected, rtol=1e-6, err_msg=name)


# ---- alignment ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_t_plus_one_rows_make_t_transitions_env_major_wherever_episodes_end(num_envs, seed):
    script = Script(num_envs, seed=seed)
    buffer = make(num_envs=num_envs)
    roll(buffer, script, 100)
    batch = buffer.get_all()
    assert batch.batch_size == (num_envs * 100,)
    assert_equals_truth(batch, script.truth)


def test_episodes_continue_across_rollouts_without_loss_or_duplicate():
    script = Script(3)
    buffer = make(num_envs=3)
    env_ret = roll(buffer, script, 7)
    roll(buffer, script, 5, start=env_ret)
    assert buffer.size() == 36
    first = [env[:7] for env in script.truth]
    second = [env[7:] for env in script.truth]
    everything = buffer.get_all()
    assert_equals_truth(everything[:21], first)
    assert_equals_truth(everything[21:], second)


def test_the_batch_has_the_documented_keys_order_and_dtypes():
    buffer = make()
    script = Script(1)
    env_ret = script.first()
    for step in range(3):
        action, response = script.answer(log_prob=np.float64(-0.5))
        buffer.add_transition("e-0", env_ret, response, step == 2)
        env_ret = script.step(action)
    (batch,) = buffer.sample()
    assert list(batch.keys()) == [
        "next_observation",
        "observation",
        "reward",
        "terminated",
        "truncated",
        "action",
        "log_prob",
    ]
    assert {name: str(batch[name].dtype).removeprefix("torch.") for name in batch.keys()} == {  # noqa: SIM118
        "next_observation": "float32",
        "observation": "float32",
        "reward": "float32",
        "terminated": "bool",
        "truncated": "bool",
        "action": "int64",
        "log_prob": "float32",
    }


def test_two_workers_of_different_size_follow_each_other():
    metas = [EnvMeta("a-0", gym.spaces.Discrete(5), BOX, 2), EnvMeta("b-1", None, BOX, 1)]
    buffer = make(metas=metas)
    one, two = Script(2, env_id="a-0", seed=1), Script(1, env_id="b-1", seed=2)
    rets = [one.first(), two.first()]
    for step in range(11):
        answers = [one.answer(), two.answer()]
        buffer.add_batched_transition(
            batched(*rets), batched(*(answer for _, answer in answers)), [step == 10] * 2
        )
        if step < 10:
            rets = [one.step(answers[0][0]), two.step(answers[1][0])]
    assert_equals_truth(buffer.get_all(), one.truth + two.truth)


def test_nested_observations_come_back_nested_with_their_final_ones():
    space = gym.spaces.Dict(
        {"camera": gym.spaces.Box(0, 255, (2, 2), np.uint8), "pair": gym.spaces.Tuple([BOX, BOX])}
    )
    buffer = make(metas=[EnvMeta("e-0", gym.spaces.Discrete(2), space, 2)])

    def observe(number):
        return {
            "camera": np.full((2, 2, 2), number, np.uint8),
            "pair": (np.full((2, 2), number / 8), np.full((2, 2), -1.0 * number)),
        }

    for row in range(4):
        over = np.array([False, row == 2])
        info = {"final_obs": observe(row + 100), "_final_obs": over} if over.any() else {}
        env_ret = EnvRet("e-0", observe(row), np.ones(2), over, over & False, info)
        buffer.add_transition(
            "e-0", env_ret, PolicyResponse("e-0", action=np.zeros(2, int)), row == 3
        )
    batch = buffer.get_all()
    assert batch["observation", "camera"].dtype == torch.uint8
    assert batch["observation", "camera"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["next_observation", "camera"][:, 0, 0].tolist() == [1, 2, 3, 1, 102, 3]
    assert batch["next_observation", "pair", "0"][:, 0].tolist() == [
        value / 8 for value in (1, 2, 3, 1, 102, 3)
    ]
    assert batch["observation", "pair", "1"].dtype == torch.float32


@pytest.mark.parametrize("with_axis", [True, False])
def test_a_worker_of_one_row_takes_answers_with_and_without_a_leading_axis(with_axis):
    box = gym.spaces.Box(-1, 1, (3,), np.float32)
    buffer = make(metas=[EnvMeta("e-0", box, BOX, 1)])
    lead = (1,) if with_axis else ()
    for row in range(3):
        response = PolicyResponse(
            "e-0",
            action=torch.full((*lead, 3), float(row)),
            log_prob=torch.full(lead, row + 0.5),
            features=torch.full((*lead, 2, 2), float(row)),
        )
        buffer.add_transition("e-0", EnvRet("e-0", np.zeros(2)), response, row == 2)
    batch = buffer.get_all()
    assert batch["action"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert batch["log_prob"].tolist() == [0.5, 1.5]
    assert batch["features"].shape == (2, 2, 2)


def test_integers_and_half_precision_keep_their_dtype_and_their_bits():
    buffer = make()
    depth = np.array([0, 1000, 65535], np.uint16)
    half = torch.tensor([1.0, 3.140625]).bfloat16()
    for row in range(3):
        over = row == 1
        env_ret = EnvRet("e-0", depth + 0, 1, over, False)
        if over:
            env_ret.info = {"_final_obs": True, "final_obs": depth // 2}
        response = PolicyResponse(
            "e-0",
            action=0,
            half=half,
            small=np.float16(0.1),
            tiny=torch.tensor(3, dtype=torch.int8),
        )
        buffer.add_transition("e-0", env_ret, response, row == 2)
    (batch,) = buffer.sample(shuffle=True)
    assert batch["observation"].dtype == torch.uint16
    assert batch["observation"][0].tolist() == [0, 1000, 65535]
    assert sorted(batch["next_observation"][:, 1].tolist()) == [500, 1000]
    assert batch["half"].dtype == torch.bfloat16
    assert torch.equal(batch["half"][0], half)
    assert batch["small"].dtype == torch.float16
    assert batch["tiny"].dtype == torch.int8


def test_reward_is_float_and_flags_are_bool_whatever_the_environment_returns():
    buffer = make(num_envs=2)
    rows = [
        EnvRet("e-0", np.zeros((2, 2))),  # the defaults of EnvRet: plain scalars
        EnvRet("e-0", np.zeros((2, 2)), np.array([1, 2]), np.array([0, 1]), np.array([0, 0])),
        EnvRet("e-0", np.zeros((2, 2)), torch.tensor([[0.25], [0.5]]), False, np.zeros(2, bool)),
    ]
    for index, row in enumerate(rows):
        response = PolicyResponse("e-0", action=np.zeros(2, int))
        buffer.add_transition("e-0", row, response, index == 2)
    batch = buffer.get_all()
    assert batch["reward"].tolist() == [1.0, 0.25, 2.0, 0.5]
    assert batch["terminated"].tolist() == [False, False, True, False]
    assert batch["reward"].dtype == torch.float32


def test_tensors_that_require_a_gradient_are_stored_without_it():
    buffer = make()
    for row in range(2):
        response = PolicyResponse("e-0", action=0, value=torch.ones((), requires_grad=True))
        buffer.add_transition("e-0", EnvRet("e-0", np.zeros(2)), response, row == 1)
    assert buffer.get_all()["value"].tolist() == [1.0]


def test_agents_rewards_by_name_stay_apart():
    buffer = make()
    for row in range(3):
        flags = {"left": row == 1, "right": False}
        env_ret = MultiAgentEnvRet(
            "e-0",
            np.zeros(2),
            {"left": 1.0, "right": float(row)},
            flags,
            {"left": False, "right": 0},
        )
        action = {"left": np.zeros(2), "right": np.ones(3)}
        buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", action=action), row == 2)
    batch = buffer.get_all()
    assert batch["reward", "right"].tolist() == [1.0, 2.0]
    assert batch["terminated", "left"].tolist() == [True, False]
    assert batch["action", "right"].shape == (2, 3)


def test_none_fields_are_left_out_and_extra_fields_travel():
    buffer = make()
    for row in range(3):
        env_ret = EnvRet("e-0", np.zeros(2), _extra={"stage": row})
        response = PolicyResponse("e-0", action=0, nothing=None, information_gain=0.5)
        buffer.add_transition("e-0", env_ret, response, row == 2)
    batch = buffer.get_all()
    assert "nothing" not in batch.keys()  # noqa: SIM118
    assert batch["information_gain"].tolist() == [0.5, 0.5]
    assert batch["stage"].tolist() == [0, 1]


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"action": np.zeros((2, 1), int)}, r"'action' has shape \(2, 1\).*\(2,\)"),
        ({"action": np.zeros(2)}, "'action' has dtype float64.*int64"),
        ({"action": np.zeros(2, int), "more": np.zeros(2)}, r"\['more'\] are not in every row"),
        ({}, r"\['action'\] are not in every row"),
        ({"action": np.array(["a", "b"])}, "the buffer stores numbers"),
    ],
)
def test_a_row_unlike_the_first_is_refused_with_the_fields_name(second, text):
    buffer = make(num_envs=2)
    env_ret = EnvRet("e-0", np.zeros((2, 2)))
    buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", action=np.zeros(2, int)))
    with pytest.raises(ValueError, match=text):
        buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", **second))


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"a": np.zeros((2, 1))}, r"observation.b"),
        ({"a": np.zeros((2, 1)), "b": np.zeros(2), "c": np.zeros(2)}, r"observation.c"),
        (np.zeros((2, 1)), "observation"),
    ],
)
def test_a_nested_observation_that_changes_is_refused(observation, text):
    buffer = make(num_envs=2)
    response = PolicyResponse("e-0", action=np.zeros(2, int))
    first = {"a": np.zeros((2, 1)), "b": np.zeros(2)}
    buffer.add_transition("e-0", EnvRet("e-0", first), response)
    with pytest.raises(ValueError, match=text):
        buffer.add_transition("e-0", EnvRet("e-0", observation), response)


def test_a_vectorised_answer_without_one_entry_per_environment_is_refused():
    buffer = make(num_envs=2)
    response = PolicyResponse("e-0", action=np.zeros(3, int))
    with pytest.raises(ValueError, match="leading axis of 2"):
        buffer.add_transition("e-0", EnvRet("e-0", np.zeros((2, 2))), response)


@pytest.mark.parametrize("name", ["observation", "last_reward", "info"])
def test_an_answer_with_an_environments_name_is_refused(name):
    buffer = make()
    with pytest.raises(ValueError, match=name):
        buffer.add_transition(
            "e-0", EnvRet("e-0", np.zeros(2)), PolicyResponse("e-0", action=0, **{name: 1.0})
        )


def test_final_observations_of_another_layout_are_refused():
    buffer = make(num_envs=2)
    response = PolicyResponse("e-0", action=np.zeros(2, int))
    space = {"a": np.zeros((2, 1)), "b": np.zeros(2)}
    buffer.add_transition("e-0", EnvRet("e-0", space), response)
    info = {"_final_obs": np.array([True, False]), "final_obs": {"a": np.zeros((2, 1))}}
    buffer.add_transition("e-0", EnvRet("e-0", space, 0.0, np.array([1, 0]), info=info), response)
    with pytest.raises(ValueError, match=r"final_obs.*observation.b"):
        buffer.truncate_one_episode("e-0")


def test_unknown_workers_and_mismatching_lists_are_refused():
    buffer = make()
    env_ret, response = EnvRet("e-0", np.zeros(2)), PolicyResponse("e-0", action=0)
    with pytest.raises(KeyError, match="e-7"):
        buffer.add_transition("e-7", env_ret, response)
    with pytest.raises(KeyError, match="e-7"):
        buffer.truncate_one_episode("e-7")
    with pytest.raises(ValueError, match="do not match"):
        buffer.add_batched_transition(batched(env_ret), BatchedData(["e-1"], [response]))
    with pytest.raises(ValueError, match="2 truncations for 1"):
        buffer.add_batched_transition(batched(env_ret), batched(response), [True, False])
    with pytest.raises(TypeError, match="expected a list"):
        buffer.add_batched_transition(batched(env_ret), batched(response), True)
    with pytest.raises(TypeError, match="environment id"):
        buffer.truncate_one_episode(3)
    with pytest.raises(TypeError, match="list of environment ids"):
        buffer.truncate_episodes("e-0")
    with pytest.raises(ValueError, match="1 environment ids for 2"):
        buffer.init([EnvMeta("a"), EnvMeta("b")], ["a"])


def test_workers_with_different_fields_are_refused_when_their_rows_meet():
    buffer = make(metas=[EnvMeta("a", None, BOX, 1), EnvMeta("b", None, BOX, 1)])
    for name, more in (("a", {}), ("b", {"value": 1.0})):
        for _ in range(2):
            response = PolicyResponse(name, action=0, **more)
            buffer.add_transition(name, EnvRet(name, np.zeros(2)), response)
    buffer.truncate_one_episode("a")
    with pytest.raises(ValueError, match="value"):
        buffer.truncate_one_episode("b")


def test_errors_call_a_worker_by_its_name_where_it_has_one():
    meta = EnvMeta("5f3c-0", gym.spaces.Discrete(5), BOX, 1, "env 'cartpole' worker 0")
    buffer = make(metas=[meta])
    buffer.add_transition(
        "5f3c-0", EnvRet("5f3c-0", np.zeros(2)), PolicyResponse("5f3c-0", action=0)
    )
    wrong = EnvRet("5f3c-0", np.zeros(7, np.float32))
    with pytest.raises(ContractError, match=r"^env 'cartpole' worker 0: .*observation.*\(7,\)"):
        buffer.add_transition("5f3c-0", wrong, PolicyResponse("5f3c-0", action=0))
    with pytest.raises(ContractError, match="a response to env 'cartpole' worker 0"):
        buffer.add_data_async("5f3c-0", PolicyResponse("5f3c-0", action=0))
    buffer.add_data_async("5f3c-0", wrong)
    with pytest.raises(ContractError, match=r"^env 'cartpole' worker 0 returned twice"):
        buffer.add_data_async("5f3c-0", wrong)
    unnamed = make()
    unnamed.add_data_async("e-0", EnvRet("e-0", np.zeros(2, np.float32)))
    with pytest.raises(ContractError, match=r"^e-0 returned twice"):
        unnamed.add_data_async("e-0", EnvRet("e-0", np.zeros(2, np.float32)))


# ---- advantages --------------------------------------------------------------------------------


def rollout_with_values(buffer, rewards, ends, values, finals):
    """One environment; row t+1 carries reward t and its end, as ``"term"``, ``"trunc"`` or None."""
    for row in range(len(rewards) + 1):
        end = ends[row - 1] if row else None
        info = {"_final_obs": True, "final_obs": np.full(2, 9.0)} if end else {}
        env_ret = EnvRet(
            "e-0",
            np.full(2, float(row)),
            rewards[row - 1] if row else 0.0,
            end == "term",
            end == "trunc",
            info,
        )
        response = PolicyResponse("e-0", action=0, value=values[row], final_value=finals[row])
        buffer.add_transition("e-0", env_ret, response, row == len(rewards))


def test_advantages_bootstrap_truncations_from_the_final_value_and_the_end_from_the_last_value():
    buffer = make(gamma=0.5, gae_lambda=1.0)
    nan = float("nan")
    rollout_with_values(
        buffer,
        rewards=[1.0, 1.0, 1.0],
        ends=["trunc", "term", None],
        values=[0.0, 0.0, 0.0, 8.0],
        finals=[nan, 4.0, nan, nan],
    )
    batch = buffer.get_all()
    # 1 + 0.5*4 (cut, bootstrapped); 1 (terminated); 1 + 0.5*8 (the rollout's end).
    assert batch["advantage"].tolist() == [3.0, 1.0, 5.0]
    assert batch["return"].tolist() == [3.0, 1.0, 5.0]
    assert "final_value" not in batch.keys()  # noqa: SIM118


def test_a_constant_reward_cut_by_time_has_no_advantage():
    buffer = make(gamma=0.9, gae_lambda=0.95)
    ends = [None, None, None, None, "trunc"]
    rollout_with_values(buffer, [1.0] * 5, ends, [10.0] * 6, [10.0] * 6)
    torch.testing.assert_close(buffer.get_all()["advantage"], torch.zeros(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("auto", [False, True])
def test_advantages_equal_ops_gae_on_random_episodes(auto):
    script = Script(4, seed=3)
    buffer = make(num_envs=4, auto_truncate_episode=auto)
    rng = np.random.default_rng(5)
    values = rng.normal(size=(51, 4)).astype(np.float32)
    finals = rng.normal(size=(51, 4)).astype(np.float32)
    env_ret = script.first()
    for row in range(51):
        action, response = script.answer(value=values[row], final_value=torch.tensor(finals[row]))
        buffer.add_transition("e-0", env_ret, response, row == 50)
        env_ret = script.step(action) if row < 50 else None
    flags = np.array([[step[4:] for step in env] for env in script.truth])
    terminated, truncated = torch.tensor(flags).unbind(-1)
    over = (terminated | truncated).T.numpy()
    reward = torch.tensor([[step[2] for step in env] for env in script.truth]).float()
    advantage, returns = gae(
        reward.T,
        torch.tensor(values[:-1]),
        torch.tensor(np.where(over, finals[1:], values[1:])),
        terminated.T,
        truncated.T,
        gamma=0.99,
        gae_lambda=0.95,
    )
    batch = buffer.get_all()
    order = torch.argsort(batch["observation"][:, 0]) if auto else slice(None)
    firsts = np.array([[step[0][0] for step in env] for env in script.truth]).reshape(-1)
    expected = np.argsort(firsts) if auto else slice(None)
    torch.testing.assert_close(batch["advantage"][order], advantage.T.reshape(-1)[expected])
    torch.testing.assert_close(batch["return"][order], returns.T.reshape(-1)[expected])


# ---- sampling, capacity, indices ---------------------------------------------------------------


def fill(buffer, numbers, *, end=True):
    """Add transitions whose observation is the number itself."""
    for index, number in enumerate([*numbers, -1]):
        response = PolicyResponse("e-0", action=0)
        env_ret = EnvRet("e-0", np.full(2, float(number)))
        buffer.add_transition("e-0", env_ret, response, end and index == len(numbers))


def numbers(batch):
    return [int(value) for value in batch["observation"][:, 0]]


def test_sampling_hands_out_everything_once_and_empties_the_buffer():
    buffer = make()
    fill(buffer, range(10))
    (batch,) = buffer.sample(batch_size=3)
    assert sorted(numbers(batch)) == list(range(10))
    assert numbers(batch) != list(range(10))
    assert buffer.size() == len(buffer) == 0
    with pytest.raises(ValueError, match="empty"):
        buffer.sample()
    with pytest.raises(ValueError, match="empty"):
        buffer.get_all()


def test_without_shuffling_rows_stay_in_order():
    buffer = make()
    fill(buffer, range(10))
    assert numbers(buffer.sample(shuffle=False)[0]) == list(range(10))


def test_the_empty_buffers_error_tells_of_unfinished_segments():
    buffer = make()
    fill(buffer, range(3), end=False)
    assert buffer.pending_size() == 3
    with pytest.raises(ValueError, match="3 transitions wait in unfinished segments"):
        buffer.sample()


def test_sampling_keeps_the_rows_of_unfinished_segments():
    buffer = make()
    fill(buffer, range(3))
    fill(buffer, [10, 11], end=False)
    assert sorted(numbers(buffer.sample()[0])) == [0, 1, 2]
    buffer.truncate_one_episode("e-0")
    assert numbers(buffer.get_all()) == [10, 11]


def test_a_full_buffer_drops_the_oldest_and_keeps_the_order():
    buffer = make(DataBuffer, capacity=5)
    fill(buffer, [0, 1, 2, 3])
    fill(buffer, [100, 101, 102, 103])
    assert numbers(buffer.get_all()) == [3, 100, 101, 102, 103]
    fill(buffer, range(20, 29))
    assert numbers(buffer.get_all()) == [24, 25, 26, 27, 28]
    assert buffer.storage.dropped == 12


def test_a_fixed_buffer_stops_accepting_counts_and_says_so_once(caplog):
    buffer = make(DataBuffer, capacity=5, storage={"mode": "fixed"})
    with caplog.at_level(logging.WARNING):
        fill(buffer, [0, 1, 2, 3])
        fill(buffer, [100, 101, 102, 103])
        fill(buffer, [7, 8])
    assert numbers(buffer.get_all()) == [0, 1, 2, 3, 100]
    assert buffer.storage.refused == 5
    assert sum("fixed" in record.message for record in caplog.records) == 1


def test_episodes_as_the_unit_are_counted_indexed_and_dropped_whole():
    buffer = make(DataBuffer, capacity=8, storage={"unit": "episode"})
    for start, length in ((10, 3), (30, 3), (20, 2)):
        fill(buffer, range(start, start + length))
    assert len(buffer) == 3
    assert [numbers(buffer.get(index)) for index in range(3)] == [
        [10, 11, 12],
        [30, 31, 32],
        [20, 21],
    ]
    assert numbers(buffer[-1]) == [20, 21]
    fill(buffer, [40, 41])
    assert numbers(buffer.get_all()) == [30, 31, 32, 20, 21, 40, 41]
    (batch,) = buffer.sample(batch_size=2)
    assert len(numbers(batch)) in range(4, 7)


def test_a_fixed_buffer_of_episodes_refuses_them_whole():
    buffer = make(DataBuffer, capacity=4, storage={"unit": "episode", "mode": "fixed"})
    fill(buffer, [0, 1, 2])
    fill(buffer, [3, 4])
    assert numbers(buffer.get_all()) == [0, 1, 2]
    assert buffer.storage.refused == 2


def test_indices_count_stored_transitions_from_both_ends():
    buffer = make()
    fill(buffer, range(4))
    assert buffer[-1]["observation"][0] == 3
    assert buffer[0]["observation"][0] == 0
    assert numbers(buffer.get([1, -2])) == [1, 2]
    for index in (4, -5):
        with pytest.raises(IndexError, match="4 transitions"):
            buffer[index]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [3, 1]),
        (slice(9, None), []),
        ([], []),
        ([3, -4], [3, 0]),
        (np.array([2, 2], np.uint8), [2, 2]),
        (torch.tensor([0, -1]), [0, 3]),
        ([True, False, False, True], [0, 3]),
        (torch.tensor([False, True, True, False]), [1, 2]),
    ],
    ids=str,
)
def test_slices_lists_arrays_and_masks_are_indices(index, expected):
    buffer = make()
    fill(buffer, range(4))
    batch = buffer[index]
    assert numbers(batch) == expected
    assert batch.batch_size == (len(expected),)


def test_a_number_of_any_kind_gives_one_transition():
    buffer = make()
    fill(buffer, range(4))
    for one in (2, np.int64(2), np.array(2), torch.tensor(2)):
        assert buffer[one].batch_size == ()
        assert buffer[one]["observation"][0] == 2


def test_a_pair_is_refused_and_never_two_rows():
    buffer = make()
    fill(buffer, range(4))
    with pytest.raises(TypeError, match=r"\(0, 1\).*one storage.*buffer\[\[0, 1\]\]"):
        buffer[0, 1]
    assert numbers(buffer.get((0, 1))) == [0, 1], "a sequence, as documented"


@pytest.mark.parametrize(
    "index", [1.5, [0.0], True, None, "0", [[0, 1], [1, 2]], [[0], [1, 2]], {"storage_idx": 0}]
)
def test_what_is_no_index_is_refused(index):
    buffer = make()
    fill(buffer, range(4))
    with pytest.raises(TypeError, match="expected a whole number, a slice"):
        buffer[index]


def test_a_mask_of_another_length_is_refused():
    buffer = make()
    fill(buffer, range(4))
    with pytest.raises(IndexError, match="a mask of 2 truth values for 4 transitions"):
        buffer[[True, False]]


@pytest.mark.parametrize("kind", ["batch", "uniform"])
def test_a_batch_larger_than_the_buffer_is_refused(kind):
    buffer = make(sampler={"type": kind})
    fill(buffer, range(4))
    with pytest.raises(ValueError, match="holds 4 transitions"):
        buffer.sample(batch_size=5)
    assert buffer.size() == 4


def test_a_partial_batch_warns_of_what_is_dropped(caplog):
    buffer = make(sampler={"type": "batch"})
    fill(buffer, range(4))
    with caplog.at_level(logging.WARNING):
        assert len(buffer.sample(batch_size=3)[0]) == 3
    assert "1 of 4 transitions" in caplog.text
    assert buffer.size() == 0


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [3, 3, 3]), (False, [4, 4, 4])])
def test_train_workers_get_even_shares(drop_last, sizes):
    buffer = make()
    buffer.init([EnvMeta("e-0", None, BOX, 1)], train_worker_num=3)
    fill(buffer, range(10))
    batches = buffer.sample(shuffle=False, drop_last=drop_last)
    assert [len(batch) for batch in batches] == sizes
    seen = [number for batch in batches for number in numbers(batch)]
    assert set(seen) >= set(range(9))
    assert len(set(seen)) == (9 if drop_last else 10)


def test_the_share_of_a_train_worker_is_consecutive_rows():
    """As policies need that learn from sequences."""
    buffer = make()
    buffer.init([EnvMeta("e-0", None, BOX, 1)], train_worker_num=3)
    fill(buffer, range(9))
    batches = buffer.sample(shuffle=False)
    assert [numbers(batch) for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_fewer_rows_than_train_workers_are_refused():
    buffer = make()
    buffer.init([EnvMeta("e-0", None, BOX, 1)], train_worker_num=3)
    fill(buffer, range(2))
    with pytest.raises(ValueError, match="3 train workers"):
        buffer.sample()


def test_the_same_seed_samples_the_same_and_a_restored_state_continues():
    def draws(buffer, count):
        out = []
        for _ in range(count):
            fill(buffer, range(20))
            out.append(numbers(buffer.sample()[0]))
        return out

    one, two = make(seed=3), make(seed=3)
    assert draws(one, 2) == draws(two, 2)
    state = one.state_dict()
    expected = draws(one, 2)
    other = make(seed=99)
    other.load_state_dict(state)
    assert draws(other, 2) == expected
    assert draws(make(seed=4), 2) != draws(make(seed=3), 2)


def test_contents_are_saved_on_request():
    buffer = make(DataBuffer, capacity=5, save_contents=True)
    fill(buffer, range(3))
    fill(buffer, range(10, 14))
    state = buffer.state_dict()
    assert "contents" not in buffer.state_dict(include_data=False)
    other = make(DataBuffer, capacity=5)
    other.load_state_dict(state)
    assert numbers(other.get_all()) == numbers(buffer.get_all()) == [2, 10, 11, 12, 13]
    assert other.storage.dropped == 2


# ---- other ways in -----------------------------------------------------------------------------


def test_evaluation_rows_are_not_stored():
    buffer = make()
    env_ret, response = EnvRet("e-0", np.zeros(2)), PolicyResponse("e-0", action=0)
    buffer.add_transition("e-0", env_ret, response, is_eval=True)
    buffer.add_batched_transition(batched(env_ret), batched(response), is_eval=True)
    assert buffer.pending_size() == buffer.size() == 0


def test_clearing_drops_unfinished_segments_too():
    buffer = make()
    fill(buffer, range(3))
    fill(buffer, [5, 6], end=False)
    buffer.clear()
    buffer.truncate_episodes(["e-0"])
    assert buffer.size() == 0


def test_halves_of_rows_meet_by_id():
    buffer = make()
    for row in range(3):
        buffer.add_batched_data_async(batched(EnvRet("e-0", np.full(2, float(row)))), row == 2)
        buffer.add_batched_data_async(batched(PolicyResponse("e-0", action=0)))
    assert numbers(buffer.get_all()) == [0, 1]
    with pytest.raises(ValueError, match="nothing to answer"):
        buffer.add_data_async("e-0", PolicyResponse("e-0", action=0))
    buffer.add_data_async("e-0", EnvRet("e-0", np.zeros(2)))
    with pytest.raises(ValueError, match="twice"):
        buffer.add_data_async("e-0", EnvRet("e-0", np.zeros(2)))


def test_finished_episodes_are_added_from_arrays_and_from_rows():
    buffer = make(DataBuffer)
    arrays = {
        "observation": np.arange(4.0).reshape(2, 2),
        "next_observation": np.arange(4.0).reshape(2, 2) + 2,
        "reward": np.ones(2),
        "terminated": np.array([False, True]),
        "truncated": np.zeros(2, bool),
        "action": np.zeros(2, int),
    }
    buffer.add_episode(arrays)
    rows = [
        {
            "observation": np.full(2, float(10 + row)),
            "last_reward": float(row),
            "last_terminated": row == 2,
            "last_truncated": False,
            "action": row,
            "info": {},
        }
        for row in range(3)
    ]
    buffer.add_episode(rows)
    assert numbers(buffer.get_all()) == [0, 2, 10, 11]
    assert buffer.get_all()["reward"].tolist() == [1.0, 1.0, 1.0, 2.0]
    wide = {name: np.stack([value, value], axis=1) for name, value in arrays.items()}
    buffer.add_episode(wide, num_envs=2)
    assert numbers(buffer.get_all())[4:] == [0, 2, 0, 2]
    with pytest.raises(ValueError, match=r"expected \[T, 3"):
        buffer.add_episode(wide, num_envs=3)
    with pytest.raises(ValueError, match="lengths"):
        buffer.add_episode({**arrays, "reward": np.ones(3)})
    with pytest.raises(ValueError, match="mapping"):
        buffer.add_episode(3)


# ---- automatic truncation ----------------------------------------------------------------------


def test_automatic_truncation_pushes_each_environment_when_its_episode_ends():
    script = Script(3, seed=1)
    buffer = make(num_envs=3, auto_truncate_episode=True)
    env_ret = script.first()
    for _ in range(200):
        action, response = script.answer()
        buffer.add_transition("e-0", env_ret, response)
        env_ret = script.step(action)
    complete = 0
    for env in script.truth:
        ends = [step for step, row in enumerate(env[:-1]) if row[4] or row[5]]
        complete += ends[-1] + 1 if ends else 0
    assert buffer.size() == complete
    assert buffer.pending_size() == 3 * 199 - complete
    buffer.truncate_one_episode("e-0")
    batch = buffer.get_all()
    order = np.argsort(batch["observation"][:, 0].numpy())
    truth = sorted((row for env in script.truth for row in env[:-1]), key=lambda row: row[0][0])
    assert_equals_truth(batch[torch.as_tensor(order)], [truth])


def test_an_episode_that_ends_at_the_rollouts_end_is_pushed_once():
    buffer = make(auto_truncate_episode=True)
    for row in range(4):
        env_ret = EnvRet("e-0", np.full(2, float(row)), 1.0, row == 3)
        buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", action=0), row == 3)
    assert numbers(buffer.get_all()) == [0, 1, 2]
    assert buffer.pending_size() == 0


def test_a_long_collection_with_automatic_truncation_keeps_its_memory_bounded():
    buffer = make(auto_truncate_episode=True, num_envs=1)
    script = Script(1, seed=2)
    env_ret = script.first()
    for _ in range(2000):
        action, response = script.answer()
        buffer.add_transition("e-0", env_ret, response)
        env_ret = script.step(action)
    segment = buffer._segments["e-0"]
    assert len(segment) < 512
    buffer.truncate_one_episode("e-0")
    assert_equals_truth(buffer.get_all(), [script.truth[0][:-1]])


def test_episodes_as_the_unit_with_automatic_truncation_hold_one_episode_each():
    script = Script(2, seed=4)
    buffer = make(DataBuffer, num_envs=2, auto_truncate_episode=True, storage={"unit": "episode"})
    roll(buffer, script, 60)
    ends = sum(bool(row[4] or row[5]) for env in script.truth for row in env)
    assert len(buffer) in range(ends, ends + 3)
    for index in range(len(buffer)):
        episode = buffer.get(index)
        over = (episode["terminated"] | episode["truncated"])[:-1]
        assert not over.any()


def test_a_batch_changed_in_place_does_not_change_what_the_buffer_keeps():
    buffer = make(DataBuffer, sampler={"type": "all"})
    fill(buffer, range(4))
    for batch in (buffer.get_all(), buffer.sample(shuffle=False)[0], buffer.sample()[0]):
        batch["observation"] += 100
    assert numbers(buffer.get_all()) == [0, 1, 2, 3]


def test_the_buffer_says_whether_rows_and_batches_fit():
    buffer = make(capacity=10)
    assert buffer.can_insert(10)
    assert not buffer.can_insert(11)
    fill(buffer, range(4))
    assert not buffer.can_insert(7)
    assert buffer.can_sample(4)
    assert not buffer.can_sample(5)
    assert make(DataBuffer, capacity=10).can_insert(100)


def test_pieces_of_another_shape_are_refused():
    metas = [EnvMeta("a", None, BOX, 1), EnvMeta("b", None, BOX, 1)]
    buffer = make(metas=metas)
    for name, size in (("a", 2), ("b", 3)):
        for _ in range(2):
            response = PolicyResponse(name, action=0)
            buffer.add_transition(name, EnvRet(name, np.zeros(size)), response)
    buffer.truncate_one_episode("a")
    with pytest.raises(ValueError, match=r"observation' has shape \(3,\) here and \(2,\)"):
        buffer.truncate_one_episode("b")


def test_batches_of_another_buffer_and_many_environments_are_added_as_episodes():
    source = make(num_envs=2)
    script = Script(2)
    roll(source, script, 6)
    target = make(DataBuffer, storage={"unit": "episode"})
    target.add_episode(source.get_all())
    assert_equals_truth(target.get_all(), script.truth)
    target.add_episode(_wide(source), num_envs=2)
    assert len(target) == 3


def _wide(buffer):
    """Return a buffer of two environments as ``[T, 2, ...]`` arrays."""
    batch = buffer.get_all()
    return {
        name: batch[name].reshape(2, -1, *batch[name].shape[1:]).transpose(0, 1).numpy()
        for name in batch.keys()  # noqa: SIM118
    }


def test_the_rollout_buffer_passes_the_conformance_kit():
    check_buffer(lambda: RolloutBuffer(BufferConfig(type="RolloutBuffer", capacity=64)))
