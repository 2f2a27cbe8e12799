"""What benchmarks report of several seeds, against numbers by hand. The benchmarks run by hand."""

import importlib.util
import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a benchmark by name, for one test only."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "common", raising=False)

    def load_one(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load_one


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_shipped_configuration_learns_as_its_recorded_run_did(load, seed):
    """The mean return over the last tenth of the steps is within a tenth of the recorded one."""
    load("common")
    learn_ppo = load("learn_ppo")
    recorded = json.loads((learn_ppo.RESULTS / "cartpole_0.json").read_text())
    result = learn_ppo.run("cartpole", seed, [])
    assert late_return(result) == pytest.approx(late_return(recorded), rel=0.1)


def late_return(result):
    late = [value for step, value in result["curve"] if step > 0.9 * result["env_steps"]]
    return sum(late) / len(late)


@pytest.mark.parametrize(
    ("limits", "wanted", "holds"),
    [
        ({"at_least": 2}, "at least 2", True),
        ({"at_least": 2.5}, "at least 2.5", False),
        ({"at_most": 2}, "at most 2", True),
        ({"at_most": 1.5}, "at most 1.5", False),
    ],
    ids=["as much", "too little", "as little", "too much"],
)
def test_a_goal_says_what_was_found_and_wanted_and_whether_it_holds(load, limits, wanted, holds):
    assert load("common").goal("speed", 2.0, **limits) == {
        "what": "speed",
        "found": 2.0,
        "wanted": wanted,
        "holds": holds,
    }


@pytest.mark.parametrize("limits", [{}, {"at_least": 1, "at_most": 2}], ids=["none", "two"])
def test_a_goal_has_one_limit(load, limits):
    with pytest.raises(ValueError, match="either at_least or at_most"):
        load("common").goal("speed", 2.0, **limits)


def test_a_result_holds_figures_goals_command_machine_and_commit(load, tmp_path, capsys):
    common = load("common")
    common.RESULTS = tmp_path
    goals = [common.goal("speed", 1.0, at_least=2)]
    path = common.write_result("name", {"speed": 1.0}, goals, rounds=3)
    kept = json.loads(path.read_text())
    assert (kept["figures"], kept["goals"], kept["rounds"]) == ({"speed": 1.0}, goals, 3)
    assert {"command", "machine", "commit", "date"} <= kept.keys()
    assert capsys.readouterr().out == "FAILS  speed: 1, at least 2\n"


def test_one_seed_has_a_mean_and_no_interval(load):
    common = load("common")
    assert common.over_seeds([3.04]) == {"mean": 3.0}
    assert common.spread({"mean": 3.0}) == "one seed"


def test_several_seeds_have_an_interquartile_mean_and_an_interval_around_it(load):
    common = load("common")
    row = common.over_seeds([0.0, 10.0, 20.0, 1000.0])
    assert (row["mean"], row["iqm"]) == (257.5, 15.0)
    low, high = row["iqm_interval_95"]
    assert 0 <= low < 15 < high <= 1000
    assert common.over_seeds([5.0, 5.0])["iqm_interval_95"] == [5.0, 5.0]
    assert common.spread(row).startswith("15.0 [")


def test_the_summary_of_learn_ppo_has_every_seed_and_what_it_says_of_them(load, tmp_path):
    load("common")
    learn_ppo = load("learn_ppo")
    learn_ppo.RESULTS = tmp_path
    for seed, value in enumerate([500.0, 500.0, 440.0]):
        run = {"seed": seed, "final_return": value, "env_steps": 9, "evaluations": [[9, value]]}
        (tmp_path / f"cartpole_{seed}.json").write_text(json.dumps(run))
    (row,) = learn_ppo.summarise(["cartpole", "acrobot"])
    assert row["returns"] == [500.0, 500.0, 440.0]
    assert (row["mean"], row["iqm"], row["best"]) == (480.0, 480.0, 500.0)
    assert row["iqm_interval_95"] == [440.0, 500.0]
    (judged,) = learn_ppo.judge([row])
    assert (judged["found"], judged["wanted"], judged["holds"]) == (480.0, "at least 500", False)


def test_who_learns_sooner_and_who_stays_there_has_the_higher_mean(load, tmp_path):
    load("common")
    learning = load("learning")
    learning.RESULTS = tmp_path
    (tmp_path / "name").mkdir()
    for seed, values in enumerate([[10.0, 20.0, 30.0, 40.0], [50.0, 50.0, 50.0, 10.0]]):
        run = {
            "seed": seed,
            "final_return": values[-1],
            "env_steps": 4,
            "evaluations": list(enumerate(values, start=1)),
        }
        (tmp_path / "name" / f"case_{seed}.json").write_text(json.dumps(run))
    rows = learning.summarise("name", {"case": learning.Case("c"), "never_run": learning.Case("c")})
    assert rows.keys() == {"case"}
    row = rows["case"]
    assert (row["seeds"], row["returns"], row["mean"]) == ([0, 1], [40.0, 10.0], 25.0)
    assert (row["mean_on_the_way"], row["late_mean"]) == (32.5, 32.5)


@pytest.mark.parametrize(("ours", "holds"), [([-150.0, -170.0], True), ([-150.0, -190.0], False)])
def test_our_mean_may_not_be_below_the_lowest_of_the_peers_returns(load, tmp_path, ours, holds):
    load("common")
    load("learning")
    learn_sac = load("learn_sac")
    for side, values in (("rlightning", ours), ("stable_baselines3", [-140.0, -160.0])):
        for seed, value in enumerate(values):
            run = {"seed": seed, "returns": {"5000": value, "20000": value}}
            (tmp_path / f"pendulum_sac_{side}_{seed}.json").write_text(json.dumps(run))
    rows = learn_sac.summarise(tmp_path)
    assert [row["env_steps"] for row in rows] == [5000, 20_000]
    assert [judged["holds"] for judged in learn_sac.judge(rows)] == [holds, holds]
