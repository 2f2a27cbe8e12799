"""Measure a policy: whole episodes, in environments of its own, without exploration.

Every row of the evaluation environments plays its own share of the episodes, so that short
episodes are not counted more often than long ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.types import to_numpy
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup
    from rlightning.types import BatchedData, EnvRet

__all__ = [
    "EpisodeTally",
    "bootstrap_interval",
    "evaluate_episodes",
    "interquartile_mean",
    "summarise",
]

LONGEST_EVALUATION_STEPS = 100_000
"""Steps after which an evaluation ends where the configuration sets no limit."""

SAID_AFTER_STEPS = 20_000
"""Steps after which an evaluation says that it goes on, and for how long at most."""

_log = get_logger("engine.evaluation")


class EpisodeTally:
    """Counts the first episodes of every row, up to the row's quota.

    Args:
        rows: how many environments are stepped at once.
        episodes: how many episodes to count in all, shared evenly over the tasks and then over the
            rows of each; every task gets at least one.
        tasks: the task of each row; by default all have the same.

    Attributes:
        tasks: the names of the tasks.
        returns: of the episodes that were counted.
        lengths: of the same, in steps.
    """

    def __init__(self, rows: int, episodes: int, tasks: Sequence[str] | None = None) -> None:
        labels = np.array([""] * rows if tasks is None else list(tasks))
        self.tasks = list(dict.fromkeys(labels.tolist()))
        self._labels = labels
        self._quota = np.zeros(rows, dtype=np.int64)
        for task, share in zip(self.tasks, _shares(episodes, len(self.tasks)), strict=True):
            own = labels == task
            self._quota[own] = _shares(max(1, share), int(own.sum()))
        self._return = np.zeros(rows)
        self._length = np.zeros(rows, dtype=np.int64)
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self._successes: list[float] = []  # NaN where nothing reports it
        self._tasks: list[str] = []

    @property
    def unfinished(self) -> int:
        """How many episodes are still missing."""
        return int(self._quota.sum())

    @property
    def successes(self) -> list[float]:
        """Of the episodes that were counted, where something reports it."""
        return [success for success in self._successes if not np.isnan(success)]

    def of_task(self, task: str) -> EpisodeTally:
        """Return the tally of one task's episodes alone."""
        own = self._labels == task
        tally = EpisodeTally(int(own.sum()), 0)
        tally._quota, tally._return, tally._length = (
            column[own] for column in (self._quota, self._return, self._length)
        )
        episodes = zip(self.returns, self.lengths, self._successes, self._tasks, strict=True)
        for value, length, success, label in episodes:
            if label == task:
                tally._keep(value, length, success, label)
        return tally

    def _keep(self, episode_return: float, length: int, success: float, task: str) -> None:
        self.returns.append(episode_return)
        self.lengths.append(length)
        self._successes.append(success)
        self._tasks.append(task)

    def add(
        self, reward: Any, ended: Any, success: Any = None, *, steps: Any = 1, begins: Any = None
    ) -> None:
        """Count one step of every row.

        Args:
            reward: ``[rows]``.
            ended: ``[rows]`` bool, whether the episode ended with this step.
            success: ``[rows]``, read where an episode ended; NaN or None where nothing reports it.
            steps: environment steps that this step was, ``[rows]`` or one number.
            begins: ``[rows]`` bool, where an episode begins although the one before had not ended.
        """
        if begins is not None:
            self._return[begins] = 0.0
            self._length[begins] = 0
        self._return += reward
        self._length += steps
        for row in np.flatnonzero(ended):
            if self._quota[row] > 0:
                self._quota[row] -= 1
                self._keep(
                    float(self._return[row]),
                    int(self._length[row]),
                    np.nan if success is None else float(success[row]),
                    str(self._labels[row]),
                )
        self._return[ended] = 0.0
        self._length[ended] = 0


def evaluate_episodes(
    env_group: EnvGroup,
    policy_group: PolicyGroup,
    *,
    episodes: int,
    max_steps: int = -1,
    options: dict[str, Any] | None = None,
    seed: int | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> EpisodeTally:
    """Play `episodes` whole episodes without exploration and return their tally.

    Args:
        env_group: environments used for nothing else.
        policy_group: acts deterministically and is not changed.
        episodes: how many, shared evenly over all tasks and the rows of each.
        max_steps: steps per row at most; -1 means `LONGEST_EVALUATION_STEPS`.
        options: handed to the environments' ``reset``.
        seed: seeds the environments, so that every evaluation sees the same episodes.
        check_stop: called every step; may raise.
    """
    env_rets, _ = env_group.reset(seed=seed, options=options)
    counts = [_rows(env_ret) for env_ret in env_rets.values()]
    tasks = np.repeat(env_group.tasks, counts)
    tally = EpisodeTally(len(tasks), episodes, tasks.tolist())
    limit = LONGEST_EVALUATION_STEPS if max_steps == -1 else max_steps
    with policy_group.memory_kept(empty=True):
        for step in range(limit):
            if tally.unfinished == 0:
                break
            if step == SAID_AFTER_STEPS:
                _log.warning(
                    "after %d steps the evaluation still lacks %d of %d episodes; it ends at step "
                    "%d. A limit of the environment's own is env.max_episode_steps, one of the "
                    "evaluation train.max_eval_rollout_steps",
                    *(step, tally.unfinished, episodes, limit),
                )
            check_stop()
            responses = policy_group.rollout_batch(env_rets, deterministic=True)
            env_rets, _ = env_group.step(responses)
            tally.add(
                _joined(env_rets, "last_reward"),
                _joined(env_rets, "last_terminated") | _joined(env_rets, "last_truncated"),
                _successes(env_rets),
                steps=_steps(env_rets),
                begins=_marked(env_rets, "_lost"),
            )
    return tally


def summarise(tally: EpisodeTally) -> dict[str, float]:
    """Return mean, spread and interquartile mean of the episodes, and how many ended.

    The interquartile mean and its percentile-bootstrap 95 % interval follow Agarwal et al. 2021
    (arXiv:2108.13264).

    Where there are several tasks: over the episodes of all, and as ``<task>/<metric>`` of each.
    """
    metrics = _summary(tally)
    if len(tally.tasks) > 1:
        for task in tally.tasks:
            own = _summary(tally.of_task(task))
            metrics |= {f"{task}/{name}": value for name, value in own.items()}
    return metrics


def _summary(tally: EpisodeTally) -> dict[str, float]:
    metrics: dict[str, float] = {
        "episodes": float(len(tally.returns)),
        "unfinished": float(tally.unfinished),
    }
    if tally.returns:
        returns = np.asarray(tally.returns)
        low, high = bootstrap_interval(returns, interquartile_mean)
        metrics |= {
            "episode_return": float(returns.mean()),
            "episode_return_std": float(returns.std()),
            "episode_return_min": float(returns.min()),
            "episode_return_max": float(returns.max()),
            "episode_return_iqm": float(interquartile_mean(returns[None])[0]),
            "episode_return_iqm_low": low,
            "episode_return_iqm_high": high,
            "episode_length": float(np.mean(tally.lengths)),
        }
    if tally.successes:
        metrics["success"] = float(np.mean(tally.successes))
    return metrics


def interquartile_mean(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the mean of the middle half of each row of ``[B, n]`` samples; ``[B]``."""
    count = samples.shape[1]
    cut = count // 4
    middle = np.sort(samples, axis=1)[:, cut : count - cut]
    return np.asarray(middle.mean(axis=1))


def bootstrap_interval(
    samples: np.ndarray[Any, Any],
    statistic: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    *,
    resamples: int = 1000,
) -> tuple[float, float]:
    """Return the percentile-bootstrap 95 % interval of `statistic` over ``[n]`` samples.

    Resampling is seeded, so that the same samples give the same interval.
    """
    generator = np.random.default_rng(0)
    drawn = samples[generator.integers(len(samples), size=(resamples, len(samples)))]
    low, high = np.percentile(statistic(drawn), [2.5, 97.5])
    return float(low), float(high)


def _shares(count: int, parts: int) -> Any:
    """Return `count` divided into whole parts that differ by one at most, int64 ``[parts]``."""
    share, rest = divmod(count, parts)
    return np.full(parts, share) + (np.arange(parts) < rest)


def _rows(env_ret: EnvRet) -> int:
    return int(np.size(to_numpy(env_ret.last_terminated)))


def _joined(env_rets: BatchedData[EnvRet], name: str) -> Any:
    parts = [np.atleast_1d(to_numpy(getattr(env_ret, name))) for env_ret in env_rets.values()]
    return np.concatenate(parts)


def _steps(env_rets: BatchedData[EnvRet]) -> Any:
    """Return how many environment steps each row took, ``[rows]``; 1 where nothing says."""
    idle, lost = _marked(env_rets, "_idle"), _marked(env_rets, "_lost")
    chunks = any("last_steps" in env_ret._extra for env_ret in env_rets.values())
    if idle is None and lost is None and not chunks:
        return 1
    parts = [
        np.broadcast_to(to_numpy(env_ret._extra.get("last_steps", 1)), _rows(env_ret))
        for env_ret in env_rets.values()
    ]
    steps = np.concatenate(parts)
    for mask in (idle, lost):
        steps = steps if mask is None else np.where(mask, 0, steps)
    return steps


def _marked(env_rets: BatchedData[EnvRet], key: str) -> Any:
    """Return the rows that a worker marks in its info, bool ``[rows]``; None where none does."""
    if not any(key in env_ret.info for env_ret in env_rets.values()):
        return None
    parts = [
        np.broadcast_to(np.asarray(env_ret.info.get(key, False), dtype=bool), _rows(env_ret))
        for env_ret in env_rets.values()
    ]
    return np.concatenate(parts)


def _successes(env_rets: BatchedData[EnvRet]) -> Any:
    """Return ``[rows]`` successes, NaN where a worker reports none; None where none does."""
    parts = [
        np.full(_rows(env_ret), np.nan)
        if env_ret.info.get("success") is None
        else np.atleast_1d(np.asarray(to_numpy(env_ret.info["success"]), dtype=np.float64))
        for env_ret in env_rets.values()
    ]
    joined = np.concatenate(parts)
    return None if np.isnan(joined).all() else joined
