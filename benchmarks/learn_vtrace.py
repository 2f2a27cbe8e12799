"""Does V-trace make up for acting with old weights? CartPole-v1, weights two versions behind.

    python benchmarks/learn_vtrace.py [--quick] [--cases vtrace ...] [--seeds 0 1 2]

The same steps for PPO and V-trace PPO, without a lag and with one. Rollouts are short and lambda
is small, so that returns lean on the critic, and an old one shows. Learning rates fall to zero, so
that the end shows what was learned and not the last large step. What is compared is the mean over
the second half of the evaluations: how far one got, and whether one stayed there.
"""

from learning import Case, main

SETTINGS = [
    "train.max_epochs=120",
    "train.max_rollout_steps=32",
    "buffer.capacity=256",
    "buffer.gae_lambda=0.5",
    "train.minibatch_size=64",
    "train.anneal_lr=true",
    "train.eval_interval=15",
    "train.eval_episodes=20",
]
LAGGED = ["engine=lagged_syncrl", "+train.lag=2"]
VTRACE = [
    "policy.type=VTracePPOPolicy",
    "+train.gamma=${buffer.gamma}",
    "+train.trace_lambda=${buffer.gae_lambda}",
]
CASES = {
    "ppo_fresh": Case("cartpole_ppo", SETTINGS),
    "vtrace_fresh": Case("cartpole_ppo", [*SETTINGS, *VTRACE]),
    "ppo_lagged": Case("cartpole_ppo", [*SETTINGS, *LAGGED], "lagged"),
    "vtrace_lagged": Case("cartpole_ppo", [*SETTINGS, *LAGGED, *VTRACE], "lagged"),
}


def goals(rows: dict[str, dict]) -> dict[str, bool]:
    """Return what is claimed, and whether it holds."""
    return {
        "with two versions of lag V-trace PPO solves CartPole": rows["vtrace_lagged"]["mean"]
        >= 475,
        "where PPO is hurt": (
            rows["ppo_lagged"]["late_mean"] < rows["vtrace_lagged"]["late_mean"] - 50
        ),
    }


if __name__ == "__main__":
    main("learn_vtrace", __doc__, CASES, goals)
