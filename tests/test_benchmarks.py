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
    assert not row["goal_holds"]
