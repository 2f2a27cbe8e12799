import gymnasium as gym
import numpy as np
import pytest
import torch

from plugrl_envs import derive_seeds, make_vec
from plugrl_envs.testing import CounterEnv, FaultyEnv, SpaceEnv
from rlightning.config import EnvConfig
from rlightning.env import EnvGroup
from rlightning.env.gym_env import GymEnv
from rlightning.errors import ConfigError, ContractError, EnvWorkerError, NonFiniteError
from rlightning.types import BatchedData, PolicyResponse


class NanEnv(CounterEnv):
    """Returns NaN in the step and row that the test asks for."""

    made = 0

    def __init__(self, where="observation", row=1):
        super().__init__()
        self.row = NanEnv.made
        NanEnv.made += 1
        self.where, self.bad_row = where, row

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.row == self.bad_row and self.steps == 2:
            observation = observation * np.nan if self.where == "observation" else observation
            reward = np.inf if self.where == "reward" else reward
        return observation, reward, *rest


SPACES = {
    "Box-v0": gym.spaces.Box(-2, 0, (3,)),
    "Matrix-v0": gym.spaces.Box(0, 5, (2, 2)),
    "Start-v0": gym.spaces.Discrete(4, start=7),
    "Multi-v0": gym.spaces.MultiDiscrete([3, 4]),
    "Binary-v0": gym.spaces.MultiBinary(3),
}
for name, space in SPACES.items():
    gym.register(f"test-env/{name}", entry_point=SpaceEnv, kwargs={"action_space": space})
gym.register("test-env/Counter-v0", entry_point=CounterEnv)
gym.register("test-env/Nan-v0", entry_point=NanEnv)
gym.register("test-env/Faulty-v0", entry_point=FaultyEnv)


def config(task="test-env/Counter-v0", **kwargs):
    return EnvConfig(name="e", backend="gymnasium", task=task, **kwargs)


def answer(env, action):
    return PolicyResponse(env.env_id, action=action)


def test_one_row_has_no_leading_axis():
    env = GymEnv(config())
    first = env._reset(seed=0)
    assert first.observation.tolist() == [0, 0]
    assert (np.shape(first.last_reward), first.last_terminated, first.last_truncated) == (
        (),
        False,
        False,
    )
    for _ in range(2):
        env_ret = env._step(answer(env, 1))
        assert env_ret.observation.shape == (2,)
        assert "final_obs" not in env_ret.info
    env_ret = env._step(answer(env, 1))
    assert env_ret.observation.tolist() == [1, 0]
    assert env_ret.info["final_obs"].tolist() == [0, 3]
    assert env_ret.info["_final_obs"] is np.True_
    assert (env_ret.last_reward, env_ret.last_terminated, env_ret.last_truncated) == (
        4,
        True,
        False,
    )
    assert env_ret.last_reward.dtype == np.float32


def test_several_rows_have_a_leading_axis():
    env = GymEnv(config(num_envs=3))
    assert env._reset(seed=0).observation.shape == (3, 2)
    for _ in range(8):
        env_ret = env._step(answer(env, np.zeros(3, int)))
    assert env_ret.observation.shape == env_ret.info["final_obs"].shape == (3, 2)
    assert env_ret.last_truncated.tolist() == [True] * 3
    assert env_ret.last_terminated.tolist() == [False] * 3
    assert env_ret.info["_final_obs"].tolist() == [True] * 3
    assert env_ret.last_reward.shape == (3,)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", SPACES)
def test_every_action_space_takes_tensors_and_arrays_and_stays_unchanged(name, num_envs):
    env = GymEnv(config(f"test-env/{name}", num_envs=num_envs))
    meta = env.init()
    env._reset(seed=0)
    sample = np.stack([meta.action_space.sample() for _ in range(num_envs)])
    forms = [sample, torch.as_tensor(sample), torch.as_tensor(sample).clone().requires_grad_(False)]
    if num_envs == 1:
        forms += [sample[0], torch.as_tensor(sample[0])]
    if sample.dtype.kind == "f":
        forms += [torch.full(sample.shape, 100.0, requires_grad=True), sample - 100]
    for action in forms:
        before = torch.as_tensor(action).detach().clone()
        env._step(answer(env, action))
        assert torch.equal(torch.as_tensor(action).detach(), before)
    original = gym.make(f"test-env/{name}").unwrapped.action_space
    for row in env.env.call("received"):
        assert len(row) == len(forms)
        assert all(original.contains(received) for received in row)


def test_metadata_is_that_of_one_environment_in_the_policys_terms():
    meta = GymEnv(config("test-env/Start-v0", num_envs=3), worker_index=4).init()
    assert meta.action_space == gym.spaces.Discrete(4)
    assert meta.observation_space.shape == (2,)
    assert meta.num_envs == 3
    assert meta.env_id.endswith("-4")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((2, 3)), r"has shape \(2, 3\); expected \(3, 3\)"),
        (np.array([["a"] * 3] * 3), "has dtype <U1"),
        (np.full((3, 3), np.nan), "environment 0 is not finite"),
    ],
)
def test_a_wrong_action_names_its_shape_and_what_was_expected(action, message):
    env = GymEnv(config("test-env/Box-v0", num_envs=3))
    env._reset(seed=0)
    with pytest.raises(ContractError, match=message):
        env._step(answer(env, action))


@pytest.mark.parametrize("where", ["observation", "reward"])
def test_what_is_not_finite_is_named_with_environment_row_and_step(where):
    NanEnv.made = 0
    env = GymEnv(config("test-env/Nan-v0", num_envs=3, env_kwargs={"where": where}))
    env._reset(seed=0)
    env._step(answer(env, np.zeros(3, int)))
    with pytest.raises(NonFiniteError) as caught:
        env._step(answer(env, np.zeros(3, int)))
    assert caught.value.tensor == where
    assert caught.value.step == 2
    assert caught.value.source == f"env {env.config.name!r} worker 0 (row 1)"


def test_a_failing_simulator_becomes_our_error_with_worker_and_row():
    env = GymEnv(config("test-env/Faulty-v0", env_kwargs={"fault": "raise"}))
    env._reset(seed=0)
    env._step(answer(env, 0))
    with pytest.raises(
        EnvWorkerError, match=r"env '.*' worker 0: environment 0 failed during step"
    ):
        env._step(answer(env, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "CartPol-v1"}, "Did you mean"),
        ({"task": "CartPole-v1", "env_kwargs": {"gravity": 3}}, "gravity"),
        ({"task": "CartPole-v1", "wrappers": ["no_such_module:thing"]}, "no_such_module"),
        ({"task": "Pendulum-v1", "vectorization": "native"}, "no native vector environment"),
    ],
)
def test_what_cannot_be_made_is_a_configuration_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        GymEnv(config(**changes))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'jax'"), "cannot be made: No module named 'jax'"),
        (gym.error.DependencyNotInstalled("pip install x"), "cannot be made: pip install x"),
    ],
)
def test_a_package_that_an_environment_lacks_is_a_configuration_error(error, message):
    def maker(**kwargs):
        raise error

    gym.register("test-env/Lacking-v0", entry_point=maker)
    try:
        with pytest.raises(ConfigError, match=message):
            GymEnv(config("test-env/Lacking-v0"))
    finally:
        del gym.registry["test-env/Lacking-v0"]


def test_extras_choose_vectorization_and_wrappers():
    env = GymEnv(config("CartPole-v1", num_envs=2, vectorization="native", max_episode_steps=5))
    assert type(env.env.env).__name__ == "CartPoleVectorEnv"
    env = GymEnv(config("CartPole-v1", wrappers=["gymnasium.wrappers:TimeAwareObservation"]))
    assert env.init().observation_space.shape == (5,)


def test_async_rows_give_what_rows_in_this_process_give():
    results = []
    for extra in ({"vectorization": "async", "start_method": "fork"}, {}):
        env = GymEnv(config("MountainCar-v0", num_envs=2, max_episode_steps=4, **extra))
        rows = [env._reset(seed=3).observation]
        rows += [env._step(answer(env, np.array([0, 2]))).observation for _ in range(6)]
        results.append(np.stack(rows))
        env.close()
    assert np.array_equal(*results)


def test_rows_get_the_seeds_of_their_worker():
    env = GymEnv(config("Pendulum-v1", num_envs=3), worker_index=2)
    first = env._reset(seed=11).observation
    twin = make_vec("Pendulum-v1", 3)
    expected, _ = twin.reset(seed=derive_seeds(11, 3, worker_index=2))
    assert np.array_equal(first, expected)


def test_a_seed_in_the_section_wins_over_the_runs():
    one, two = (GymEnv(config("Pendulum-v1", seed=5)) for _ in range(2))
    assert np.array_equal(one._reset(seed=1).observation, two._reset(seed=2).observation)
    again = one._reset().observation
    assert not np.array_equal(again, two._reset(seed=2).observation), "the stream continues"


def test_return_and_length_are_reported_for_a_plain_gymnasium_task():
    env = GymEnv(config(num_envs=2))
    env._reset(seed=0)
    for _ in range(8):
        env._step(answer(env, np.zeros(2, int)))
    # Rewards count the steps: 1+2+3 in the first episode, 1+2+3+4+5 in the second, in two rows.
    assert env.get_env_stats() == {"episode_return": [42.0, 4], "episode_length": [16.0, 4]}
    assert env.get_env_stats(reset=True)["episode_return"] == [42.0, 4]
    assert env.get_env_stats() == {}


def test_a_reset_forgets_the_running_episode_and_keeps_finished_ones():
    env = GymEnv(config())
    env._reset(seed=0)
    for _ in range(4):
        env._step(answer(env, 0))
    env._reset()
    for _ in range(3):
        env._step(answer(env, 0))
    assert env.get_env_stats()["episode_length"] == [6.0, 2]


def test_success_reaches_the_metrics_and_the_info():
    class Task(CounterEnv):
        def step(self, action):
            *result, _ = super().step(action)
            return (*result, {"is_success": self.episode == 0})

    gym.register("test-env/Success-v0", entry_point=Task)
    for num_envs in (1, 2):
        env = GymEnv(config("test-env/Success-v0", num_envs=num_envs))
        env._reset(seed=0)
        seen = [env._step(answer(env, [0] * num_envs)) for _ in range(8)]
        assert env.get_env_stats()["success"] == [num_envs, 2 * num_envs]
        assert np.all(seen[2].info["success"])
        assert np.shape(seen[2].info["success"]) == (() if num_envs == 1 else (2,))
        assert not np.any(seen[7].info["success"])


@pytest.mark.parametrize("num_envs", [1, 2])
def test_state_continues_episodes_and_their_statistics(num_envs):
    env = GymEnv(config("CartPole-v1", num_envs=num_envs))
    env._reset(seed=0)
    actions = [np.arange(num_envs) % 2] * 40
    for action in actions[:5]:
        env._step(answer(env, action))
    state = env.get_state()
    env.get_env_stats(reset=True)

    def follow(worker):
        rets = [worker._step(answer(worker, action)) for action in actions]
        return np.stack([ret.observation for ret in rets]), worker.get_env_stats(reset=True)

    expected, metrics = follow(env)
    other = GymEnv(config("CartPole-v1", num_envs=num_envs))
    other._reset(seed=9)
    other.set_state(state)
    observations, again = follow(other)
    assert np.array_equal(observations, expected)
    assert again == metrics
    assert metrics["episode_length"][1] > 0


def test_dictionary_observations_without_leading_axis_keep_their_layout():
    space = gym.spaces.Dict({"x": gym.spaces.Box(0, 1, (2,)), "k": gym.spaces.Discrete(3)})
    gym.register(
        "test-env/Dict-v0",
        entry_point=SpaceEnv,
        kwargs={"action_space": gym.spaces.Discrete(2), "observation_space": space},
    )
    env = GymEnv(config("test-env/Dict-v0"))
    assert space.contains(
        {key: np.asarray(value) for key, value in env._reset(seed=0).observation.items()}
    )
    env_ret = [env._step(answer(env, 0)) for _ in range(4)][-1]
    assert env_ret.info["final_obs"]["x"].shape == (2,)
    assert env_ret.info["_final_obs"]


def test_a_preprocess_function_makes_the_action():
    env = GymEnv(config(), 0, lambda response: response.plan[0])
    env._reset(seed=0)
    assert env._step(PolicyResponse(env.env_id, plan=[4, 5])).last_reward == 5  # 4 + step 1


def test_options_reach_the_environment():
    class Options(CounterEnv):
        def reset(self, *, seed=None, options=None):
            observation, _ = super().reset(seed=seed)
            return observation, {"set": {"train": 1, "test": 2}[(options or {})["obj_set"]]}

    gym.register("test-env/Options-v0", entry_point=Options)
    group = EnvGroup([config("test-env/Options-v0")])
    env_rets, _ = group.reset(seed=1, options={"obj_set": "test"})
    assert env_rets.values()[0].info["set"] == 2
    group.close()


def test_the_step_of_a_group_leaves_the_response_as_it_was():
    group = EnvGroup([config("test-env/Box-v0")])
    group.init(seed=0)
    action = torch.full((1, 3), 50.0)
    response = PolicyResponse(group.env_ids[0], action=action)
    group.step(BatchedData(group.env_ids, [response]))
    assert response.action is action
    assert torch.equal(action, torch.full((1, 3), 50.0))


def test_frames_are_kept_only_when_asked_for():
    env = GymEnv(config("CartPole-v1", keep_frames=True, env_kwargs={"render_mode": "rgb_array"}))
    env._reset(seed=0)
    env._step(answer(env, 0))
    frames = env.take_frames()
    assert [(frame.shape, frame.dtype) for frame in frames] == [((400, 600, 3), np.uint8)] * 2
    assert env.take_frames() == []
    env.close()
    with pytest.raises(ConfigError, match="keeps no frames"):
        GymEnv(config("CartPole-v1")).take_frames()
