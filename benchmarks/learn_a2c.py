"""Does A2C learn CartPole-v1 as it is known to?

    python benchmarks/learn_a2c.py [--quick] [--seeds 0 1 2]

RL Baselines3 Zoo reports 500 after 500,000 steps, from one run of Stable-Baselines3.
"""

from common import goal
from learning import Case, main

CASES = {"cartpole": Case("cartpole_a2c")}


def goals(rows: dict[str, dict]) -> list[dict]:
    """Compare with what is published."""
    return [goal("A2C on CartPole-v1, mean return", rows["cartpole"]["mean"], at_least=475)]


if __name__ == "__main__":
    main("learn_a2c", __doc__, CASES, goals)
