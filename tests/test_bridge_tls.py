"""Environments that dial in over TLS and with a key: who is let in, and who is told why not."""

import contextlib
import re
import ssl
import threading
from pathlib import Path

import gymnasium as gym
import pytest

from plugrl_protocol import Backoff, EnvClient, HandshakeError, ServerNotFoundError
from rlightning.config import EnvConfig
from rlightning.env.remote_env import RemoteEnv, RemoteEnvClient
from rlightning.errors import ConfigError

PEM = Path(__file__).parents[1] / "packages/plugrl-protocol/tests/localhost_certificate.pem"
"""A certificate for localhost, signed by itself, and its key."""
QUICK = Backoff(first_s=0.01, limit_s=0.2)


def remote(**keys):
    return RemoteEnv(
        EnvConfig.from_dict(
            {"name": "far", "backend": "env_server", "task": "CartPole-v1", "port": 0, **keys}
        )
    )


@contextlib.contextmanager
def running(call):
    """Run a client in a thread beside the block; it must end soon after it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def files(tmp_path):
    """The certificate and its key, in files of their own."""
    blocks = re.findall(r"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n", PEM.read_text(), re.S)
    assert len(blocks) == 2
    parts = re.split(r"(?=-----BEGIN)", PEM.read_text())
    for part in parts[1:]:
        (tmp_path / ("key.pem" if "PRIVATE KEY" in part else "cert.pem")).write_text(part)
    return {"certificate": str(tmp_path / "cert.pem"), "private_key": str(tmp_path / "key.pem")}


def test_a_client_that_trusts_the_certificate_and_has_the_key_plays(files):
    env = remote(**files, api_key="secret")
    env.init()
    trusts = ssl.create_default_context(cafile=PEM)
    url = f"wss://localhost:{env.port}"
    with pytest.raises(HandshakeError, match="certificate is not trusted"):
        EnvClient(url, api_key="secret", backoff=QUICK).connect()
    for key in ("guess", None):
        with pytest.raises(HandshakeError, match="401"):
            EnvClient(url, api_key=key, backoff=QUICK, ssl_context=trusts).connect()
    with pytest.raises(ServerNotFoundError):  # what answers does not speak without TLS
        EnvClient(f"ws://localhost:{env.port}", api_key="secret", backoff=QUICK).connect()
    client = RemoteEnvClient(
        gym.make("CartPole-v1"), "localhost", env.port, api_key="secret", ssl_context=trusts
    )
    with running(client.run):
        assert env.reset().observation.shape == (4,)
        env.close()


def test_certificate_and_key_may_be_in_one_file_and_the_key_in_the_environment(monkeypatch):
    monkeypatch.setenv("PLUGRL_API_KEY", "secret")
    env = remote(certificate=str(PEM))
    env.init()
    trusts = ssl.create_default_context(cafile=PEM)
    client = RemoteEnvClient(gym.make("CartPole-v1"), f"wss://localhost:{env.port}", 0,
                             ssl_context=trusts)  # fmt: skip
    with running(client.run):
        assert env.reset().observation.shape == (4,)
        env.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"certificate": "nowhere.pem"}, r"certificate nowhere.pem .* cannot be used: .*No such"),
        ({"certificate": __file__}, r"cannot be used: .*Give a certificate chain in PEM"),
        ({"private_key": str(PEM)}, "certificate is not set"),
    ],
    ids=["no file", "no certificate", "only a key"],
)
def test_files_that_cannot_be_meant_are_named_before_anybody_waits(keys, message):
    env = remote(**keys)
    with pytest.raises(ConfigError, match=message):
        env.init()
    env.close()
