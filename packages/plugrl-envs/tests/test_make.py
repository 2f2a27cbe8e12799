import builtins
import logging
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from plugrl_envs import (
    CanonicalVectorEnv,
    EnvWorkerError,
    MissingExtraError,
    UnknownEnvError,
    derive_seeds,
    make_vec,
)
from plugrl_envs.envpool_env import EnvPoolVectorEnv
from plugrl_envs.quiet import quiet_mujoco
from plugrl_envs.sync_vector import SyncRows
from plugrl_envs.testing import CounterEnv, FaultyEnv, SpaceEnv

IDS = ["CartPole-v1", "Taxi-v4", "LunarLander-v3", "Hopper-v5", "MinAtar/Asterix-v1"]


@pytest.mark.parametrize("env_id", [*IDS, "ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_families_run_through_ends_of_episodes(env_id):
    env = make_vec(env_id, 2, max_episode_steps=5)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    ends = 0
    for _ in range(11):
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation)
        assert (reward.shape, reward.dtype) == ((2,), np.float64)
        ends += "final_obs" in info
        assert terminated.dtype == truncated.dtype == np.bool_
    assert ends >= 2
    env.close()


def test_push_t_runs():
    pytest.importorskip("gym_pusht")
    env = make_vec("gym_pusht/PushT-v0", 1, max_episode_steps=3)
    env.reset(seed=0)
    *_, info = [env.step(env.action_space.sample()) for _ in range(3)][-1]
    assert info["final_info"]["is_success"].tolist() == [False]
    env.close()


def test_atari_frames_are_stacked_and_stay_uint8():
    env = make_vec("ALE/Pong-v5", 2, wrappers=["atari"])
    observation, _ = env.reset(seed=0)
    assert (observation.shape, observation.dtype) == ((2, 4, 84, 84), np.uint8)
    assert observation.max() > 1
    env.close()


def test_native_atari_has_dense_final_frames():
    env = make_vec("ALE/Breakout-v5", 2, vectorization="native", max_episode_steps=20)
    env.reset(seed=0)
    for step in range(1, 41):
        observation, _, terminated, truncated, info = env.step(np.array([1, 3]))
        assert not terminated.any()
        assert truncated.all() == truncated.any() == (step % 20 == 0)
    assert info["final_obs"].shape == observation.shape == (2, 4, 84, 84)
    assert info["final_obs"].dtype == np.uint8
    env.close()


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("ALE/Breakout-v5", {"vectorization": "native"}),
        ("ALE/Breakout-v5", {"vectorization": "native", "env_kwargs": {"frameskip": 2}}),
        ("ALE/Breakout-v5", {}),
        ("ALE/Breakout-v5", {"wrappers": ["atari"]}),
        ("ALE/Breakout-v5", {"wrappers": ["plugrl_envs.atari:atari_preprocessing"]}),
        ("BreakoutNoFrameskip-v4", {"wrappers": ["atari"]}),
    ],
    ids=str,
)
def test_the_limit_of_an_atari_episode_counts_steps_and_not_frames(env_id, options):
    env = make_vec(env_id, 2, max_episode_steps=7, **options)
    env.reset(seed=0)
    for step in range(1, 22):
        _, _, terminated, truncated, _ = env.step(np.array([0, 0]))
        assert not terminated.any()
        assert truncated.tolist() == [step % 7 == 0] * 2, f"step {step}"
    env.close()


def test_unknown_ids_get_suggestions():
    with pytest.raises(UnknownEnvError, match=r"Did you mean .*CartPole-v1"):
        make_vec("cartpole-v1", 1)
    with pytest.raises(UnknownEnvError, match="module_that_registers_it"):
        make_vec("NothingLikeThis-v0", 1)


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("gym_pusht/PushT-v0", "gym_pusht", "pusht"),
        ("MinAtar/Breakout-v1", "minatar.gym", "minatar"),
        ("Ant-v5", "mujoco", "mujoco"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("envpool:Pong-v5", "envpool", "envpool"),
    ],
)
def test_a_missing_family_names_its_extra(monkeypatch, env_id, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", real)
    with pytest.raises(MissingExtraError, match=rf"plugrl-envs\[{extra}\]") as caught:
        make_vec(env_id, 1)
    assert caught.value.extra == extra


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="num_envs is 0"):
        make_vec(CounterEnv, 0)
    with pytest.raises(ValueError, match="max_episode_steps is 0"):
        make_vec(CounterEnv, 1, max_episode_steps=0)
    with pytest.raises(ValueError, match="vectorization is 'magic'"):
        make_vec(CounterEnv, 1, vectorization="magic")
    with pytest.raises(ValueError, match="registers no native vector environment"):
        make_vec("Pendulum-v1", 2, vectorization="native")
    with pytest.raises(ValueError, match="no single environment to wrap"):
        make_vec("CartPole-v1", 2, vectorization="native", wrappers=["atari"])
    with pytest.raises(ValueError, match="needs an id"):
        make_vec(CounterEnv, 2, vectorization="native")
    with pytest.raises(ValueError, match="wrapper 'blur' cannot be found"):
        make_vec(CounterEnv, 2, wrappers=["blur"])


def test_an_error_in_this_process_names_its_row():
    fns = iter([FaultyEnv("none"), FaultyEnv("raise")])
    env = make_vec(lambda: next(fns), 2)
    env.reset(seed=0)
    env.step(np.zeros(2, int))
    with pytest.raises(EnvWorkerError, match="environment 1 failed during step: ZeroDivision"):
        env.step(np.zeros(2, int))


def test_env_kwargs_and_a_function_reach_the_environment():
    env = make_vec(SpaceEnv, 1, env_kwargs={"action_space": gym.spaces.Discrete(2), "length": 2})
    env.reset(seed=0)
    assert not env.step(0)[3].any()
    assert env.step(0)[3].all()
    gravity = make_vec("Pendulum-v1", 1, env_kwargs={"g": 1.5})
    assert gravity.call("g") == (1.5,)


def test_rows_and_workers_get_distinct_seeds_that_repeat():
    seeds = [seed for worker in range(50) for seed in derive_seeds(3, 100, worker_index=worker)]
    evaluation = derive_seeds(3, 100, purpose="eval")
    assert len({*seeds, *evaluation}) == 5100
    assert seeds[:100] == derive_seeds(3, 100)
    assert not set(seeds) & set(derive_seeds(4, 100)), "neighbouring base seeds overlap"
    assert all(0 <= seed < 2**31 for seed in [*seeds, *evaluation])
    for bad in ({"seed": -1, "num_envs": 1}, {"seed": 0, "num_envs": 0}):
        with pytest.raises(ValueError, match="expected"):
            derive_seeds(**bad)
    with pytest.raises(ValueError, match="worker_index"):
        derive_seeds(0, 1, worker_index=1 << 14)


def test_the_same_seed_gives_the_same_run_and_rows_differ():
    def run(seed):
        env = make_vec("Pendulum-v1", 3)
        first, _ = env.reset(seed=seed)
        steps = [env.step(env.action_space.sample())[0] for _ in range(250)]
        return np.stack([first, *steps])

    one, two = run(5), run(5)
    assert np.array_equal(one, two)
    assert len(np.unique(one[0], axis=0)) == 3
    assert not np.array_equal(one, run(6))


def test_mujocos_warning_is_logged_once_and_nothing_is_printed(tmp_path):
    """Eight instances used to print eight lines and write a log file into the working directory."""
    code = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from plugrl_envs import make_vec\nmake_vec('HalfCheetah-v5', 8).reset(seed=0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert done.stderr.count("settotalmass") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_warning_handler_of_the_program_is_left_alone(caplog):
    import mujoco

    before = mujoco.get_mju_user_warning()
    seen = []
    mujoco.set_mju_user_warning(seen.append)
    with caplog.at_level(logging.WARNING):
        quiet_mujoco()
        gym.make("HalfCheetah-v5").close()
    mujoco.set_mju_user_warning(before)
    assert len(seen) == 1
    assert not caplog.records


class FakePool:
    """EnvPool's interface: resets by id, answers in any order, counts elapsed steps."""

    observation_space = gym.spaces.Box(0, 1e6, (2,), np.float64)
    action_space = gym.spaces.Discrete(10)

    def __init__(self, num_envs, seed=0):
        self.envs = [CounterEnv() for _ in range(num_envs)]
        self.elapsed = np.zeros(num_envs, int)
        self.done = np.zeros(num_envs, bool)
        self.seed = seed
        self.closed = False

    def reset(self, env_id=None):
        rows = np.arange(len(self.envs)) if env_id is None else np.asarray(env_id)[::-1]
        self.elapsed[rows] = 0
        self.done[rows] = False
        observation = np.stack([self.envs[row].reset()[0] for row in rows])
        return observation, {"env_id": rows, "elapsed_step": self.elapsed[rows]}

    def step(self, actions):
        assert not self.done.any(), "a step of an ended row would be a dummy"
        self.elapsed += 1
        results = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        observation, reward, terminated, truncated, _ = map(np.array, zip(*results, strict=True))
        self.done = terminated | truncated
        info = {"env_id": np.arange(len(self.envs)), "elapsed_step": self.elapsed.copy()}
        return observation, reward.astype(np.float32), terminated, truncated, info

    def close(self):
        self.closed = True


def test_envpool_rows_are_reset_by_id_at_once():
    """Against the rows in this process; the pool's own count of steps restarts with the episode."""
    env = CanonicalVectorEnv(EnvPoolVectorEnv(lambda seed: FakePool(3, seed), 3))
    twin = make_vec(CounterEnv, 3)
    assert np.array_equal(env.reset(seed=0)[0], twin.reset(seed=0)[0])
    first_pool = env.env._pool
    for step in range(40):
        result, expected = env.step(np.arange(3)), twin.step(np.arange(3))
        for left, right in zip(result[:4], expected[:4], strict=True):
            assert np.array_equal(left, right), step
        if "final_obs" in expected[4]:
            assert np.array_equal(result[4]["final_obs"], expected[4]["final_obs"])
        assert np.array_equal(result[4]["elapsed_step"] % 8, [env.env._pool.elapsed[0]] * 3) or (
            "final_obs" in expected[4]
        )
    env.reset(seed=5)
    assert first_pool.closed
    assert env.env._pool.seed == derive_seeds(5, 3)[0]
    env.close()


def test_what_could_not_be_made_can_be_closed_and_leaves_no_row_open():
    """Gymnasium 1.1 closes it when it is collected, and would print what that raises."""
    closed = []

    class Noted(CounterEnv):
        def close(self):
            closed.append(self)

    def fails(*_):
        raise LookupError("not today")

    for kind, arguments in ((SyncRows, ([Noted, fails],)), (EnvPoolVectorEnv, (fails, 2))):
        half = kind.__new__(kind)
        with pytest.raises(LookupError, match="not today"):
            half.__init__(*arguments)
        half.close()
    assert len(closed) == 1
