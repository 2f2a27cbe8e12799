"""What the distribution exports, needs and loads."""

import subprocess
import sys
from importlib.metadata import requires

import plugrl_protocol


def test_the_public_names_are_pinned():
    public = {
        name
        for name, value in vars(plugrl_protocol).items()
        if not name.startswith("_") and getattr(value, "__name__", "") != f"plugrl_protocol.{name}"
    }
    assert sorted({*public, "__version__"}) == sorted(plugrl_protocol.__all__)
    assert len(plugrl_protocol.__all__) == 52
    assert plugrl_protocol.__version__ == "0.1.0"


def test_it_needs_numpy_msgpack_and_websockets_and_nothing_else():
    needed = [line for line in requires("plugrl-protocol") or [] if "extra ==" not in line]

    assert sorted(line.split(">")[0] for line in needed) == ["msgpack", "numpy", "websockets"]


def test_importing_it_loads_no_websocket_library():
    code = (
        "import sys, plugrl_protocol; "
        "print(sorted({'websockets', 'picows', 'torch', 'gymnasium'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
