"""Does a memory make up for velocities that nobody shows? CartPole-v1, positions only.

    python benchmarks/learn_recurrent.py [--quick] [--cases lstm ...] [--seeds 0 1 2]

The same steps for an LSTM, a GRU, and PPO without a memory.
"""

from common import goal
from learning import Case, main

MASKED = "+env.wrappers=['plugrl_envs.masking:without_velocities']"
NORMALIZED = "+policy.model_cfg={normalize_observations: true}"
STEPS = ["train.max_epochs=120", "train.eval_interval=20"]
CASES = {
    "lstm": Case("cartpole_masked_recurrent_ppo", STEPS),
    "gru": Case("cartpole_masked_recurrent_ppo", [*STEPS, "policy.model_cfg.memory=gru"]),
    "feed_forward": Case("cartpole_ppo", [*STEPS, MASKED, NORMALIZED]),
}


def goals(rows: dict[str, dict]) -> list[dict]:
    """Judge whether a memory is needed, and enough."""
    return [
        goal("an LSTM, mean return", rows["lstm"]["mean"], at_least=450),
        goal("a GRU, mean return", rows["gru"]["mean"], at_least=450),
        goal("PPO without a memory, mean return", rows["feed_forward"]["mean"], at_most=200),
    ]


if __name__ == "__main__":
    main("learn_recurrent", __doc__, CASES, goals)
