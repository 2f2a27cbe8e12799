"""Does V-trace make up for acting with old weights? CartPole-v1, weights two versions behind.

    python benchmarks/learn_vtrace.py [--quick] [--cases vtrace ...] [--seeds 0 1 2]

The same steps for PPO and V-trace PPO, without a lag and with one. Rollouts are short and lambda
is small, so that returns lean on the critic, and an old one shows. Learning rates fall to zero, so
that the end shows what was learned and not the last large step. What is compared is the mean over
the second half of the evaluations: how far one got, and whether one stayed there.
"""

from common import goal
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


def goals(rows: dict[str, dict]) -> list[dict]:
    """Judge whether V-trace makes up for a lag."""
    lagged = rows["vtrace_lagged"]
    ahead = lagged["late_mean"] - rows["ppo_lagged"]["late_mean"]
    return [
        goal("V-trace PPO, two versions behind, mean return", lagged["mean"], at_least=475),
        goal("its later evaluations, above PPO's two versions behind by", ahead, at_least=50),
    ]


if __name__ == "__main__":
    main("learn_vtrace", __doc__, CASES, goals)
