"""`ServedPolicy`: a policy of rlightning as the server sees policies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from plugrl_envs.actions import ActionBorder
from plugrl_server.algorithm.rlightning.chains import ChainTable
from plugrl_server.algorithm.rlightning.parts import build_policies, spaces_of, user_errors
from plugrl_server.errors import ObservationError
from plugrl_server.policy.base_policy import BasePolicy
from rlightning.policy.joining import ROW_OWNERS, split_rows
from rlightning.types import BatchedData, EnvMeta, EnvRet, map_leaves
from rlightning.utils.observation_form import ObservationForm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlightning.config import MainConfig
    from rlightning.policy import PolicyGroup
    from rlightning.types import PolicyResponse

__all__ = ["ServedPolicy"]


@final
class ServedPolicy(BasePolicy):
    """Environments of clients are rows of one environment worker.

    A policy that acts in joined rows, or whose configuration has several rows (``num_envs``), gets
    a leading row axis, as it would in process; any other gets one row at a time without one.

    Args:
        config: the whole run; the first ``env`` section says what clients show and take.
        build: makes the TRAIN and EVAL instances.

    Attributes:
        group: the TRAIN and the EVAL instance.
        form: what clients show.
        row_meta: of one environment.
        deterministic: whether it acts without exploration.

    Raises:
        UsageError: the policy cannot be built for these environments.
    """

    def __init__(
        self, config: MainConfig, build: Callable[[MainConfig], PolicyGroup] = build_policies
    ) -> None:
        super().__init__(config)
        keys, spaces = spaces_of(config.env[0])
        assert spaces.observation is not None  # `spaces_of` has seen to it
        self.form: ObservationForm = spaces.observation
        self._action_space = spaces.action
        self._borders = {1: ActionBorder(spaces.action, 1)}
        self.action_horizon = keys.action_horizon
        shape = spaces.action.shape or ()
        self.action_dim = int(np.prod(shape[1:] if keys.action_horizon > 1 else shape))
        self.row_meta = EnvMeta(
            env_id="served",
            action_space=self._borders[1].policy_space,
            observation_space=self.form.space,
            num_envs=1,
        )
        rows = config.env[0].num_envs
        self._joins = rows > 1
        self.deterministic = False
        with user_errors():
            self.group = build(config)
            self.group.init(config.train, dataclasses.replace(self.row_meta, num_envs=rows))

    @property
    def name(self) -> str:
        """The class of the policy that is served."""
        return self.group.policy_class.__name__

    def prepare_observation(self, _obs: dict[str, Any]) -> Any:
        """Give the observation as the policy sees it, ``[n, ...]``, copied.

        Raises:
            ObservationError: the client shows other names or shapes than the policy was built for.
        """
        if not self.form.fits(_obs):
            raise ObservationError(
                f"observation {ObservationForm.of(_obs)}",
                str(self.form),
                hint="set env.observation of the configuration to what the client shows",
            )
        return map_leaves(np.array, self.form.read(_obs))

    def get_action_and_runtime_state(self, _obs: dict[str, Any]) -> tuple[Any, Any]:
        """Act in environments that have just begun, ``[n, H, *A]``; see `act`."""
        table = ChainTable(shows_steps=self.action_horizon > 1)
        slots = table.slots_of(range(len(_obs["text"])))
        rows = self.prepare_observation(_obs)
        with self.group.memory_kept(empty=True):
            return self.act(table.env_ret("rows", slots, rows))

    def act(self, env_ret: EnvRet) -> tuple[Any, Any]:
        """Act in n environments.

        Args:
            env_ret: what they show, n rows.

        Returns:
            Actions ``[n, H, *A]`` within their bounds; and what the policy saw and answered,
            ``{"observation": [n, ...], "response": {field: [n, ...]}}``.
        """
        response = self.respond(env_ret)
        rows = len(env_ret.last_reward)
        if rows not in self._borders:
            self._borders[rows] = ActionBorder(self._action_space, rows)
        action = self._borders[rows].convert(response["action"])
        state = {"observation": env_ret.observation, "response": response}
        return (action if self.action_horizon > 1 else action[:, None]), state

    def respond(self, env_ret: EnvRet) -> dict[str, Any]:
        """Return the fields that the policy answers to n rows, ``[n, ...]`` each.

        Raises:
            ContractError: a field has not one entry per row.
        """
        acting = self.group.eval_list
        if len(acting) == 1 and (self._joins or acting[0].batched_rollout):
            (answer,) = split_rows(self._ask([env_ret])[0], [env_ret])
            return {name: _as_maps(value) for name, value in answer.extras.items()}
        return self._stacked(
            self._ask([_row(env_ret, row) for row in range(len(env_ret.last_reward))])
        )

    def _ask(self, env_rets: Sequence[EnvRet]) -> Sequence[PolicyResponse]:
        batch = BatchedData([env_ret.env_id for env_ret in env_rets], list(env_rets))
        return self.group.rollout_batch(batch, deterministic=self.deterministic).values()

    def _stacked(self, answers: Sequence[PolicyResponse]) -> dict[str, Any]:
        """Join the answers to single rows, which may have a leading axis of one."""
        extras = [answer.extras for answer in answers]
        has_axis = np.ndim(extras[0]["action"]) > len(self.row_meta.action_space.shape or ())
        return {name: _join([row[name] for row in extras], has_axis) for name in extras[0]}

    def fake_runtime_state(self, batch_size: int) -> Any:
        """Give what acting on zeros gives."""
        zeros = {
            "images": {
                k: np.zeros((batch_size, *v), np.uint8) for k, v in self.form.images.items()
            },
            "states": {k: np.zeros((batch_size, v)) for k, v in self.form.states.items()},
            "text": np.full(batch_size, ""),
        }
        return self.get_action_and_runtime_state(zeros)[1]


def _row(env_ret: EnvRet, row: int) -> EnvRet:
    """Return one environment's part, under its own name and without the row axis."""

    def pick(tree: Any) -> Any:
        return map_leaves(lambda leaf: leaf[row], tree)

    owners = env_ret.info[ROW_OWNERS]
    info: dict[str, Any] = {}
    if env_ret.info.get("_final_obs", np.zeros(len(owners)))[row]:
        info = {key: pick(env_ret.info[key]) for key in ("final_obs", "_final_obs")}
    return EnvRet(
        owners[row][0],
        pick(env_ret.observation),
        pick(env_ret.last_reward),
        pick(env_ret.last_terminated),
        pick(env_ret.last_truncated),
        info,
        _extra=pick(env_ret._extra),
    )


def _as_maps(value: Any) -> Any:
    """Write tuples as maps, as the buffer names their entries."""
    if isinstance(value, tuple):
        value = {str(index): part for index, part in enumerate(value)}
    if isinstance(value, dict):
        return {key: _as_maps(part) for key, part in value.items()}
    return value


def _join(values: list[Any], has_axis: bool) -> Any:  # noqa: FBT001  # private
    """Join one field of the answers to single rows."""
    first = _as_maps(values[0])
    if isinstance(first, dict):
        rows = [_as_maps(value) for value in values]
        return {key: _join([row[key] for row in rows], has_axis) for key in first}
    if first is None:
        return None
    together = has_axis and np.shape(first)[:1] == (1,)
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if together else torch.stack(values)
    return np.concatenate(values) if together else np.stack([np.asarray(v) for v in values])
