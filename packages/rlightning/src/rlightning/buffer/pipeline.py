"""The stages that turn what an environment returned and a policy answered into one row.

Where no stage is replaced, nothing is called: the fields are handed on as they are. Knows nothing
about where rows go.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rlightning.buffer.utils.preprocessors import (
    Preprocessor,
    default_obs_preprocessor,
    default_reward_preprocessor,
)
from rlightning.buffer.utils.utils import (
    default_env_ret_preprocess_fn,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
)
from rlightning.errors import ConfigError, ContractError
from rlightning.types import Processed_EnvRet_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

__all__ = ["Pipeline", "refuse_taken"]

_TAKEN = frozenset(Processed_EnvRet_fields)
"""Names that a transition has for what the environment returned."""

_DEFAULTS: dict[str, Callable[..., Any]] = {
    "obs_preprocessor": default_obs_preprocessor,
    "reward_preprocessor": default_reward_preprocessor,
    "env_ret_preprocess_fn": default_env_ret_preprocess_fn,
    "policy_resp_preprocess_fn": default_policy_resp_preprocess_fn,
    "preprocess_fn": default_preprocess_fn,
    "postprocess_fn": default_postprocess_fn,
}
_CALLS = {
    "env_ret_preprocess_fn": ("obs_preprocessor", "reward_preprocessor"),
    "preprocess_fn": (
        "obs_preprocessor",
        "reward_preprocessor",
        "env_ret_preprocess_fn",
        "policy_resp_preprocess_fn",
    ),
}
"""Which stages each default calls; replacing it leaves those with no caller."""


def refuse_taken(made: Iterable[str], fields: Collection[str]) -> None:
    """Refuse answers of a policy with a name that the buffer gives to what it makes itself.

    Raises:
        ContractError: there is one.
    """
    taken = [name for name in made if name in fields]
    if taken:
        raise ContractError(
            f"the policy answers {', '.join(taken)}, which this buffer makes itself; give it "
            "another name"
        )


@dataclasses.dataclass(kw_only=True)
class Pipeline:
    """The stages of one buffer; None means the default.

    Raises:
        ConfigError: a stage is replaced whose only caller is replaced too.
    """

    obs_preprocessor: Any = None
    reward_preprocessor: Any = None
    env_ret_preprocess_fn: Any = None
    policy_resp_preprocess_fn: Any = None
    preprocess_fn: Any = None
    postprocess_fn: Any = None

    def __post_init__(self) -> None:
        replaced = {name for name in _DEFAULTS if self._stage(name) is not _DEFAULTS[name]}
        for caller, called in _CALLS.items():
            clash = [name for name in called if name in replaced]
            if caller in replaced and clash:
                raise ConfigError(
                    f"{caller} is replaced together with {', '.join(clash)}, which only the "
                    f"default {caller} calls: do that work inside your {caller}, or leave "
                    f"{caller} alone"
                )
        for name in _DEFAULTS:
            setattr(self, name, self._stage(name))
        self.plain = not replaced - {"postprocess_fn"}
        """Whether rows are handed on as they are."""
        self.by_row = "postprocess_fn" in replaced
        """Whether finished rows go through a `postprocess_fn` of the user's."""

    def _stage(self, name: str) -> Callable[..., Any]:
        stage: Callable[..., Any] | None = getattr(self, name)
        return _DEFAULTS[name] if stage is None else stage

    def bind(self, meta: EnvMeta) -> None:
        """Make the preprocessor of the worker's observation space, where a class was given."""
        kind = self.obs_preprocessor
        if isinstance(kind, type) and issubclass(kind, Preprocessor):
            self.obs_preprocessor = kind(meta.observation_space)

    def row(
        self, env_ret: EnvRet, response: PolicyResponse
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the row's fields, and the environment's ``info``.

        Raises:
            ContractError: the policy answered a field with the name of an environment's field.
        """
        if not self.plain:
            return self._custom_row(env_ret, response)
        fields: dict[str, Any] = {
            "observation": env_ret.observation,
            "last_reward": env_ret.last_reward,
            "last_terminated": env_ret.last_terminated,
            "last_truncated": env_ret.last_truncated,
        }
        if env_ret._extra:
            fields.update(env_ret._extra)
        count = len(fields)
        answers = response.extras
        fields.update(answers)
        if len(fields) != count + len(answers) or not _TAKEN.isdisjoint(answers):
            self._refuse_clash(env_ret, response)
        return fields, env_ret.info

    def _custom_row(
        self, env_ret: EnvRet, response: PolicyResponse
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self._refuse_clash(env_ret, response)
        row = self.preprocess_fn(
            {},
            env_ret,
            response,
            self.obs_preprocessor,
            self.reward_preprocessor,
            self.env_ret_preprocess_fn,
            self.policy_resp_preprocess_fn,
        )
        if not isinstance(row, dict):
            raise ContractError(
                f"a preprocessing function returned a {type(row).__name__}; expected the "
                "transition dictionary"
            )
        info = row.pop("info", None)
        return row, info if isinstance(info, dict) else {}

    @staticmethod
    def _refuse_clash(env_ret: EnvRet, response: PolicyResponse) -> None:
        clash = (env_ret.to_dict().keys() | _TAKEN) & response.extras.keys()
        if clash:
            raise ContractError(
                f"the response fields {sorted(clash)} have the names of environment fields; "
                "rename them in the policy"
            )
