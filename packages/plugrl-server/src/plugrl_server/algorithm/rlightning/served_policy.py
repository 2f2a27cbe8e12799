"""`ServedPolicy`: a policy of rlightning as the server sees policies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, final

import numpy as np

from plugrl_envs.actions import ActionBorder
from plugrl_server.algorithm.rlightning.parts import build_policies, spaces_of, user_errors
from plugrl_server.errors import ObservationError
from plugrl_server.policy.base_policy import BasePolicy
from rlightning.policy.joining import join_rows, split_rows
from rlightning.types import BatchedData, EnvMeta, EnvRet, map_leaves
from rlightning.utils.observation_form import ObservationForm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.config import MainConfig
    from rlightning.types import PolicyResponse

__all__ = ["ServedPolicy", "row_of"]

_NO = np.bool_(False)  # noqa: FBT003  # a value, not a switch


def row_of(rows: Any, row: int) -> Any:
    """Return one environment's part of an observation, without the batch axis."""
    return map_leaves(lambda leaf: leaf[row], rows)


@final
class ServedPolicy(BasePolicy):
    """Every environment of a client is one environment worker of one row.

    A policy that acts in joined rows, or whose configuration has several rows (``num_envs``), gets
    a leading row axis, as it would in process; any other gets one row at a time without one.

    Args:
        config: the whole run; the first ``env`` section says what clients show and take.

    Attributes:
        group: the TRAIN and the EVAL instance.
        form: what clients show.
        row_meta: of one environment.
        deterministic: whether it acts without exploration.

    Raises:
        UsageError: the policy cannot be built for these environments.
    """

    def __init__(self, config: MainConfig) -> None:
        super().__init__(config)
        keys, spaces = spaces_of(config.env[0])
        assert spaces.observation is not None  # `spaces_of` has seen to it
        self.form: ObservationForm = spaces.observation
        self._border = ActionBorder(spaces.action, 1)
        self.action_horizon = keys.action_horizon
        shape = spaces.action.shape or ()
        self.action_dim = int(np.prod(shape[1:] if keys.action_horizon > 1 else shape))
        self.row_meta = EnvMeta(
            env_id="served",
            action_space=self._border.policy_space,
            observation_space=self.form.space,
            num_envs=1,
        )
        rows = config.env[0].num_envs
        self._joins = rows > 1
        self.deterministic = False
        with user_errors():
            self.group = build_policies(config)
            self.group.init(config.train, dataclasses.replace(self.row_meta, num_envs=rows))

    @property
    def name(self) -> str:
        """The class of the policy that is served."""
        return type(self.group.eval_list[0]).__name__

    def prepare_observation(self, _obs: dict[str, Any]) -> Any:
        """Give the observation as the policy sees it, ``[n, ...]``, copied.

        Raises:
            ObservationError: the client shows other names or shapes than the policy was built for.
        """
        if not self.form.fits(_obs):
            raise ObservationError(
                f"observation {ObservationForm.of(_obs)}",
                str(self.form),
                hint="Set env.observation of the configuration to what the client shows",
            )
        return map_leaves(np.array, self.form.read(_obs))

    def get_action_and_runtime_state(self, _obs: dict[str, Any]) -> tuple[Any, Any]:
        """Act in environments that have just begun, ``[n, H, *A]``; see `act`."""
        rows = self.prepare_observation(_obs)
        count = len(_obs["text"])
        with self.group.memory_kept(empty=True):
            return self.act(
                [EnvRet(f"row-{row}", row_of(rows, row), 0.0, _NO, _NO) for row in range(count)]
            )

    def act(self, env_rets: Sequence[EnvRet]) -> tuple[Any, Any]:
        """Act in n environments.

        Returns:
            Actions ``[n, H, *A]`` within their bounds; and an object array ``[n]`` of the pairs
            (what the environment returned, what the policy answered).
        """
        responses = self.respond(env_rets)
        action = np.concatenate([self._border.convert(response.action) for response in responses])
        pairs = np.empty(len(env_rets), object)
        for row, pair in enumerate(zip(env_rets, responses, strict=True)):
            pairs[row] = pair
        return (action if self.action_horizon > 1 else action[:, None]), pairs

    def respond(self, env_rets: Sequence[EnvRet]) -> Sequence[PolicyResponse]:
        """Return the policy's answers, one each."""
        joins = self._joins and not self.group.eval_list[0].batched_rollout
        asked = [join_rows(env_rets)] if joins else list(env_rets)
        ids = [env_ret.env_id for env_ret in asked]
        answers = self.group.rollout_batch(
            BatchedData(ids, asked), deterministic=self.deterministic
        ).values()
        return split_rows(answers[0], env_rets) if joins else answers

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
