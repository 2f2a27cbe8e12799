"""Policies with a memory: in process and over the wire both ways, the same weights."""

import numpy as np
import pytest

SMALL = (
    "env.num_envs=1", "train.max_epochs=4", "train.max_rollout_steps=64",
    "train.minibatch_size=32", "train.ppo_epochs=2", "train.eval_episodes=1", "train.seed=0",
)  # fmt: skip
CASES = {
    "lstm": ("policy.type=RecurrentPPOPolicy", "policy.model_cfg={memory_size: 8}"),
    "gru": ("policy.type=RecurrentPPOPolicy", "policy.model_cfg={memory_size: 8, memory: gru}"),
    "vtrace": ("policy.type=VTracePPOPolicy", "train.gamma=0.98"),
}


@pytest.mark.parametrize("case", CASES)
def test_in_process_and_over_the_wire_both_ways_end_with_the_same_weights(
    case, tmp_path, monkeypatch, bridge
):
    name, overrides = "cartpole_ppo", (*SMALL, *CASES[case])
    in_process = bridge.train_in_process(name, tmp_path / "one", *overrides)
    remote = bridge.train_remotely(name, tmp_path / "two", monkeypatch, *overrides)
    bridge.assert_same_weights(in_process, remote)
    served = bridge.train_served(name, tmp_path / "three", *overrides)
    bridge.assert_same_weights(in_process, served)


def test_a_client_that_has_gone_is_forgotten_and_others_are_not(tmp_path, bridge):
    config = bridge.config_of("cartpole_ppo", tmp_path, *SMALL, *CASES["lstm"])
    served = bridge.ServedPolicy(config)
    algorithm = bridge.RLightningAlgorithm(bridge.RLightningConfig(), served)

    def act(*chains):
        algorithm.expect_chains(chains)
        states = {key: np.ones((len(chains), size)) for key, size in served.form.states.items()}
        algorithm.infer({"images": {}, "states": states, "text": np.full(len(chains), "")})

    def remembered():
        return sorted(served.group.eval_list[0].episode_memory())

    act(3, 5)
    act(5)
    assert remembered() == ["env-3", "env-5"]
    served.fake_runtime_state(2)
    algorithm.forget_chain(3)
    assert remembered() == ["env-5"]
