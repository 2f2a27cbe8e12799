"""The server checker passes our endpoint, on both libraries, and sees what is broken."""

import numpy as np
import pytest

from plugrl_protocol.conformance.raw import Target
from plugrl_protocol.conformance.server_checks import CHECKS, Setup
from plugrl_protocol.conformance.server_cli import check_server, main
from plugrl_protocol.endpoint import EndpointConfig
from plugrl_protocol.errors import CLOSE_STOP
from plugrl_protocol.links import ServerOptions
from plugrl_protocol.messages import make_metadata
from plugrl_protocol.server_session import SessionConfig
from plugrl_protocol.testing import NotingApplication, serve_in_thread


def echo(request):
    """Answer each env with the first entry of its state, four times."""
    first = request.observation.states["state"][:, :1]
    return np.broadcast_to(first, (4, *first.shape)).astype(np.float32)


class PolicyOfOneCamera(NotingApplication):
    """Refuse observations that the policy was not built for."""

    def infer(self, connection, request):
        seen = request.observation
        if set(seen.images) or seen.states["state"].shape[1] != 4:
            connection.refuse("built for states state:4 and no camera")
        else:
            super().infer(connection, request)


def endpoint(library, application=None, **session):
    return serve_in_thread(
        application or PolicyOfOneCamera(act=echo),
        metadata=make_metadata(policy="Echo", action_horizon=4, action_dim=1),
        config=EndpointConfig(
            library=library,
            listen=ServerOptions(api_key="sesame", max_message_mb=1.0),
            session=SessionConfig(**{"feedback_timeout_s": 0.5, **session}),
        ),
    )


def test_our_endpoint_passes_every_clause(library):
    with endpoint(library) as server:
        target = Target(url=server.url, api_key="sesame", timeout_s=10.0)
        setup = Setup(target=target, max_message_mb=1.0, feedback_timeout_s=0.5, echo=True)
        report = check_server(setup)

    verdicts = {name: verdict.name for name, (verdict, _) in report.verdicts.items()}
    assert verdicts.pop("stop") == "SKIP"
    assert set(verdicts.values()) == {"PASS"}, "\n".join(report.lines())
    assert set(verdicts) == {clause.name for clause, _ in CHECKS} - {"stop"}
    assert len(verdicts) > 60


def test_a_server_without_features_passes_and_skips_them(library):
    with endpoint(library, features=()) as server:
        setup = Setup(target=Target(url=server.url, api_key="sesame", timeout_s=10.0))
        names = ["reuse", "reuse-rows", "steps", "steps-range", "env-ids", "state-gone"]
        report = check_server(setup, names)

    assert report.exit_code == 0
    assert [v.name for v, _ in report.verdicts.values()].count("SKIP") == 4


def test_the_end_of_a_run_is_judged(library):
    class Finite(PolicyOfOneCamera):
        def feedback(self, connection, report):
            super().feedback(connection, report)
            if len(self.reports) >= 10:
                connection.close(CLOSE_STOP)

    with endpoint(library, Finite(act=echo)) as server:
        target = Target(url=server.url, api_key="sesame", timeout_s=5.0)
        report = check_server(Setup(target=target, until_stop=True), ["stop"])
    assert report.verdicts["stop"][0].name == "PASS"


@pytest.mark.parametrize(
    ("act", "clause"),
    [
        (lambda r: echo(r)[:, ::-1], "routing"),
        (lambda r: np.zeros((len(r.env_indices), len(r.env_indices), 1)), "action-shape"),
        (lambda r: np.full((4, len(r.env_indices), 1), np.nan), "action-shape"),
        (lambda r: np.zeros((4, len(r.env_indices), 7)), "action-shape"),
    ],
)
def test_broken_actions_are_named(act, clause):
    with endpoint("websockets", NotingApplication(act=act)) as server:
        setup = Setup(target=Target(url=server.url, api_key="sesame", timeout_s=5.0))
        report = check_server(setup, [clause])
    assert report.failures == [clause]


def test_harm_to_others_is_blamed_on_the_clause_that_was_tried():
    class Rude(NotingApplication):
        def connected(self, connection):
            super().connected(connection)
            for other in self.clients[:-1]:
                other.close(CLOSE_STOP)

    with endpoint("websockets", Rude(act=echo)) as server:
        setup = Setup(target=Target(url=server.url, api_key="sesame", timeout_s=5.0))
        report = check_server(setup, ["env-ids"])
    verdict, found = report.verdicts["env-ids"]
    assert verdict.name == "FAIL"
    assert "an honest one, was hit" in found


def test_a_server_that_is_gone_ends_the_check():
    class Fragile(NotingApplication):
        def feedback(self, connection, report):
            super().feedback(connection, report)
            if connection.serial > 1:
                self.act = None

    with endpoint("websockets", Fragile(act=echo)) as server:
        setup = Setup(target=Target(url=server.url, api_key="sesame", timeout_s=0.5))
        report = check_server(setup, ["env-ids", "garbage"])
    assert "server-gone" in report.failures
    assert "garbage" not in report.verdicts


def test_the_command_line(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(CHECKS)
    assert "garbage\t5: undecodable bytes close that connection with resync" in listed

    with endpoint("websockets") as server:
        arguments = [server.url, "--api-key", "sesame", "--only", "garbage", "--only", "env-ids"]
        assert main(arguments) == 0
        assert "2 passed, 0 failed, 0 skipped" in capsys.readouterr().out
    assert main([server.url, "--only", "env-ids", "--timeout", "1"]) == 1, "nobody is there"
    assert "no connection" in capsys.readouterr().out
