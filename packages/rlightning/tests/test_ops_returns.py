"""Returns against hand-computed cases, a slow twin written from the definition, and a peer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlightning.ops import returns

GAMMA, LAMBDA = 0.9, 0.8


def column(*values: float) -> torch.Tensor:
    """[T] numbers as one environment's rollout, [T, 1]."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def flags(length: int, *steps: int) -> torch.Tensor:
    """[T, 1] bools, true at the given steps."""
    out = torch.zeros(length, 1, dtype=torch.bool)
    out[list(steps)] = True
    return out


def random_rollout(seed: int, n_steps: int, n_envs: int, p_end: float = 0.2) -> dict:
    """Rewards, values and ends anywhere, both kinds at once included; values consistent."""
    rng = torch.Generator().manual_seed(seed)
    shape = (n_steps, n_envs)
    terminated = torch.rand(shape, generator=rng) < p_end
    truncated = torch.rand(shape, generator=rng) < p_end
    value = torch.randn((n_steps + 1, n_envs), generator=rng)
    final_value = torch.randn(shape, generator=rng)
    return {
        "reward_TN": torch.randn(shape, generator=rng),
        "value_TN": value[:-1],
        "next_value_TN": torch.where(truncated, final_value, value[1:]),
        "terminated_TN": terminated,
        "truncated_TN": truncated,
    }


def episodes(rollout: dict, env: int) -> list[range]:
    """The stretches of steps of one environment that belong together."""
    cut = (rollout["terminated_TN"] | rollout["truncated_TN"])[:, env].tolist()
    out, start = [], 0
    for t, is_cut in enumerate(cut):
        if is_cut or t == len(cut) - 1:
            out.append(range(start, t + 1))
            start = t + 1
    return out


def slow_gae(rollout: dict) -> torch.Tensor:
    """O(T^2), one episode at a time, float64: sum of (gamma lambda)^k delta over the episode."""
    r, v, nv = (rollout[k].double() for k in ("reward_TN", "value_TN", "next_value_TN"))
    advantage = torch.zeros_like(r)
    for env in range(r.shape[1]):
        for episode in episodes(rollout, env):
            for t in episode:
                for k in range(t, episode.stop):
                    bootstrap = 0.0 if rollout["terminated_TN"][k, env] else nv[k, env]
                    delta = r[k, env] + GAMMA * bootstrap - v[k, env]
                    advantage[t, env] += (GAMMA * LAMBDA) ** (k - t) * delta
    return advantage


def test_gae_of_three_steps_by_hand():
    advantage, target = returns.gae(
        column(1, 2, 3), column(10, 20, 30), column(20, 30, 40), flags(3), flags(3),
        gamma=0.5, gae_lambda=0.5,
    )  # fmt: skip
    # deltas: 1+10-10=1, 2+15-20=-3, 3+20-30=-7; decay 0.25.
    assert advantage.squeeze(1).tolist() == [1 + 0.25 * (-3 + 0.25 * -7), -3 + 0.25 * -7, -7]
    assert target.squeeze(1).tolist() == [10 - 0.1875, 20 - 4.75, 30 - 7]
    assert advantage.dtype == torch.float32


def test_a_perfect_critic_sees_no_advantage_across_time_limits():
    """Reward 1 for ever is worth 1 / (1 - 0.9) = 10; a time limit does not change that."""
    ten = torch.full((10, 1), 10.0)
    advantage, _ = returns.gae(
        torch.ones(10, 1), ten, ten, flags(10), flags(10, 4, 9), gamma=0.9, gae_lambda=0.95
    )
    assert torch.allclose(advantage, torch.zeros(10, 1), atol=1e-6)


def test_a_termination_removes_the_bootstrap():
    zero = torch.zeros(5, 1)
    _, target = returns.gae(
        torch.ones(5, 1), zero, torch.full((5, 1), 10.0) * 0, flags(5, 4), flags(5),
        gamma=0.9, gae_lambda=1.0,
    )  # fmt: skip
    expected = [(1 - 0.9**k) / 0.1 for k in (5, 4, 3, 2, 1)]
    assert target.squeeze(1).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("junk", [1e30, float("nan"), float("inf")])
def test_the_next_value_of_a_terminated_step_is_never_read(junk):
    rollout = random_rollout(0, 12, 3)
    expected, _ = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    rollout["next_value_TN"] = rollout["next_value_TN"].masked_fill(rollout["terminated_TN"], junk)
    advantage, _ = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    assert torch.equal(advantage, expected)


def test_a_step_that_is_both_terminated_and_truncated_counts_as_terminated():
    advantage, _ = returns.gae(
        column(1, 1), column(5, 5), column(100, 100), flags(2, 0), flags(2, 0),
        gamma=0.9, gae_lambda=0.8,
    )  # fmt: skip
    assert advantage[0].item() == 1 - 5


def test_the_rollouts_end_bootstraps_and_is_not_an_end_of_an_episode():
    advantage, _ = returns.gae(
        column(1), column(0), column(10), flags(1), flags(1), gamma=0.9, gae_lambda=0.8
    )
    assert advantage.item() == pytest.approx(10.0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n_envs=st.integers(1, 8), n_steps=st.integers(1, 24))
def test_gae_equals_the_slow_twin(seed, n_envs, n_steps):
    rollout = random_rollout(seed, n_steps, n_envs)
    advantage, target = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    expected = slow_gae(rollout)
    assert torch.allclose(advantage.double(), expected, atol=1e-5)
    assert torch.allclose(target.double(), expected + rollout["value_TN"].double(), atol=1e-5)


def test_two_chunks_equal_one_rollout_when_gae_lambda_is_zero_or_an_episode_ends_between():
    rollout = random_rollout(3, 20, 4, p_end=0.1)
    rollout["truncated_TN"][9] = True
    whole, _ = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    first, second = (
        returns.gae(**{k: v[part] for k, v in rollout.items()}, gamma=GAMMA, gae_lambda=LAMBDA)[0]
        for part in (slice(0, 10), slice(10, 20))
    )
    assert torch.allclose(torch.cat([first, second]), whole, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_flags_of_any_dtype_mean_the_same(dtype):
    rollout = random_rollout(1, 10, 2)
    expected, _ = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    for name in ("terminated_TN", "truncated_TN"):
        rollout[name] = rollout[name].to(dtype)
    advantage, _ = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    assert torch.equal(advantage, expected)


def peers_gae(rollout: dict, gae_lambda: float):
    """SB3 adds gamma V(final observation) to the reward of a truncated step and cuts there."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    from gymnasium import spaces

    n_steps, n_envs = rollout["reward_TN"].shape
    done = rollout["terminated_TN"] | rollout["truncated_TN"]
    box = spaces.Box(-1, 1, (1,))
    peer = buffers.RolloutBuffer(
        n_steps, box, box, "cpu", gae_lambda=gae_lambda, gamma=GAMMA, n_envs=n_envs
    )
    peer.reset()
    bootstrapped = rollout["reward_TN"] + torch.where(
        rollout["truncated_TN"], GAMMA * rollout["next_value_TN"], 0.0
    )
    starts = np.zeros(n_envs)
    dummy = np.zeros((n_envs, 1), np.float32)
    for t in range(n_steps):
        value = rollout["value_TN"][t]
        peer.add(dummy, dummy, bootstrapped[t].numpy(), starts, value, torch.zeros(n_envs))
        starts = done[t].numpy().astype(np.float32)
    peer.compute_returns_and_advantage(rollout["next_value_TN"][-1], starts)
    return peer


def test_gae_equals_stable_baselines3():
    rollout = random_rollout(7, 64, 8, p_end=0.08)
    rollout["truncated_TN"] &= ~rollout["terminated_TN"]
    peer = peers_gae(rollout, LAMBDA)
    advantage, target = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    np.testing.assert_allclose(advantage.numpy(), peer.advantages, atol=1e-5)
    np.testing.assert_allclose(target.numpy(), peer.returns, atol=1e-5)


def test_shapes_that_differ_are_named():
    rollout = random_rollout(0, 4, 2)
    rollout["truncated_TN"] = rollout["truncated_TN"][:3]
    with pytest.raises(ValueError, match=r"truncated has shape \(3, 2\), but reward has \(4, 2\)"):
        returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)


def test_discounted_sum_by_hand_stops_at_both_kinds_of_end():
    total = returns.discounted_sum(
        column(1, 2, 3, 4, 5, 6), flags(6, 1), flags(6, 3), gamma=0.5
    ).squeeze(1)
    assert total.tolist() == [2.0, 2.0, 5.0, 4.0, 8.0, 6.0]


def test_discounted_sums_equal_stable_baselines3():
    """Its returns with lambda 1 and a critic that says 0."""
    rollout = random_rollout(3, 64, 8, p_end=0.08)
    rollout["truncated_TN"] &= ~rollout["terminated_TN"]
    zero = torch.zeros(64, 8)
    peer = peers_gae(rollout | {"value_TN": zero, "next_value_TN": zero}, 1.0)
    total = returns.discounted_sum(
        rollout["reward_TN"], rollout["terminated_TN"], rollout["truncated_TN"], gamma=GAMMA
    )
    np.testing.assert_allclose(total.numpy(), peer.returns, atol=1e-5)


def test_discounted_sum_is_gae_with_lambda_one_and_no_critic():
    rollout = random_rollout(5, 30, 3)
    zero = torch.zeros(30, 3)
    rollout |= {"value_TN": zero, "next_value_TN": zero}
    _, target = returns.gae(**rollout, gamma=GAMMA, gae_lambda=1.0)
    total = returns.discounted_sum(
        rollout["reward_TN"], rollout["terminated_TN"], rollout["truncated_TN"], gamma=GAMMA
    )
    assert torch.allclose(total, target, atol=1e-5)


def slow_n_step(rollout: dict, n: int) -> torch.Tensor:
    r, nv = rollout["reward_TN"].double(), rollout["next_value_TN"].double()
    out = torch.zeros_like(r)
    for env in range(r.shape[1]):
        for episode in episodes(rollout, env):
            for t in episode:
                stop = min(t + n, episode.stop)
                for k in range(t, stop):
                    out[t, env] += GAMMA ** (k - t) * r[k, env]
                if not rollout["terminated_TN"][stop - 1, env]:
                    out[t, env] += GAMMA ** (stop - t) * nv[stop - 1, env]
    return out


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n_envs=st.integers(1, 8),
    n_steps=st.integers(1, 20),
    window=st.integers(1, 6),
)
def test_n_step_returns_equal_the_slow_twin(seed, n_envs, n_steps, window):
    rollout = random_rollout(seed, n_steps, n_envs)
    expected = slow_n_step(rollout, window)
    del rollout["value_TN"]
    result = returns.n_step_returns(**rollout, gamma=GAMMA, n_steps=window)
    assert torch.allclose(result.double(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 7])
def test_n_step_returns_equal_stable_baselines3(window):
    """Its buffer returns the sum, the power of gamma, and where and whether to bootstrap."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    from gymnasium import spaces

    n_steps = 200
    rollout = random_rollout(11, n_steps, 1, p_end=0.15)
    rollout["truncated_TN"] &= ~rollout["terminated_TN"]
    box = spaces.Box(-1e6, 1e6, (1,))
    peer = buffers.NStepReplayBuffer(
        n_steps, box, box, "cpu", n_envs=1, n_steps=window, gamma=GAMMA
    )
    done = rollout["terminated_TN"] | rollout["truncated_TN"]
    for t in range(n_steps):
        here = np.full((1, 1), t, np.float32)
        infos = [{"TimeLimit.truncated": bool(rollout["truncated_TN"][t, 0])}]
        reward = rollout["reward_TN"][t].numpy()
        peer.add(here, here, np.zeros((1, 1), np.float32), reward, done[t].numpy(), infos)
    batch = peer._get_samples(np.arange(n_steps))
    bootstrap = rollout["next_value_TN"][batch.next_observations[:, 0].long(), 0]
    expected = batch.rewards[:, 0] + batch.discounts[:, 0] * (1 - batch.dones[:, 0]) * bootstrap
    del rollout["value_TN"]
    result = returns.n_step_returns(**rollout, gamma=GAMMA, n_steps=window)
    assert torch.allclose(result[:, 0], expected, atol=1e-5)


def test_n_step_returns_leave_their_inputs_alone_and_refuse_an_empty_window():
    rollout = random_rollout(2, 6, 2)
    del rollout["value_TN"]
    before = {k: v.clone() for k, v in rollout.items()}
    returns.n_step_returns(**rollout, gamma=GAMMA, n_steps=3)
    assert all(torch.equal(before[k], rollout[k]) for k in rollout)
    with pytest.raises(ValueError, match="n_steps is 0"):
        returns.n_step_returns(**rollout, gamma=GAMMA, n_steps=0)


def test_every_window_of_a_wrapped_ring_buffer_is_right():
    """Ring of 10, windows of 3, 17 steps written, terminated at step 6 and truncated at 12."""
    capacity, window, written = 10, 3, 17
    reward, terminated, truncated = torch.zeros(10), torch.zeros(10).bool(), torch.zeros(10).bool()
    for step in range(written):
        reward[step % capacity] = float(step)
        terminated[step % capacity] = step == 6
        truncated[step % capacity] = step == 12
    newest = written - 1
    cut = terminated | truncated
    cut[newest % capacity] = True
    rows = torch.arange(capacity)
    index = (rows + torch.arange(window).unsqueeze(1)) % capacity
    result = returns.n_step_window(reward[index], terminated[index], cut[index], gamma=0.5)

    ends = {7: None, 12: 12, newest: newest}
    for step in range(written - capacity, written):
        stop = min(step + window - 1, *(e for e in ends.values() if e and e >= step))
        row, length = step % capacity, stop - step + 1
        expected = sum(0.5 ** (k - step) * k for k in range(step, stop + 1))
        assert result.reward_B[row].item() == expected, step
        assert result.length_B[row].item() == length, step
        assert result.discount_B[row].item() == 0.5**length, step


def test_a_window_that_terminates_has_no_bootstrap_and_ignores_what_follows():
    reward = torch.tensor([[1.0, 1.0], [1.0, 1.0], [float("nan"), 1.0]])
    terminated = torch.tensor([[False, False], [True, False], [True, True]])
    result = returns.n_step_window(reward, terminated, terminated, gamma=0.5)
    assert result.reward_B.tolist() == [1.5, 1.75]
    assert result.length_B.tolist() == [2, 3]
    assert result.discount_B.tolist() == [0.0, 0.0]


def slow_vtrace(rollout: dict, log_ratio: torch.Tensor, rho_bar: float, c_bar: float):
    """Remark 1 of the paper, backwards, one number at a time."""
    r, v, nv = (rollout[k].double() for k in ("reward_TN", "value_TN", "next_value_TN"))
    ratio, target, advantage = log_ratio.double().exp(), torch.zeros_like(r), torch.zeros_like(r)
    for env in range(r.shape[1]):
        for episode in episodes(rollout, env):
            carry, next_target = 0.0, None
            for t in reversed(episode):
                bootstrap = 0.0 if rollout["terminated_TN"][t, env] else nv[t, env]
                rho = min(rho_bar, ratio[t, env].item())
                c = min(c_bar, ratio[t, env].item()) * LAMBDA
                delta = rho * (r[t, env] + GAMMA * bootstrap - v[t, env])
                carry = delta + GAMMA * c * carry
                target[t, env] = v[t, env] + carry
                following = bootstrap if next_target is None else next_target
                advantage[t, env] = rho * (r[t, env] + GAMMA * following - v[t, env])
                next_target = target[t, env]
    return target, advantage


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n_envs=st.integers(1, 8), n_steps=st.integers(1, 20))
def test_vtrace_equals_the_slow_twin(seed, n_envs, n_steps):
    rollout = random_rollout(seed, n_steps, n_envs)
    log_ratio = torch.randn(n_steps, n_envs, generator=torch.Generator().manual_seed(seed))
    expected_target, expected_advantage = slow_vtrace(rollout, log_ratio, 1.2, 0.9)
    result = returns.vtrace(
        **rollout, log_ratio_TN=log_ratio, gamma=GAMMA, rho_bar=1.2, c_bar=0.9, trace_lambda=LAMBDA
    )
    assert torch.allclose(result.value_target_TN.double(), expected_target, atol=1e-5)
    assert torch.allclose(result.advantage_TN.double(), expected_advantage, atol=1e-5)


def test_vtrace_of_the_current_policy_is_the_lambda_return():
    rollout = random_rollout(11, 20, 4)
    _, target = returns.gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
    result = returns.vtrace(
        **rollout, log_ratio_TN=torch.zeros(20, 4), gamma=GAMMA, trace_lambda=LAMBDA
    )
    assert torch.allclose(result.value_target_TN, target, atol=1e-5)


def test_a_discount_per_step_is_each_steps_own():
    """Two steps of 1, values 0: the first counts the second at its own 0.5, not at 0.9."""
    ones, zeros = torch.ones(2, 1), torch.zeros(2, 1)
    gammas = torch.tensor([[0.5], [0.9]])
    advantage, _ = returns.gae(
        ones, zeros, zeros, zeros.bool(), zeros.bool(), gamma=gammas, gae_lambda=1.0
    )
    assert advantage.flatten().tolist() == pytest.approx([1.5, 1.0])


# ---- advantages of targets ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_targets_on_fresh_data_are_those_of_gae(seed):
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, 20, 4, generator=generator, dtype=torch.float64)
    terminated, truncated = torch.rand(2, 20, 4, generator=generator) < 0.15
    truncated &= ~terminated
    inside = ~(terminated | truncated)
    inside[-1] = False
    next_value = torch.where(inside, value.roll(-1, 0), next_value)
    columns = (reward, value, next_value)
    fresh = returns.vtrace(
        *columns, terminated, truncated, torch.zeros_like(reward), gamma=0.9, trace_lambda=0.8
    )
    advantage = returns.advantage_of_targets(
        *columns, fresh.value_target_TN, terminated, truncated, gamma=0.9, trace_lambda=0.8
    )
    expected, target = returns.gae(*columns, terminated, truncated, gamma=0.9, gae_lambda=0.8)
    assert torch.allclose(advantage, expected)
    assert torch.allclose(fresh.value_target_TN, target)


def test_advantages_of_targets_by_hand():
    """Two steps and a truncation: the second step's correction counts by lambda, for the first."""
    advantage = returns.advantage_of_targets(
        column(1.0, 2.0),
        column(3.0, 4.0),
        column(4.0, 10.0),
        column(9.0, 6.0),
        column(False, False),
        column(False, True),
        gamma=0.5,
        trace_lambda=0.5,
    )
    assert advantage.flatten().tolist() == [1 + 0.5 * (4 + 0.5 * (6 - 4)) - 3, 2 + 0.5 * 10 - 4]
