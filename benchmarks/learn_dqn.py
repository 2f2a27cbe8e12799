"""Does DQN reach what Gymnasium calls solved? CartPole-v1 500, LunarLander-v3 200.

python benchmarks/learn_dqn.py [--quick] [--cases cartpole ...] [--seeds 0 1 2]
"""

from learning import Case, main

CASES = {"cartpole": Case("cartpole_dqn"), "lunarlander": Case("lunarlander_dqn")}
GOALS = {"cartpole": 500.0, "lunarlander": 200.0}


def goals(rows: dict[str, dict]) -> dict[str, bool]:
    """Return the claims and whether each holds."""
    return {
        f"{label}: a mean return of {goal:g} or more": rows[label]["mean"] >= goal
        for label, goal in GOALS.items()
    }


if __name__ == "__main__":
    main("learn_dqn", __doc__, CASES, goals)
