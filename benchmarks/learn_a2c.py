"""Does A2C learn CartPole-v1 as it is known to?

    python benchmarks/learn_a2c.py [--quick] [--seeds 0 1 2]

RL Baselines3 Zoo reports 500 after 500,000 steps, from one run of Stable-Baselines3.
"""

from learning import Case, main

CASES = {"cartpole": Case("cartpole_a2c")}


def goals(rows: dict[str, dict]) -> dict[str, bool]:
    """Return what is claimed, and whether it holds."""
    return {"A2C solves CartPole, 475": rows["cartpole"]["mean"] >= 475}


if __name__ == "__main__":
    main("learn_a2c", __doc__, CASES, goals)
