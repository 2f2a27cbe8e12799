"""A command of the wire's packages, the reader of whose output leaves, ends without a message."""

import os
import subprocess
import sys

import pytest

SERVER = ["gaussian-policy", "default", "ppo", "default"]
COMMANDS = {
    "plugrl_server.cli": [["--help"], [*SERVER, "--help"]],
    "plugrl_server.cli_ray": [["--help"]],
    "plugrl_env_client.cli": [["--help"], ["gym-v1", "--help"]],
    "plugrl_protocol.conformance.server_cli": [["--list"]],
    "plugrl_protocol.conformance.client_cli": [["--list"]],
}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [(module, arguments) for module, lines in COMMANDS.items() for arguments in lines],
)
def test_a_reader_that_has_left_ends_a_command_without_a_message(module, arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    finally:
        os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == 141
