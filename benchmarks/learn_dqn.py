"""Does DQN reach what Gymnasium calls solved? CartPole-v1 500, LunarLander-v3 200.

python benchmarks/learn_dqn.py [--quick] [--cases cartpole ...] [--seeds 0 1 2]
"""

from common import goal
from learning import Case, main

CASES = {"cartpole": Case("cartpole_dqn"), "lunarlander": Case("lunarlander_dqn")}
GOALS = {"cartpole": 500.0, "lunarlander": 200.0}


def goals(rows: dict[str, dict]) -> list[dict]:
    """Compare with what counts as solved."""
    return [
        goal(f"DQN on {label}, mean return", rows[label]["mean"], at_least=at_least)
        for label, at_least in GOALS.items()
    ]


if __name__ == "__main__":
    main("learn_dqn", __doc__, CASES, goals)
