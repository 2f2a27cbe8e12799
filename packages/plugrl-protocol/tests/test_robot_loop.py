"""The robot loop of the examples: what it reports, and how it bears a lost server."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from plugrl_protocol.errors import CLOSE_RESYNC, CLOSE_STOP, close_refused
from plugrl_protocol.messages import read_episodes
from plugrl_protocol.testing import NotingApplication, serve_in_thread

EXAMPLE = Path(__file__).parents[3] / "examples" / "robot_loop.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the repository's examples")


@pytest.fixture
def robot(monkeypatch):
    spec = importlib.util.spec_from_file_location("robot_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "robot_loop", module)
    spec.loader.exec_module(module)
    return module


def steer(request):
    """Drive towards the target: a perfect policy with chunks of four."""
    pose = request.observation.states["pose"][0]
    way, step = pose[2:] - pose[:2], np.zeros((4, 1, 2), np.float32)
    for k in range(4):
        step[k, 0] = np.clip(way * 10, -1, 1)
        way = way - 0.1 * step[k, 0]
    return step


def test_it_reaches_its_targets_and_reports_true_episodes(robot, capsys):
    app = NotingApplication(act=steer)
    with serve_in_thread(app) as server:
        assert robot.main([server.url, "--episodes", "3", "--rate-hz", "0"]) == 0
        app.wait_for(lambda notes: notes.closes)

    assert "reached the target 3 times" in capsys.readouterr().out
    assert app.closes[0][1].code == 1000
    ends = [episode for _, report in app.reports for episode in read_episodes(report)]
    steps = [0]
    returns = [0.0]
    for _, report in app.reports:
        steps[-1] += int(report.steps[0])
        returns[-1] += float(report.rewards[0])
        if report.done[0]:
            steps.append(0)
            returns.append(0.0)
    assert [episode.length_steps for episode in ends] == steps[:-1]
    assert [episode.episode_return for episode in ends] == pytest.approx(returns[:-1], rel=1e-5)
    assert all(episode.success for episode in ends)


def test_an_intervention_is_reported_as_executed(robot):
    def outwards(request):
        return np.full((4, 1, 2), 1.0, np.float32)

    app = NotingApplication(act=outwards)
    with serve_in_thread(app) as server:
        assert robot.main([server.url, "--episodes", "1", "--rate-hz", "0", "--person"]) == 0
        app.wait_for(lambda notes: notes.closes)

    taken_over = 0
    for _, report in app.reports:
        by_person = report.info["intervened"][0]
        executed = report.info["executed_action"][0]
        assert (by_person.shape, executed.shape) == ((4,), (4, 2))
        steps = int(report.steps[0])
        taken_over += int(by_person[:steps].sum())
        assert (executed[~by_person] == 1.0).all(), "what the policy asked"
        assert (executed[by_person] <= 0.0).all(), "what the person did"
        assert not by_person[steps:].any()
    assert taken_over > 0
    assert app.reports[-1][1].truncated.tolist() == [True]
    assert not app.reports[-1][1].terminated[0]


def test_it_goes_on_after_a_resync_and_ends_with_the_run(robot, capsys):
    class Moody(NotingApplication):
        def infer(self, connection, request):
            super().infer(connection, request)
            if len(self.requests) == 3:
                connection.close(CLOSE_RESYNC)
            if len(self.requests) == 8:
                connection.close(CLOSE_STOP)

    app = Moody(act=lambda request: np.zeros((4, 1, 2), np.float32))
    with serve_in_thread(app) as server:
        assert robot.main([server.url, "--rate-hz", "0"]) == 0
    assert len(app.clients) == 2
    captured = capsys.readouterr()
    assert "the arm holds still" in captured.err
    assert "the run is finished" in captured.out


def test_it_gives_up_where_reconnecting_would_not_help(robot, capsys):
    class Picky(NotingApplication):
        def infer(self, connection, request):
            connection.close(close_refused("built for another camera"))

    with serve_in_thread(Picky()) as server:
        assert robot.main([server.url]) == 1
    assert "built for another camera" in capsys.readouterr().err
