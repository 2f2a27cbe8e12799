"""The parts of the server alone: records, batches, buffers, trees, metrics, display."""

import dataclasses
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugrl_protocol.messages import Feedback, Infer, make_observation
from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, FrameBatch, Sampled
from plugrl_server.buffer.replay_buffer import ReplayBuffer
from plugrl_server.buffer.rollout_buffer import RolloutBuffer, Segments
from plugrl_server.common.layout import check_layout, layout_of
from plugrl_server.common.logging_utils import configure_logging, get_logger
from plugrl_server.common.metrics import (
    NoOpMetricSink,
    Recent,
    RunMetricSink,
    flatten_metrics,
)
from plugrl_server.common.trees import concatenate, leaves, num_rows, take
from plugrl_server.errors import ObservationError, PolicyContractError
from plugrl_server.policy.state import pick_fields
from plugrl_server.server.client_envs import ClientEnvs, InferStep
from plugrl_server.server.display import Display, format_metrics_table
from plugrl_server.server.inference import Inference, describe_observation, layout_of_observation
from plugrl_server.server.joining import join_frames, usable_frames
from plugrl_server.server.metadata import build_server_metadata, describe_policy
from plugrl_server.server.runtime_metrics import ClientCounter, MetricReporter, RuntimeMetrics
from plugrl_server.testing import check_policy


def seen(values, images=None):
    values = np.asarray(values, np.float32).reshape(-1, 1)
    return make_observation(num_envs=len(values), states={"x": values}, images=images)


def report(ids, values, *, terminated=None, steps=None, info=None):
    n = len(ids)
    flags = np.zeros(n, np.bool_)
    return Feedback(
        env_indices=np.asarray(ids),
        step_ids=np.zeros(n, np.int64),
        observation=seen(values),
        rewards=np.asarray(values, np.float64),
        terminated=flags if terminated is None else np.asarray(terminated, np.bool_),
        truncated=flags,
        steps=None if steps is None else np.asarray(steps),
        info=info or {},
    )


def sampled(n):
    obs = {
        "images": {},
        "states": {"x": np.arange(n, dtype=np.float32)[:, None]},
        "text": ["t"] * n,
    }
    return Sampled(obs, {"s": np.arange(n)}, lambda state: {"s2": state["s"] * 2})


def step(inference, start, rows, *, whole=False):
    return InferStep(sampled=inference, version=3, start=start, is_whole=whole, rows_left=rows)


# --- what is remembered of a client's environments ------------------------------------------------


def test_a_report_of_the_last_inference_in_its_order_needs_no_cut():
    envs = ClientEnvs(itertools.count(100))
    inference = sampled(2)
    envs.acted(np.array([4, 9]), step(inference, 0, 2, whole=True))
    feedback = report([4, 9], [1.0, 2.0], terminated=[0, 1], steps=[3, 1])
    claim = envs.claim(feedback)
    assert claim is not None
    ((version, frames),) = envs.report(feedback, claim)
    assert version == 3
    assert frames.obs is inference.obs
    assert frames.chains.tolist() == [100, 101]
    assert frames.train_state["s2"].tolist() == [0, 2]
    assert frames.steps.tolist() == [3, 1]
    assert frames.rewards.dtype == np.float32
    assert frames.was_terminated.tolist() == [False, False]
    envs.acted(np.array([4, 9]), step(sampled(2), 0, 2, whole=True))
    again = report([4, 9], [1.0, 2.0])
    ((_, frames),) = envs.report(again, envs.claim(again))
    assert frames.was_terminated.tolist() == [False, True]
    assert frames.steps.tolist() == [1, 1]


def test_a_claimed_report_may_become_frames_after_the_next_inference():
    envs = ClientEnvs(itertools.count())
    envs.acted(np.array([0]), step(sampled(5), 2, 1))
    feedback = report([0], [1.0])
    claim = envs.claim(feedback)
    envs.acted(np.array([0]), step(sampled(1), 0, 1, whole=True))
    ((_, frames),) = envs.report(feedback, claim)
    assert frames.obs["states"]["x"].tolist() == [[2.0]]


def test_reports_find_the_inference_of_every_row_whatever_their_order():
    envs = ClientEnvs(itertools.count())
    first, second = sampled(4), sampled(6)
    envs.acted(np.array([1, 2, 3]), step(first, 1, 3))
    partial = report([2], [0.0])
    assert envs.claim(partial) is None
    ((_, frames),) = envs.report(partial, None)
    assert frames.obs["states"]["x"].tolist() == [[2.0]]
    envs.acted(np.array([2]), step(second, 5, 1))
    mixed = report([3, 2, 1], [30.0, 20.0, 10.0], info={"k": np.array([3, 2, 1])})
    assert envs.claim(mixed) is None
    parts = envs.report(mixed, None)
    by_obs = {
        tuple(frames.obs["states"]["x"].ravel()): frames.rewards.tolist() for _, frames in parts
    }
    assert by_obs == {(3.0, 1.0): [30.0, 10.0], (5.0,): [20.0]}
    assert not envs._steps, "an inference is forgotten when all of its rows are reported"


def test_a_missing_frame_ends_its_chain():
    envs = ClientEnvs(itertools.count())
    envs.acted(np.array([0, 1]), step(sampled(2), 0, 2))
    assert envs.chains == [0, 1]
    assert envs.end_chains(np.array([1]))
    assert envs.chains == [0, 2]
    assert not envs.end_chains(np.array([77]))


def test_many_environments_make_room():
    envs = ClientEnvs(itertools.count())
    envs.acted(np.arange(100), step(sampled(100), 0, 100))
    assert envs.chains == list(range(100))


def frames_of(inference, rows, values, **changes):
    n = len(values)
    flags = np.zeros(n, np.bool_)
    defaults = {
        "sampled": inference,
        "sampled_rows": rows,
        "chains": np.arange(n),
        "was_terminated": flags,
        "was_truncated": flags,
        "next_obs": seen(values).to_wire(),
        "rewards": np.asarray(values, np.float32),
        "steps": np.ones(n, np.int64),
        "terminated": flags,
        "truncated": flags,
        "info": {},
    }
    return FrameBatch(**{**defaults, **changes})


def joined_frames(*parts):
    return join_frames([("layout", frames) for frames in parts])


def xs(observation):
    return observation["states"]["x"].ravel().tolist()


def test_frames_of_one_inference_are_joined_as_rows_of_it():
    one = sampled(6)
    (joined,) = joined_frames(frames_of(one, slice(0, 2), [0, 1]), frames_of(one, slice(2, 3), [2]))
    assert joined.sampled is one
    assert joined.sampled_rows == slice(0, 3)
    (joined,) = joined_frames(
        frames_of(one, slice(5, 6), [5]), frames_of(one, np.array([4, 3]), [4, 3])
    )
    assert xs(joined.obs) == [5.0, 4.0, 3.0]
    assert xs(joined.next_obs) == [5.0, 4.0, 3.0]
    assert joined_frames() == []


@pytest.mark.parametrize("rows", [6, 600])
def test_frames_of_several_inferences_are_joined_in_their_order(rows):
    one, two = sampled(rows), sampled(2)
    parts = [
        frames_of(one, slice(1, 3), [1, 2]),
        frames_of(two, None, [7, 8]),
        frames_of(one, np.array([5]), [5]),
    ]
    (joined,) = joined_frames(*parts)
    assert xs(joined.obs) == [1.0, 2.0, 0.0, 1.0, 5.0]
    assert joined.obs["text"] == ["t"] * 5
    assert joined.train_state["s2"].tolist() == [2, 4, 0, 2, 10]
    assert joined.runtime_state["s"].tolist() == [1, 2, 0, 1, 5]
    assert joined.rewards.tolist() == [1.0, 2.0, 7.0, 8.0, 5.0]
    assert joined.rows(np.array([4, 0])).train_state["s2"].tolist() == [10, 2]


def test_frames_with_an_info_or_another_layout_stay_apart():
    one = sampled(6)
    plain = [frames_of(one, slice(i, i + 1), [i]) for i in range(4)]
    told = frames_of(one, slice(4, 5), [4], info={"k": np.array([1])})
    joined = join_frames(
        [("a", plain[0]), ("b", plain[1]), ("b", plain[2]), ("b", told), ("b", plain[3])]
    )
    assert [len(frames) for frames in joined] == [1, 2, 1, 1]
    assert joined[2] is told


def test_states_that_change_their_shape_between_inferences_are_the_policys_fault():
    wider = Sampled(sampled(1).obs, {"s": np.zeros((1, 2))}, lambda state: state)
    (joined,) = joined_frames(frames_of(sampled(1), None, [0]), frames_of(wider, None, [0]))
    with pytest.raises(PolicyContractError, match="keep what get_action_and_runtime_state"):
        _ = joined.runtime_state


def test_frames_with_images_are_not_copied_together():
    one = sampled(2)
    images = {"camera": np.zeros((1, 2, 2, 3), np.uint8)}
    heavy = seen([1.0], images=images).to_wire()
    parts = [frames_of(one, slice(i, i + 1), [1.0], next_obs=heavy) for i in range(2)]
    assert joined_frames(*parts) == parts


def test_rows_that_cannot_be_learned_from_are_found():
    inference = sampled(4)
    inference.obs["states"]["x"][1] = np.inf
    frames = frames_of(inference, None, [0.0, 0.0, np.nan, 0.0])
    assert usable_frames(frames).tolist() == [True, False, False, True]
    assert usable_frames(frames_of(sampled(2), None, [0.0, 1.0])) is None
    huge = {"images": {}, "states": {"x": np.array([[1.0], [1e300]])}, "text": ["", ""]}
    overflows = frames_of(sampled(2), None, [0.0, 1.0], next_obs=huge)
    assert usable_frames(overflows).tolist() == [True, False]
    infinite = frames_of(sampled(2), None, [0.0, 1.0], rewards=np.array([np.inf, 1], np.float32))
    assert usable_frames(infinite).tolist() == [False, True]
    enormous = frames_of(sampled(2), None, [0.0, 1.0], rewards=np.array([1e38, 1], np.float32))
    assert usable_frames(enormous).tolist() == [False, True]
    assert frames.rows(np.array([3])).obs["states"]["x"].tolist() == [[3.0]]


# --- inference ------------------------------------------------------------------------------------


class Scripted(BaseAlgorithm):
    """Answers with what the test says."""

    __abstractmethods__ = frozenset()

    def __init__(self, answer):
        super().__init__(None, "a policy")
        self.answer = answer

    def infer(self, obs):
        return self.answer(obs), None


Scripted.__abstractmethods__ = frozenset()


def infer(*values):
    n = len(values)
    ids, zeros = np.arange(n), np.zeros(n, np.int64)
    return Infer(env_indices=ids, step_ids=zeros, observation=seen(values))


def test_a_batch_is_cut_apart_time_first():
    inference = Inference(Scripted(lambda obs: np.repeat(obs["states"]["x"][:, None], 2, axis=1)))
    inferred = inference.run([infer(1, 2), infer(3)], ("layout",))
    assert [action.shape for action in inferred.actions] == [(2, 2, 1), (2, 1, 1)]
    assert inferred.actions[1].ravel().tolist() == [3.0, 3.0]
    steps = inferred.steps()
    assert [(step.start, step.rows_left, step.is_whole) for step in steps] == [
        (0, 2, False),
        (2, 1, False),
    ]
    assert steps[0].sampled is steps[1].sampled
    (whole,) = inference.run([infer(1, 2)], ("layout",)).steps()
    assert whole.is_whole


@pytest.mark.parametrize(
    "answer",
    [
        lambda obs: obs["states"]["x"].tolist(),
        lambda obs: np.zeros(2),
        lambda obs: np.zeros((3, 1, 1)),
    ],
)
def test_an_action_of_the_wrong_form_is_the_policys_fault(answer):
    with pytest.raises(PolicyContractError, match="batch first"):
        Inference(Scripted(answer)).run([infer(1, 2)], ())


def test_an_action_without_its_horizon_is_refused():
    scripted = Scripted(lambda obs: np.zeros((len(obs["text"]), 3)))
    scripted.policy = SimpleNamespace(action_horizon=1)
    with pytest.raises(PolicyContractError, match=r"shape \[2, 3\], .* expected \[n, 1, \.\.\.\]"):
        Inference(scripted).run([infer(1, 2)], ())


@pytest.mark.parametrize("given", [None, np.zeros((2, 1, 1)), [1, 2], (1, 2, 3)])
def test_a_policy_that_does_not_give_two_values_is_named(given):
    scripted = Scripted(None)
    scripted.policy = SimpleNamespace(get_action_and_runtime_state=lambda obs: given)
    with pytest.raises(PolicyContractError, match=r"get_action_and_runtime_state gave .*two"):
        scripted.infer_with_policy({})


def test_an_action_that_changes_its_shape_is_refused():
    inference = Inference(Scripted(lambda obs: np.zeros((len(obs["text"]), len(obs["text"]), 1))))
    inference.run([infer(1)], ())
    with pytest.raises(PolicyContractError, match="keep the action's shape stable"):
        inference.run([infer(1, 2)], ())


def test_the_reason_of_a_refusal_names_both_sides():
    inference = Inference(Scripted(lambda obs: np.zeros((len(obs["text"]), 1, 1))))
    good = layout_of_observation(seen([1.0]))
    other = layout_of_observation(make_observation(num_envs=1, states={"y": np.zeros((1, 2))}))
    assert inference.blame(KeyError("x"), other) == "observation y:2, policy raised KeyError: 'x'"
    inference.run([infer(1)], good)
    assert inference.blame(KeyError("x"), other) == "observation y:2, policy has x:1"
    refused = ObservationError("states y:2", "x:1", hint="set it")
    assert inference.blame(refused, other) == "states y:2, policy has x:1; set it"
    refused = ObservationError("states y:2", "x:1", hint="set it" * 20)
    assert inference.blame(refused, other) == "states y:2, policy has x:1"
    assert str(refused).endswith("set it")
    assert describe_observation(()) == "nothing"


# --- buffers --------------------------------------------------------------------------------------


def test_segments_line_up_what_took_turns():
    segments = Segments(np.array([5, 2, 5, 2, 2, 5, 5]))
    flat = torch.arange(7.0)
    block = segments.block(flat)
    assert block.tolist() == [[1.0, 0.0], [3.0, 2.0], [4.0, 5.0], [0.0, 6.0]]
    assert segments.flat(block).tolist() == flat.tolist()
    assert segments.shift(flat).tolist() == [2.0, 3.0, 5.0, 4.0, 0.0, 6.0, 0.0]
    assert segments.last.tolist() == [4, 6]


def rollout(buffer, chains, values, **changes):
    n = len(chains)
    defaults = {
        "train_state": {"v": np.asarray(values, np.float32)},
        "chains": np.asarray(chains),
        "rewards": np.zeros(n, np.float32),
        "steps": np.ones(n, np.int64),
        "terminated": np.zeros(n, np.bool_),
        "truncated": np.zeros(n, np.bool_),
        "next_obs": {**seen(values).to_wire(), "text": np.array([f"t{v}" for v in values])},
    }
    buffer.add(**{**defaults, **changes})


def test_a_rollout_bootstraps_truncated_frames_and_the_last_of_each_chain():
    buffer = RolloutBuffer(4, {"v": np.zeros(1, np.float32)})
    rollout(buffer, [0, 1], [10, 11])
    rollout(buffer, [0, 1], [20, 21], truncated=np.array([True, False]))
    rollout(buffer, [0, 1], [30, 31], terminated=np.array([False, True]))
    assert buffer.full()
    ((frames, observation),) = buffer.bootstrap()
    assert frames.tolist() == [2, 4]
    assert observation["states"]["x"].ravel().tolist() == [20.0, 30.0]
    again = RolloutBuffer(4, {"v": np.zeros(1, np.float32)})
    again.load_state_dict(buffer.state_dict())
    ((frames, observation),) = again.bootstrap()
    assert frames.tolist() == [2, 4]
    assert observation["text"].tolist() == ["t20", "t30"]
    assert again.read()["state"]["v"].tolist() == [10, 11, 20, 21, 30, 31]
    buffer.reset()
    assert len(buffer) == 0
    assert buffer.bootstrap() == []


def test_clients_that_show_other_things_besides_bootstrap_in_batches_of_their_own():
    buffer = RolloutBuffer(4, {"v": np.zeros(1, np.float32)})
    with_camera = seen([11]).to_wire()
    with_camera["images"] = {"top": np.zeros((1, 2, 2, 3), np.uint8)}
    rollout(buffer, [0], [10])
    rollout(buffer, [1], [11], next_obs=with_camera)
    rollout(buffer, [2], [12])
    plain, other = buffer.bootstrap()
    assert (plain.frames.tolist(), other.frames.tolist()) == ([0, 2], [1])
    assert plain.observation["states"]["x"].ravel().tolist() == [10.0, 12.0]
    assert other.observation["images"]["top"].shape == (1, 2, 2, 3)


def transitions(first, count):
    values = np.arange(first, first + count, dtype=np.float32)
    example = ReplayBuffer.example(values[:, None], values[:, None])
    return {**example, "reward": values, "discount": np.ones(count, np.float32)}


def test_a_replay_buffer_keeps_the_newest_and_draws_the_same_after_a_restore():
    buffer = ReplayBuffer(5, transitions(0, 1), seed=3)
    buffer.add(transitions(0, 3))
    buffer.add(transitions(3, 4))
    assert sorted(buffer._columns.read(5)["reward"].tolist()) == [2, 3, 4, 5, 6]
    buffer.add(transitions(100, 12))
    assert sorted(buffer._columns.read(5)["reward"].tolist()) == [107, 108, 109, 110, 111]
    again = ReplayBuffer(5, transitions(0, 1), seed=99)
    again.load_state_dict(buffer.state_dict())
    assert again.sample(8)["reward"].tolist() == buffer.sample(8)["reward"].tolist()
    small = ReplayBuffer(2, transitions(0, 1), seed=0)
    with pytest.raises(ValueError, match=r"--algo\.buffer-size is 2"):
        small.load_state_dict(buffer.state_dict())
    small.load_state_dict(buffer.state_dict(contents=False))
    assert len(small) == 0
    with pytest.raises(ValueError, match="empty"):
        small.sample(1)
    with pytest.raises(PolicyContractError, match="lacks reward"):
        small.add({k: v for k, v in transitions(0, 1).items() if k != "reward"})


# --- trees and layouts ----------------------------------------------------------------------------


@dataclasses.dataclass
class Held:
    a: Any
    b: Any


def test_trees_are_cut_joined_and_walked():
    tree = {"a": np.arange(4), "b": {"c": ["w", "x", "y", "z"], "d": None}}
    assert take(tree, np.array([3, 1]))["b"]["c"] == ["z", "x"]
    assert take(tree, slice(1, 3))["a"].tolist() == [1, 2]
    assert [path for path, _ in leaves(tree)] == [("a",), ("b", "c")]
    state = Held(torch.arange(2), None)
    together = concatenate([state, Held(torch.tensor([7]), None)])
    assert together == Held(together.a, None)
    assert together.a.tolist() == [0, 1, 7]
    both = concatenate([tree, tree])
    assert num_rows(both) == 8
    assert both["b"]["c"] == ["w", "x", "y", "z"] * 2
    with pytest.raises(ValueError, match="names differ"):
        concatenate([{"a": np.zeros(1)}, {"b": np.zeros(1)}])
    with pytest.raises(ValueError, match="no batch size"):
        num_rows({})


def test_layouts_differ_by_field_shape_or_dtype():
    expected = layout_of({"a": np.zeros((1, 2)), "b": {"c": np.zeros(1, np.int64)}})
    check_layout("it", {"a": np.ones((5, 2)), "b": {"c": np.ones(5, np.int64)}}, expected)
    for wrong, message in (
        ({"a": np.ones((5, 2))}, "lacks b.c"),
        ({"a": np.ones((5, 2)), "b": {"c": np.ones(5, np.int64)}, "d": np.ones(5)}, "unknown d"),
        ({"a": np.ones((5, 3)), "b": {"c": np.ones(5, np.int64)}}, r"a of shape \(3,\)"),
        ({"a": np.ones((5, 2)), "b": {"c": np.ones(5)}}, "dtype float64"),
    ):
        with pytest.raises(PolicyContractError, match=message):
            check_layout("it", wrong, expected)


def test_fields_of_a_state_are_picked_or_missed_by_name():
    assert pick_fields({"a": torch.ones(2)}, ["a"], needed_by="it")["a"].tolist() == [1.0, 1.0]
    with pytest.raises(PolicyContractError, match="lacks 'b', which it stores; it has a"):
        pick_fields({"a": 1}, ["b"], needed_by="it")
    with pytest.raises(PolicyContractError, match="has nothing"):
        pick_fields(None, ["b"], needed_by="it")


# --- metrics, metadata, display, logging ----------------------------------------------------------


class Sink:
    def __init__(self):
        self.rows = []

    def log_scalars(self, scalars, *, step):
        self.rows.append((step, dict(scalars)))


def test_rows_of_metrics_are_merged_until_it_is_time():
    sink, shown, now = Sink(), [], [0.0]
    reporter = MetricReporter(sink, show=lambda *row: shown.append(row), clock=lambda: now[0])
    runtime, client = RuntimeMetrics(), ClientCounter(2, 0.0)
    client.requests, client.steps = 10, 30
    more = {"runtime": runtime, "clients": [client]}
    reporter.add(1, {"losses": {"a": 1.0}}, now=False, **more)
    assert sink.rows == []
    now[0] = 2.0
    reporter.add(2, {"losses": {"b": 2.0}}, now=False, **more)
    ((at, row),) = sink.rows
    assert at == 2
    assert (row["losses/a"], row["losses/b"]) == (1.0, 2.0)
    assert row["clients/2/requests_per_s"] == 5.0
    assert row["clients/2/env_steps_per_s"] == 15.0
    assert row["server/discarded_frames"] == 0
    assert len(shown) == 1
    reporter.add(3, {}, now=True, **more)
    assert len(sink.rows) == 1
    reporter.add(3, {"x": 1}, now=True, **more)
    assert len(sink.rows) == 2


def test_percentiles_are_of_the_recent_past():
    recent = Recent(length=100)
    assert recent.summary("x") == {}
    for value in range(1000):
        recent.add(value)
    assert recent.summary("x", scale=2.0)["x_p50"] == pytest.approx(2 * 949.5)
    assert len(recent) == 100


def test_metrics_are_flattened_and_sorted_into_streams():
    assert flatten_metrics({"a": {"b": 1, "c": None}, "d": True}) == {"a/b": 1.0, "d": 1.0}
    logged = []

    class Logger:
        def log(self, values, *, step, prefix):
            logged.append((prefix, dict(values), step))

        def close(self):
            logged.append("closed")

    sink = RunMetricSink(Logger())
    sink.log_scalars({"losses/a": 1.0, "losses/b/c": 2.0, "plain": 3.0}, step=7)
    sink.flush()
    sink.close()
    assert logged == [("losses", {"a": 1.0, "b/c": 2.0}, 7), ("run", {"plain": 3.0}, 7), "closed"]
    nothing = NoOpMetricSink()
    nothing.log_scalars({}, step=0)
    nothing.flush()
    nothing.close()


def test_a_full_disk_costs_metrics_and_is_told_once_for_all_that_are_lost(caplog):
    class Full:
        is_full = True

        def log(self, values, *, step, prefix):
            self.close()

        def close(self):
            if self.is_full:
                raise OSError(28, "No space left on device")

    full = Full()
    sink = RunMetricSink(full)
    for full.is_full in (True, True, False, True):
        sink.log_scalars({"a": 1.0}, step=0)
    sink.close()
    told = [record.message for record in caplog.records]
    assert ["cannot be written" in line for line in told] == [True, True, False]
    assert "not complete" in told[-1]


def test_metadata_tells_what_is_known_and_leaves_out_the_rest():
    class Policy:
        action_dim = 3
        action_horizon = ...

    class Algorithm:
        policy = Policy()

    assert describe_policy(Policy()) == {"policy": "Policy", "action_dim": 3}
    values = build_server_metadata(Algorithm(), {"policy": "mine", "more": 1}).values
    assert values["algorithm"] == "Algorithm"
    assert (values["policy"], values["more"], values["action_dim"]) == ("mine", 1, 3)
    assert values["protocol_version"] == 1
    assert "algorithm" not in build_server_metadata().values


def test_without_a_terminal_numbers_come_as_lines_now_and_then(caplog):
    now = [100.0]
    display = Display(1000, table=True, progress=True, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, logger="plugrl_server"):
        display.show(10, {"rollout/reward": 1.5, "server/x": 1})
        display.show(20, {"rollout/reward": 2.5})
        now[0] += 4
        display.show(30, {"rollout/reward": 3.5})
    display.close()
    assert [record.getMessage() for record in caplog.records] == [
        "step 10/1000  rollout/reward 1.5",
        "step 30/1000  rollout/reward 3.5",
    ]


def test_on_a_terminal_a_table_and_a_bar_are_redrawn(monkeypatch):
    import io
    import sys

    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr("rlightning.utils.progress.get_console", lambda: console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    display = Display(100, table=True, progress=True)
    display.show(40, {"rollout/reward": 1.25, "server/infer_ms_p50": 0.5})
    display.close()
    assert "rollout/reward" in screen.getvalue()
    assert "40/100" in screen.getvalue()
    assert format_metrics_table({"losses/a": 1.0}).row_count == 1


def test_logging_is_ours_alone_and_configured_twice_prints_once(capsys):
    configure_logging("info")
    configure_logging("warning")
    get_logger("somewhere").info("quiet")
    get_logger("somewhere").warning("loud")
    assert capsys.readouterr().err.count("|WARNING|loud") == 1


# --- the policy's conformance kit -----------------------------------------------------------------


def test_check_policy_names_each_broken_promise():
    class Policy:
        action_horizon = 1
        action, state, fake = np.zeros((3, 1, 2)), None, None

        def get_action_and_runtime_state(self, obs):
            n = len(obs["text"])
            return self.action[:n], None if self.state is None else self.state(n)

        def fake_runtime_state(self, batch_size):
            return None if self.fake is None else self.fake(batch_size)

    def observation(rows):
        return seen([0.0] * rows).to_wire()

    check_policy(Policy(), observation)
    for changes, message in (
        ({"action": np.zeros(3)}, "batch first"),
        ({"action_horizon": 5}, "action_horizon to 5"),
        ({"state": lambda n: np.zeros(n)}, "fake_runtime_state gives NoneType"),
        ({"state": lambda n: {"a": np.zeros(9)}, "fake": lambda n: {"a": np.zeros(n)}}, "9 rows"),
    ):
        policy = Policy()
        for name, value in changes.items():
            setattr(policy, name, value)
        with pytest.raises(PolicyContractError, match=message):
            check_policy(policy, observation)
