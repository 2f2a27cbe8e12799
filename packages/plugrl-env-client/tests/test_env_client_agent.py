"""The agent against a scripted server, over a real connection."""

import numpy as np
import pytest

from plugrl_env_client.agent import ConnectionReplaced, ServerStopped, WebSocketEnvClientAgent
from plugrl_env_client.envs.base_env import Observation
from plugrl_protocol import CLOSE_RESYNC, CLOSE_STOP, Backoff, ServerNotFoundError, make_metadata
from plugrl_protocol.testing import NotingApplication, serve_in_thread

NOW = np.arange(2)
QUICK = Backoff(first_s=0.01, longest_s=0.05, limit_s=5.0)


def observe(value, rows=2):
    return Observation(states={"x": np.full((rows, 3), value)}, text="go")


def report(agent, obs, *, done=(False, False), steps=None):
    no = np.zeros(2, bool)
    agent.feedback(obs, np.array([1.5, 2.5]), np.array(done), no, {}, env_indices=NOW,
                   step_ids=NOW, steps=steps)  # fmt: skip


@pytest.fixture
def served():
    application = NotingApplication()
    with serve_in_thread(application, metadata=make_metadata(action_horizon=4)) as server:
        yield application, server


def connect(server, **options):
    return WebSocketEnvClientAgent(server.url, backoff=QUICK, **options)


def test_one_exchange_carries_everything(served):
    application, server = served
    agent = connect(server)
    assert agent.get_server_metadata()["action_horizon"] == 4
    data = agent.infer(observe(1.0), env_indices=NOW, step_ids=NOW)
    assert data["env_ids"].tolist() == [0, 1]
    assert data["action"].shape == (4, 2, 3)
    assert data["action"][2, 1].tolist() == [20010, 20011, 20012]
    report(agent, observe(2.0), steps=np.array([3, 4]))
    application.wait_for(lambda notes: notes.reports)
    found = application.reports[0][1]
    assert found.rewards.dtype == np.float32
    assert found.rewards.tolist() == [1.5, 2.5]
    assert found.steps.tolist() == [3, 4]
    assert found.observation.text.tolist() == ["go", "go"]
    agent.close()


def test_rows_that_the_server_has_are_left_out_and_others_are_not(served):
    """Byte-identical rows only: -0.0 is not 0.0."""
    application, server = served
    agent = connect(server)
    agent.infer(observe(0.0), env_indices=NOW, step_ids=NOW)
    report(agent, observe(0.0))
    changed = observe(0.0)
    changed.states["x"][1, 2] = -0.0
    agent.infer(changed, env_indices=NOW, step_ids=NOW)
    assert application.clients[0].reused_rows == 1
    seen = application.requests[1][1].observation
    assert np.signbit(seen.states["x"]).tolist() == [[False] * 3, [False, False, True]]
    agent.close()


def test_a_lost_connection_is_said_once_and_replaced(served):
    application, server = served
    agent = connect(server)
    agent.infer(observe(0.0), env_indices=NOW, step_ids=NOW)
    report(agent, observe(0.0))
    application.act = None
    server.call(lambda: application.clients[0].close(CLOSE_RESYNC))
    with pytest.raises(ConnectionReplaced):
        agent.infer(observe(0.0), env_indices=NOW, step_ids=NOW)
    application.act = lambda request: np.zeros((1, 2, 3))
    assert agent.infer(observe(0.0), env_indices=NOW, step_ids=NOW)["action"].shape == (1, 2, 3)
    assert agent.client.connections == 2
    agent.close()


def test_a_report_never_connects(served):
    _, server = served
    agent = connect(server)
    with pytest.raises(ConnectionReplaced):
        report(agent, observe(0.0))
    assert agent.client.connections == 0


def test_a_reset_begins_a_new_connection(served):
    _, server = served
    agent = connect(server)
    agent.infer(observe(0.0), env_indices=NOW, step_ids=NOW)
    agent.reset()
    agent.infer(observe(0.0), env_indices=NOW, step_ids=NOW)
    assert agent.client.connections == 2
    agent.close()


def test_the_end_of_the_run_is_its_own_exception(served):
    _, server = served
    agent = connect(server)
    agent.get_server_metadata()
    server.stop(CLOSE_STOP)
    with pytest.raises(ServerStopped):
        agent.infer(observe(0.0), env_indices=NOW, step_ids=NOW)


def test_patience_ends():
    agent = WebSocketEnvClientAgent("127.0.0.1", 1, backoff=Backoff(first_s=0.01, limit_s=0.1))
    with pytest.raises(ServerNotFoundError, match=r"no server at ws://127.0.0.1:1 after"):
        agent.get_server_metadata()


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("127.0.0.1", None, "ws://127.0.0.1:8000"),
        ("::1", 9, "ws://[::1]:9"),
        ("wss://far.example/run", 9, "wss://far.example/run"),
    ],
)
def test_hosts_become_urls(host, port, url):
    assert WebSocketEnvClientAgent(host, port).client.options.url == url
