import gymnasium as gym
import numpy as np
import pytest

from plugrl_envs.testing import CounterEnv, SpaceEnv
from rlightning.config import EnvConfig
from rlightning.env import BaseEnv, EnvGroup, EnvMeta
from rlightning.env.step_counter import EnvStepCounter, ThroughputTracker
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.errors import ContractError, UnknownNameError
from rlightning.types import BatchedData, EnvRet, MultiAgentEnvRet, PolicyResponse

gym.register("test-group/Counter-v0", entry_point=CounterEnv)
gym.register(
    "test-group/Three-v0",
    entry_point=SpaceEnv,
    kwargs={"action_space": gym.spaces.Discrete(3)},
)


class PlainEnv(BaseEnv):
    """A user's environment: knows nothing of seeds, options or metrics; never ends by itself."""

    def __init__(self, config, worker_index=0, preprocess_fn=None):
        super().__init__(config, worker_index, preprocess_fn)
        self.env = CounterEnv()
        self.calls = []
        self.settings = "train"

    def reset(self):
        self.calls.append("reset")
        return EnvRet(self.env_id, np.zeros(2))

    def step(self, policy_resp):
        self.calls.append(self._preprocess_fn(policy_resp))
        return EnvRet(self.env_id, np.ones(2), last_reward=1.0)

    def apply_evaluate_cfg(self):
        self.settings = "eval"

    def restore_evaluate_cfg(self):
        self.settings = "train"

    def finish_rollout(self):
        self.calls.append("finish")

    def offload(self):
        self.calls.append("offload")

    def reload(self):
        self.calls.append("reload")

    def close(self):
        self.calls.append("close")


class OptionEnv(PlainEnv):
    """Also remembers the keywords of its resets."""

    def reset(self, **kwargs):
        self.calls.append(kwargs)
        return EnvRet(self.env_id, np.zeros(2))


def config(task="test-group/Counter-v0", **kwargs):
    return EnvConfig(**{"name": "e", "backend": "gymnasium", "task": task, **kwargs})


def plain(kind="PlainEnv", **kwargs):
    return config(backend=f"{__name__}:{kind}", **kwargs)


def batch(group, action=0, ids=None):
    ids = group.env_ids if ids is None else ids
    return BatchedData(ids, [PolicyResponse(env_id, action=action) for env_id in ids])


def test_ids_are_unique_and_end_with_the_worker_index():
    group = EnvGroup([config(), config(num_envs=2), config()])
    assert len(set(group.env_ids)) == 3
    assert [env_id.rsplit("-", 1)[1] for env_id in group.env_ids] == ["0", "1", "2"]
    assert len(group) == group.size() == 3
    assert group.ids == group.env_ids
    assert list(group.id_to_num_envs.values()) == [1, 2, 1]
    assert group[group.env_ids[1]] is group.env_list[1]
    assert group[group.env_ids[1] + "/0"] is group.env_list[1]


def test_construction_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at least one"):
        EnvGroup([])
    with pytest.raises(ValueError, match="3 preprocess functions for 2"):
        EnvGroup([config(), config()], [default_env_preprocess_fn] * 3)
    with pytest.raises(ValueError, match="expected a function"):
        EnvGroup([config()], "action")
    with pytest.raises(UnknownNameError, match="Did you mean 'gymnasium'"):
        EnvGroup([config(backend="gymnasiun")])


def test_each_worker_has_its_preprocess_function():
    group = EnvGroup([plain(), plain()], [default_env_preprocess_fn, lambda resp: -resp.action])
    group.step(batch(group, 3))
    assert [env.calls[-1] for env in group.env_list] == [3, -3]


def test_init_returns_the_spaces_of_one_row_and_the_first_observations():
    group = EnvGroup([config(num_envs=2), config()])
    with pytest.raises(RuntimeError, match="call init"):
        _ = group.first_env_rets
    metas = group.init(seed=3)
    assert [type(meta) for meta in metas] == [EnvMeta] * 2
    assert [meta.num_envs for meta in metas] == [2, 1]
    assert group.get_action_spaces() == [gym.spaces.Discrete(10)] * 2
    assert [space.shape for space in group.get_observation_spaces()] == [(2,)] * 2
    assert [ret.observation.shape for ret in group.first_env_rets.values()] == [(2, 2), (2,)]


def test_workers_with_different_action_spaces_are_refused():
    group = EnvGroup([config(), config("test-group/Three-v0", name="three")])
    with pytest.raises(
        ValueError, match=r"'three' has the action space Discrete\(3\), env 'e' has"
    ):
        group.init()


def test_workers_that_observe_different_things_are_refused_before_anything_is_joined():
    with pytest.raises(ValueError, match=r"one policy needs one observation space.*pad_spaces"):
        EnvGroup([config("Acrobot-v1"), config("MountainCar-v0")]).init()


def test_workers_and_rows_start_differently_and_the_same_in_every_run():
    def first(seed):
        group = EnvGroup([config("Pendulum-v1", num_envs=2), config("Pendulum-v1")])
        group.init(seed=seed)
        return np.concatenate(
            [np.atleast_2d(ret.observation) for ret in group.first_env_rets.values()]
        )

    assert np.array_equal(first(1), first(1))
    assert len(np.unique(first(1), axis=0)) == 3
    assert not np.array_equal(first(1), first(2))


def test_an_entry_with_a_seed_of_its_own_starts_the_same_whatever_the_run_s():
    def first(seed):
        group = EnvGroup([config("Pendulum-v1"), config("Pendulum-v1", seed=5, num_envs=2)])
        group.init(seed=seed)
        return [ret.observation for ret in group.first_env_rets.values()]

    (free, own), (other_free, other_own) = first(1), first(2)
    assert np.array_equal(own, other_own)
    assert not np.array_equal(free, other_free)
    assert not np.array_equal(own[0], own[1])


def test_environments_of_an_evaluation_never_start_as_in_training():
    group = EnvGroup([config("Pendulum-v1", num_envs=4, max_episode_steps=9)])
    group.init(seed=1)
    evaluation = group.for_evaluation()
    evaluation.init(seed=1)
    train, test = (g.first_env_rets.values()[0].observation for g in (group, evaluation))
    assert not set(map(tuple, train)) & set(map(tuple, test))


def test_evaluation_takes_its_own_settings_and_leaves_training_alone():
    section = config(
        "Pendulum-v1",
        env_kwargs={"g": 3.0, "render_mode": None},
        evaluate_cfg={"env_kwargs": {"g": 7.0}, "max_episode_steps": 2},
    )
    group = EnvGroup([section])
    evaluation = group.for_evaluation()
    assert group.env_list[0].env.call("g") == (3.0,)
    assert evaluation.env_list[0].env.call("g") == (7.0,)
    assert evaluation.env_list[0].max_episode_steps == 2
    bad = EnvGroup([config(evaluate_cfg={"backend": "ale"})])
    with pytest.raises(ValueError, match="cannot replace 'backend'"):
        bad.for_evaluation()


def test_hooks_reach_every_worker():
    group = EnvGroup([plain(), plain()])
    group.apply_evaluate_cfg()
    assert [env.settings for env in group.env_list] == ["eval"] * 2
    group.restore_evaluate_cfg()
    assert [env.settings for env in group.env_list] == ["train"] * 2
    group.offload()
    group.reload()
    group.get_env_stats()
    group.close()
    assert [env.calls for env in group.env_list] == [["offload", "reload", "finish", "close"]] * 2
    assert group.for_evaluation().env_list[0].settings == "eval"


# ---- auto_reset --------------------------------------------------------------------------------


def test_auto_reset_flags_step_t_and_resets_instead_of_step_t_plus_1():
    group = EnvGroup([plain()])
    env = group.env_list[0]
    with group.auto_reset(3):
        _, flags = group.reset()
        seen = [flags]
        for step in range(8):
            _, flags = group.step(batch(group, step))
            seen.append(flags)
    assert seen == [
        [flag] for flag in [False, False, False, True, False, False, False, True, False]
    ]
    assert env.calls == ["reset", 0, 1, 2, "reset", 4, 5, 6, "reset"]
    assert group.step(batch(group))[1] is None, "outside the block there are no flags"


def test_counters_advance_only_for_workers_in_the_batch():
    group = EnvGroup([plain(), plain()])
    one, two = group.env_ids
    with group.auto_reset(2):
        group.reset()
        assert group.step(batch(group, ids=[one]))[1] == [False]
        assert group.step(batch(group, ids=[two, one]))[1] == [False, True]
        assert group.step(batch(group))[1] == [False, True]
    assert [env.calls.count("reset") for env in group.env_list] == [2, 1]


def test_automatic_resets_keep_options_and_drop_the_seed():
    group = EnvGroup([plain("OptionEnv")])
    with group.auto_reset(1):
        group.reset(seed=4, options={"obj_set": "train"})
        group.step(batch(group))
        group.step(batch(group))
    first, _, again = group.env_list[0].calls
    assert first["options"] == again["options"] == {"obj_set": "train"}
    assert "seed" in first
    assert "seed" not in again


def test_each_worker_uses_its_own_limit_where_none_is_given():
    group = EnvGroup([plain(max_episode_steps=1), plain(max_episode_steps=2)])
    with group.auto_reset():
        group.reset()
        assert group.step(batch(group))[1] == [True, False]
        assert group.step(batch(group))[1] == [False, True]
    with pytest.raises(ValueError, match="no max_episode_steps"), EnvGroup([plain()]).auto_reset():
        pass
    with pytest.raises(ValueError, match="is 0; expected at least 1"), group.auto_reset(0):
        pass


def test_an_ended_episode_is_reset_by_the_environment_whatever_the_counter_says():
    """Termination after 3 steps keeps the last observation; the counter only counts steps."""
    group = EnvGroup([config()])
    with group.auto_reset(5):
        group.reset(seed=0)
        steps = [group.step(batch(group)) for _ in range(5)]
    third = steps[2][0].values()[0]
    assert third.last_terminated
    assert third.info["final_obs"].tolist() == [0, 3]
    assert third.observation.tolist() == [1, 0]
    assert [flags for _, flags in steps] == [[False]] * 4 + [[True]]


def test_auto_reset_restores_what_was_before_even_after_an_error():
    group = EnvGroup([plain()])
    with pytest.raises(KeyError), group.auto_reset(2):
        group.step(batch(group, ids=["nobody-0"]))
    assert group.step_counter is None


def test_the_counter_refuses_steps_beyond_the_limit_and_bad_limits():
    counter = EnvStepCounter(["a", "b"], [2, 3])
    assert [counter.step("a"), counter.step("a"), counter.step("b")] == [False, True, False]
    with pytest.raises(ValueError, match="reset it first"):
        counter.step("a")
    counter.reset("a")
    assert (counter.get_steps("a"), counter.get_steps("b")) == (0, 1)
    assert counter.get_max_steps("b") == 3
    counter.reset_all()
    assert counter.get_steps("b") == 0
    with pytest.raises(ValueError, match="2 workers, 1 limits"):
        EnvStepCounter(["a", "b"], [2])


# ---- stepping ----------------------------------------------------------------------------------


def test_an_unknown_worker_is_a_key_error_and_nothing_is_stepped():
    group = EnvGroup([plain()])
    with pytest.raises(KeyError, match="environment group"):
        group.step(batch(group, ids=[group.env_ids[0], "nobody-1"]))
    assert group.env_list[0].calls == []


def test_results_come_in_the_order_of_the_batch():
    group = EnvGroup([plain(), plain(), plain()])
    ids = [group.env_ids[index] for index in (2, 0)]
    env_rets, _ = group.step(batch(group, ids=ids))
    assert list(env_rets.ids()) == ids == [ret.env_id for ret in env_rets.values()]


def test_asynchronous_steps_are_collected_once():
    group = EnvGroup([plain(), plain()])
    one, two = group.env_ids
    assert [len(part) for part in group.collect_async()] == [0, 0], "nothing pending, no hanging"
    group.step_async(batch(group, ids=[one]))
    group.step_async(batch(group, ids=[two]))
    env_rets, flags = group.collect_async(timeout=0.1)
    assert (list(env_rets.ids()), flags) == ([one, two], [False, False])
    assert len(group.collect_async(wait_all=True)[0]) == 0
    for timeout in (0, -1.0):
        with pytest.raises(ValueError, match="expected a positive number"):
            group.collect_async(timeout=timeout)


def test_asynchronous_steps_count_like_others():
    group = EnvGroup([plain()])
    with group.auto_reset(2):
        group.reset()
        seen = []
        for _ in range(3):
            group.step_async(batch(group))
            seen += group.collect_async()[1]
    assert seen == [False, True, False]


# ---- metrics and state -------------------------------------------------------------------------


def test_metrics_are_means_over_the_episodes_of_all_workers():
    group = EnvGroup([config(num_envs=2), config()])
    group.init(seed=0)
    one, two = group.env_ids
    for _ in range(3):
        group.step(batch(group, np.array([1, 1]), ids=[one]))
    for _ in range(8):
        group.step(batch(group, 0, ids=[two]))
    # Rewards: (1+1)+(1+2)+(1+3) = 9 in two rows; 6 and 15 in the other worker.
    assert group.get_env_stats()["episode_return"] == 39 / 4, "which forgets nothing"
    assert group.get_env_stats(reset=True) == {"episode_return": 39 / 4, "episode_length": 14 / 4}
    assert group.get_env_stats() == {}, "no episode, no metric, no NaN"


def test_metrics_of_several_tasks_are_told_apart():
    group = EnvGroup([config(num_envs=2), config(name="other")], tasks=["one", "two"])
    group.init(seed=0)
    for _ in range(5):
        group.step(batch(group, np.array([1, 1]), ids=group.env_ids[:1]))
        group.step(batch(group, 0, ids=group.env_ids[1:]))
    stats = group.get_env_stats(reset=True)
    assert stats == {
        "episode_return": (9 + 9 + 6) / 3,
        "episode_length": 3,
        "one/episode_return": 9,
        "one/episode_length": 3,
        "two/episode_return": 6,
        "two/episode_length": 3,
    }
    assert group.get_env_stats() == {}


def test_a_metric_that_the_environment_reports_itself_wins():
    class Reporting(PlainEnv):
        def step(self, policy_resp):
            info = {"episode_info": {"episode_return": np.array([5.0, 7.0]), "grasp": 1.0}}
            return EnvRet(self.env_id, np.ones(2), last_reward=1.0, last_terminated=True, info=info)

    env = Reporting(config())
    env._reset(seed=1, options={})
    env._step(PolicyResponse(env.env_id, action=0))
    assert env.get_env_stats() == {
        "episode_return": [12.0, 2],
        "grasp": [1.0, 1],
        "episode_length": [1.0, 1],
    }


def test_rewards_per_agent_have_no_single_return():
    class Agents(PlainEnv):
        def step(self, policy_resp):
            return MultiAgentEnvRet(self.env_id, np.ones(2), last_reward={"a": 1.0, "b": 2.0})

    env = Agents(config())
    env._step(PolicyResponse(env.env_id, action=0))
    assert env.get_env_stats() == {}


def test_throughput_counts_rows_and_is_absent_before_the_first_step():
    group = EnvGroup([config(num_envs=4)])
    assert group.get_stats() == {}
    group.init(seed=0)
    group.step(batch(group, np.zeros(4, int)))
    assert group.get_stats()["env_throughput"] > 0
    tracker = ThroughputTracker()
    tracker.record(4, begin_s=0.0)
    assert tracker.get_stats()["env_throughput"] > 0


def test_timings_are_counted_and_can_be_forgotten(caplog):
    group = EnvGroup([config()])
    group.init(seed=0)
    group.step(batch(group))
    env = group.env_list[0]
    assert {name: timing["count"] for name, timing in env.timing_raw.items()} == {
        "env_reset": 1,
        "env_step": 1,
    }
    with caplog.at_level("INFO", logger="rlightning.env"):
        group.print_timing_summary(reset=True)
    assert env.timing_raw == {}


def test_state_of_a_group_continues_every_worker():
    def make():
        return EnvGroup([config("CartPole-v1", num_envs=2), config("CartPole-v1")])

    def follow(group):
        rets = []
        for _ in range(30):
            actions = [np.array([0, 1]), 1]
            responses = [
                PolicyResponse(env_id, action=action)
                for env_id, action in zip(group.env_ids, actions, strict=True)
            ]
            env_rets, _ = group.step(BatchedData(group.env_ids, responses))
            rets += [ret.observation for ret in env_rets.values()]
        return rets

    group = make()
    group.init(seed=0)
    follow(group)
    state = group.get_state()
    expected = follow(group)
    other = make()
    other.init(seed=5)
    other.set_state(state)
    assert all(map(np.array_equal, expected, follow(other)))
    with pytest.raises(ValueError, match="for 2 environment workers; there are 1"):
        EnvGroup([config()]).set_state(state)


def test_a_group_with_a_worker_that_cannot_be_captured_has_no_state():
    group = EnvGroup([config(), plain()])
    group.init(seed=0)
    assert group.get_state() is None
    with pytest.raises(NotImplementedError, match="cannot restore"):
        group.env_list[1].set_state({})


def test_a_plain_environment_needs_neither_seed_nor_options():
    group = EnvGroup([plain()])
    group.init(seed=3)
    group.reset(seed=1, options={"obj_set": "train"})
    assert group.env_list[0].calls == ["reset", "reset"]


def test_every_worker_of_a_user_gets_a_seed_of_its_own():
    group = EnvGroup([plain("OptionEnv"), plain("OptionEnv")])
    group.init(seed=3)
    seeds = [env.calls[0]["seed"] for env in group.env_list]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_bad_actions_are_contract_errors_through_the_group():
    group = EnvGroup([config()])
    group.init(seed=0)
    with pytest.raises(ContractError, match="out of range"):
        group.step(batch(group, 10))
