"""Algorithms learn, count, and continue from a checkpoint with the same numbers."""

import dataclasses

import numpy as np
import pytest
import torch

from plugrl_server.algorithm.base_algorithm import (
    BaseAlgoConfig,
    BaseAlgorithm,
    EpisodeMetricWindow,
    FrameBatch,
    Sampled,
)
from plugrl_server.algorithm.ppo import PPOConfig
from plugrl_server.algorithm.registration import (
    REGISTERED_ALGO_CONFIGS,
    make_algo,
    register_algo,
    register_algo_config,
)
from plugrl_server.algorithm.sac import SACConfig
from plugrl_server.common.checkpoint_manager import CheckpointManager
from plugrl_server.errors import PolicyContractError
from plugrl_server.policy.base_policy import BasePolicy
from plugrl_server.policy.categorical import CategoricalPolicyConfig
from plugrl_server.policy.dummy import DummyPolicyConfig
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.policy.sac import SACPolicyConfig
from plugrl_server.testing import IdentityTask, train_in_process

DUMMY = DummyPolicyConfig()


@pytest.fixture(autouse=True)
def seeds():
    torch.manual_seed(0)
    np.random.seed(0)


def small_ppo(**changes):
    defaults = {"buffer_size": 256, "batch_size": 64, "learning_rate": 1e-2, "update_epochs": 6}
    return PPOConfig(**{**defaults, **changes})


def build(uid, policy_uid, config, policy_config):
    algorithm = make_algo(uid, make_policy(policy_uid, policy_config), config=config)
    algorithm.init_optimizers()
    return algorithm


def gaussian_ppo(separate=False, **changes):
    config = GaussianPolicyConfig(obs_dim=2, action_dim=2, device="cpu")
    algorithm = make_algo(
        "ppo", make_policy("gaussian-policy", config), config=small_ppo(**changes)
    )
    if separate:
        algorithm.separate_learner()
    algorithm.init_optimizers()
    return algorithm


def sac(**changes):
    defaults = {
        "global_steps": 1200,
        "buffer_size": 5000,
        "batch_size": 64,
        "learning_starts": 100,
        "gamma": 0.5,
        "q_lr": 3e-3,
        "policy_lr": 3e-3,
        "update_every": 4,
        "update_to_data_ratio": 0.5,
    }
    policy = SACPolicyConfig(state_dim=2, action_dim=2, hidden_dims=(32, 32), device="cpu")
    return build("sac", "sac-policy", SACConfig(**{**defaults, **changes}), policy)


# --- learning -------------------------------------------------------------------------------------


def test_ppo_learns_to_repeat_a_discrete_observation():
    config = CategoricalPolicyConfig(obs_dim=3, num_actions=3, device="cpu")
    algorithm = build("ppo", "categorical-policy", small_ppo(global_steps=2500, gamma=0.5), config)
    rewards = train_in_process(algorithm, IdentityTask(4, discrete=True, size=3))
    assert np.mean(rewards[:50]) < 0.5
    assert np.mean(rewards[-50:]) > 0.9
    assert algorithm.global_step == 2500


@pytest.mark.parametrize("staleness", [0, 1])
def test_ppo_learns_to_repeat_a_vector_with_and_without_vtrace(staleness):
    algorithm = gaussian_ppo(global_steps=3000, max_staleness=staleness, gamma=0.5)
    rewards = train_in_process(algorithm, IdentityTask(4, discrete=False))
    assert np.mean(rewards[-100:]) > np.mean(rewards[:100]) + 0.2


def test_vtrace_on_fresh_frames_changes_nothing():
    weights = []
    for staleness in (0, 1):
        torch.manual_seed(3)
        algorithm = gaussian_ppo(global_steps=512, max_staleness=staleness, clip_vloss=False)
        train_in_process(algorithm, IdentityTask(4, discrete=False))
        weights.append(algorithm.policy.state_dict())
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-4), name


def test_sac_learns_to_repeat_a_vector():
    rewards = train_in_process(sac(), IdentityTask(4, discrete=False))
    assert np.mean(rewards[-50:]) > 0.75


def test_a_separate_learner_ends_with_the_same_weights_when_nothing_overlaps():
    weights = []
    for separate in (False, True):
        torch.manual_seed(3)
        algorithm = gaussian_ppo(separate=separate, global_steps=1024)
        train_in_process(algorithm, IdentityTask(4, discrete=False))
        assert (algorithm.learner_policy is algorithm.policy) != separate
        weights.append(algorithm.policy.state_dict())
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


# --- the length of a run --------------------------------------------------------------------------


def test_global_steps_is_the_length_of_a_run_and_its_last_frames_are_learned():
    algorithm = gaussian_ppo(global_steps=600)
    train_in_process(algorithm, IdentityTask(4, discrete=False))
    assert algorithm.global_step == 600
    assert algorithm.train_itrs == 3
    assert algorithm.get_total_training_steps() == 600


def test_without_global_steps_ppo_ends_after_its_learn_steps():
    algorithm = gaussian_ppo(train_itrs=2)
    train_in_process(algorithm, IdentityTask(4, discrete=False))
    assert algorithm.train_itrs == 2
    assert algorithm.get_total_training_steps() == 512
    assert algorithm.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-2)


def test_sac_updates_as_often_as_its_ratio_says():
    algorithm = sac(global_steps=400, learning_starts=101, update_every=1, update_to_data_ratio=0.5)
    train_in_process(algorithm, IdentityTask(1, discrete=False))
    assert algorithm.updates == 150
    assert algorithm.skipped_updates == 0


def test_sac_tells_how_many_frames_can_be_stored_before_anything_is_due():
    options = {"learning_starts": 20, "update_every": 7, "save_interval": 33}
    algorithm = sac(global_steps=100, update_to_data_ratio=0, **options)

    def is_due():
        return algorithm.should_learn() or algorithm.should_save() or algorithm.should_stop()

    told = []
    while not algorithm.should_stop():
        told.append(algorithm.frames_before_control())
        for _ in range(told[-1]):
            algorithm.global_step += 1
            assert not is_due()
        algorithm.global_step += 1
        assert is_due()
        if algorithm.should_learn():
            algorithm.pre_learn()
        if algorithm.should_save():
            algorithm.create_checkpoint()
    assert told[:5] == [19, 6, 5, 0, 6]
    assert sum(told) + len(told) == 100


# --- numbers --------------------------------------------------------------------------------------


def frames(algorithm, *, chains, rewards, terminated, truncated, steps=None, next_obs=0.0):
    n = len(chains)
    state = algorithm.example_train_state(n)
    state["value"][:] = np.arange(n)
    seen = {"images": {}, "states": {"obs": np.zeros((n, 2), np.float32)}, "text": np.full(n, "")}
    after = {**seen, "states": {"obs": np.full((n, 2), next_obs, np.float32)}}
    return FrameBatch(
        chains=np.asarray(chains),
        sampled=Sampled(seen, None, lambda _: state),
        was_terminated=np.zeros(n, np.bool_),
        was_truncated=np.zeros(n, np.bool_),
        next_obs=after,
        rewards=np.asarray(rewards, np.float32),
        steps=np.ones(n, np.int64) if steps is None else np.asarray(steps),
        terminated=np.asarray(terminated, np.bool_),
        truncated=np.asarray(truncated, np.bool_),
        info={},
    )


def with_state(batch, state):
    return dataclasses.replace(batch, sampled=Sampled(batch.obs, None, lambda _: state))


def test_advantages_of_interleaved_environments_equal_those_by_hand():
    """Two chains take turns: one terminates, one is truncated on the way, and chunks differ."""
    gamma, lam = 0.9, 0.8
    algorithm = gaussian_ppo(gamma=gamma, gae_lambda=lam, normalize_rewards=False, buffer_size=6)
    algorithm.policy.get_value = lambda obs: torch.from_numpy(obs["states"]["obs"][:, 0])
    algorithm.feedback_batch(
        frames(
            algorithm,
            chains=[7, 3, 7, 3, 3, 7],
            rewards=[1, 2, 3, 4, 5, 6],
            terminated=[0, 0, 0, 0, 0, 1],
            truncated=[0, 0, 0, 1, 0, 0],
            steps=[1, 2, 1, 1, 3, 1],
            next_obs=10.0,
        )
    )
    assert algorithm.should_learn()
    algorithm.pre_learn()
    rows, _ = algorithm._prepare()
    # chain 7: frames 0, 2, 5 with values 0, 2, 5; the last terminates.
    a5 = 6 - 5
    a2 = 3 + gamma * 5 - 2 + gamma * lam * a5
    a0 = 1 + gamma * 2 - 0 + gamma * lam * a2
    # chain 3: frames 1, 3, 4 with values 1, 3, 4; 3 is truncated before 10, 4 is last before 10.
    a4 = 5 + gamma**3 * 10 - 4
    a3 = 4 + gamma * 10 - 3
    a1 = 2 + gamma**2 * 3 - 1 + gamma**2 * lam * a3
    by_hand = torch.tensor([a0, a1, a2, a3, a4, a5])
    torch.testing.assert_close(rows.advantage, by_hand)
    torch.testing.assert_close(rows.value_target, by_hand + torch.arange(6.0))


def test_rewards_are_divided_by_the_spread_of_the_forward_discounted_return():
    algorithm = gaussian_ppo(gamma=0.5, buffer_size=4, reward_clip=1.5)
    batch = frames(
        algorithm,
        chains=[0, 0, 0, 1],
        rewards=[1, 2, 4, 8],
        terminated=[0, 1, 0, 0],
        truncated=[0, 0, 0, 0],
    )
    algorithm.feedback_batch(batch)
    algorithm.pre_learn()
    algorithm._prepare()
    returns = np.array([1, 2 + 0.5 * 1, 4, 8])
    assert float(algorithm.return_stats.var) == pytest.approx(returns.var())
    assert float(algorithm.return_stats.mean) == pytest.approx(returns.mean())


def test_absurd_states_of_one_client_do_not_stop_sac_from_learning():
    """Adam would not forget: without them the weights end where they end with them."""
    generator = torch.Generator().manual_seed(0)
    rows = {
        "obs": torch.randn(64, 2, generator=generator),
        "action": torch.rand(64, 2, generator=generator),
        "reward": torch.rand(64, generator=generator),
        "discount": torch.full((64,), 0.9),
        "next_obs": torch.randn(64, 2, generator=generator),
    }
    spoiled = {name: column.clone() for name, column in rows.items()}
    spoiled["obs"][3, 0] = 1e12
    spoiled["next_obs"][40, 1] = -1e9
    usual = torch.ones(64, dtype=torch.bool)
    usual[[3, 40]] = False
    ends = []
    for batch in (spoiled, {name: column[usual] for name, column in rows.items()}):
        torch.manual_seed(0)
        algorithm = sac()
        algorithm._batches = [batch] * 3
        algorithm.learn_impl()
        ends.append(algorithm.policy.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], msg=name)


def test_one_absurd_reward_does_not_hide_all_others():
    algorithm = gaussian_ppo(gamma=0.5, buffer_size=8)
    rewards = [1, 2, 4, 8, 1e14, 3, 5, 7]
    flags = {"terminated": [1] * 8, "truncated": [0] * 8}
    algorithm.feedback_batch(frames(algorithm, chains=range(8), rewards=rewards, **flags))
    algorithm.pre_learn()
    algorithm._prepare()
    rewards.remove(1e14)
    assert float(algorithm.return_stats.var) == pytest.approx(np.var(rewards))


def test_a_terminated_transition_bootstraps_nothing_and_a_truncated_one_does():
    algorithm = sac(gamma=0.5)
    n = 3
    batch = frames(
        algorithm=gaussian_ppo(),
        chains=[0, 1, 2],
        rewards=[1, 1, 1],
        terminated=[1, 0, 0],
        truncated=[0, 1, 0],
        steps=[1, 1, 3],
    )
    batch = with_state(batch, algorithm.example_train_state(n))
    algorithm.feedback_batch(batch)
    stored = algorithm.replay._columns.read(3)
    assert stored["discount"].tolist() == [0.0, 0.5, 0.125]
    assert algorithm.global_step == 5


def test_a_message_over_the_buffers_size_is_stored_whole():
    algorithm = gaussian_ppo(buffer_size=2)
    columns = {"rewards": [1, 2, 3], "terminated": [0] * 3, "truncated": [0] * 3}
    algorithm.feedback_batch(frames(algorithm, chains=[0, 1, 2], **columns))
    assert len(algorithm.filling) == 3
    assert algorithm.should_learn()


@pytest.mark.parametrize("clip_vloss", [True, False], ids=["autograd", "fused"])
def test_rewards_that_overflow_move_no_weight(clip_vloss):
    changes = {"normalize_rewards": False, "gamma": 0.99, "clip_vloss": clip_vloss}
    algorithm = gaussian_ppo(buffer_size=4, **changes)
    assert (algorithm._fused is None) == clip_vloss
    before = {name: p.clone() for name, p in algorithm.policy.named_parameters()}
    columns = {"terminated": [0] * 4, "truncated": [0] * 4}
    batch = frames(algorithm, chains=[0, 0, 0, 0], rewards=[3e38, 3e38, 3e38, 1], **columns)
    algorithm.feedback_batch(batch)
    algorithm.pre_learn()
    algorithm.learn()
    assert algorithm.skipped_steps > 0
    for name, parameter in algorithm.policy.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("policy_uid", ["gaussian-policy", "categorical-policy"])
def test_the_short_way_through_an_update_is_the_long_one(policy_uid):
    """Same frames, same order of minibatches: the same weights and numbers, to rounding."""
    ends, logged = [], []
    for short in (True, False):
        torch.manual_seed(3)
        np.random.seed(3)
        discrete = policy_uid == "categorical-policy"
        config = CategoricalPolicyConfig(obs_dim=3, num_actions=3, device="cpu")
        if not discrete:
            config = GaussianPolicyConfig(obs_dim=3, action_dim=3, device="cpu")
        settings = small_ppo(clip_vloss=False, ent_coef=0.01, train_itrs=1, max_grad_norm=0.3)
        algorithm = build("ppo", policy_uid, settings, config)
        assert algorithm._fused is not None
        if not short:
            algorithm._fused = None
        learn = algorithm.learn_impl
        algorithm.learn_impl = lambda learn=learn: logged.append(learn()[1]["losses"]) or (0, {})
        train_in_process(algorithm, IdentityTask(4, discrete=discrete, size=3))
        ends.append(algorithm.policy.state_dict())
    first, second = logged[0], logged[len(logged) // 2]
    for name, value in first.items():
        assert value == pytest.approx(second[name], rel=1e-2, abs=1e-4), name
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-3, atol=1e-3, msg=name)


def test_the_critic_alone_learns_while_it_warms_up():
    algorithm = gaussian_ppo(
        buffer_size=8, n_critic_warmup_itrs=1, critic_learning_rate=1e-2, train_itrs=2
    )
    before = {name: p.clone() for name, p in algorithm.policy.named_parameters()}
    train_in_process_until(algorithm, itrs=1)
    moved = {
        name for name, p in algorithm.policy.named_parameters() if not torch.equal(p, before[name])
    }
    assert moved
    assert all("critic_trunk" in name or "value_head" in name for name in moved)


def train_in_process_until(algorithm, itrs):
    algorithm.config.train_itrs = itrs
    train_in_process(algorithm, IdentityTask(4, discrete=False))


# --- refusals -------------------------------------------------------------------------------------


def test_ppo_says_which_policies_it_cannot_train():
    dummy = make_policy("dummy-policy", DUMMY)
    with pytest.raises(TypeError, match="evaluate_actions"):
        make_algo("ppo", dummy, config=small_ppo())
    fixed = make_policy("gaussian-policy", GaussianPolicyConfig(deterministic=True))
    with pytest.raises(ValueError, match="deterministic"):
        make_algo("ppo", fixed, config=small_ppo())
    with pytest.raises(PolicyContractError, match="lacks sample_with_log_prob"):
        make_algo("sac", make_policy("gaussian-policy", GaussianPolicyConfig()), config=SACConfig())
    with pytest.raises(PolicyContractError, match="no BaseTorchPolicy"):
        make_algo("sac", dummy, config=SACConfig())


def test_a_state_that_is_not_like_the_fake_one_is_named():
    algorithm = gaussian_ppo()
    columns = {"chains": [0], "rewards": [1], "terminated": [0], "truncated": [0]}
    batch = frames(algorithm, **columns)
    state = {**batch.train_state, "value": batch.train_state["value"].astype(np.float64)}
    with pytest.raises(PolicyContractError, match=r"value.*float64.*float32"):
        algorithm.feedback_batch(with_state(batch, state))
    del state["value"]
    with pytest.raises(PolicyContractError, match="lacks value"):
        algorithm.feedback_batch(with_state(batch, state))


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gaussian_ppo, sac])
def test_a_run_continues_from_its_checkpoint_with_the_same_weights(tmp_path, make):
    """N and N more steps end like 2N: weights, optimizers, normalisers, generators, frames."""
    half, steps = {gaussian_ppo: (900, 2000), sac: (402, 800)}[make]

    def run(algorithm, task, until):
        algorithm.config.global_steps, total = until, algorithm.config.global_steps
        algorithm._all_collected = lambda: False
        algorithm.should_stop = lambda: algorithm.global_step >= until
        train_in_process(algorithm, task)
        del algorithm._all_collected, algorithm.should_stop
        algorithm.config.global_steps = total

    torch.manual_seed(1)
    changes = {"global_steps": steps, "anneal_lr": False} if make is gaussian_ppo else {}
    whole = make(**changes)
    task = IdentityTask(4, discrete=False)
    run(whole, task, half)
    manager = CheckpointManager(tmp_path / "run", config={}, overwrite=False, resume=False)
    manager.save_checkpoint(whole.create_checkpoint())
    rng = (torch.get_rng_state(), np.random.get_state())
    observed = task._rng.bit_generator.state, task._seen.copy(), task._steps.copy()
    run(whole, task, steps)

    again = make(**changes)
    again.load_checkpoint(manager.load_checkpoint())
    torch.set_rng_state(rng[0])
    np.random.set_state(rng[1])
    task._rng.bit_generator.state, task._seen, task._steps = observed
    task._goal = task._seen
    run(again, task, steps)
    assert again.global_step == whole.global_step
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, again.policy.state_dict()[name]), name


# --- the base -------------------------------------------------------------------------------------


class Rows(BaseAlgorithm):
    """Keeps what it gets, row by row."""

    def __init__(self, config, policy):
        super().__init__(config, policy)
        self.seen = []

    def infer(self, obs):
        return self.infer_with_policy(obs)

    def feedback(self, **frame):
        self.seen.append(frame)
        return (len(self.seen), "s"), len(self.seen), {"rows": {"n": len(self.seen)}}

    def should_learn(self):
        return False

    should_stop = should_save = should_learn

    def learn_impl(self):
        return self.global_step, {"losses": {"loss": 1.0}}

    def create_checkpoint(self):
        raise NotImplementedError

    def load_checkpoint(self, checkpoint):
        raise NotImplementedError


def test_a_batch_reaches_the_documented_feedback_row_by_row():
    algorithm = Rows(BaseAlgoConfig(), make_policy("dummy-policy", DUMMY))
    columns = {"rewards": [1, 2], "terminated": [0, 1], "truncated": [0, 0]}
    batch = frames(gaussian_ppo(), chains=[4, 9], **columns)
    batch = dataclasses.replace(batch, info={"episode": {"r": np.array([0.0, 5.0])}})
    logged = algorithm.feedback_batch(batch)
    assert logged == {"rows": {"n": 2}}
    assert algorithm.global_step == 2
    assert [frame["prev_node"] for frame in algorithm.seen] == [(-1, ""), (-1, "")]
    assert [frame["reward"] for frame in algorithm.seen] == [1.0, 2.0]
    assert algorithm.seen[1]["next_terminated"] is True
    assert algorithm.seen[1]["info"]["episode"]["r"] == 5.0
    assert algorithm.seen[1]["obs"]["states"]["obs"].shape == (1, 2)
    algorithm.feedback_batch(batch)
    assert [frame["prev_node"] for frame in algorithm.seen[2:]] == [(1, "s"), (2, "s")]
    algorithm.forget_chain(4)
    algorithm.feedback_batch(batch.rows(np.array([0])))
    assert algorithm.seen[-1]["prev_node"] == (-1, "")
    assert algorithm.seen[-1]["info"]["episode"]["r"] == 0.0


def test_discarded_frames_still_count_their_finished_episodes():
    algorithm = Rows(BaseAlgoConfig(), make_policy("dummy-policy", DUMMY))
    columns = {"rewards": [1, 2], "terminated": [0, 1], "truncated": [0, 0]}
    batch = frames(gaussian_ppo(), chains=[4, 9], **columns)
    info = {"episode": {"r": np.array([0.0, 5.0]), "l": np.array([0, 3]), "s": np.array([0, 1])}}
    algorithm.discard_batch(dataclasses.replace(batch, info=info))
    assert algorithm.get_rollout_metrics() == {
        "rollout": {"success": 1.0, "reward": 5.0, "length": 3.0}
    }
    _, info = algorithm.learn()
    assert info["losses"] == {"loss": 1.0}
    assert info["rollout"]["reward"] == 5.0
    algorithm.post_learn()
    assert algorithm.get_rollout_metrics() == {}
    with pytest.raises(NotImplementedError, match="--learn-mode sync"):
        algorithm.separate_learner()


def test_episodes_that_do_not_count_are_left_out():
    window = EpisodeMetricWindow()
    window.record({"r": 1.0, "l": 2, "s": True, "mask": False})
    assert window.summary() == {"success": 0.0, "reward": 0.0, "length": 0.0}
    window.record({"r": np.array([3.0]), "mask": np.array([True])})
    assert window.summary() == {"success": 0.0, "reward": 3.0, "length": 0.0}


def test_algorithms_are_registered_like_policies():
    assert set(REGISTERED_ALGO_CONFIGS) >= {"dummy", "eval", "ppo", "sac"}
    assert set(REGISTERED_ALGO_CONFIGS["ppo"]) >= {"default", "dppo-square"}
    register_algo("rows")(Rows)
    register_algo_config("rows")(BaseAlgoConfig)
    assert isinstance(make_algo("rows", None, config=BaseAlgoConfig()), Rows)
    with pytest.raises(KeyError, match="Algorithm absent is not registered"):
        make_algo("absent", None)
    with pytest.raises(TypeError, match="BaseAlgorithm"):
        register_algo("other")(BasePolicy)
