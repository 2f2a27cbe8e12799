"""Acting and learning in workers: the same results, deaths that cost little, who may be spread."""

import dataclasses
import itertools
import logging
import pathlib
import pickle
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from plugrl_server import cli, cli_args, cli_ray
from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
from plugrl_server.algorithm.dummy.dummy_algorithm import DummyAlgorithm
from plugrl_server.algorithm.eval.eval_algorithm import EvalAlgorithm
from plugrl_server.algorithm.ppo.ppo_algorithm import PPOAlgorithm
from plugrl_server.algorithm.ranks import Ranks
from plugrl_server.algorithm.torch_state import learner_checkpoint
from plugrl_server.cluster import building
from plugrl_server.cluster.algorithm_worker import (
    AlgorithmWorker,
    as_plain,
    like_example,
    with_text,
    without_text,
)
from plugrl_server.cluster.places import Places, PlacesConfig, share_gpus
from plugrl_server.errors import MissingExtraError, ObservationError, UsageError
from plugrl_server.policy.actor_critic_policy import ActorCriticRuntimeState
from plugrl_server.testing import IdentityTask, train_in_process
from rlightning.errors import WorkerLostError
from rlightning.runtime.base import Done, Failed, Handle, Runtime
from rlightning.runtime.placement_plan import Worker
from rlightning.runtime.process_group import destroy, free_address

CPU = ["--policy.device", "cpu"]
PPO = ["gaussian-policy", "default", "ppo", "default", "--policy.obs-dim", "2", *CPU]
PPO += ["--policy.action-dim", "2", "--algo.global-steps", "160", "--algo.buffer-size", "32"]
PPO += ["--algo.batch-size", "16", "--algo.update-epochs", "2"]
SAC = ["sac-policy", "default", "sac", "default", "--policy.state-dim", "2", *CPU]
SAC += ["--policy.action-dim", "2", "--algo.global-steps", "60", "--algo.learning-starts", "40"]
SAC += ["--algo.batch-size", "16"]
DUMMY = ["dummy-policy", "default", "dummy", "default", "--algo.fake-learn-freq", "50"]
DUMMY += ["--algo.fake-inference-duration-sec", "0", "--algo.fake-learn-duration-sec", "0"]


def recipe(argv):
    return cli.recipe_of(cli_args.parse(argv))


class Here(Handle):
    """A worker in this process, which dies when it is told to."""

    def __init__(self, spec, runtime):
        self.name, self.pid, self.runtime = spec.name, next(runtime.pids), runtime
        self.target = spec.make(*spec.args)

    def call(self, method, *args, timeout_s=None, **kwargs):
        self.runtime.calls.append((self.name, method))
        if (self.name, method) in self.runtime.dying:
            self.runtime.dying.remove((self.name, method))
            self.stop()
        if self.target is None:
            return Failed(WorkerLostError(self.name, reason="told so"))
        try:
            return Done(getattr(self.target, method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # raised where the answer is asked for
            return Failed(error)

    def stop(self):
        self.target = None


class Workers(Runtime):
    """Starts workers in this process.

    Attributes:
        calls: names of workers and methods, in order.
        dying: calls that are a worker's last.
    """

    def __init__(self):
        self.calls, self.dying, self.pids = [], [], itertools.count(1)

    def spawn(self, spec):
        return Here(spec, self)

    def close(self): ...


def spread(argv, runtime=None, **config):
    runtime = runtime or Workers()
    places_config = PlacesConfig(**{"infer_workers": 1, "ddp_workers": 1, **config})
    names = [("eval", n) for n in range(places_config.infer_workers)]
    names += [("train", n) for n in range(places_config.ddp_workers)]
    workers = [
        Worker(role=role, index=n, node=None, bundle=None, cpus=1.0, gpus=0.0) for role, n in names
    ]
    return building.build_spread(Places(places_config, runtime, workers), recipe(argv))


def weights_of(algorithm):
    return algorithm.policy.state_dict()


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# ---- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [PPO, [*PPO, "--algo.no-clip-vloss"], SAC], ids=["ppo", "ppo fused", "sac"]
)
def test_one_worker_of_each_kind_ends_with_the_same_bits(argv):
    here = recipe(argv).build()
    train_in_process(here, IdentityTask(2, discrete=False))
    there = spread(argv)
    rewards = train_in_process(there, IdentityTask(2, discrete=False))
    assert len(rewards) == here.global_step // 2
    assert_same(weights_of(here), weights_of(there))
    one, other = here.create_checkpoint(), there.create_checkpoint()
    assert one.step == other.step
    assert one.meta.keys() == other.meta.keys()
    assert_same(one.model["extra"], other.model["extra"])
    assert str(one.optimizer) == str(other.optimizer)
    there.close()


def test_a_resumed_run_in_workers_goes_on_with_the_same_bits():
    whole = spread(PPO)
    train_in_process(whole, IdentityTask(2, discrete=False))
    first = spread([*PPO, "--algo.global-steps", "64"])
    task = IdentityTask(2, discrete=False)
    train_in_process(first, task)
    saved = first.create_checkpoint()
    saved.meta["train_itrs"] = int(saved.meta["train_itrs"])
    second = spread(PPO)
    state = torch.get_rng_state()
    second.load_checkpoint(saved)
    torch.set_rng_state(state)
    assert second.global_step == 64
    assert second.train_itrs == 2
    train_in_process(second, task)
    assert second.global_step == whole.global_step
    assert second.train_itrs == whole.train_itrs


def test_acting_goes_on_with_the_last_weights_while_the_learner_learns():
    algorithm = spread([*PPO, "--learn-mode", "overlap"])
    task = IdentityTask(2, discrete=False)
    play(algorithm._algorithm, 17)
    before = algorithm.infer(task.observe())[1].value
    algorithm.pre_learn()
    assert len(algorithm.filling) == 0
    assert not algorithm.should_learn(), "new frames go to another buffer"
    algorithm.learn()
    assert torch.equal(algorithm.infer(task.observe())[1].value, before)
    algorithm.post_learn()
    assert not torch.equal(algorithm.infer(task.observe())[1].value, before)
    assert algorithm.train_itrs == 1


def test_a_dummy_run_needs_no_weights():
    algorithm = spread(DUMMY)
    train_in_process(algorithm, IdentityTask(2, discrete=False, size=7))
    assert algorithm.global_step == 300
    assert algorithm.create_checkpoint().model is None


def test_the_rows_of_a_batch_come_back_in_order_from_several_workers():
    argv = [*PPO[:2], "eval", "default", *PPO[4:10], "--policy.deterministic"]
    one = recipe(argv).build()
    many = spread(argv, infer_workers=3, ddp_workers=0)
    for rows in (1, 2, 7):
        obs = IdentityTask(rows, discrete=False, seed=rows).observe()
        expected, _ = one.infer(obs)
        action, state = many.infer(obs)
        np.testing.assert_allclose(action, expected, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(state.obs), obs["states"]["obs"])


def test_every_worker_acts_with_the_newest_weights_after_a_learn_step():
    algorithm = spread(PPO, infer_workers=3)
    obs = IdentityTask(1, discrete=False).observe()
    for _ in range(2):
        play_and_learn(algorithm)
        learned = algorithm.policy.get_value(obs)
        values = [float(algorithm.infer(obs)[1].value) for _ in range(3)]
        assert values == pytest.approx([float(learned)] * 3)


SECOND = """
import pickle, sys
from plugrl_server.cluster.algorithm_worker import AlgorithmWorker
recipe, address, checkpoint, collected = pickle.load(open(sys.argv[1], "rb"))
worker = AlgorithmWorker(recipe)
worker.join_ranks(1, 2, address, 90.0)
worker.load_learner(checkpoint)
worker.learn(33, collected)
pickle.dump(worker.learner_checkpoint(), open(sys.argv[2], "wb"))
"""


def test_two_learners_move_the_weights_as_one_does(tmp_path):
    """The last minibatch has one row, fewer than there are learners."""
    argv = [*PPO, "--algo.target-kl", "10"]
    collecting = recipe(argv).build()
    start = learner_checkpoint(collecting)
    play(collecting, 33, envs=1)
    collecting.pre_learn()
    collected = collecting.hand_over()
    assert len(collecting.filling) == 0
    alone = AlgorithmWorker(recipe(argv))
    alone.load_learner(start)
    expected, _ = alone.learn(33, collected)
    there, back, address = tmp_path / "there", tmp_path / "back", free_address()
    there.write_bytes(pickle.dumps((recipe(argv), address, start, collected)))
    with subprocess.Popen([sys.executable, "-c", SECOND, str(there), str(back)]) as process:
        first = AlgorithmWorker(recipe(argv))
        first.join_ranks(0, 2, address, 90.0)
        try:
            first.load_learner(start)
            metrics, _ = first.learn(33, collected)
            assert process.wait(90) == 0
        finally:
            process.kill()
            destroy()
    for name, value in expected["losses"].items():
        assert metrics["losses"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    moved = flat(first.learner_checkpoint().model)
    assert_same(moved, flat(pickle.loads(back.read_bytes()).model))
    for name, tensor in flat(alone.learner_checkpoint().model).items():
        torch.testing.assert_close(moved[name], tensor, rtol=1e-4, atol=1e-5)
        assert name.startswith("observation") or not torch.equal(tensor, flat(start.model)[name])


def flat(model):
    modules = {f"{m}.{k}": v for m, state in model["weights"].items() for k, v in state.items()}
    return {**modules, **model["extra"]}


def play(algorithm, rounds, envs=2):
    """Collect so many rounds, and learn nothing of them yet."""
    left = iter(range(rounds))
    algorithm.should_stop = lambda: next(left, None) is None
    algorithm.should_learn = lambda: False
    train_in_process(algorithm, IdentityTask(envs, discrete=False))
    del algorithm.should_stop, algorithm.should_learn


def test_parts_of_a_batch_cover_it_once_and_their_shares_sum_to_one():
    for rows, count in ((8, 3), (2, 3), (1, 4), (5, 1)):
        ranks = [Ranks(None, rank, count) for rank in range(count)]
        covered = [0.0] * rows
        for rank in ranks:
            part, share = rank.part(rows)
            taken = range(rows)[part]
            for row in taken:
                covered[row] += share / len(taken)
        assert covered == pytest.approx([1 / rows] * rows)


# ---- deaths --------------------------------------------------------------------------------------


def test_rows_of_a_worker_that_dies_are_answered_by_the_others_and_then_by_its_successor(caplog):
    runtime = Workers()
    algorithm = spread(PPO, runtime, infer_workers=2)
    obs = IdentityTask(4, discrete=False).observe()
    runtime.dying.append(("infer-1", "infer"))
    with caplog.at_level(logging.WARNING):
        action, _ = algorithm.infer(obs)
        assert action.shape == (4, 1, 2)
        assert wait_until(lambda: "infer-1 is lost" in caplog.text)  # whoever replaces it says so
    runtime.calls.clear()
    assert wait_until(lambda: algorithm.infer(obs) and ("infer-1", "infer") in runtime.calls)
    algorithm.close()


def test_a_worker_that_dies_with_several_parts_of_a_batch_is_replaced_once():
    runtime = Workers()
    algorithm = spread(PPO, runtime, infer_workers=3)
    runtime.dying += [("infer-1", "infer"), ("infer-2", "infer")]
    obs = IdentityTask(6, discrete=False).observe()
    action, state = algorithm.infer(obs)
    assert action.shape == (6, 1, 2)
    np.testing.assert_array_equal(np.asarray(state.obs), obs["states"]["obs"])
    workers = algorithm._actors._workers
    assert wait_until(lambda: [worker.restarts for worker in workers] == [0, 1, 1])
    algorithm.close()


def wait_until(condition):
    deadline_s = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return condition()


def test_a_single_worker_that_dies_is_waited_for_and_has_the_newest_weights():
    runtime = Workers()
    algorithm = spread(PPO, runtime)
    play_and_learn(algorithm)
    runtime.dying.append(("infer-0", "infer"))
    obs = IdentityTask(2, discrete=False).observe()
    runtime.calls.clear()
    algorithm.infer(obs)
    assert ("infer-0", "load_published") in runtime.calls


def play_and_learn(algorithm):
    task, left = IdentityTask(2, discrete=False), iter(range(17))
    inner = algorithm._algorithm
    stop, inner.should_stop = inner.should_stop, lambda: next(left, None) is None
    train_in_process(algorithm, task)
    inner.should_stop = stop


def test_a_worker_that_dies_too_often_ends_the_run_and_blames_no_client():
    runtime = Workers()
    algorithm = spread(PPO, runtime, max_restarts=1)
    obs = IdentityTask(2, discrete=False).observe()
    runtime.dying += [("infer-0", "infer")] * 2
    with pytest.raises(WorkerLostError, match="infer-0"):
        algorithm.infer(obs)


def test_a_learner_that_dies_takes_learning_back_to_the_last_checkpoint(caplog):
    runtime = Workers()
    algorithm = spread(PPO, runtime)
    play_and_learn(algorithm)
    saved = algorithm.create_checkpoint()
    play_and_learn(algorithm)
    assert algorithm.train_itrs == 2
    runtime.dying.append(("learner-0", "learn"))
    with caplog.at_level(logging.WARNING):
        play_and_learn(algorithm)
    assert "learning goes on from the weights of step 32" in caplog.text
    assert algorithm.train_itrs == 1
    assert_same(flat(saved.model), flat(algorithm.create_checkpoint().model))
    assert_same(flat(saved.model), {k: weights_of(algorithm)[k] for k in flat(saved.model)})
    play_and_learn(algorithm)
    assert algorithm.train_itrs == 2


@pytest.mark.parametrize("method", ["learner_checkpoint", "publish"])
def test_a_learner_that_dies_between_learn_steps_is_found_when_it_is_needed(method):
    runtime = Workers()
    algorithm = spread(PPO, runtime)
    runtime.dying.append(("learner-0", method))
    play_and_learn(algorithm)
    checkpoint = algorithm.create_checkpoint()
    assert checkpoint.meta["train_itrs"] == algorithm.train_itrs == 0
    assert algorithm.global_step == 34


def test_learners_that_die_too_often_end_the_run():
    runtime = Workers()
    algorithm = spread(PPO, runtime, max_restarts=1)
    runtime.dying += [("learner-0", "learn"), ("learner-0", "load_learner")]
    with pytest.raises(WorkerLostError, match="learner-0"):
        play_and_learn(algorithm)


def test_what_a_policy_refuses_is_raised_as_it_was():
    algorithm = spread(PPO)
    obs = IdentityTask(2, discrete=False, size=3).observe()
    with pytest.raises(ObservationError, match="obs:3"):
        algorithm.infer(obs)


# ---- who may be spread ---------------------------------------------------------------------------


class Own(BaseAlgorithm):
    """Someone's algorithm, which knows nothing of workers."""


def test_an_algorithm_that_cannot_learn_apart_learns_beside_the_sockets():
    assert building.number_of_learners(PPOAlgorithm, None) == 1
    assert building.number_of_learners(PPOAlgorithm, 4) == 4
    assert building.number_of_learners(DummyAlgorithm, 2) == 2
    assert building.number_of_learners(EvalAlgorithm, None) == 0
    assert building.number_of_learners(Own, None) == 0
    with pytest.raises(UsageError, match=r"Own learns only beside .* ppo, sac, dummy"):
        building.number_of_learners(Own, 2)


def test_learning_beside_the_sockets_gives_the_same_bits():
    here = recipe(PPO).build()
    train_in_process(here, IdentityTask(2, discrete=False))
    there = spread(PPO, ddp_workers=0)
    train_in_process(there, IdentityTask(2, discrete=False))
    assert_same(weights_of(here), weights_of(there))


@pytest.mark.parametrize(
    ("asked", "gpus", "given"),
    [
        ({}, 0, (0.0, 0.0, "")),
        ({"infer_gpu": 1}, 0, (0.0, 0.0, "no GPU: workers, which ask for 1,")),
        ({}, 2, (1.0, 1.0, "")),
        ({}, 1, (0.5, 0.5, "")),
        ({"infer_workers": 2}, 2, (0.5, 0.5, "")),
        ({"infer_gpu": 0, "num_ddp_gpus": 1}, 1, (0.0, 1.0, "")),
        ({"ddp_workers": 4, "num_ddp_gpus": 4}, 2, (0.3333, 0.3333, "2 GPUs: workers")),
    ],
)
def test_gpus_are_shared_out_and_never_more_than_there_are(asked, gpus, given):
    infer, ddp, note = share_gpus(PlacesConfig(**asked), gpus)
    assert (infer, ddp) == given[:2]
    assert given[2] in note
    assert bool(note) == bool(given[2])


def test_a_worker_has_a_share_of_one_gpu_or_whole_ones():
    with pytest.raises(UsageError, match=r"--num-ddp-gpus gives a worker 1\.5 GPUs"):
        share_gpus(PlacesConfig(ddp_workers=2, num_ddp_gpus=3), 8)
    assert share_gpus(PlacesConfig(ddp_workers=2, num_ddp_gpus=4), 8) == (1.0, 2.0, "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-infer-workers", "0"], "--num-infer-workers is 0"),
        (["--num-ddp-workers", "0"], "--num-ddp-workers is 0"),
        (["--infer-gpu", "-1"], "--infer-gpu"),
        (["--inline-limit-ms", "1"], "only 0 is possible"),
        (["--host", "0.0.0.0"], "--allow-anonymous"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        cli_args.parse([*PPO, *flags], cli_ray.RayArgs, cli_ray.PROGRAM)


def test_the_flags_say_how_many_workers_there_are():
    flags = ["--num-infer-workers", "3", "--num-ddp-gpus", "2", "--master-port", "7000"]
    config = cli_ray.places_config(cli_args.parse([*PPO, *flags], cli_ray.RayArgs, cli_ray.PROGRAM))
    assert (config.infer_workers, config.ddp_workers, config.meeting) == (3, 2, ("", 7000))
    assert dataclasses.asdict(config)["address"] == "auto"


def test_help_names_the_program_and_what_it_adds(capsys):
    cli_ray.main(["--help"])
    assert "usage: plugrl-run-server-ray <policy>" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli_ray.main([*PPO[:4], "--help"])
    assert "--num-infer-workers" in capsys.readouterr().out


def test_help_takes_less_than_a_second_and_loads_neither_torch_nor_ray():
    program = pathlib.Path(sys.executable).parent / "plugrl-run-server-ray"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([program, "--help"], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    code = (
        "import sys; from plugrl_server.cli_ray import main; main(['--help']); "
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_missing_ray_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rlightning.runtime.ray", raising=False)
    with pytest.raises(SystemExit) as end:
        cli_ray.main([*PPO, "--log-level", "error"])
    assert end.value.code == 2
    assert "pip install 'plugrl-server[ray]'" in capsys.readouterr().err
    assert issubclass(MissingExtraError, ImportError)


# ---- what travels --------------------------------------------------------------------------------


def test_states_travel_as_plain_maps_and_come_back_as_they_were():
    state = ActorCriticRuntimeState(
        obs=torch.zeros(2, 3), action=torch.ones(2, 1), logprob=torch.zeros(2), value=torch.ones(2)
    )
    plain = as_plain({"inner": state, "n": 3})
    assert plain["inner"]["action"] is state.action
    back = like_example(plain, {"inner": state, "n": 0})
    assert back == {"inner": state, "n": 3}
    assert like_example(None, state) is None
    assert like_example({"a": 1}, None) == {"a": 1}


def test_texts_travel_as_lists():
    obs = {"images": {}, "states": {}, "text": np.array(["a", "longer"])}
    there = without_text(obs)
    assert there["text"] == ["a", "longer"]
    np.testing.assert_array_equal(with_text(there)["text"], obs["text"])
