"""How fast does PPO train? Environment steps per CPU-second, beside Stable-Baselines3.

    python benchmarks/speed_ppo.py [--quick] [--rounds 20]

The same work on both sides: 8 environments, 256 steps, minibatches of 64, 10 epochs, two networks
of 2x64 tanh units, one torch thread, no evaluation. The two take turns in one process, rollout by
rollout, and the median of the turns' ratios counts: the speed of a shared processor drifts. So is
measured what the framework costs on top of a loop written by hand around the same network and the
same update. Then 64 native CartPoles (128 steps, minibatches of 2,048, 4 epochs).

Everything twice: with the update by autograd, which is the default, and with the hand-written one
of ``train.fused_update: auto``, which the shipped configurations of small networks take.
"""

import argparse
import logging
import statistics
import tempfile
import time

import gymnasium as gym
import numpy as np
import torch
from common import goal, write_result

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.config import MainConfig
from rlightning.ops.returns import gae

STEPS, ENVS = 256, 8
UPDATES = {"autograd update": "off", "hand-written update": "auto"}
"""The two ways to compute a gradient step, and their setting; the first is the default."""


def config_of(task: str, folder: str, **changes: object) -> MainConfig:
    """Return a run of `task` with the settings of the comparison."""
    env = {"name": "speed", "backend": "gymnasium", "task": task, "num_envs": ENVS}
    train = {
        "max_epochs": 1_000_000,
        "max_rollout_steps": STEPS,
        "ppo_epochs": 10,
        "minibatch_size": 64,
        "seed": 0,
        "torch_threads": 1,
    }
    for key, value in changes.items():
        (env if key in ("num_envs", "vectorization") else train)[key] = value
    rows = env["num_envs"] * train["max_rollout_steps"]
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "verbose": False,
            "debug": False,
            "env": env,
            "buffer": {"type": "RolloutBuffer", "capacity": rows},
            "policy": {"type": "PPOPolicy", "optim_cfg": {"lr": 3e-4}},
            "train": train,
            "log": {"level": "ERROR", "log_dir": folder},
        }
    )
    check_config(config)
    return config


def engine_of(config: MainConfig):
    """Return a synchronous engine, ready to run."""
    return build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer),
    )


def epochs(engine, count: int) -> float:
    """Run `count` epochs and return the CPU seconds they took."""
    start = time.process_time()
    for _ in range(count):
        engine._rollout()
        engine._update_dataset()
        engine._train()
        engine._sync_weights()
        engine._end_epoch(engine.epoch)
    return time.process_time() - start


def sb3_of(task: str):
    """Return Stable-Baselines3's PPO with the same work."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    return PPO(
        "MlpPolicy", make_vec_env(task, ENVS), n_steps=STEPS, batch_size=64, n_epochs=10,
        device="cpu", seed=0,
    )  # fmt: skip


def sb3_epochs(model, count: int) -> float:
    """Train for `count` rollouts and return the CPU seconds they took."""
    start = time.process_time()
    model.learn(count * STEPS * ENVS, reset_num_timesteps=False)
    return time.process_time() - start


def by_hand(config: MainConfig, task: str):
    """Return a function that runs epochs of a loop without the framework, with the same update."""
    policy = build_policy_group(config.policy.type, config.policy).train_list[0]
    from rlightning.types import EnvMeta

    env = gym.make_vec(
        task, ENVS, vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )  # fmt: skip
    space = env.single_action_space
    policy.init_train(config.train, EnvMeta("e", space, env.single_observation_space, ENVS))
    model, shape = policy.actor_critic, env.single_observation_space.shape
    observations = np.zeros((STEPS + 1, ENVS, *shape), np.float32)
    rewards = np.zeros((STEPS, ENVS), np.float32)
    terminated, truncated = np.zeros((2, STEPS, ENVS), bool)
    state = {"observation": env.reset(seed=0)[0]}

    def run(count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            actions, log_probs, values, finals = [], [], [], torch.zeros(STEPS, ENVS)
            with torch.inference_mode():
                for step in range(STEPS):
                    observations[step] = state["observation"]
                    distribution, value = model.act(torch.from_numpy(observations[step]))
                    action, log_prob = distribution.sample_with_log_prob()
                    actions.append(action)
                    log_probs.append(log_prob)
                    values.append(value)
                    sent = action.numpy()
                    if isinstance(space, gym.spaces.Box):
                        sent = np.clip(sent, space.low, space.high)
                    result = env.step(sent)
                    state["observation"], rewards[step], terminated[step], truncated[step] = result[
                        :4
                    ]
                    if truncated[step].any():
                        cut = truncated[step]
                        final = np.stack(list(result[4]["final_obs"][cut])).astype(np.float32)
                        finals[step, torch.from_numpy(cut)] = model.act(torch.from_numpy(final))[1]
                observations[STEPS] = state["observation"]
                values.append(model.act(torch.from_numpy(observations[STEPS]))[1])
                value = torch.stack(values)
                ended = torch.from_numpy(terminated | truncated)
                advantage, returns = gae(
                    torch.from_numpy(rewards), value[:-1], torch.where(ended, finals, value[1:]),
                    torch.from_numpy(terminated), torch.from_numpy(truncated),
                    gamma=0.99, gae_lambda=0.95,
                )  # fmt: skip
            flat = {
                "observation": torch.from_numpy(observations[:STEPS].reshape(-1, *shape)),
                "action": torch.stack(actions).flatten(0, 1),
                "log_prob": torch.stack(log_probs).flatten(),
                "value": value[:-1].flatten(),
                "advantage": advantage.flatten(),
                "return": returns.flatten(),
            }
            policy.update_dataset({name: tensor.clone() for name, tensor in flat.items()})
            policy.train()
        return time.process_time() - start

    return run


def alternate(contestants: dict, rounds: int, rows: int) -> dict[str, list[float]]:
    """Let the contestants take turns; return steps per CPU-second of each turn."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run(1)  # the first rollout pays for allocations
    for _ in range(rounds):
        for name, run in contestants.items():
            rates[name].append(rows / run(1))
    return rates


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median ratio of turns that followed each other."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def main() -> None:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    figures: list[dict] = []
    goals: list[dict] = []

    def report(name: str, value: float, judged: list[dict], detail: object) -> None:
        figures.append({"name": name, "value": round(value, 3), "detail": detail})
        goals.extend(judged)
        print(f"{name:57} {value:10.2f}  {detail}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for task in ("CartPole-v1", "HalfCheetah-v5"):
            for update, fused in UPDATES.items():
                config = config_of(task, f"{folder}/{task}-{fused}", fused_update=fused)
                engine, model = engine_of(config), sb3_of(task)
                rates = alternate(
                    {
                        "ours": lambda n, e=engine: epochs(e, n),
                        "sb3": lambda n, m=model: sb3_epochs(m, n),
                        "hand": by_hand(config, task),
                    },
                    rounds,
                    STEPS * ENVS,
                )
                engine.close()
                median = {name: statistics.median(values) for name, values in rates.items()}
                detail = {name: round(value) for name, value in median.items()}
                name = f"{task}: times Stable-Baselines3, {update}"
                times = ratio(rates["ours"], rates["sb3"])
                judged = [
                    goal(f"{name} (floor)", times, at_least=2),
                    goal(name, times, at_least=3),
                ]
                report(name, times, judged if fused == "auto" else [], detail)
                name = f"{task}: own cost in %, {update}"
                cost = 100 * (ratio(rates["hand"], rates["ours"]) - 1)
                judged = [
                    goal(f"{name} (floor)", cost, at_most=15),
                    goal(name, cost, at_most=5),
                ]
                report(name, cost, judged, detail)
        native = config_of(
            "CartPole-v1", f"{folder}/native", num_envs=64, vectorization="native",
            max_rollout_steps=128, minibatch_size=2048, ppo_epochs=4,
        )  # fmt: skip
        for update, fused in UPDATES.items():
            native.train.fused_update = fused
            engine = engine_of(native)
            rates = alternate({"ours": lambda n, e=engine: epochs(e, n)}, rounds, 64 * 128)
            engine.close()
            name = f"64 native CartPoles: steps per CPU-second, {update}"
            rate = statistics.median(rates["ours"])
            judged = [goal(name, rate, at_least=15000)]
            report(name, rate, judged, [round(each) for each in rates["ours"]])
    if not arguments.quick:
        write_result("speed_ppo", figures, goals)


if __name__ == "__main__":
    main()
