"""`RowTable`: the rows of a remote environment, filled by clients that come and go.

A row is one environment of one client. It is *ready* when its client waits for an action, and
between two takes it earns at most one transition. A row whose client is gone is free until another
client sits down in it. Knows nothing about connections, threads and time.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from plugrl_envs.actions import ActionBorder
from plugrl_envs.errors import InvalidActionError
from rlightning.types import map_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    import gymnasium as gym

    from rlightning.utils.observation_form import ObservationForm

__all__ = ["Ask", "Episodes", "Outcome", "RowTable", "Seat", "Taken"]

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclasses.dataclass(slots=True, eq=False)
class Ask:
    """What some environments of a client see while they wait for actions."""

    indices: list[int]
    """The client's own numbers of its environments, n of them."""
    step_ids: list[int]
    """Completed chunks of their episodes."""
    observation: Any
    """As a policy sees it, ``[n, ...]``."""
    text: Any
    """``[n]`` strings."""
    was_taken: bool = False
    """Whether a policy has seen it."""


@dataclasses.dataclass(slots=True, eq=False)
class Outcome:
    """What became of the actions of some environments of a client."""

    indices: list[int]
    rewards: Array
    """Summed over the chunk, ``[m]``."""
    terminated: Array
    truncated: Array
    steps: Array
    """Environment steps of each chunk, ``[m]``."""
    observation: Any
    """What followed, ``[m, ...]``; at an episode's end its own last observation."""
    episode: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The client's own account of episodes that ended: ``r``, ``l``, ``s``, ``mask``, ``[m]``."""
    executed: Array | None = None
    """The actions that were really executed, as `RowTable.read_executed` returns them."""


@dataclasses.dataclass(slots=True, eq=False)
class Seat:
    """Where a client's environments sit."""

    table: RowTable
    rows: dict[int, int] = dataclasses.field(default_factory=dict)
    """The client's own number of an environment to its row."""


class Episodes(NamedTuple):
    """Episodes that ended, K of them: return, length and success, NaN where nobody says."""

    returns: Array
    lengths: Array
    successes: Array


class Taken(NamedTuple):
    """What a step returns; arrays are new, ``[N, ...]``.

    Attributes:
        observation: what to act on.
        reward: of the transition since the last take, float32.
        terminated: whether it ended the episode.
        truncated: likewise, from outside.
        steps: environment steps of the transition, int64.
        final: last observations of episodes that ended, of the observation's layout; None without.
        idle: rows with nothing new: neither transition nor observation; None without.
        lost: rows that begin a new episode because the one before was lost; None without.
        text: instructions; None where there are none.
        executed: actions as they were executed, a person's included, like those asked for, and the
            rows that they are told of; None where no client says.
        episodes: those that ended.
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    steps: Array
    final: Any
    idle: Array | None
    lost: Array | None
    text: Array | None
    executed: tuple[Array, Array] | None
    episodes: Episodes


class RowTable:
    """The rows of one remote environment.

    Args:
        rows: N.
        form: of an observation.
        action_space: of one row, of a chunk where `action_horizon` is above 1.
        action_horizon: H, the actions of a chunk.
        purpose: rows of ``"eval"`` leave out the rest of an episode that was under way when they
            got their client: an evaluation counts whole episodes.

    Attributes:
        lost_episodes: how many were lost since the last `count_lost`.
        has_started: whether every row had a client once; kept by the hub.
        vacant_since_s: since when some row has none; kept by the hub.
    """

    def __init__(
        self,
        rows: int,
        form: ObservationForm,
        action_space: gym.Space[Any],
        *,
        action_horizon: int,
        purpose: Literal["train", "eval"],
    ) -> None:
        self.form, self.purpose, self.rows = form, purpose, rows
        self._action_space, self._action_horizon = action_space, action_horizon
        self.lost_episodes = 0
        self.has_started = False
        self.vacant_since_s: float | None = None
        self.client: list[Any] = [None] * rows
        """Who sits in each row."""
        self.ready = np.zeros(rows, np.bool_)
        self._observation = form.zeros(rows)
        self._final = form.zeros(rows)
        self._text = np.full(rows, "", object)
        self._reward = np.zeros(rows, np.float64)
        self._terminated = np.zeros(rows, np.bool_)
        self._truncated = np.zeros(rows, np.bool_)
        self._steps = np.zeros(rows, np.int64)
        self._executed = np.zeros((rows, *(action_space.shape or ())), action_space.dtype)
        self._told = np.zeros(rows, np.bool_)  # what was executed there is known
        self._success = np.full(rows, np.nan)
        self._lost = np.zeros(rows, np.bool_)
        self._in_episode = np.zeros(rows, np.bool_)  # a policy has seen some of it
        self._partial = np.zeros(rows, np.bool_)  # its beginning was not seen here
        self._left_out = np.zeros(rows, np.bool_)  # it is not to be counted at all
        self._return = np.zeros(rows, np.float64)
        self._length = np.zeros(rows, np.int64)
        self._finished: list[tuple[float, float, float]] = []

    # ---- clients -------------------------------------------------------------------------------

    @property
    def free(self) -> list[int]:
        """Rows without a client."""
        return [row for row, client in enumerate(self.client) if client is None]

    def sit(self, client: Any, seat: Seat, ask: Ask, others: Sequence[int] = ()) -> bool:
        """Give every environment of a client a row; False, and nothing done, if there are too few.

        Args:
            client: who sits down.
            seat: gets the rows.
            ask: what the client asks now.
            others: its environments that are acting.
        """
        wanted = dict.fromkeys([*ask.indices, *others])
        newcomers = sorted(index for index in wanted if index not in seat.rows)
        free = self.free
        if len(newcomers) > len(free):
            return False
        step_ids = dict(zip(ask.indices, ask.step_ids, strict=True))
        for index, row in zip(newcomers, free, strict=False):
            seat.rows[index] = row
            self.client[row] = client
            self._begin(row, is_partial=step_ids.get(index, 1) > 0)
        return True

    def _begin(self, row: int, *, is_partial: bool) -> None:
        """Start to account for an episode."""
        self._return[row], self._length[row] = 0.0, 0
        self._partial[row] = is_partial
        self._left_out[row] = is_partial and self.purpose == "eval"

    def leave(self, seat: Seat) -> None:
        """Free the rows of a client; an episode that had not ended is lost."""
        for row in seat.rows.values():
            ended = self._terminated[row] or self._truncated[row]
            if self._in_episode[row] and not ended:
                self._lose(row)
                self.lost_episodes += 1
            self.client[row], self.ready[row] = None, False
        seat.rows.clear()

    def _lose(self, row: int) -> None:
        self._lost[row], self._in_episode[row] = True, False
        self._reward[row] = self._steps[row] = 0

    def restart(self) -> None:
        """Leave out the rest of the episodes under way: an evaluation begins."""
        for row in range(self.rows):
            if self._in_episode[row] and not self._left_out[row]:
                self._begin(row, is_partial=self._length[row] > 0)

    # ---- what clients say ----------------------------------------------------------------------

    def asked(self, seat: Seat, ask: Ask) -> None:
        """Take what a client's environments see."""
        rows = [seat.rows[index] for index in ask.indices]
        _put(self._observation, rows, ask.observation)
        self._text[rows] = ask.text
        self.ready[rows] = True

    def read_executed(self, given: Any, count: int) -> Array:
        """Return executed actions as a policy numbers them, ``[m, *A]``, of chunks ``[m, H, *A]``.

        Args:
            given: ``[m, H, *A]``, as a client reports them.
            count: the environments of the report, m.

        Raises:
            InvalidActionError: they are no actions of this environment.
        """
        array = np.asarray(given)
        if self._action_horizon == 1:
            if array.shape[:2] != (count, 1):
                raise InvalidActionError(f"shape {array.shape}, expected [{count}, 1, ...]")
            array = array[:, 0]
        if array.shape[:1] != (count,) or array.dtype.kind not in "iuf":
            raise InvalidActionError(f"{array.dtype}{list(array.shape)} for {count} environments")
        array = array - getattr(self._action_space, "start", 0)
        ActionBorder(self._action_space, count).convert(array)
        return array

    def reported(self, seat: Seat, outcome: Outcome) -> None:
        """Take what became of actions; of environments that sit here."""
        rows = [seat.rows[index] for index in outcome.indices]
        ended = outcome.terminated | outcome.truncated
        self._reward[rows] = outcome.rewards
        self._steps[rows] = outcome.steps
        self._terminated[rows], self._truncated[rows] = outcome.terminated, outcome.truncated
        self._return[rows] += outcome.rewards
        self._length[rows] += outcome.steps
        self._told[rows] = outcome.executed is not None
        if outcome.executed is not None:
            self._executed[rows] = outcome.executed
        if ended.any():
            over = [row for row, end in zip(rows, ended, strict=True) if end]
            _put(self._final, over, map_leaves(lambda leaf: leaf[ended], outcome.observation))
            for position in np.flatnonzero(ended).tolist():
                self._end(rows[position], position, outcome.episode)

    def _end(self, row: int, position: int, told: dict[str, Any]) -> None:
        def say(key: str, otherwise: float) -> float:
            return float(told[key][position]) if key in told else otherwise

        success = say("s", np.nan)
        self._success[row] = success
        if not self._partial[row] and say("mask", 1.0):
            own = (float(self._return[row]), float(self._length[row]))
            self._finished.append((say("r", own[0]), say("l", own[1]), success))
        self._return[row], self._length[row], self._partial[row] = 0.0, 0, False

    # ---- what a step takes ---------------------------------------------------------------------

    def acted(self, seat: Seat, ask: Ask) -> Sequence[int]:
        """Return the rows of an ask, in its order, which an action is on its way to."""
        rows = [seat.rows[index] for index in ask.indices]
        self.ready[rows] = False
        return rows

    def take(self, *, is_reset: bool = False) -> Taken:
        """Return what is new since the last take.

        Args:
            is_reset: whether nothing but the observations is wanted.
        """
        ready = self.ready
        over = ready & (self._terminated | self._truncated)
        shown = ready & ~self._left_out & ~self._lost & (not is_reset)
        finals = over & shown
        lost = ready & (self._lost | (over & self._left_out))
        told = self._told & shown
        taken = Taken(
            observation=map_leaves(np.copy, self._observation),
            reward=np.where(shown, self._reward, 0.0).astype(np.float32),
            terminated=self._terminated & shown,
            truncated=self._truncated & shown,
            steps=np.where(shown, self._steps, 0),
            final=map_leaves(np.copy, self._final) if finals.any() else None,
            idle=None if ready.all() else ~ready,
            lost=lost if lost.any() else None,
            text=self._text.astype(np.str_) if any(self._text) else None,
            executed=(self._executed.copy(), told) if told.any() else None,
            episodes=self._take_episodes(),
        )
        self._left_out &= ~over
        self._in_episode |= ready
        for column in (self._reward, self._steps, self._terminated, self._truncated):
            column[ready] = 0
        self._lost[ready] = self._told[ready] = False
        return taken

    def _take_episodes(self) -> Episodes:
        columns = np.array(self._finished, np.float64).reshape(-1, 3)
        self._finished = []
        return Episodes(columns[:, 0], columns[:, 1], columns[:, 2])

    @property
    def success(self) -> Array:
        """Success of the last episode of each row, ``[N]``; NaN where nobody says."""
        return self._success

    def count_lost(self) -> int:
        """Return how many episodes were lost since the last call."""
        count, self.lost_episodes = self.lost_episodes, 0
        return count


def _put(target: Any, rows: Sequence[int], values: Any) -> None:
    """Write rows of an observation."""
    if isinstance(target, dict):
        for name, part in target.items():
            part[rows] = values[name]
    else:
        target[rows] = values
