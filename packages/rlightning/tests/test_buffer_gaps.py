"""Rows of environments that were away or lost: what is stored is what really happened."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.buffer import ReplayBuffer, RolloutBuffer
from rlightning.buffer.gaps import Gaps
from rlightning.buffer.utils.utils import default_postprocess_fn
from rlightning.config import BufferConfig
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

ENVS = 3
META = EnvMeta("e-0", gym.spaces.Discrete(1000), gym.spaces.Box(-np.inf, np.inf, (1,)), ENVS)


def make(kind, capacity=1000, **stages):
    buffer = kind(BufferConfig(type=kind.__name__, capacity=capacity), seed=0, **stages)
    buffer.init([META])
    return buffer


class Environments:
    """Environments that are sometimes away and sometimes lost; every observation is a new number.

    `expected` holds, per environment, the transitions that really happened: (observation, action,
    reward, next observation, terminated, truncated), and whether the episode was lost later.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.numbers = iter(range(1, 10**6))
        self.now = np.array([float(next(self.numbers)) for _ in range(ENVS)])
        self.acted = [None] * ENVS
        self.expected = [[] for _ in range(ENVS)]

    def respond(self, env_ret):
        self.action = np.array([next(self.numbers) for _ in range(ENVS)])
        return PolicyResponse("e-0", action=self.action, value=self.action * 0.5,
                              final_value=self.action * 0.25)  # fmt: skip

    def first(self):
        no = np.zeros(ENVS, bool)
        return EnvRet("e-0", self.now[:, None].copy(), np.zeros(ENVS, np.float32), no, no.copy())

    def step(self):
        """Send the actions of those who wait; some of them come back."""
        reward = np.zeros(ENVS, np.float32)
        terminated, truncated, idle, lost = np.zeros((4, ENVS), bool)
        final = self.now.copy()
        for env in range(ENVS):
            if self.acted[env] is None:
                self.acted[env] = (self.now[env], self.action[env])
            chance = self.rng.random()
            if chance < 0.3:
                idle[env] = True
                continue
            seen, action = self.acted[env]
            self.acted[env] = None
            following = float(next(self.numbers))
            self.now[env] = following
            if chance < 0.4:
                lost[env] = True
                while self.expected[env] and not self.expected[env][-1]["over"]:
                    self.expected[env].pop()
                continue
            reward[env] = next(self.numbers)
            terminated[env], truncated[env] = chance > 0.9, 0.8 < chance < 0.85
            over = bool(terminated[env] or truncated[env])
            if over:
                final[env] = following
                self.now[env] = float(next(self.numbers))
            self.expected[env].append(
                {"seen": seen, "action": action, "reward": reward[env], "next": following,
                 "terminated": terminated[env], "truncated": truncated[env], "over": over}
            )  # fmt: skip
        masks = {"_idle": idle, "_lost": lost}
        info = {key: mask for key, mask in masks.items() if mask.any()}
        if (terminated | truncated).any():
            info |= {"final_obs": final[:, None], "_final_obs": terminated | truncated}
        return EnvRet("e-0", self.now[:, None].copy(), reward, terminated, truncated, info)


def play(buffer, seed, steps=40):
    """Fill a buffer; return what should be in it, as sorted rows."""
    world = Environments(seed)
    env_ret = world.first()
    for step in range(steps):
        response = world.respond(env_ret)
        buffer.add_transition("e-0", env_ret, response, step == steps - 1)
        if step < steps - 1:
            env_ret = world.step()
    rows = [tuple(float(row[key]) for key in ("seen", "action", "reward", "next", "terminated",
                                              "truncated"))
            for env in world.expected for row in env]  # fmt: skip
    return sorted(rows)


def stored(buffer):
    batch = buffer.get_all()
    names = ("observation", "action", "reward", "next_observation", "terminated", "truncated")
    columns = [batch[name].reshape(len(batch)).double().tolist() for name in names]
    return sorted(zip(*columns, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_an_on_policy_buffer_holds_what_happened_without_lost_episodes(seed):
    buffer = make(RolloutBuffer)
    expected = play(buffer, seed)
    assert stored(buffer) == expected
    assert len(expected) > 20


@pytest.mark.parametrize("seed", range(4))
def test_rows_through_a_function_of_the_users_are_the_same(seed):
    by_row = make(RolloutBuffer, postprocess_fn=lambda rows: default_postprocess_fn(rows))
    expected = play(by_row, seed)
    assert stored(by_row) == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_buffer_holds_every_transition_that_was_completed(seed):
    buffer = make(ReplayBuffer)
    world = Environments(seed)
    happened = []

    class Remembering(list):
        def pop(self):  # a lost episode's transitions were real: they may have been sampled
            happened.append(super().pop())

    world.expected = [Remembering() for _ in range(ENVS)]
    env_ret = world.first()
    for _ in range(40):
        buffer.add_transition("e-0", env_ret, world.respond(env_ret))
        env_ret = world.step()
    buffer.add_transition("e-0", env_ret, world.respond(env_ret))
    happened += [row for env in world.expected for row in env]
    keys = ("seen", "action", "reward", "next", "terminated", "truncated")
    assert stored(buffer) == sorted(tuple(float(row[k]) for k in keys) for row in happened)
    assert buffer.limiter.inserts == len(happened)


def test_a_full_replay_buffer_drops_the_oldest_and_never_mixes():
    buffer = make(ReplayBuffer, capacity=20)
    world = Environments(3)
    env_ret, happened = world.first(), set()
    for _ in range(200):
        buffer.add_transition("e-0", env_ret, world.respond(env_ret))
        env_ret = world.step()
        happened |= {(row["seen"], row["next"]) for env in world.expected for row in env}
        assert buffer.size() <= 20
    pairs = {(row[0], row[3]) for row in stored(buffer)}
    assert pairs <= happened
    assert len(pairs) > 10


def test_advantages_are_as_if_idle_rows_had_never_been():
    def fill(rows):
        meta = EnvMeta("e-0", META.action_space, META.observation_space, 2)
        buffer = RolloutBuffer(BufferConfig(type="RolloutBuffer", capacity=99), seed=0)
        buffer.init([meta])
        for row in rows:
            seen = np.array([[row], [row + 100.0]], np.float32)
            idle = np.array([row != int(row), False])  # halves repeat what was there, in env 0
            info = {"_idle": idle} if idle.any() else {}
            env_ret = EnvRet("e-0", seen, seen[:, 0] * ~idle, *np.zeros((2, 2), bool), info)
            value = torch.from_numpy(seen[:, 0] * 3)
            answer = {"action": np.zeros(2, int), "value": value, "final_value": value * 0}
            buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", **answer), row == rows[-1])
        batch = buffer.get_all()
        first = batch["observation"].reshape(-1) < 50
        return batch[first]

    with_idle, without = fill([0, 1, 1.5, 2, 2.5, 3]), fill([0, 1, 2, 3])
    assert len(without) == 3
    for name in ("observation", "next_observation", "reward", "advantage", "return"):
        assert torch.equal(with_idle[name], without[name]), name


def test_a_transition_of_several_steps_discounts_by_each_of_them():
    meta = EnvMeta("e-0", gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,)), 1)
    buffer = RolloutBuffer(BufferConfig(type="RolloutBuffer", capacity=9), seed=0)
    buffer.init([meta])
    for row, steps in enumerate((0, 4, 2)):
        extra = {"last_steps": np.int64(steps)}
        env_ret = EnvRet("e-0", np.zeros(1, np.float32), float(row), _extra=extra)
        answer = {"action": 0, "value": torch.tensor(10.0), "final_value": torch.tensor(0.0)}
        buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", **answer), row == 2)
    batch = buffer.get_all()
    assert batch["steps"].tolist() == [4, 2]
    second = 2.0 + 0.99**2 * 10.0 - 10.0
    first = 1.0 + 0.99**4 * 10.0 - 10.0 + 0.99**4 * 0.95 * second
    assert batch["advantage"].tolist() == pytest.approx([first, second], rel=1e-5)


def test_a_lost_episode_leaves_the_one_before_whole():
    gaps = Gaps(1)
    gaps.note(4, {"_lost": True})
    gaps.note(2, {"_idle": np.array([True])})
    over = [False, False, False, True, False, False]
    pieces = gaps.pieces(0, range(6), over)
    assert [piece.tolist() for piece in pieces] == [[0, 1, 3], [4, 5]]


def test_what_is_lost_at_the_start_of_a_rollout_is_left_out():
    gaps = Gaps(1)
    gaps.note(2, {"_lost": np.array([True])})
    pieces = gaps.pieces(0, range(5), [True, False, False, False, False])
    assert [piece.tolist() for piece in pieces] == [[2, 3, 4]]
