"""Environments that live elsewhere: the side that trains (`RemoteEnv`), and the side that acts.

``backend: env_server`` listens for the same environment clients as ``plugrl-run-server``: a
simulator host, a robot, a program in another language. `RemoteEnvClient` makes one of any
environment of this package. This is the one file of rlightning that knows the wire.
"""

from __future__ import annotations

import os
import ssl
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

import plugrl_envs
from plugrl_envs.actions import ActionBorder
from rlightning import __version__
from rlightning.config.wire import WireConfig, wire_spaces
from rlightning.env.base_env import BaseEnv
from rlightning.env.remote_hub import RemoteHub
from rlightning.env.remote_rows import RowTable
from rlightning.env.remote_runner import LocalRows
from rlightning.errors import ConfigError, ContractError
from rlightning.types import EnvRet, map_leaves
from rlightning.utils.logger import get_logger

try:
    from plugrl_protocol import (
        CLOSE_FEEDBACK_TIMEOUT,
        CLOSE_INTERNAL_ERROR,
        CLOSE_SHUTDOWN,
        CLOSE_STOP,
        Backoff,
        ConnectionReplaced,
        Endpoint,
        EndpointConfig,
        EnvClient,
        Feedback,
        Infer,
        ServerOptions,
        ServerStopped,
        SessionConfig,
        make_metadata,
        make_observation,
    )
except ModuleNotFoundError as error:
    if error.name != "plugrl_protocol":
        raise
    raise ConfigError(
        "environments that dial in need plugrl-protocol: pip install 'rlightning[remote]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.config import EnvConfig
    from rlightning.env.remote_rows import Taken
    from rlightning.types import EnvMeta, PolicyResponse

__all__ = ["RemoteEnv", "RemoteEnvClient"]

_log = get_logger("env.remote")
_CLOSES = {
    "stop": CLOSE_STOP,
    "interrupted": CLOSE_SHUTDOWN,
    "failed": CLOSE_INTERNAL_ERROR,
    "overdue": CLOSE_FEEDBACK_TIMEOUT,
}


class RemoteEnv(BaseEnv):
    """The rows of environment clients that dial in, as one worker.

    Several clients, of one environment or several each, make up ``num_envs`` rows. They come, go
    and return while the run goes on: rows without a client are *idle* (they make no data), and the
    episode of a client that is lost is dropped and counted (``lost_episodes``). A reset sends
    nothing: the episodes of clients are their own, and go on.

    What clients show is checked: another camera, name or width than the policy was built for is
    refused by both names, and the run goes on for the others.

    With chunks of actions a transition is a chunk, and ``last_steps`` holds its environment steps.

    Args:
        config: the worker's section; ``task`` may name the Gymnasium environment that clients run,
            from which spaces are read.
        worker_index: position among all environment workers of the run.
        preprocess_fn: from a policy's response to the action.

    Raises:
        ConfigError: the action space is not known, or an address that others can reach is to be
            open to everybody.
    """

    waits_for_others = True

    class Extras(WireConfig):
        """Further configuration keys of this environment."""

        host: str = "127.0.0.1"
        """Address to listen on. Any but a loopback address needs `api_key` or `allow_anonymous`."""
        port: int = Field(default=8000, ge=0, le=65535)
        """Port to listen on; 0 takes a free one, named in the log."""
        zmq_port: int | None = None
        """The port, under the name that it has in RLightning."""
        api_key: str | None = None
        """What clients must show; unset reads PLUGRL_API_KEY from the environment."""
        allow_anonymous: bool = False
        """Let everybody in who can reach the address."""
        certificate: str | None = None
        """Certificate chain in PEM: clients speak wss."""
        private_key: str | None = None
        """The certificate's key in PEM; unset if it is in the same file."""
        max_message_mb: float = Field(default=256.0, gt=0)
        """Largest message taken, in MiB."""
        library: Literal["websockets", "picows"] = "websockets"
        """What carries the frames; picows needs plugrl-protocol[fast]."""
        start_timeout_s: float = Field(default=300.0, gt=0)
        """Longest wait for clients to fill all rows at the start, in seconds."""
        row_timeout_s: float | None = Field(default=300.0, gt=0)
        """Longest time that a row may be without a client later; null: for ever."""
        feedback_timeout_s: float = Field(default=60.0, gt=0)
        """Longest time that a client may take for a chunk of actions, in seconds."""
        batch_deadline_s: float | None = Field(default=None, ge=0)
        """Longest wait for slow clients while others ask; unset waits for every client."""

    _hubs: ClassVar[dict[tuple[str, int, str], RemoteHub]] = {}
    _hubs_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        self.options = options = self.Extras.read(config)
        if "row_timeout_s" in config and config["row_timeout_s"] is None:
            options.row_timeout_s = None  # null is meant
        self._key = options.api_key or os.environ.get("PLUGRL_API_KEY") or None
        if not (_is_loopback(options.host) or self._key or options.allow_anonymous):
            raise ConfigError(
                f"env {config.name!r}: host {options.host} can be reached by others: set api_key "
                "(or PLUGRL_API_KEY), or allow_anonymous: true"
            )
        self._spaces = wire_spaces(config, options, lambda: _task_spaces(config))
        self._border = ActionBorder(self._spaces.action, self.num_envs)
        self._tls: ssl.SSLContext | None = None
        self._hub: RemoteHub | None = None
        self._rows: RowTable | None = None

    # ---- life ----------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """Where it listens; the configured port before `init`."""
        configured = self.options.zmq_port or self.options.port
        return configured if self._hub is None else self._hub.port

    @property
    def _place(self) -> tuple[str, int, str]:
        """What environments with one hub have in common; a port of one's own goes by the name."""
        port = self.options.zmq_port or self.options.port
        return self.options.host, port, "" if port else self.config.name

    def init(self) -> EnvMeta:
        """Begin to listen; where nothing says what clients observe, wait for the first one."""
        self._hub = self._join_hub()
        form = self._spaces.observation or self._hub.await_form(self.options)
        self._rows = RowTable(
            self.num_envs,
            form,
            self._spaces.action,
            action_horizon=self.options.action_horizon,
            purpose=self.purpose,
        )
        return self.get_metadata()

    def _join_hub(self) -> RemoteHub:
        """Return the hub of the address, which environments of this process share."""
        host = self.options.host
        with self._hubs_lock:
            hub = self._hubs.get(self._place)
            if hub is None:
                self._tls = _ssl_context(self.options.certificate, self.options.private_key)
                hub = RemoteHub(
                    self._make_endpoint,
                    closes=_CLOSES,
                    form=self._spaces.observation,
                    address=f"{host}:{self.port}",
                )
                hub.start()
                hub.address = f"{host}:{hub.port}"
                hub.command = self._client_command(hub.port)
                self._hubs[self._place] = hub
                _log.info("listening for environment clients at %s", hub.address)
            hub.users += 1
            return hub

    def _client_command(self, port: int) -> str:
        """Return how a person starts a client of this environment on the machine it listens at."""
        options, is_known = self.options, self.options.action_space is None
        env = f"gym-v1 --env.name {self.config.task}" if is_known else "YOUR_ENVIRONMENT"
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # not to be dialled
        host = everywhere.get(options.host, options.host)
        secret = " --api-key KEY" if self._key else ""
        certificate = " --ca-file CERTIFICATE" if options.certificate else ""
        return (
            f"plugrl-run-env-client {env} --num-envs {self.num_envs} --server-host {host} "
            f"--server-port {port}{secret}{certificate}"
        )

    def _make_endpoint(self, hub: RemoteHub) -> Endpoint:
        options = self.options
        shape = self._spaces.action.shape or ()
        metadata = make_metadata(
            server_version=__version__,
            action_horizon=options.action_horizon,
            action_dim=int(np.prod(shape[1:] if options.action_horizon > 1 else shape)),
        )
        config = EndpointConfig(
            listen=ServerOptions(
                host=options.host,
                port=options.zmq_port or options.port,
                api_key=self._key,
                ssl_context=self._tls,
                max_message_mb=options.max_message_mb,
            ),
            session=SessionConfig(feedback_timeout_s=options.feedback_timeout_s),
            library=options.library,
        )
        return Endpoint(hub, metadata=metadata, config=config)

    def get_observation_space(self) -> Any:
        """Return the observation space of one row."""
        form = self._spaces.observation if self._rows is None else self._rows.form
        if form is None:
            raise ContractError("what clients observe is known after init()")
        return form.space

    def get_action_space(self) -> Any:
        """Return the action space of one row, of a chunk where the horizon is above 1."""
        return self._border.policy_space

    def close(self) -> None:
        """Leave; the last environment of the address tells clients that the run is finished."""
        hub, self._hub = self._hub, None
        if hub is None:
            return
        if self._rows is not None:
            hub.release(self._rows)
        with self._hubs_lock:
            hub.users -= 1
            if hub.users:
                return
            self._hubs.pop(self._place, None)
        hub.stop(failed=isinstance(sys.exc_info()[1], Exception))  # Ctrl-C is no failure

    # ---- stepping ------------------------------------------------------------------------------

    def reset(self) -> EnvRet:
        """Wait for a client in every row, and return what they see.

        Raises:
            NoClientError: too few come in time.
        """
        return self._exchange(None)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Act in every row with the action of `policy_resp`, ``[N, *A]``, of chunks ``[N, H, *A]``.

        For one row it may also be ``[*A]`` or ``[H, *A]``.

        Raises:
            ContractError: the action does not fit the action space.
            NoClientError: a row has had no client for too long.
        """
        try:
            action = self._border.convert(self._preprocess_fn(policy_resp))
        except plugrl_envs.InvalidActionError as error:
            raise ContractError(f"environment {self.env_id}: {error}") from error
        by_time = action.swapaxes(0, 1) if self.options.action_horizon > 1 else action[None]
        return self._exchange(by_time)

    def _exchange(self, action: Any) -> EnvRet:
        if self._hub is None or self._rows is None:
            raise ContractError(f"environment {self.env_id} is not initialised; call init() first")
        taken: Taken = self._hub.exchange(self._rows, action, self.options)
        return self._env_ret(taken)

    def _env_ret(self, taken: Taken) -> EnvRet:
        info: dict[str, Any] = {}
        if taken.final is not None:
            ended = taken.terminated | taken.truncated
            info = {"final_obs": taken.final, "_final_obs": ended}
        for key, value in (("_idle", taken.idle), ("_lost", taken.lost), ("text", taken.text)):
            if value is not None:
                info[key] = value
        if taken.executed is not None:
            info["executed_action"], info["_executed_action"] = taken.executed
        self._count(taken, info)
        fields = (taken.observation, taken.reward, taken.terminated, taken.truncated, info)
        extra = {"last_steps": taken.steps} if self.options.action_horizon > 1 else {}
        if self.num_envs == 1:
            fields = tuple(map_leaves(lambda leaf: leaf[0], field) for field in fields)
            extra = {name: value[0] for name, value in extra.items()}
        return EnvRet(self.env_id, *fields, _extra=extra)

    def _count(self, taken: Taken, info: dict[str, Any]) -> None:
        """Account for episodes that ended, as the clients tell of them."""
        episodes = taken.episodes
        if self._rows is None or not len(episodes.returns):
            return
        self._add("episode_return", float(episodes.returns.sum()), len(episodes.returns))
        self._add("episode_length", float(episodes.lengths.sum()), len(episodes.lengths))
        told = ~np.isnan(episodes.successes)
        if told.any():
            self._add("success", float(episodes.successes[told].sum()), int(told.sum()))
            info["success"] = self._rows.success.copy()

    def _account(self, env_ret: EnvRet) -> None:
        """Do nothing: chunks and lost episodes are counted in `_count`."""

    def get_env_stats(self, reset: bool = False) -> dict[str, list[float]]:  # noqa: FBT001, FBT002  # public contract
        """Return ``{metric: [sum, count]}``; ``lost_episodes`` since they were last forgotten."""
        lost = 0 if self._rows is None else self._rows.lost_episodes
        totals = {**super().get_env_stats(reset), "lost_episodes": [float(lost), 1.0]}
        if reset and self._rows is not None:
            self._rows.count_lost()
        return totals


def _task_spaces(config: EnvConfig) -> tuple[Any, Any]:
    """Make the Gymnasium environment that `config` names, for its spaces."""
    env = plugrl_envs.make_vec(config.task, 1, env_kwargs=config.env_kwargs.to_dict())
    try:
        return env.single_observation_space, env.single_action_space
    finally:
        env.close()


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _ssl_context(certificate: str | None, private_key: str | None) -> ssl.SSLContext | None:
    """Return what encrypts; None where there is no certificate.

    Raises:
        ConfigError: the files hold no certificate and its key.
    """
    if certificate is None:
        if private_key is not None:
            raise ConfigError(f"env private_key is {private_key}, and certificate is not set")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key)
    except OSError as error:  # of which ssl.SSLError is one
        key = private_key or "unset: in the same file"
        raise ConfigError(
            f"env certificate {certificate} (private_key {key}) cannot be used: {error}. Give a "
            "certificate chain in PEM, and its key"
        ) from error
    return context


class RemoteEnvClient:
    """An environment of this package that dials in to whoever trains.

    Args:
        env: a `BaseEnv` of any number of rows, or a Gymnasium environment.
        hostname: of the trainer: ``plugrl-run-server`` or an ``env_server`` backend; a whole
            ``ws://`` or ``wss://`` URL stands for host and port.
        port: of the trainer.
        api_key: sent in the handshake; None reads PLUGRL_API_KEY from the environment.
        seed: of the first reset; None continues the environment's own random streams.
        give_up_after_s: longest search for a trainer, in seconds; None never gives up.
        ssl_context: for ``wss``.

    Attributes:
        env: the environment.
        episodes: how many have ended.
    """

    def __init__(
        self,
        env: Any,
        hostname: str,
        port: int,
        *,
        api_key: str | None = None,
        seed: int | None = None,
        give_up_after_s: float | None = 300.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        scheme = "ws" if ssl_context is None else "wss"
        url = hostname if "://" in hostname else f"{scheme}://{_bracketed(hostname)}:{port}"
        self.env = env
        self.episodes = 0
        self._rows = LocalRows(env)
        self._seed = seed
        self._wire = EnvClient(
            url,
            api_key=api_key or os.environ.get("PLUGRL_API_KEY") or None,
            backoff=Backoff(limit_s=give_up_after_s),
            ssl_context=ssl_context,
        )

    def connect(self) -> None:
        """Connect to the trainer, waiting for it as long as it may take.

        Raises:
            ConnectionError: it does not come within the limit, or refuses.
        """
        self._wire.connect()

    def run(self, num_episodes: int | None = None) -> None:
        """Do what the trainer says until its run is finished, or `is_finish` of the environment.

        A connection that is lost is made anew; its chunks are dropped and episodes go on.

        Args:
            num_episodes: stop after so many; None goes on.

        Raises:
            ConnectionError: the trainer refuses what this environment shows, or is gone for good.
            ContractError: the trainer's actions do not fit; it is told so, and closed with 1008.
        """
        rows = self._rows
        rows.reset(self._seed)
        try:
            while num_episodes is None or self.episodes < num_episodes:
                try:
                    self._ask()
                    while not rows.step():
                        pass
                    self._report()
                except ConnectionReplaced as lost:
                    _log.warning("%s; dropped the chunks in flight, connecting again", lost)
                    rows.drop()
                if rows.is_finished:
                    break
        except ServerStopped:
            _log.info("the trainer says that the run is finished")
        except ContractError as error:
            self._wire.refuse(str(error))
            raise
        finally:
            self.close()

    def _ask(self) -> None:
        asking = self._rows.without_chunk()
        shown = self._rows.show(asking)
        action = self._wire.infer(
            Infer(
                env_indices=asking,
                step_ids=self._rows.step_ids[asking],
                observation=make_observation(num_envs=len(asking), **shown),
            )
        )
        self._rows.load(asking, action.action)

    def _report(self) -> None:
        report = self._rows.finish()
        self.episodes += int((report.terminated | report.truncated).sum())
        rows = report.rows
        self._wire.feedback(
            Feedback(
                env_indices=rows,
                step_ids=report.step_ids,
                observation=make_observation(num_envs=len(rows), **report.shown),
                rewards=report.rewards,
                terminated=report.terminated,
                truncated=report.truncated,
                info=report.info,
                steps=report.steps,
            )
        )

    def close(self) -> None:
        """End the connection, and close the environment."""
        self._wire.close()
        self.env.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
