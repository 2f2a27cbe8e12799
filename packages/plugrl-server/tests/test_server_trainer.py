"""The trainer behind a live server: threads, blame, staleness, accounting, endings."""

import threading
import time
import urllib.request

import numpy as np
import pytest
import torch

from plugrl_protocol.env_client import EnvClient
from plugrl_protocol.errors import (
    CLOSE_RESYNC,
    CLOSE_SHUTDOWN,
    ConnectionReplaced,
    ObservationRefusedError,
    ServerFailedError,
)
from plugrl_protocol.messages import Feedback, Infer, make_observation
from plugrl_server.algorithm.dummy import DummyAlgoConfig
from plugrl_server.algorithm.eval import EvalConfig
from plugrl_server.algorithm.ppo import PPOConfig
from plugrl_server.algorithm.registration import make_algo
from plugrl_server.algorithm.sac import SACConfig
from plugrl_server.common.checkpoint_manager import CheckpointManager
from plugrl_server.policy.base_policy import BasePolicy
from plugrl_server.policy.dummy import DummyPolicyConfig
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.policy.sac import SACPolicyConfig
from plugrl_server.server.inline_guard import InlineGuard
from plugrl_server.server.trainer import Ending, TrainerConfig
from plugrl_server.testing import IdentityTask, TaskClient, serve
from rlightning import checkpoint

OVERLAP = TrainerConfig(learn_mode="overlap")
NEVER_INLINE = TrainerConfig(inline_limit_ms=0.0)
ALWAYS_INLINE = TrainerConfig(inline_limit_ms=1e6)


def ppo(seed=0, separate=False, **changes):
    torch.manual_seed(seed)
    np.random.seed(seed)
    policy = make_policy(
        "gaussian-policy", GaussianPolicyConfig(obs_dim=2, action_dim=2, device="cpu")
    )
    defaults = {"buffer_size": 64, "batch_size": 32, "update_epochs": 2, "global_steps": 400}
    algorithm = make_algo("ppo", policy, config=PPOConfig(**{**defaults, **changes}))
    if separate:
        algorithm.separate_learner()
    algorithm.init_optimizers()
    return algorithm


def sac(separate=False, **changes):
    torch.manual_seed(0)
    np.random.seed(0)
    config = SACPolicyConfig(state_dim=2, action_dim=2, hidden_dims=(16, 16), device="cpu")
    defaults = {
        "global_steps": 200,
        "buffer_size": 1000,
        "batch_size": 16,
        "learning_starts": 20,
        "update_every": 4,
        "update_to_data_ratio": 0.25,
    }
    policy = make_policy("sac-policy", config)
    algorithm = make_algo("sac", policy, config=SACConfig(**{**defaults, **changes}))
    if separate:
        algorithm.separate_learner()
    algorithm.init_optimizers()
    return algorithm


def play_to_the_end(algorithm, *, seed=0, envs=2, reuse=True, **options):
    with serve(algorithm, **options) as running:
        client = TaskClient(running.url, IdentityTask(envs, discrete=False, seed=seed), reuse=reuse)
        assert client.play()
        running.join()
    assert running.ending == [Ending.FINISHED]
    return running.server.trainer, client


def weights(algorithm):
    return b"".join(
        tensor.contiguous().numpy().tobytes() for tensor in algorithm.policy.state_dict().values()
    )


# --- one client -----------------------------------------------------------------------------------


def test_every_frame_is_stored_and_the_run_ends_at_its_steps():
    algorithm = ppo()
    trainer, client = play_to_the_end(algorithm)
    assert algorithm.global_step == 400
    assert trainer.metrics.stored_frames == 400
    assert trainer.metrics.discarded_frames == 0
    assert trainer.version == 7
    assert client.episodes > 0
    summary = trainer.metrics.summary()
    assert summary["server/infer_ms_p50"] > 0
    assert summary["server/queue_ms_p95"] >= summary["server/queue_ms_p50"]


@pytest.mark.parametrize("make", [ppo, sac])
def test_one_client_and_one_seed_end_with_the_same_bytes_however_it_is_run(make):
    """Twice; without reuse; on the event loop; in the acting thread."""
    runs = [{}, {"reuse": False}, {"trainer_config": NEVER_INLINE}]
    runs.append({"trainer_config": ALWAYS_INLINE})
    ends = set()
    for options in runs:
        algorithm = make()
        play_to_the_end(algorithm, **options)
        ends.add(weights(algorithm))
    assert len(ends) == 1
    other = ppo(seed=1) if make is ppo else None
    if other is not None:
        play_to_the_end(other)
        assert weights(other) not in ends


@pytest.mark.parametrize("make", [ppo, sac])
def test_in_overlap_mode_the_run_ends_too_and_every_frame_is_accounted_for(make):
    algorithm = make(separate=True)
    trainer, client = play_to_the_end(algorithm, trainer_config=OVERLAP)
    metrics = trainer.metrics
    assert algorithm.global_step >= (400 if make is ppo else 200)
    # The last report may be on its way when the run ends.
    received = metrics.stored_frames + metrics.discarded_frames
    assert client.frames_sent - 2 <= received <= client.frames_sent
    if make is sac:
        # Nothing is too old for it; only the last report comes behind the end of the run.
        assert metrics.discarded_frames <= 2
    for name, tensor in algorithm.learner_policy.state_dict().items():
        assert torch.equal(tensor, algorithm.policy.state_dict()[name]), name


def test_stale_frames_are_discarded_by_ppo_unless_it_may_correct_them():
    """Frames sampled before a learn step and reported after it."""
    for staleness, stored in ((0, 64), (1, 66)):
        algorithm = ppo(max_staleness=staleness, global_steps=None, train_itrs=100)
        with serve(algorithm) as running:
            late = TaskClient(running.url, IdentityTask(2, discrete=False))
            seen = make_observation(num_envs=2, states=late.task.observe()["states"])
            ids, zeros = np.arange(2), np.zeros(2, np.int64)
            late.client.infer(Infer(env_indices=ids, step_ids=zeros, observation=seen))
            other = TaskClient(running.url, IdentityTask(2, discrete=False))
            other.play(33)
            flags = np.zeros(2, np.bool_)
            late.client.feedback(
                Feedback(
                    env_indices=ids,
                    step_ids=zeros,
                    observation=seen,
                    rewards=np.zeros(2, np.float32),
                    terminated=flags,
                    truncated=flags,
                )
            )
            late.client.infer(Infer(env_indices=ids, step_ids=zeros + 1, observation=seen))
            late.close()
            other.close()
            running.wait_until_alone()
        metrics = running.server.trainer.metrics
        assert running.server.trainer.version == 1
        assert metrics.stored_frames - 2 == stored
        assert metrics.discarded_frames == 66 - stored


class Poisoned:
    """A task whose second environment shows a NaN for one round."""

    def __init__(self, task):
        self.task, self.is_poisoned = task, False

    def observe(self):
        seen = self.task.observe()
        if self.is_poisoned:
            seen["states"]["obs"] = seen["states"]["obs"].copy()
            seen["states"]["obs"][1, 0] = np.nan
        return seen

    def step(self, action):
        self.is_poisoned = False
        return self.task.step(np.nan_to_num(action))


def test_observations_that_are_not_finite_are_counted_and_not_learned_from():
    algorithm = ppo()
    with serve(algorithm) as running:
        task = Poisoned(IdentityTask(4, discrete=False))
        client = TaskClient(running.url, task)
        client.play(2)
        task.is_poisoned = True
        client.play(1)
        client.play(2)
        client.close()
        running.wait_until_alone()
    metrics = running.server.trainer.metrics
    # Env 1's poisoned observation is the one before one frame.
    assert metrics.nonfinite_observations == 1
    assert metrics.discarded_frames == 1
    assert metrics.stored_frames == client.frames_sent - 1
    assert bool(algorithm.filling.read()["state"]["obs"].isfinite().all())


# --- several clients ------------------------------------------------------------------------------


class Picky(BasePolicy):
    """Doubles a state; counts batches; raises for what it does not like."""

    def __init__(self, config):
        super().__init__(config)
        self.batches = []
        self.started = threading.Event()
        self.may_go = threading.Event()

    def get_action_and_runtime_state(self, _obs):
        self.started.set()
        self.may_go.wait(10.0)
        state = _obs["states"]["x"]
        self.batches.append(len(state))
        if (state < 0).any():
            raise ValueError("negative")
        return 2.0 * state[:, None, :], None

    def fake_runtime_state(self, batch_size):
        return None


def ask(client, value, name="x", width=1):
    states = {name: np.full((1, width), value)}
    seen = make_observation(num_envs=1, states=states)
    request = Infer(env_indices=np.arange(1), step_ids=np.zeros(1, np.int64), observation=seen)
    return client.infer(request, timeout_s=20.0)


def play_rounds(client, rounds):
    for _ in range(rounds):
        client.play_round()


def in_threads(calls):
    """Run calls side by side; give results or exceptions in their order."""
    results = [None] * len(calls)

    def run(position, call):
        try:
            results[position] = call()
        except Exception as error:  # noqa: BLE001  # given to the test
            results[position] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


def test_who_makes_the_policy_raise_is_blamed_alone_and_the_rest_of_the_batch_is_answered():
    policy = Picky(None)
    algorithm = make_algo("eval", policy, config=EvalConfig())
    with serve(algorithm, trainer_config=NEVER_INLINE) as running:
        clients = [EnvClient(running.url) for _ in range(4)]
        for client in clients:
            client.connect()
        first = threading.Thread(target=ask, args=(clients[0], 1.0))
        first.start()
        assert policy.started.wait(10.0)
        # While the first request runs, three more come in; they form the next batch.
        calls = [
            lambda c=c, v=v: ask(c, v) for c, v in zip(clients[1:], (2.0, -1.0, 3.0), strict=True)
        ]
        threading.Timer(0.5, policy.may_go.set).start()
        good, bad, also_good = in_threads(calls)
        first.join(10.0)
        assert float(good.action[0, 0, 0]) == 4.0
        assert float(also_good.action[0, 0, 0]) == 6.0
        assert isinstance(bad, ObservationRefusedError)
        assert "ValueError: negative" in bad.close.reason
        assert "Traceback" not in bad.close.reason
        assert policy.batches[:2] == [1, 3]
        assert sorted(policy.batches[2:]) == [1, 1, 1]
        for client in clients:
            client.close()
    assert running.server.trainer.metrics.refused_requests == 1
    assert running.ending == [Ending.INTERRUPTED]


def test_requests_of_different_layouts_form_different_batches():
    algorithm = make_algo(
        "eval", make_policy("dummy-policy", DummyPolicyConfig()), config=EvalConfig()
    )
    with serve(algorithm) as running:
        clients = [EnvClient(running.url) for _ in range(3)]
        calls = [
            lambda: ask(clients[0], 1.0, "a"),
            lambda: ask(clients[1], 1.0, "a", width=2),
            lambda: ask(clients[2], 1.0, "b"),
        ]
        for answer in in_threads(calls):
            assert answer.action.shape == (4, 1, 7)
        for client in clients:
            client.close()


def test_an_unknown_state_is_refused_with_both_sides_named_and_others_go_on():
    with serve(ppo()) as running:
        good = TaskClient(running.url, IdentityTask(2, discrete=False))
        good.play(3)
        with EnvClient(running.url) as bad, pytest.raises(ObservationRefusedError) as refused:
            ask(bad, 1.0, "joints", width=3)
        assert refused.value.close.code == 1008
        assert refused.value.close.reason == (
            "states joints:3, policy has obs:2; "
            "serve it with --policy.state-keys joints --policy.obs-dim 3"
        )
        good.play(3)
        good.close()


def test_a_feedback_that_observes_something_else_ends_its_connection_alone():
    """It would fail in the middle of a learn step, where nobody could be blamed."""
    with serve(ppo()) as running:
        good = TaskClient(running.url, IdentityTask(2, discrete=False))
        good.play(3)
        with EnvClient(running.url) as bad:
            states = {"obs": np.zeros((1, 2), np.float32)}
            seen = make_observation(num_envs=1, states=states)
            ids, zeros, flags = np.arange(1), np.zeros(1, np.int64), np.zeros(1, np.bool_)
            request = Infer(env_indices=ids, step_ids=zeros, observation=seen)
            bad.infer(request)
            report = Feedback(
                env_indices=ids,
                step_ids=zeros,
                observation=make_observation(num_envs=1, states={"joints": np.zeros((1, 9))}),
                rewards=np.zeros(1, np.float32),
                terminated=flags,
                truncated=flags,
            )
            bad.feedback(report)
            with pytest.raises(ConnectionReplaced) as closed:
                bad.infer(request)
        assert closed.value.close == CLOSE_RESYNC
        good.play(100)
        good.close()
        running.wait_until_alone()
    assert running.server.trainer.version > 0
    metrics = running.server.trainer.metrics
    assert metrics.stored_frames + metrics.discarded_frames == good.frames_sent


def test_frames_of_clients_that_come_and_go_are_all_accounted_for():
    algorithm = ppo(global_steps=None, train_itrs=10_000)
    rng = np.random.default_rng(0)
    plans = [rng.integers(1, 12, size=4).tolist() for _ in range(4)]
    with serve(algorithm) as running:

        def come_and_go(number, plan):
            sent = 0
            for rounds in plan:
                client = TaskClient(running.url, IdentityTask(1 + number, discrete=False))
                client.play(rounds)
                client.close()
                sent += client.frames_sent
            return sent

        calls = [lambda n=n, p=p: come_and_go(n, p) for n, p in enumerate(plans)]
        sent = in_threads(calls)
        running.wait_until_alone()
    metrics = running.server.trainer.metrics
    assert metrics.stored_frames + metrics.discarded_frames == sum(sent)
    assert metrics.stored_frames == algorithm.global_step
    assert metrics.total_connections == 16


# --- a long learn step ----------------------------------------------------------------------------


def test_pings_health_and_newcomers_are_answered_during_a_long_learn_step():
    learn_s = 2.0
    config = DummyAlgoConfig(
        fake_inference_duration_sec=0.0,
        fake_learn_duration_sec=learn_s,
        fake_learn_freq=2,
        global_steps=None,
    )
    policy = make_policy("dummy-policy", DummyPolicyConfig(action_dim=2, action_horizon=1))
    algorithm = make_algo("dummy", policy, config=config)
    with serve(algorithm, feedback_wait_timeout=0.5 * learn_s) as running:
        holding = EnvClient(running.url)
        ask(holding, 1.0)
        client = TaskClient(running.url, IdentityTask(2, discrete=False))
        client.play(1)
        waiting = threading.Thread(target=client.play, args=(1,))
        waiting.start()
        deadline_s = time.monotonic() + 10.0
        while running.server.trainer.learning_for_s() < 0.6 * learn_s:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        started_s = time.monotonic()
        address = running.url.replace("ws", "http") + "/healthz"
        with urllib.request.urlopen(address, timeout=5.0) as answer:
            assert answer.status == 200
        with EnvClient(running.url) as newcomer:
            assert newcomer.metadata.values["algorithm"] == "DummyAlgorithm"
        quick_s = time.monotonic() - started_s
        assert running.server.trainer.learning_for_s() > 0
        assert quick_s < 0.5
        waiting.join(20.0)
        # The feedback clock stood still while the learner made everybody wait.
        assert holding.holding == {0}
        assert client.client.connections == 1
        client.close()
        holding.close()


# --- endings --------------------------------------------------------------------------------------


def test_a_stop_tells_clients_to_come_back():
    with serve(ppo()) as running:
        client = TaskClient(running.url, IdentityTask(2, discrete=False))
        client.play(3)
        running.stop()
        with pytest.raises(ConnectionReplaced) as closed:
            play_rounds(client, 2)
    assert closed.value.close == CLOSE_SHUTDOWN
    assert running.ending == [Ending.INTERRUPTED]


def test_a_learner_that_fails_ends_the_run_and_says_so():
    algorithm = ppo()

    def fail():
        raise ZeroDivisionError("in learn")

    algorithm.learn_impl = fail
    with serve(algorithm) as running:
        client = TaskClient(running.url, IdentityTask(2, discrete=False))
        with pytest.raises(ServerFailedError):
            client.play()
        running.join()
    assert isinstance(running.ending[0], ZeroDivisionError)


def learn_fails(algorithm):
    def fail():
        raise ZeroDivisionError("in learn")

    algorithm.learn_impl = fail


def feedback_fails(algorithm):
    store = algorithm.feedback_batch

    def fail(batch):
        if algorithm.global_step >= 10:
            raise ZeroDivisionError("in feedback")
        return store(batch)

    algorithm.feedback_batch = fail


@pytest.mark.parametrize("config", [NEVER_INLINE, ALWAYS_INLINE, OVERLAP])
@pytest.mark.parametrize("spoil", [learn_fails, feedback_fails])
def test_a_users_code_that_raises_costs_nothing_of_what_was_stored(tmp_path, spoil, config):
    """The run is saved before clients hear 1011, and goes on from there once the code is mended."""
    algorithm = ppo(separate=config is OVERLAP)
    algorithm.frames_before_control = lambda: 0
    spoil(algorithm)
    options = {"config": {"policy_uid": "gaussian-policy"}, "keep": 1}
    manager = CheckpointManager(tmp_path / "run", overwrite=False, resume=False, **options)
    with serve(algorithm, checkpoint_manager=manager, trainer_config=config) as running:
        client = TaskClient(running.url, IdentityTask(2, discrete=False))
        with pytest.raises(ServerFailedError):
            client.play()
        running.join()
    assert isinstance(running.ending[0], ZeroDivisionError)
    assert manager.latest_step() == algorithm.global_step >= 10
    mended = ppo(separate=config is OVERLAP)
    mended.load_checkpoint(manager.load_checkpoint())
    assert len(mended.filling) == len(algorithm.filling)
    assert len(mended.filling) > 0 or config is OVERLAP, "the learner's own frames go with it"
    play_to_the_end(mended, trainer_config=config)
    assert mended.global_step >= 400


@pytest.mark.parametrize(
    "complaint",
    [OSError(28, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc]")],
)
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch, caplog, complaint):
    saved, real = [], checkpoint.save_checkpoint

    def full_at_first(*args, **kwargs):
        saved.append(1)
        if len(saved) == 1:
            raise complaint
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_checkpoint", full_at_first)
    algorithm = ppo(save_interval=1)
    manager = CheckpointManager(tmp_path / "run", config={}, overwrite=False, resume=False)
    with serve(algorithm, checkpoint_manager=manager) as running:
        client = TaskClient(running.url, IdentityTask(2, discrete=False))
        client.play()
        running.join()
    assert running.ending == [Ending.FINISHED]
    (told,) = [record for record in caplog.records if "is not saved" in record.message]
    assert "the run goes on" in told.message
    assert manager.latest_step() == algorithm.global_step


def test_eval_stops_after_its_episodes_and_logs_them():
    rows = []

    class Sink:
        def log_scalars(self, scalars, *, step):
            rows.append(dict(scalars))

        def flush(self):
            pass

        close = flush

    algorithm = make_algo(
        "eval",
        make_policy("gaussian-policy", GaussianPolicyConfig(obs_dim=2, action_dim=2)),
        config=EvalConfig(num_episodes=4),
    )
    play_to_the_end(algorithm, metric_sink=Sink())
    assert algorithm.episodes_done == 4
    assert not algorithm.policy.training
    logged = {name for row in rows for name in row}
    assert {"episode/reward", "episode/length", "server/total_connections"} <= logged
    assert "clients/0/requests_per_s" in logged


# --- the guard ------------------------------------------------------------------------------------


def quick(guard, calls=20, duration_s=0.0002):
    for _ in range(calls):
        guard.note_infer(duration_s)


def test_work_moves_to_the_event_loop_only_while_it_stays_quick():
    guard = InlineGuard(0.001)
    quick(guard, 19)
    assert not guard.allows
    quick(guard, 1)
    assert guard.allows
    guard.note_infer(0.025)
    assert guard.allows, "an interruption now and then is the machine's affair"
    guard.note_infer(0.025)
    guard.note_infer(0.025)
    assert not guard.allows
    quick(guard, 200)
    assert guard.allows
    quick(guard, 11, 0.002)
    assert not guard.allows, "the median is over the limit"


def test_short_interruptions_are_no_reason_to_hand_work_over():
    """A busy machine takes the processor away from any thread: another one would not help."""
    guard = InlineGuard(0.001)
    quick(guard)
    for _ in range(50):
        guard.note_infer(0.012)
        quick(guard, 2)
    assert guard.allows


@pytest.mark.parametrize("work", ["note_infer", "note_feedback"])
def test_one_call_that_is_far_too_slow_sends_work_back_at_once(work):
    guard = InlineGuard(0.001)
    quick(guard, 500)
    getattr(guard, work)(0.2)
    assert not guard.allows
    quick(guard, 19)
    assert not guard.allows
    quick(guard, 1)
    assert guard.allows


def test_a_limit_of_zero_never_allows_it():
    guard = InlineGuard(0.0)
    quick(guard, 100, 0.0001)
    assert not guard.allows
