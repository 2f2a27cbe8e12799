"""A robot's control loop on `plugrl-protocol` alone: no Gymnasium, no simulator, numpy only.

The robot here is a two-joint arm that exists in this file; put your drivers behind the same three
methods. A person at the robot may take over at any step: then the person's action is executed, and
reported as executed, so that the learner knows what really happened.

    python examples/robot_loop.py ws://trainer:8000 --episodes 20 --rate-hz 10
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plugrl_protocol import (
    Backoff,
    ConnectionReplaced,
    EnvClient,
    Feedback,
    Infer,
    Observation,
    ServerStopped,
    WireError,
    make_observation,
)

Vector = npt.NDArray[np.float32]
# Asked before every step with the joint angles and the policy's action: None leaves it in charge.
Person = Callable[[Vector, Vector], "Vector | None"]

THIS_ROBOT = np.array([0], dtype=np.int64)  # one robot: env index 0
STEPS_PER_EPISODE = 40


@dataclass
class Arm:
    """Two joints that should reach a target; replace this with your robot."""

    rng: np.random.Generator
    angles: Vector = field(default_factory=lambda: np.zeros(2, np.float32))
    target: Vector = field(default_factory=lambda: np.zeros(2, np.float32))

    def reset(self) -> None:
        """Bring the robot to the start; on a real one this takes seconds."""
        self.angles = np.zeros(2, np.float32)
        self.target = self.rng.uniform(-1.0, 1.0, 2).astype(np.float32)

    def move(self, action: Vector) -> float:
        """Execute one action (joint velocities) and give its reward."""
        self.angles = self.angles + 0.1 * np.clip(action, -1.0, 1.0)
        return -float(np.abs(self.angles - self.target).sum())

    def reached(self) -> bool:
        """Tell whether the task is done."""
        return bool(np.abs(self.angles - self.target).max() < 0.05)

    def look(self) -> Observation:
        """Read cameras and joints: one row, because this is one robot."""
        image = np.zeros((1, 32, 32, 3), np.uint8)
        column, row = (((self.angles + 2.0) / 4.0).clip(0.0, 0.99) * 32).astype(int)
        image[0, row, column] = 255
        pose = np.concatenate([self.angles, self.target])[None]
        return make_observation(
            num_envs=1, images={"camera": image}, states={"pose": pose}, text="reach the target"
        )


@dataclass
class Chunk:
    """What one action chunk became when it was executed."""

    executed: Vector
    """``[H, 2]``: what the robot did; unused rows keep what the policy asked."""
    by_person: npt.NDArray[np.bool_]
    """``[H]``: steps at which a person was in charge."""
    reward: float = 0.0
    steps: int = 0


def execute(arm: Arm, chunk: Vector, person: Person, *, steps_left: int, period_s: float) -> Chunk:
    """Run a chunk at the control rate, until it is used up or the episode ends."""
    record = Chunk(executed=chunk.copy(), by_person=np.zeros(len(chunk), np.bool_))
    for step, asked in enumerate(chunk[:steps_left]):
        begin = time.monotonic()
        taken_over = person(arm.angles, asked)
        if taken_over is not None:
            record.executed[step] = taken_over
            record.by_person[step] = True
        record.reward += arm.move(record.executed[step])
        record.steps = step + 1
        if arm.reached():
            break
        time.sleep(max(0.0, period_s - (time.monotonic() - begin)))
    return record


def report(arm: Arm, record: Chunk, step_id: int, episode_steps: int, total: float) -> Feedback:
    """Say what became of the chunk; on an end the observation is the last one, before the reset."""
    reached, out_of_time = arm.reached(), episode_steps >= STEPS_PER_EPISODE
    return Feedback(
        env_indices=THIS_ROBOT,
        step_ids=np.array([step_id]),
        observation=arm.look(),
        rewards=np.array([record.reward], np.float32),
        terminated=np.array([reached]),
        truncated=np.array([out_of_time and not reached]),
        steps=np.array([record.steps]),
        info={
            "executed_action": record.executed[None],
            "intervened": record.by_person[None],
            "episode": {
                "r": np.array([total], np.float32),
                "l": np.array([episode_steps]),
                "s": np.array([reached]),
            },
        },
    )


def run_episode(client: EnvClient, arm: Arm, person: Person, period_s: float) -> bool:
    """Run one episode; gives whether the target was reached."""
    arm.reset()
    step_id, steps, total = 0, 0, 0.0
    while True:
        request = Infer(
            env_indices=THIS_ROBOT, step_ids=np.array([step_id]), observation=arm.look()
        )
        try:
            action = client.infer(request).action[:, 0].astype(np.float32)
            left = STEPS_PER_EPISODE - steps
            record = execute(arm, action, person, steps_left=left, period_s=period_s)
            steps += record.steps
            total += record.reward
            done = arm.reached() or steps >= STEPS_PER_EPISODE
            client.feedback(report(arm, record, step_id, steps, total))
        except ConnectionReplaced as lost:
            print(f"lost the server ({lost.close}); the arm holds still", file=sys.stderr)
            if lost.must_reset:
                return arm.reached()
            continue
        step_id += 1
        if done:
            return arm.reached()


def nobody(angles: Vector, asked: Vector) -> Vector | None:
    """No person is at the robot."""
    del angles, asked
    return None


class SafetyStop:
    """A stand-in for a person with a joystick: pushes back when a joint goes too far."""

    def __init__(self, limit: float = 1.2) -> None:
        self.limit = limit
        self.interventions = 0

    def __call__(self, angles: Vector, asked: Vector) -> Vector | None:
        """See `Person`."""
        del asked
        too_far = np.abs(angles) > self.limit
        if not too_far.any():
            return None
        self.interventions += 1
        return np.where(too_far, -np.sign(angles), 0.0).astype(np.float32)


def main(arguments: list[str] | None = None) -> int:
    """Run episodes until there are enough, or the run is finished."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--rate-hz", type=float, default=10.0, help="0 runs as fast as it can")
    parser.add_argument("--api-key")
    parser.add_argument("--person", action="store_true", help="somebody watches the joint limits")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    arm = Arm(np.random.default_rng(given.seed))
    person: Person = SafetyStop() if given.person else nobody
    period_s = 1.0 / given.rate_hz if given.rate_hz else 0.0
    reached = 0
    try:
        backoff = Backoff(limit_s=120.0)
        with EnvClient(given.url, api_key=given.api_key, backoff=backoff) as client:
            for _ in range(given.episodes):
                reached += run_episode(client, arm, person, period_s)
    except ServerStopped:
        print("the run is finished")
    except WireError as error:
        print(f"giving up: {error}", file=sys.stderr)
        return 1
    print(f"reached the target {reached} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
