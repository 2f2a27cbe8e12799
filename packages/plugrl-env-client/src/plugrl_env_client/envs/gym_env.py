"""Any Gymnasium environment: ``gym-v1``, and the base of the families with names of their own.

Vectorisation, autoreset and the action border are `plugrl_envs`'.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar, Literal, TypeVar

from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AddRenderObservation

import plugrl_envs
from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.envs.gym_observation import ImageLayout, ObservationMapper
from plugrl_env_client.errors import EnvContractError
from plugrl_env_client.utils.registration import register_env, register_env_config

__all__ = ["GymEnv", "GymEnvConfig"]


@register_env_config("Gym-v1")
@dataclasses.dataclass
class GymEnvConfig(BaseEnvConfig):
    """Options of a Gymnasium environment."""

    name: str = "CartPole-v1"
    """A Gymnasium id; "module:id" imports the module that registers it first."""
    render: bool = False
    """Show the server a rendered frame, too, as the image "render"."""
    vectorization: Literal["sync", "async", "native"] = "sync"
    """Rows one after another, in a process each, or in the id's own vector environment."""
    image_layout: ImageLayout = "auto"
    """Where the channels of images stand: last, first, or where 1, 3 or 4 of them are."""
    kwargs: str = "{}"
    """Options of the environment itself, as JSON."""


GymConfigT = TypeVar("GymConfigT", bound=GymEnvConfig)


@register_env("Gym-v1")
class GymEnv(BaseEnv[GymConfigT]):
    """A Gymnasium environment in the client's contract; rows are reset in the step that ends them.

    Args:
        config: which one, and how.
        num_envs: rows.
        process_id: not used; rows are told apart by their seeds.
        total_processes: likewise.

    Raises:
        plugrl_envs.PlugrlEnvsError: it cannot be made; says why.
        EnvContractError: ``config.kwargs`` is no JSON object, or not what it takes.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # as Gymnasium declares it
    limits_episodes = True
    checks_actions = True
    wrappers: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: GymConfigT,
        num_envs: int = 1,
        process_id: int | None = None,
        total_processes: int | None = None,
    ) -> None:
        super().__init__(config, num_envs, process_id, total_processes)
        options = _json_object(config.kwargs)
        wrappers: list[Any] = list(self.wrappers)
        if config.render:
            options["render_mode"] = "rgb_array"
            wrappers.append(_add_frames)
        try:
            self.vec_env = plugrl_envs.make_vec(
                config.name,
                num_envs,
                vectorization=config.vectorization,
                max_episode_steps=config.max_episode_steps,
                env_kwargs=options,
                wrappers=wrappers,
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, plugrl_envs.PlugrlEnvsError):
                raise
            raise EnvContractError(
                f"{config.name} cannot be made with --env.kwargs {config.kwargs!r}: {error} "
                "(--log-level debug shows where)"
            ) from error
        self.metadata = {**self.vec_env.metadata, **type(self).metadata}
        self.single_observation_space = self.vec_env.single_observation_space
        self.observation_space = self.vec_env.observation_space
        self.single_action_space = self.vec_env.single_action_space
        self.action_space = self.vec_env.action_space
        self._observe = ObservationMapper(
            self.single_observation_space, image_layout=config.image_layout
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Reset all rows; row i is seeded with ``seed + i``.

        Raises:
            EnvContractError: single rows were asked for, which reset themselves.
        """
        if options and "reset_indices" in options:
            raise EnvContractError(f"the rows of {self.config.name} reset themselves")
        seeds = None if seed is None else [seed + row for row in range(self.num_envs)]
        batch, info = self.vec_env.reset(seed=seeds, options=options)
        return self._observe(batch), info

    def step(self, actions: Any) -> tuple[Observation, Any, Any, Any, dict[str, Any]]:
        """Step every row; see `BaseEnv.step`."""
        batch, rewards, terminated, truncated, info = self.vec_env.step(actions)
        if "final_obs" in info:
            info = {**info, "final_obs": self._observe(info["final_obs"])}
        return self._observe(batch), rewards, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        """Close all rows; Gymnasium may call it for one that could not be made, too."""
        made = getattr(self, "vec_env", None)
        if made is not None:
            made.close(**kwargs)


def _add_frames(env: Any) -> Any:
    return AddRenderObservation(env, render_only=False, render_key="render", obs_key="obs")


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise EnvContractError(f"--env.kwargs {text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise EnvContractError(f"--env.kwargs {text!r} is no JSON object, such as '{{\"g\": 9.8}}'")
    return found
