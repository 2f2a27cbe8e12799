"""`BasePolicy`: the class that users subclass, once, for acting and for learning.

A TRAIN instance owns the optimizer and updates the network; an EVAL instance acts. This module
drives the hooks of a subclass in their documented order and carries everything a policy needs
between the two roles. It knows nothing about environments, buffers or where other workers run.
"""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from rlightning.checkpoint import load_plain
from rlightning.config import Config
from rlightning.errors import CheckpointError, ContractError
from rlightning.policy.finite_guard import FiniteGuard
from rlightning.policy.inference import InferenceModeAwaitable
from rlightning.policy.over_ranks import check_same_weights, least_over_ranks
from rlightning.policy.starting_weights import start_from
from rlightning.policy.state import (
    EXTRA_STATE,
    Settings,
    find_modules,
    find_stateful,
    load_extra_state,
    optimizer_settings,
    read_extra_state,
    read_training_state,
    unwrap,
    write_training_state,
)
from rlightning.types import EnvRet, PolicyResponse, PolicyRole, to_device
from rlightning.utils.tensors import default_device, set_nested_attr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlightning.config import PolicyConfig, TrainConfig
    from rlightning.types import EnvMeta

__all__ = ["BasePolicy", "PolicyRole", "set_nested_attr"]

_FIRST_UPDATES = 3
_CHECK_EVERY = 20
"""After which updates ranks compare their weights: each of the first ones, then one in so many."""


class BasePolicy(nn.Module, ABC):
    """A policy and its learning rule.

    Subclasses implement `construct_network`, `setup_optimizer`, `rollout_step`, `postprocess`,
    `update_dataset` and `train`; `get_trainable_parameters` and `load_state_dict` have defaults
    over `model_list`.

    TRAIN order: ``__init__``, `construct_network` (with ``backend="transformers"``), `model_list`
    found, modules in training mode, wrapped for data parallelism, `setup_optimizer`; then per epoch
    `update_dataset`, `train`, `get_trainable_parameters`.
    EVAL order: ``__init__``, `construct_network`, `model_list` found, modules in evaluation mode;
    then `load_state_dict` per weight sync and `rollout_step` per environment step.

    Args:
        config: the ``policy`` section; the ``train`` section is ``config.train_config``.
        role_type: ``"train"`` or ``"eval"``.

    Raises:
        ValueError: another role.
    """

    batched_rollout: ClassVar[bool] = False
    """Whether `rollout_step` takes the rows of all environment workers joined in one `EnvRet`,
    always with a leading row axis. Otherwise it is called once per worker."""

    uneven_batches: ClassVar[bool] = False
    """Whether `train` takes the same number of gradient steps on every rank of a data-parallel
    learner though their batches have different numbers of rows. Otherwise all get as many rows as
    the smallest has."""

    reads_action_mask: ClassVar[bool] = False
    """Whether it acts and learns with the actions that ``observation["action_mask"]`` keeps only.
    Others are not given environments of which some have fewer actions."""

    class Extras(Config):
        """Further keys of the ``policy`` section that this class reads, with their defaults."""

        init_from: str | None = None
        """A checkpoint whose modules of the same names learning starts from; a resumed run goes on
        from its own."""

    class TrainExtras(Config):
        """Further keys of the ``train`` section that this class reads, with their defaults."""

    def __init__(self, config: PolicyConfig, role_type: PolicyRole | str) -> None:
        super().__init__()
        self.config = config
        self.role_type = PolicyRole(role_type)
        self.device: str = default_device()
        self.model_list: list[tuple[str, nn.Module]] = []
        self.is_init = False
        self.rollout_mode = config.rollout_mode
        self.deterministic = False
        self.dataset: Any = None
        self.process_group: Any = None
        self.world_size = 1
        self.weights_version = -1
        self.timing_raw: dict[str, dict[str, float]] = {}
        self._logged: dict[str, list[float]] = {}
        self._dropped_rows = 0
        self._some_rank_is_idle = False
        self._updates = 0
        self._guard: FiniteGuard | None = None
        self._optimizer_settings: Settings = {}
        self._weights_lock = threading.Lock()
        self._inference = torch.inference_mode()  # entered under the lock: it is one at a time

    # ---- what subclasses implement -------------------------------------------------------------

    @abstractmethod
    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Create the network as attributes of self.

        Args:
            env_meta: spaces of one environment, and how many rows a worker steps.
            *args: unused by the framework.
            **kwargs: ``backend="transformers"`` on TRAIN workers.
        """

    @abstractmethod
    def setup_optimizer(self, optim_cfg: Any) -> None:
        """Create the optimizer; called on TRAIN workers only, after the network exists."""

    @abstractmethod
    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Return the action for `env_ret`, whose observation is a tensor on `self.device`.

        Runs in inference mode. `self.deterministic` is true during evaluation. With
        ``rollout_mode: async`` it is a coroutine function.
        """

    @abstractmethod
    def postprocess(
        self, env_ret: EnvRet | None = None, policy_resp: PolicyResponse | None = None
    ) -> Any:
        """Process what the environment and the policy returned; may do nothing."""

    @abstractmethod
    def update_dataset(self, data: Any) -> None:
        """Keep the sampled batch for `train`.

        Args:
            data: a TensorDict of flat ``[rows, ...]`` tensors on `self.device`; what a buffer of
                your own gives otherwise, its arrays and tensors moved there, too.
        """

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Update the network from the last dataset; return a dict of metrics, or None."""

    def get_trainable_parameters(self) -> dict[str, Any]:
        """Return ``{module name: state dict}`` of `model_list`."""
        return {name: unwrap(module).state_dict() for name, module in self.model_list}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load what `get_trainable_parameters` returned on a TRAIN worker."""
        for name, module in self.model_list:
            unwrap(module).load_state_dict(state_dict[name], *args, **kwargs)

    def training_state(self) -> dict[str, Any]:
        """Return further state that a resumed run needs, as plain data and tensors.

        Optimizers, schedulers, gradient scalers and generators that are attributes are saved
        already; override for counters and the like.
        """
        return {}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore what `training_state` returned."""

    def episode_memory(self) -> dict[str, Any]:
        """Return what `rollout_step` remembers of the episodes under way, by environment id.

        Plain data and tensors, copied. For recurrent policies and the like: the framework sets it
        aside during evaluation and saves it with checkpoints.
        """
        return {}

    def load_episode_memory(self, memory: dict[str, Any]) -> None:
        """Replace what is remembered by what `episode_memory` returned; ``{}`` forgets it all."""

    # ---- initialisation ------------------------------------------------------------------------

    def init_eval(self, eval_config: Any = None, env_meta: EnvMeta | None = None) -> None:
        """Build the network for acting."""
        del eval_config  # part of the public signature; nothing here depends on it
        with self._missing_key_named("model_cfg"):
            self.construct_network(env_meta=env_meta)  # type: ignore[arg-type]  # None only in tests
        self._find_model()
        self.to(self.device)
        self.eval()
        self.is_init = True

    def init_train(self, train_config: TrainConfig, env_meta: EnvMeta | None = None) -> None:
        """Build the network and the optimizer for learning."""
        with self._missing_key_named("model_cfg"):
            self.construct_network(env_meta=env_meta, backend="transformers")  # type: ignore[arg-type]  # as above
        self._find_model()
        self.to(self.device)
        for child in self.children():
            child.train()
        path = self.config.get("init_from")
        if path is not None:
            start_from(self, path)
        self._wrap_for_data_parallelism(train_config.parallel)
        with self._missing_key_named("optim_cfg"):
            self.setup_optimizer(self.config.optim_cfg)
        self._optimizer_settings = optimizer_settings(self)
        if train_config.check_finite:
            self._guard = FiniteGuard(self)
        self.is_init = True

    @contextlib.contextmanager
    def _missing_key_named(self, section: str) -> Iterator[None]:
        """Say what to set where a subclass reads a key of `section` that is not there."""
        try:
            yield
        except AttributeError as error:
            if error.obj is not self.config.get(section):
                raise
            raise ContractError(
                f"{type(self).__name__} reads {error.name!r}, and policy.{section} has no such "
                f"key; set policy.{section}.{error.name}"
            ) from error

    def _find_model(self) -> None:
        """Fill `model_list` with the direct children that train, unless the user already did."""
        if not self.model_list:
            self.model_list = find_modules(self)
            return
        for name, module in self.model_list:
            if not isinstance(module, nn.Module):
                raise ContractError(
                    f"model_list entry {name!r} is a {type(module).__name__}; expected a "
                    "torch.nn.Module"
                )

    def _wrap_for_data_parallelism(self, parallel: str | None) -> None:
        import torch.distributed as dist

        if self.process_group is not None:
            self.world_size = dist.get_world_size(self.process_group)
        if self.process_group is None or (parallel is None and self.world_size == 1):
            return
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        custom_wrap = getattr(self, "wrap_with_ddp", None)
        if custom_wrap is not None:
            custom_wrap(gpu, self.process_group)
            return
        for name, module in self.model_list:
            wrapped = nn.parallel.DistributedDataParallel(
                module,
                device_ids=None if gpu is None else [gpu],
                process_group=self.process_group,
                find_unused_parameters=True,
            )
            for place in self._places_of(name, module):
                set_nested_attr(self, place, wrapped)

    def _places_of(self, name: str, module: nn.Module) -> list[str]:
        """Return the attributes to wrap of an entry of `model_list`: `name`, or those that hold it.

        Raises:
            ContractError: no attribute does: what the policy calls would not be the wrapper.
        """
        held = [
            path for path, found in self.named_modules(remove_duplicate=False) if found is module
        ]
        if not held:
            raise ContractError(
                f"model_list entry {name!r} is no attribute of {type(self).__name__}, so that its "
                "gradients would not be averaged over the train workers: set it as an attribute "
                "(a list of modules as torch.nn.ModuleList), or write a wrap_with_ddp of your own"
            )
        return [name] if name in held else held

    def is_initialized(self) -> bool:
        """Return whether `init_eval` or `init_train` has run."""
        return self.is_init

    def eval(self) -> BasePolicy:
        """Put every module into evaluation mode, without running the user's `train`."""
        self.training = False
        for child in self.children():
            child.eval()
        return self

    # ---- acting --------------------------------------------------------------------------------

    def _rollout(self, env_ret: EnvRet) -> PolicyResponse:
        with self._weights_lock, self._inference:
            response = self.rollout_step(self._pre_rollout_hook(env_ret))
        return self._post_rollout_hook(env_ret, response)

    async def _rollout_async(self, env_ret: EnvRet) -> PolicyResponse:
        coroutine: Any = self.rollout_step(self._pre_rollout_hook(env_ret))
        if not inspect.iscoroutine(coroutine):
            raise ContractError(
                f"{type(self).__name__}.rollout_step is no coroutine function; write `async def "
                "rollout_step`, or set policy.rollout_mode: sync"
            )
        response = await InferenceModeAwaitable(coroutine)
        return self._post_rollout_hook(env_ret, response)

    def _postprocess(self, env_ret: EnvRet, policy_resp: PolicyResponse) -> PolicyResponse:
        """Run `postprocess`; where it returns nothing, `policy_resp` goes on as it is."""
        with torch.inference_mode():
            processed = self.postprocess(env_ret=env_ret, policy_resp=policy_resp)
        return policy_resp if processed is None else processed

    def _pre_rollout_hook(self, env_ret: EnvRet) -> EnvRet:
        return env_ret.to(self.device)

    def _post_rollout_hook(self, env_ret: EnvRet, response: Any) -> PolicyResponse:
        if not isinstance(response, PolicyResponse) or response.env_id != env_ret.env_id:
            self._refuse_response(env_ret, response)
        if self.device != "cpu":
            response.cpu()
        answered: PolicyResponse = response.mark_policy_sent()
        return answered

    def _refuse_response(self, env_ret: EnvRet, response: Any) -> None:
        name = f"{type(self).__name__}.rollout_step"
        if inspect.iscoroutine(response):
            response.close()
            raise ContractError(f"{name} is a coroutine function; set policy.rollout_mode: async")
        if not isinstance(response, PolicyResponse):
            raise ContractError(
                f"{name} returned a {type(response).__name__}; expected a PolicyResponse "
                "(env_id=env_ret.env_id, action=...)"
            )
        raise ContractError(
            f"{name} answered env_id {response.env_id!r}; expected {env_ret.env_id!r}: "
            "pass env_id=env_ret.env_id"
        )

    # ---- learning ------------------------------------------------------------------------------

    def _update_dataset(self, data: Any) -> None:
        data = self._agree_on_rows(data)
        if self.device != "cpu":
            data = data.to(self.device) if hasattr(data, "to") else to_device(data, self.device)
        if self._guard is not None:
            self._guard.watch(data)
        self.update_dataset(data)

    def _agree_on_rows(self, data: Any) -> Any:
        """Return the batch, cut to what every rank has unless `train` copes with more."""
        if self.process_group is None or not hasattr(data, "batch_size"):
            return data
        least = least_over_ranks(len(data), self.process_group)
        self._some_rank_is_idle = least == 0
        self._dropped_rows = 0 if self.uneven_batches else len(data) - least
        return data[:least] if self._dropped_rows else data

    def _train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._logged.clear()
        if self._some_rank_is_idle:
            return {"skipped_updates": 1.0}
        result = self.train(*args, **kwargs)
        if result is not None and not isinstance(result, dict):
            raise ContractError(
                f"{type(self).__name__}.train returned a {type(result).__name__}; expected a "
                "dictionary of metrics, or None"
            )
        if self._guard is not None:
            self._guard.check_parameters()
        if self._updates < _FIRST_UPDATES or self._updates % _CHECK_EVERY == 0:
            check_same_weights(self, self.process_group)
        self._updates += 1
        if self._dropped_rows:
            self.log_metric("dropped_rows", self._dropped_rows)
        logged = {key: sum(values) / len(values) for key, values in self._logged.items()}
        return logged | (result or {})

    def priorities(self) -> tuple[Any, Any] | None:
        """Return the rows last learned from and how much each has still to teach, or None.

        For prioritised replay: the batch's ``index``, and a non-negative number per row.
        """
        return None

    def set_dump_dir(self, path: pathlib.Path) -> None:
        """Say where to save what is found not to be finite."""
        if self._guard is not None:
            self._guard.dump_dir = path

    def log_metric(self, key: str, value: float) -> None:
        """Report a metric from inside `train`; several values of one epoch are averaged."""
        self._logged.setdefault(key, []).append(float(value))

    def check_finite(self, name: str, tensor: torch.Tensor) -> None:
        """Raise `NonFiniteError` naming `name` where `tensor` holds NaN or infinity.

        Call it on a loss before ``backward``. Gradients are checked before every optimizer step
        anyway. Does nothing with ``train.check_finite: false``.
        """
        if self._guard is not None:
            self._guard.check(name, tensor)

    # ---- weights and checkpoints ---------------------------------------------------------------

    def export_weights(self) -> dict[str, Any]:
        """Return everything another worker needs to act like this one.

        ``weights`` is the user's own `get_trainable_parameters`; ``extra`` holds every other
        parameter and buffer of the policy (bare parameters, frozen modules, normalisers).
        """
        return {"weights": self.get_trainable_parameters(), "extra": read_extra_state(self)}

    def import_weights(self, version: int, payload: dict[str, Any]) -> None:
        """Load what `export_weights` returned; waits for a running `rollout_step` to end.

        Where that is a coroutine function, for those of all environments that run side by side: no
        step sees the weights of two versions.
        """
        with self._weights_lock, torch.no_grad():
            self.load_state_dict(payload["weights"])
            load_extra_state(self, payload["extra"])
            self.weights_version = version

    def get_param_fingerprint(self) -> dict[str, float]:
        """Return the L2 norm of every parameter and floating-point buffer, by name."""
        state = nn.Module.state_dict(self)
        return {
            name.replace("module.", ""): float(tensor.double().norm())
            for name, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        }

    def save_checkpoint(self, path: str) -> None:
        """Write the weights of `model_list`, and everything else the policy holds, to `path`."""
        content: dict[str, Any] = {
            name: unwrap(module).state_dict() for name, module in self.model_list
        }
        extra = read_extra_state(self)
        if extra:
            content[EXTRA_STATE] = extra
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)

    def load_checkpoint(self, path: str) -> None:
        """Load what `save_checkpoint` wrote; executes no code from the file.

        Raises:
            CheckpointError: the file is damaged, or another policy's.
        """
        content = load_plain(path, device=self.device)
        expected = {name for name, _ in self.model_list}
        found = set(content) - {EXTRA_STATE}
        if found != expected:
            raise CheckpointError(
                f"{path} holds the modules {sorted(found)}; {type(self).__name__} has "
                f"{sorted(expected)}. Is it another policy's checkpoint?"
            )
        try:
            for name, module in self.model_list:
                unwrap(module).load_state_dict(content[name])
            load_extra_state(self, content.get(EXTRA_STATE, {}))
        except (RuntimeError, ContractError) as error:
            raise CheckpointError(f"{path} does not fit {type(self).__name__}: {error}") from error

    def export_training_state(self) -> dict[str, Any]:
        """Return optimizers, schedulers, scalers and generators, and `training_state`."""
        return write_training_state(
            find_stateful(self), self.training_state(), self._optimizer_settings
        )

    def import_training_state(self, state: dict[str, Any]) -> None:
        """Restore what `export_training_state` returned.

        A learning rate or another setting of an optimizer that the configuration has changed since
        then stays changed.

        Raises:
            CheckpointError: something that the policy has is missing from `state`.
        """
        settings = self._optimizer_settings
        self.load_training_state(read_training_state(find_stateful(self), state, settings))
