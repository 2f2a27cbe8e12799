"""Which cluster a run joins, and what it says of one that is not there; without starting any."""

import pytest

from rlightning.errors import ConfigError
from rlightning.runtime.host import WorkerSetup

ray = pytest.importorskip("ray")

from rlightning.runtime.ray import RayRuntime  # noqa: E402

pytestmark = pytest.mark.ray


class Context:
    gcs_address = "10.0.0.7:6379"

    def get_node_id(self):
        return "node-1"


@pytest.fixture
def started(monkeypatch):
    """Return what Ray was asked for; an address answers where it is in the list of the living."""
    asked, alive = [], []

    def init(address, **options):
        asked.append(address)
        if address != "local" and address not in alive:
            raise ConnectionError(f"nothing answers at {address}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    return asked, alive


def runtime(address):
    return RayRuntime(address, setup=WorkerSetup())


def test_a_cluster_that_is_there_is_joined_and_left_running(started):
    asked, alive = started
    alive.append("10.0.0.7:6379")
    runtime("auto").close()
    assert asked == ["10.0.0.7:6379"]


def test_what_an_earlier_cluster_has_left_behind_does_not_keep_a_run_from_starting(started, caplog):
    asked, _ = started
    runtime("auto").close()
    assert asked == ["10.0.0.7:6379", "local", "shutdown"], "what it has started, it ends"
    assert "a Ray cluster at 10.0.0.7:6379, which does not answer" in caplog.text


def test_an_address_that_was_asked_for_must_answer(started):
    with pytest.raises(ConfigError, match=r"ray_address: '10\.0\.0\.9:6379'"):
        runtime("10.0.0.9:6379")


def test_a_cluster_of_ones_own_is_started_whatever_else_runs(started):
    asked, alive = started
    alive.append("10.0.0.7:6379")
    runtime("local").close()
    assert asked == ["local", "shutdown"]
