"""Does prior data speed up learning? RLPD on Pendulum-v1, with and without a few demonstrations.

    python benchmarks/learn_rlpd.py [--quick] [--cases prior ...] [--seeds 0 1 2]

The demonstrator swings the pendulum up by its energy, holds it by proportional and derivative
terms, and trembles. Its ten episodes are written as a dataset in the layout of Minari. Without them
SAC learns by the same settings from all-collected batches. What is compared is the mean over all
evaluations, one each 250 environment steps: who is up sooner.
"""

import pathlib
import statistics

import gymnasium as gym
import numpy as np
from common import goal
from learning import Case, main

from rlightning.datasets import Episode, write_minari

DATA = "../outputs/pendulum_demonstrations"
EPISODES = 10
TREMBLE = 0.7
"""Standard deviation of the noise on the demonstrator's torque, in newton metres."""
SETTINGS = [
    "train.max_epochs=500",
    "train.max_rollout_steps=4",
    "train.eval_interval=62",
    "train.eval_episodes=20",
]
ALONE = [
    "train.batch_size=2048",
    "train.minibatch_size=128",
    "train.actor_interval=4",
    "buffer.min_size=200",
    "policy.optim_cfg={actor_lr: 0.0003, critic_lr: 0.0003, temperature_lr: 0.0003}",
]
CASES = {
    "prior": Case("pendulum_rlpd", [*SETTINGS, f"buffer.dataset={DATA}"]),
    "alone": Case("pendulum_sac", [*SETTINGS, *ALONE]),
}


def torque(observation: np.ndarray) -> float:
    """Return what the demonstrator means to do."""
    cosine, sine, speed = (float(value) for value in observation)
    if cosine > 0.9:
        return -8.0 * float(np.arctan2(sine, cosine)) - 2.0 * speed
    energy = 0.5 * speed**2 + 15.0 * cosine  # 15 where it stands upright
    return (15.0 - energy) * (1.0 if speed >= 0 else -1.0)


def demonstrate(folder: pathlib.Path) -> float:
    """Record the demonstrator; return its mean return."""
    env, noise = gym.make("Pendulum-v1"), np.random.default_rng(0)
    episodes = []
    for number in range(EPISODES):
        rows, actions, rewards = [env.reset(seed=number)[0]], [], []
        ends = (False, False)
        while not any(ends):
            action = torque(rows[-1]) + TREMBLE * noise.normal()
            actions.append(np.clip([action], -2.0, 2.0).astype(np.float32))
            observation, reward, *ends, _ = env.step(actions[-1])
            rows.append(observation)
            rewards.append(reward)
        flags = np.zeros((2, len(actions)), bool)
        flags[:, -1] = ends
        episodes.append(Episode(np.stack(rows), np.stack(actions), np.array(rewards), *flags))
    write_minari(
        folder,
        episodes,
        observation_space=env.observation_space,
        action_space=env.action_space,
    )
    return statistics.fmean(float(one.rewards.sum()) for one in episodes)


def goals(rows: dict[str, dict]) -> list[dict]:
    """Judge whether prior data helps."""
    sooner = rows["prior"]["mean_on_the_way"] - rows["alone"]["mean_on_the_way"]
    return [
        goal("with prior data, mean return", rows["prior"]["mean"], at_least=-250),
        goal("mean on the way, above that without prior data by", sooner, at_least=1),
    ]


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent / DATA
    if not folder.exists():
        print(f"the demonstrator returns {demonstrate(folder):.1f}", flush=True)
    main("learn_rlpd", __doc__, CASES, goals)
