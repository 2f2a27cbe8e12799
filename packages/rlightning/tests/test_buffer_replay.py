"""`ReplayBuffer` against a list of transitions kept by hand."""

import logging
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.buffer import ReplayBuffer
from rlightning.buffer.utils.utils import default_postprocess_fn
from rlightning.config import BufferConfig
from rlightning.testing import check_buffer
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.registry import BUFFERS

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


def make(*, metas=None, num_envs=1, capacity=1000, seed=0, storage=None, sampler=None, **keys):
    more = {"storage": storage or {}} | ({"sampler": sampler} if sampler else {})
    config = BufferConfig(type="ReplayBuffer", capacity=capacity, **more, **keys)
    buffer = ReplayBuffer(config, seed=seed)
    buffer.init(metas or [EnvMeta("e-0", gym.spaces.Discrete(5), BOX, num_envs)])
    return buffer


def batched(*values):
    return BatchedData([value.env_id for value in values], list(values))


class Walk:
    """Row r of environment e observes ``1000 e + r``; ended episodes ended at ``.. + 0.5``.

    Args:
        ends: ``{(step, environment): "term" or "trunc"}``, where step s leads from row s to s+1;
            or a share of random ends.
    """

    def __init__(self, buffer, *, num_envs=1, ends=None, env_id="e-0", base=0, seed=0):
        self.buffer, self.n, self.env_id, self.base = buffer, num_envs, env_id, base
        self.rng = np.random.default_rng(seed)
        self.share = ends if isinstance(ends, float) else 0.0
        self.ends = ends if isinstance(ends, dict) else {}
        self.truth = []  # (observation, next observation, reward, end, env), in order of time
        self.row = 0
        self.ret = self._ret({})

    def _number(self, env, row):
        return float(self.base + 1000 * env + row)

    def _squeeze(self, values):
        array = np.asarray(values)
        return array if self.n > 1 else array[0]

    def _ret(self, ends):
        row, envs = self.row, range(self.n)
        rewards = [self.rng.normal() for _ in envs]
        info = {}
        if ends:
            info = {
                "_final_obs": self._squeeze([env in ends for env in envs]),
                "final_obs": self._squeeze([[self._number(env, row) + 0.5] * 2 for env in envs]),
            }
        for env in envs:
            if row:
                later = self._number(env, row) + (0.5 if env in ends else 0)
                self.truth.append(
                    (self._number(env, row - 1), later, rewards[env], ends.get(env), env)
                )
        return EnvRet(
            self.env_id,
            self._squeeze([[self._number(env, row)] * 2 for env in envs]),
            self._squeeze(rewards),
            self._squeeze([ends.get(env) == "term" for env in envs]),
            self._squeeze([ends.get(env) == "trunc" for env in envs]),
            info,
        )

    def response(self):
        return PolicyResponse(
            self.env_id, action=self._squeeze([int(self.row + env) % 5 for env in range(self.n)])
        )

    def step(self):
        """Let the environment step; its row is not added yet."""
        at = self.row
        ends = {env: self.ends[at, env] for env in range(self.n) if (at, env) in self.ends}
        if self.share:
            ends = {
                env: "term" if self.rng.random() < 0.5 else "trunc"
                for env in range(self.n)
                if self.rng.random() < self.share
            }
        self.row += 1
        self.ret = self._ret(ends)

    def add(self, *, truncated=False):
        self.buffer.add_batched_transition(batched(self.ret), batched(self.response()), [truncated])

    def run(self, steps):
        """Add rows until `steps` transitions are complete."""
        self.add()
        for _ in range(steps):
            self.step()
            self.add()
        return self


def found(batch):
    """Return the transitions of a batch as sorted tuples."""
    columns = ("observation", "next_observation", "reward", "terminated", "truncated")
    values = [batch[name] if batch[name].ndim == 1 else batch[name][..., 0] for name in columns]
    rows = zip(*(value.tolist() for value in values), strict=True)
    return sorted((o, n, round(r, 5), te, tr) for o, n, r, te, tr in rows)


def expected(truth):
    return sorted(
        (o, n, round(float(np.float32(r)), 5), end == "term", end == "trunc")
        for o, n, r, end, _ in truth
    )


# ---- insertion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("steps", [1, 10, 47, 500])
def test_the_buffer_holds_the_newest_transitions_as_they_really_were(num_envs, steps):
    buffer = make(num_envs=num_envs, capacity=60)
    walk = Walk(buffer, num_envs=num_envs, ends=0.2).run(steps)
    assert buffer.size() == min(60, steps * num_envs)
    assert found(buffer.get_all()) == expected(walk.truth[-60:])


def test_a_transition_is_there_as_soon_as_the_next_row_is():
    buffer = make()
    walk = Walk(buffer)
    walk.add()
    assert buffer.size() == 0
    walk.step()
    walk.add()
    assert buffer.size() == 1


def test_order_keys_and_negative_indices_are_those_of_every_buffer():
    buffer = make(capacity=5)
    Walk(buffer).run(8)
    batch = buffer.get_all()
    assert list(batch.keys()) == [
        "next_observation",
        "observation",
        "reward",
        "terminated",
        "truncated",
        "action",
    ]
    assert batch["observation"][:, 0].tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert buffer[-1]["observation"][0] == 7
    assert buffer.get([0, 1])["observation"][:, 0].tolist() == [3.0, 4.0]
    with pytest.raises(IndexError):
        buffer[5]


def test_rollouts_continue_without_loss_when_nobody_answers_the_last_observation():
    buffer = make()
    walk = Walk(buffer, num_envs=1, ends=0.2)
    for _ in range(4):
        for _ in range(10):
            walk.add()
            walk.step()  # the rollout's last observation is added by the next rollout
    walk.add()
    assert found(buffer.get_all()) == expected(walk.truth)
    assert buffer.needs_bootstrap_response is False


def test_a_row_added_again_after_a_rollouts_end_replaces_the_answer_only():
    buffer = make(n_step=3, gamma=0.5, sampler={"type": "all"}, capacity=8)
    walk = Walk(buffer).run(3)
    for _ in range(3):
        buffer.truncate_one_episode("e-0")
        buffer.add_batched_transition(batched(walk.ret), batched(PolicyResponse("e-0", action=9)))
        for _ in range(3):
            walk.step()
            walk.add()
    assert found(buffer.get_all()) == expected(walk.truth[-8:])
    (batch,) = buffer.sample(shuffle=False)
    assert batch["action"].tolist() == [4, 0, 9, 2, 3, 9, 0, 1]
    # Windows reach across the rollouts' ends, and no slot is lost to them.
    assert batch["discount"].tolist() == [0.125] * 6 + [0.25, 0.5]


def test_after_a_truncation_the_next_row_does_not_follow_from_the_last():
    buffer = make()
    walk = Walk(buffer).run(3)
    buffer.truncate_episodes(["e-0"])
    again = Walk(buffer, base=500).run(2)
    assert found(buffer.get_all()) == expected(walk.truth + again.truth)


def test_an_engine_that_resets_can_complete_its_last_transitions_first():
    buffer = make(num_envs=2)
    walk = Walk(buffer, num_envs=2).run(3)
    walk.step()
    buffer.finish_segments(batched(walk.ret))
    again = Walk(buffer, num_envs=2, base=500).run(2)
    assert len(walk.truth) == 8
    assert found(buffer.get_all()) == expected(walk.truth + again.truth)
    fresh = make()
    fresh.finish_segments(batched(EnvRet("e-0", np.zeros(2))))
    assert fresh.size() == 0


def test_workers_may_add_at_any_pace():
    metas = [EnvMeta("a-0", None, BOX, 2), EnvMeta("b-1", None, BOX, 1)]
    buffer = make(metas=metas, capacity=40)
    walks = [
        Walk(buffer, num_envs=2, ends=0.1, env_id="a-0"),
        Walk(buffer, ends=0.1, env_id="b-1", base=50_000, seed=1),
    ]
    rng = np.random.default_rng(0)
    for walk in walks:
        walk.add()
    order = []
    for _ in range(300):
        walk = walks[int(rng.random() < 0.3)]
        before = len(walk.truth)
        walk.step()
        walk.add()
        order += walk.truth[before:]
    held = found(buffer.get_all())
    assert 30 < len(held) <= 40
    assert set(held) <= set(expected(order))
    # Transitions age by when their row arrived, so a slow worker's newest may go first.
    newest = set(expected(order[-20:]))
    assert newest <= set(held)


def test_a_worker_that_pauses_while_others_overwrite_its_row_starts_anew():
    metas = [EnvMeta("a-0", None, BOX, 1), EnvMeta("b-1", None, BOX, 1)]
    for pause in range(1, 25):
        buffer = make(metas=metas, capacity=6)
        slow = Walk(buffer, env_id="a-0").run(2)
        fast = Walk(buffer, env_id="b-1", base=5000).run(pause)
        slow.step()
        slow.add()
        truth = set(expected(slow.truth + fast.truth))
        assert set(found(buffer.get_all())) <= truth
        assert buffer.size() <= 6


def test_workers_with_other_fields_or_shapes_are_refused():
    metas = [EnvMeta("a", None, BOX, 1), EnvMeta("b", None, BOX, 1), EnvMeta("c", None, BOX, 1)]
    buffer = make(metas=metas)
    buffer.add_transition("a", EnvRet("a", np.zeros(2)), PolicyResponse("a", action=0))
    with pytest.raises(ValueError, match="value"):
        buffer.add_transition(
            "b", EnvRet("b", np.zeros(2)), PolicyResponse("b", action=0, value=1.0)
        )
    with pytest.raises(ValueError, match=r"observation.*\(3,\)"):
        buffer.add_transition("c", EnvRet("c", np.zeros(3)), PolicyResponse("c", action=0))


def test_a_policy_may_not_answer_what_the_buffer_makes():
    buffer = make()
    with pytest.raises(ValueError, match="rename them in the policy"):
        buffer.add_transition("e-0", EnvRet("e-0", np.zeros(2)), PolicyResponse("e-0", reward=0.0))


def test_a_capacity_below_one_row_of_every_environment_is_refused():
    with pytest.raises(ValueError, match="less than one row"):
        make(num_envs=8, capacity=7)


def test_an_end_without_its_last_observation_warns_once(caplog):
    buffer = make()
    with caplog.at_level(logging.WARNING):
        for row in range(5):
            env_ret = EnvRet("e-0", np.full(2, float(row)), 0.0, False, row > 1)
            buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", action=0))
    assert sum("final_obs" in record.message for record in caplog.records) == 1


def test_a_fixed_buffer_stops_and_counts(caplog):
    buffer = make(capacity=5, storage={"mode": "fixed"})
    with caplog.at_level(logging.WARNING):
        walk = Walk(buffer).run(9)
    assert found(buffer.get_all()) == expected(walk.truth[:5])
    assert buffer.refused == 4
    assert sum("fixed" in record.message for record in caplog.records) == 1


def test_last_observations_of_overwritten_episodes_make_room_for_new_ones():
    buffer = make(capacity=50)
    Walk(buffer, ends=0.5).run(1000)
    kept = buffer.state_dict(include_data=True)["contents"]["finals"]["length"]
    assert kept <= 64


def test_clearing_forgets_everything_and_the_buffer_works_on():
    buffer = make(capacity=20)
    Walk(buffer, ends=0.3).run(50)
    buffer.clear()
    assert buffer.size() == 0
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1)
    walk = Walk(buffer, ends=0.3, base=7000).run(30)
    assert found(buffer.get_all()) == expected(walk.truth[-20:])


def test_images_and_nested_observations_keep_their_bits_and_final_frames():
    buffer = make(metas=[EnvMeta("e-0", None, None, 2)], capacity=8)

    def observe(row):
        depth = np.full((2, 2, 2), 1000 * row, np.uint16)
        return {"depth": depth, "pair": (torch.full((2, 1), float(row)).bfloat16(), np.ones(2))}

    for row in range(9):
        over = np.array([row % 3 == 2, False])
        info = {"final_obs": observe(row + 20), "_final_obs": over} if over.any() else {}
        env_ret = EnvRet("e-0", observe(row), np.ones(2), over, over & False, info)
        buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", action=np.zeros(2, int)))
    batch = buffer.get_all()
    assert batch["observation", "depth"].dtype == torch.uint16
    assert batch["observation", "depth"][:, 0, 0].tolist() == [
        1000 * row for row in (4, 4, 5, 5, 6, 6, 7, 7)
    ]
    assert batch["next_observation", "depth"][:, 0, 0].tolist() == [
        1000 * row for row in (25, 5, 6, 6, 7, 7, 28, 8)
    ]
    assert batch["next_observation", "pair", "0"][0, 0] == 25
    assert batch["observation", "pair", "0"].dtype == torch.bfloat16


# ---- n-step returns ------------------------------------------------------------------------------


def naive_n_step(truth, start, steps, gamma):
    """One environment: reward, discount, next observation and flags from `truth[start]` on."""
    total, used = 0.0, 0
    for item in truth[start : start + steps]:
        total += gamma**used * item[2]
        used += 1
        if item[3]:
            break
    last = truth[start + used - 1]
    discount = 0.0 if last[3] == "term" else gamma**used
    return total, discount, last[1], last[3] == "term", last[3] == "trunc"


@pytest.mark.parametrize("written", range(4, 40))
def test_n_step_windows_stop_at_ends_and_at_the_write_pointer(written):
    buffer = make(capacity=10, n_step=3, gamma=0.5, sampler={"type": "all"})
    walk = Walk(buffer, ends={(6, 0): "term", (12, 0): "trunc", (25, 0): "trunc"}).run(written)
    (batch,) = buffer.sample(shuffle=False)
    held = walk.truth[-10:]
    first = len(walk.truth) - len(held)
    assert batch["observation"][:, 0].tolist() == [item[0] for item in held]
    for index in range(len(held)):
        reward, discount, later, terminated, truncated = naive_n_step(
            walk.truth, first + index, 3, 0.5
        )
        row = batch[index]
        assert row["reward"] == pytest.approx(reward, abs=1e-5)
        assert row["discount"] == pytest.approx(discount)
        assert row["next_observation"][0] == later
        assert (bool(row["terminated"]), bool(row["truncated"])) == (terminated, truncated)


def test_n_step_windows_of_several_environments_do_not_mix():
    buffer = make(capacity=60, num_envs=3, n_step=4, gamma=0.9, sampler={"type": "all"})
    walk = Walk(buffer, num_envs=3, ends=0.15).run(50)
    (batch,) = buffer.sample(shuffle=False)
    for row in batch:
        number = float(row["observation"][0])
        mine = [item for item in walk.truth if item[4] == int(number) // 1000]
        start = [item[0] for item in mine].index(number)
        reward, discount, later, *_ = naive_n_step(mine, start, 4, 0.9)
        assert row["reward"] == pytest.approx(reward, abs=1e-5)
        assert row["discount"] == pytest.approx(discount)
        assert row["next_observation"][0] == later


def test_agents_rewards_by_name_have_no_n_step_sum():
    buffer = make(n_step=2)
    for _ in range(2):
        flags = {"left": False}
        env_ret = EnvRet("e-0", np.zeros(2), {"left": 1.0}, flags, flags)
        buffer.add_transition("e-0", env_ret, PolicyResponse("e-0", action=0))
    with pytest.raises(ValueError, match="one reward per environment"):
        buffer.sample(1)


# ---- sequences -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 3])
def test_sequences_stay_in_their_episode_with_flags_and_mask_per_step(num_envs):
    buffer = make(capacity=60, num_envs=num_envs, sequence_length=5)
    walk = Walk(buffer, num_envs=num_envs, ends=0.2).run(70)
    (batch,) = buffer.sample(batch_size=50)
    assert batch["observation"].shape == (50, 5, 2)
    assert batch["mask"].shape == (50, 5)
    for row in batch:
        number = float(row["observation"][0, 0])
        mine = [item for item in walk.truth if item[4] == int(number) // 1000]
        start = [item[0] for item in mine].index(number)
        window = []
        for item in mine[start : start + 5]:
            window.append(item)
            if item[3]:
                break
        count = len(window)
        assert row["mask"].tolist() == [True] * count + [False] * (5 - count)
        assert row["observation"][:, 0].tolist() == [i[0] for i in window] + [0.0] * (5 - count)
        assert row["next_observation"][:count, 0].tolist() == [i[1] for i in window]
        assert row["terminated"].tolist() == [i[3] == "term" for i in window] + [False] * (
            5 - count
        )
        assert row["truncated"].tolist() == [i[3] == "trunc" for i in window] + [False] * (
            5 - count
        )


# ---- sampling ------------------------------------------------------------------------------------


def test_every_transition_is_sampled_equally_often_and_waiting_rows_never():
    buffer = make(capacity=12, num_envs=2)
    walk = Walk(buffer, num_envs=2, ends=0.3).run(30)
    seen = {}
    for _ in range(1000):
        (batch,) = buffer.sample(batch_size=12)
        for row in found(batch):
            seen[row] = seen.get(row, 0) + 1
    assert set(seen) == set(expected(walk.truth[-12:]))
    assert max(abs(count - 1000) for count in seen.values()) < 150  # five standard deviations


def test_each_batch_is_another_and_the_same_seed_draws_the_same():
    def draws(seed):
        buffer = make(seed=seed)
        Walk(buffer).run(50)
        return [buffer.sample(batch_size=8)[0]["observation"][:, 0].tolist() for _ in range(4)]

    assert draws(1) == draws(1) != draws(2)
    assert len({tuple(batch) for batch in draws(1)}) == 4


def test_sampling_keeps_the_data_and_refuses_what_is_not_there():
    buffer = make()
    Walk(buffer).run(10)
    buffer.sample(batch_size=10)
    assert buffer.size() == 10
    with pytest.raises(ValueError, match="holds 10 transitions"):
        buffer.sample(batch_size=11)


@pytest.mark.parametrize("kind", ["all", "batch"])
def test_samplers_without_replacement_see_each_transition_once(kind):
    buffer = make(sampler={"type": kind}, capacity=10)
    walk = Walk(buffer).run(25)
    (batch,) = buffer.sample(batch_size=10)
    assert found(batch) == expected(walk.truth[-10:])


def test_a_buffer_of_mostly_unfinished_rows_still_samples():
    buffer = make(metas=[EnvMeta("a-0", None, BOX, 1), EnvMeta("b-1", None, BOX, 60)], capacity=61)
    for row in range(2):
        buffer.add_transition(
            "a-0", EnvRet("a-0", np.full(2, row)), PolicyResponse("a-0", action=0)
        )
    response = PolicyResponse("b-1", action=np.zeros(60, int))
    buffer.add_transition("b-1", EnvRet("b-1", np.zeros((60, 2), int)), response)
    buffer.truncate_one_episode("b-1")
    assert buffer.size() == 1
    for _ in range(20):
        (batch,) = buffer.sample(batch_size=1)
        assert batch["next_observation"].tolist() == [[1, 1]]


def test_train_workers_get_even_shares():
    buffer = make()
    buffer.init([EnvMeta("e-0", None, BOX, 1)], train_worker_num=2)
    Walk(buffer).run(20)
    assert [len(batch) for batch in buffer.sample(batch_size=9)] == [4, 4]


# ---- priorities ----------------------------------------------------------------------------------


def test_surprising_transitions_are_sampled_more_often_and_weigh_less():
    buffer = make(
        prioritized=True, priority_exponent=1.0, importance_exponent=1.0, priority_epsilon=1e-9
    )
    Walk(buffer).run(4)
    (batch,) = buffer.sample(batch_size=4)
    assert sorted(batch["observation"][:, 0].tolist()) == [0.0, 1.0, 2.0, 3.0]
    assert batch["weight"].tolist() == [1.0] * 4
    errors = torch.where(batch["observation"][:, 0] == 2, -7.0, 1.0)
    assert buffer.update_priorities(batch["index"], errors) == 4
    counts = torch.zeros(4)
    for _ in range(500):
        (batch,) = buffer.sample(batch_size=4)
        rows = batch["observation"][:, 0].long()
        counts += torch.bincount(rows, minlength=4)
        if set(rows.tolist()) != {2}:
            assert batch["weight"][rows == 2].tolist() == pytest.approx([1 / 7] * sum(rows == 2))
    assert counts[2] / counts.sum() == pytest.approx(0.7, abs=0.02)


def test_updates_of_overwritten_transitions_are_ignored():
    buffer = make(prioritized=True, capacity=6)
    walk = Walk(buffer).run(6)
    (batch,) = buffer.sample(batch_size=6)
    for _ in range(3):
        walk.step()
        walk.add()
    fresh = (batch["observation"][:, 0] >= 3).sum()
    assert buffer.update_priorities(batch["index"], torch.full((6,), 1e6)) == fresh
    walk.run(10)
    assert buffer.update_priorities(batch["index"].numpy(), np.ones(6)) == 0
    for _ in range(50):
        (batch,) = buffer.sample(batch_size=6)
        assert set(found(batch)) <= set(expected(walk.truth[-7:]))


def test_cleared_transitions_are_neither_drawn_nor_updated():
    buffer = make(prioritized=True, capacity=6)
    Walk(buffer).run(6)
    (batch,) = buffer.sample(batch_size=6)
    buffer.clear()
    Walk(buffer, base=100).run(2)
    assert buffer.update_priorities(batch["index"], torch.ones(6)) == 0
    (batch,) = buffer.sample(batch_size=2)
    assert set(batch["observation"][:, 0].tolist()) <= {100.0, 101.0}


def test_wrong_priorities_are_refused():
    buffer = make(prioritized=True)
    Walk(buffer).run(3)
    (batch,) = buffer.sample(batch_size=3)
    with pytest.raises(ValueError, match="priority of update_priorities is not finite"):
        buffer.update_priorities(batch["index"], torch.tensor([1.0, float("nan"), 1.0]))
    with pytest.raises(ValueError, match="2 priorities for 3"):
        buffer.update_priorities(batch["index"], torch.ones(2))
    plain = make()
    with pytest.raises(ValueError, match="prioritized: true"):
        plain.update_priorities([0], [1.0])


def test_prioritised_sequences_and_n_steps_carry_their_index():
    for keys in ({"sequence_length": 3}, {"n_step": 3}):
        buffer = make(prioritized=True, **keys)
        Walk(buffer, ends=0.2).run(20)
        (batch,) = buffer.sample(batch_size=5)
        assert batch["index"].shape == batch["weight"].shape == (5,)
        assert buffer.update_priorities(batch["index"], torch.rand(5)) == 5


# ---- limits --------------------------------------------------------------------------------------


def test_a_stated_warm_up_counts_and_a_batch_may_be_larger():
    """Drawn with replacement, 32 rows of 5 transitions are a batch; unset, 32 are waited for."""
    for options, enough in (({"min_size": 5}, True), ({}, False)):
        buffer = make(**options)
        Walk(buffer).run(5)
        assert buffer.can_sample(32) is enough
        if enough:
            assert len(buffer.sample(32)[0]) == 32
    buffer = make(min_size=5, sampler={"type": "batch"})
    Walk(buffer).run(5)
    assert not buffer.can_sample(32)
    with pytest.raises(ValueError, match="a batch of 32 was asked for"):
        buffer.sample(32)


def test_the_learner_is_told_when_to_sample():
    buffer = make(min_size=10, samples_per_insert=2.0, error_buffer=8.0)
    walk = Walk(buffer).run(9)
    assert not buffer.can_sample(4)
    walk.step()
    walk.add()
    batches = 0
    while buffer.can_sample(4):
        buffer.sample(4)
        batches += 1
    assert batches == 2
    assert buffer.can_insert(1)
    inserted = 0
    while buffer.can_insert(1):
        walk.step()
        walk.add()
        inserted += 1
    assert inserted == 8  # 8 sampled rows may be owed beside the 8 that were taken: (8 + 8) / 2


def test_a_batch_larger_than_the_buffer_is_not_offered():
    buffer = make()
    Walk(buffer).run(3)
    assert buffer.can_sample(3)
    assert not buffer.can_sample(4)


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize("steps", [7, 60])
def test_a_restored_buffer_holds_draws_and_continues_like_the_saved_one(steps, continues):
    keys = {"capacity": 40, "num_envs": 2, "n_step": 3, "prioritized": True, "save_contents": True}
    one, two = make(**keys), make(**keys, seed=99)
    walk = Walk(one, num_envs=2, ends=0.2).run(steps)
    (batch,) = one.sample(batch_size=8)
    one.update_priorities(batch["index"], torch.arange(8.0))
    two.load_state_dict(one.state_dict(), continue_episodes=continues)
    assert found(two.get_all()) == found(one.get_all())
    assert two.limiter.state_dict() == one.limiter.state_dict()
    assert two.update_priorities(batch["index"], torch.arange(8.0)) == 8
    if not continues:
        one.truncate_one_episode("e-0")
    for _ in range(30):
        walk.step()
        for buffer in (one, two):
            walk.buffer = buffer
            walk.add()
        pair = [buffer.sample(batch_size=8)[0] for buffer in (one, two)]
        for name in pair[0].keys():  # noqa: SIM118
            assert torch.equal(pair[0][name], pair[1][name]), name


def test_a_run_resumed_at_a_rollouts_end_samples_like_one_that_went_on():
    def rollout(walk):
        walk.add()
        for step in range(5):
            walk.step()
            walk.add(truncated=step == 4)

    one = make(n_step=3, save_contents=True)
    two = make(n_step=3, seed=9, metas=[EnvMeta("other-0", None, BOX, 1)])  # ids differ by run
    walk = Walk(one, ends=0.2)
    rollout(walk)
    two.load_state_dict(one.state_dict(), continue_episodes=True)

    def add_to_both():
        walk.add()
        walk.buffer, walk.env_id, walk.ret.env_id = two, "other-0", "other-0"
        walk.add()
        walk.buffer, walk.env_id, walk.ret.env_id = one, "e-0", "e-0"

    add_to_both()  # the rollout's last row again, as the next one's first
    assert found(one.get_all()) == found(two.get_all())
    walk.step()
    add_to_both()
    assert found(two.get_all()) == expected(walk.truth)
    for _ in range(5):
        pair = [buffer.sample(batch_size=6)[0] for buffer in (one, two)]
        for name in pair[0].keys():  # noqa: SIM118
            assert torch.equal(pair[0][name], pair[1][name]), name


def test_without_contents_counters_are_kept_and_the_empty_buffer_warns(caplog):
    one, two = make(samples_per_insert=4.0), make(samples_per_insert=4.0)
    Walk(one).run(10)
    one.sample(batch_size=2)
    with caplog.at_level(logging.WARNING):
        two.load_state_dict(one.state_dict())
    assert "no transitions" in caplog.text
    assert two.limiter.state_dict() == {"inserts": 10, "samples": 2}
    assert not two.can_sample(1)


def test_contents_of_another_number_of_workers_are_refused():
    pair = [EnvMeta("a", None, BOX, 1), EnvMeta("b", None, BOX, 1)]
    one, two = make(num_envs=2), make(metas=pair)
    Walk(one, num_envs=2).run(5)
    with pytest.raises(ValueError, match="1 environment workers and this one 2"):
        two.load_state_dict(one.state_dict(include_data=True))


def test_contents_of_another_capacity_are_refused():
    one, two = make(capacity=10), make(capacity=12)
    Walk(one).run(5)
    with pytest.raises(ValueError, match=r"room for 11 .* is 13"):
        two.load_state_dict(one.state_dict(include_data=True))


# ---- files, episodes, rows -----------------------------------------------------------------------


def test_rows_can_live_in_files(tmp_path):
    folder = tmp_path / "rows"
    in_memory = make(capacity=300, seed=1)
    in_files = make(capacity=300, seed=1, memmap_dir=str(folder))
    walks = [Walk(buffer, ends=0.5) for buffer in (in_memory, in_files)]
    for walk in walks:
        walk.run(400)
    assert found(in_files.get_all()) == found(in_memory.get_all())
    names = {path.name for path in folder.iterdir()}
    assert {"observation.column", "action.column"} <= names
    assert len([name for name in names if ".final" in name]) == 1
    restored = make(capacity=300, memmap_dir=str(folder / "again"))
    restored.load_state_dict(in_files.state_dict(include_data=True))
    assert found(restored.get_all()) == found(in_memory.get_all())


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        make(memmap_dir=str(tmp_path))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_demonstrations_are_added_whole_and_do_not_run_into_each_other(num_envs):
    buffer = make(capacity=30, n_step=3, gamma=0.5, sampler={"type": "all"}, prioritized=False)
    walk = Walk(buffer).run(3)
    steps = np.arange(4.0)
    one = {
        "observation": np.stack([steps, steps], axis=1) + 100,
        "next_observation": np.stack([steps, steps], axis=1) + 100.5,
        "reward": np.ones(4),
        "terminated": np.array([False, True, False, False]),
        "truncated": np.zeros(4, bool),
        "action": np.zeros(4, int),
    }
    wide = {name: np.stack([value] * num_envs, axis=1) for name, value in one.items()}
    buffer.add_episode(one if num_envs == 1 else wide, num_envs)
    walk.step()
    walk.add()
    (batch,) = buffer.sample(shuffle=False)
    demonstration = batch[batch["observation"][:, 0] >= 100]
    assert demonstration["reward"].tolist() == [1.5, 1.0, 1.5, 1.0] * num_envs
    assert demonstration["discount"].tolist() == [0.0, 0.0, 0.25, 0.5] * num_envs
    assert (
        demonstration["next_observation"][:, 0].tolist() == [101.5, 101.5, 103.5, 103.5] * num_envs
    )
    assert len(batch) == 4 + 4 * num_envs
    with pytest.raises(ValueError, match="needs reward"):
        buffer.add_episode({"observation": np.zeros((4, 2))})


def test_demonstrations_longer_than_the_buffer_keep_their_end():
    buffer = make(capacity=5, prioritized=True)
    steps = np.arange(9.0)
    flags = np.zeros(9, bool)
    buffer.add_episode(
        {"observation": steps, "next_observation": steps + 1, "reward": steps}
        | {"terminated": flags, "truncated": flags}
    )
    assert buffer.get_all()["observation"].tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]
    (batch,) = buffer.sample(batch_size=5)
    assert set(batch["observation"].tolist()) <= {4.0, 5.0, 6.0, 7.0, 8.0}


def test_episodes_as_the_unit_are_replayed_whole():
    buffer = make(storage={"unit": "episode"}, capacity=10)
    assert buffer.needs_bootstrap_response
    for base in (0, 100, 200):
        walk = Walk(buffer, base=base).run(3)
        walk.step()
        walk.add(truncated=True)
    assert len(buffer) == 2
    (batch,) = buffer.sample(batch_size=2)
    assert len(batch) == 8
    assert len(buffer) == 2
    assert set(batch["observation"][:, 0].tolist()) <= {100.0 + r for r in range(4)} | {
        200.0 + r for r in range(4)
    }
    state = buffer.state_dict(include_data=True)
    other = make(storage={"unit": "episode"}, capacity=10)
    other.load_state_dict(state)
    assert found(other.get_all()) == found(buffer.get_all())


def test_a_postprocess_function_sees_finished_segments():
    config = BufferConfig(type="ReplayBuffer", capacity=100)
    buffer = ReplayBuffer(config, postprocess_fn=lambda rows: default_postprocess_fn(rows))
    buffer.init([EnvMeta("e-0", None, BOX, 1)])
    walk = Walk(buffer, ends=0.2).run(20)
    assert buffer.size() == 0
    buffer.truncate_one_episode("e-0")
    assert found(buffer.get_all()) == expected(walk.truth)
    assert len(buffer.sample(batch_size=5)[0]) == 5
    buffer.add_episode(
        {"observation": np.zeros((1, 2))}
        | {
            name: buffer.get_all()[name][:1]
            for name in buffer.get_all().keys()  # noqa: SIM118
            if name != "observation"
        }
    )
    assert buffer.size() == 21


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"n_step": 2, "storage": {"unit": "episode"}}, "buffer.n_step"),
        ({"prioritized": True, "storage": {"unit": "episode"}}, "buffer.prioritized"),
        ({"n_step": 2, "sequence_length": 4}, "sequence_length"),
        ({"prioritized": True, "sampler": {"type": "all"}}, "sampler.type: all"),
        ({"memmap_dir": "x", "storage": {"device": "cuda"}}, "device: cpu"),
        ({"n_step": 0}, "n_step"),
        ({"min_size": 1001}, "never holds"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, text):
    with pytest.raises(ValueError, match=text):
        make(**keys)


def test_the_buffer_is_found_by_name_and_passes_the_conformance_kit():
    assert BUFFERS.get("ReplayBuffer") is ReplayBuffer
    check_buffer(lambda: ReplayBuffer(BufferConfig(type="ReplayBuffer", capacity=64)))


def test_adding_and_sampling_from_two_threads_loses_and_mixes_nothing():
    buffer = make(num_envs=2, capacity=200, n_step=2)
    walk = Walk(buffer, num_envs=2, ends=0.2).run(20)
    stop = threading.Event()
    seen, errors = set(), []

    def learn():
        try:
            while not stop.is_set():
                (batch,) = buffer.sample(batch_size=20)
                seen.update(batch["observation"][:, 0].tolist())
        except Exception as error:  # noqa: BLE001  # handed to the test
            errors.append(error)

    learner = threading.Thread(target=learn)
    learner.start()
    for _ in range(500):
        walk.step()
        walk.add()
    stop.set()
    learner.join(timeout=30)
    assert not errors
    assert seen <= {item[0] for item in walk.truth}
    assert buffer.size() == 200
    assert buffer.limiter.inserts == len(walk.truth)
