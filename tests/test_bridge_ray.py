"""Environments that dial in, and the rest of a run on a cluster."""

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SMALL = (
    "env.num_envs=1", "train.max_epochs=3", "train.max_rollout_steps=32", "train.seed=5",
    "train.minibatch_size=32", "train.eval_episodes=2", "train.eval_interval=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def local(bridge, tmp_path_factory):
    """What the run ends with where the clients dial in to a run in one process."""
    with pytest.MonkeyPatch.context() as patch:
        return bridge.train_remotely("cartpole_ppo", tmp_path_factory.mktemp("l"), patch, *SMALL)


@pytest.mark.parametrize("in_worker", [True, False])
def test_where_clients_dial_in_to_a_worker_or_to_the_trainer_the_weights_are_the_same(
    ray_cluster, in_worker, local, tmp_path, bridge
):
    weights, clients = bridge.train_remotely_on_ray(
        "cartpole_ppo", tmp_path, *SMALL, remote_env=in_worker
    )
    bridge.assert_same_weights(local, weights)
    assert [client.error for client in clients] == [None], "told that the run is finished"
    (log,) = tmp_path.glob("*/run/run.log")
    assert ("[env-0] listening" in log.read_text()) == in_worker
