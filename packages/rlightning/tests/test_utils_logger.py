"""Logging touches only the project's logger, and a run's numbers survive kills and backends."""

import csv
import dataclasses
import json
import logging
import math
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from rlightning.errors import ConfigError
from rlightning.utils.logger import (
    MetricsLogger,
    close_logger,
    get_logger,
    get_metrics_logger,
    log_metric,
    setup_logger,
)
from rlightning.utils.logger.backends import BACKENDS, BackendOptions
from rlightning.utils.logger.curve import write_curve
from rlightning.utils.logger.files import MetricsFiles, read_rows


@dataclasses.dataclass
class Settings:
    level: str = "INFO"
    backend: str = "tensorboard"
    project: str = "demo"
    name: str = "run"
    mode: str | None = None


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_logger()


@pytest.fixture
def clock():
    return types.SimpleNamespace(now_s=100.0)


@pytest.fixture
def metrics(tmp_path, clock):
    options = BackendOptions(project="p", name="n", run_dir=tmp_path)
    return MetricsLogger(get_logger("metrics"), options, clock=lambda: clock.now_s)


def rows_of(path):
    return read_rows(path / "metrics.jsonl")


def csv_of(path):
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- the project logger ---------------------------------------------------------------------------


def test_importing_prints_nothing_changes_no_logger_and_loads_no_torch():
    code = (
        "import logging, sys; before = (logging.root.level, list(logging.root.handlers));"
        "import rlightning.utils.logger, rlightning.utils.profiler, rlightning.utils.progress;"
        "assert before == (logging.root.level, list(logging.root.handlers));"
        "assert not logging.getLogger('rlightning').handlers;"
        "heavy = {'torch', 'matplotlib', 'tensorboard', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_land_below_the_project_logger():
    assert get_logger().name == "rlightning"
    assert get_logger("rlightning").name == "rlightning"
    assert get_logger("rlightning.env").name == "rlightning.env"
    assert get_logger("my_robot").name == "rlightning.my_robot"


def test_a_second_setup_replaces_the_first(tmp_path):
    root_before = list(logging.root.handlers)
    setup_logger(Settings(), run_dir=tmp_path / "a")
    setup_logger(Settings(), run_dir=tmp_path / "b")
    get_logger("x").info("once")

    assert (tmp_path / "a" / "run.log").read_text() == ""
    assert (tmp_path / "b" / "run.log").read_text().count("once") == 1
    assert len(get_logger().handlers) == 2
    assert logging.root.handlers == root_before


def test_closing_leaves_the_logger_as_it_was(tmp_path):
    setup_logger(Settings(), run_dir=tmp_path)
    close_logger()
    project = get_logger()
    assert (project.handlers, project.level, project.propagate) == ([], logging.NOTSET, True)


def test_the_level_holds_for_the_terminal_and_the_old_spelling_is_understood(tmp_path, capsys):
    setup_logger(Settings(level="WARINING"), run_dir=tmp_path)
    get_logger("x").info("quiet words")
    get_logger("x").warning("loud words")
    assert "loud words" in (shown := capsys.readouterr().err)
    assert "quiet words" not in shown
    assert "quiet words" in (tmp_path / "run.log").read_text()


def test_an_unknown_level_is_refused_with_the_list(tmp_path):
    with pytest.raises(ValueError, match="'LOUD' is unknown; use one of DEBUG, INFO, WARNING"):
        setup_logger(Settings(level="LOUD"), run_dir=tmp_path)


def test_a_terminal_gets_rich_output(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    setup_logger(Settings(), run_dir=tmp_path)
    assert {type(handler).__name__ for handler in get_logger().handlers} == {
        "FileHandler",
        "RichHandler",
    }


# --- scalars --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        np.float32(1.5),
        np.array(1.5),
        np.array([1.5]),
        torch.tensor(1.5),
        torch.tensor([[1.5]]),
    ],
)
def test_scalars_of_python_numpy_and_torch_are_recorded_as_floats(metrics, value):
    assert metrics.log({"x": value}, prefix="train") == {"train/x": 1.5}


def test_none_is_absent_and_nested_mappings_become_paths(metrics):
    payload = {"a": None, "b": {"c": True, "d": {"e": 2}}}
    assert metrics.log(payload, prefix="p") == {"p/b/c": 1.0, "p/b/d/e": 2.0}
    assert metrics.log(None) == {}


@pytest.mark.parametrize("value", ["text", np.zeros(2), torch.zeros(3), [1]])
def test_what_is_no_number_is_refused_by_name(metrics, value):
    with pytest.raises(TypeError, match=r"metric 'train/x' is .* expected one number"):
        metrics.log({"x": value}, prefix="train")


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), torch.tensor(-math.inf)])
def test_a_number_that_is_not_finite_is_left_out_and_said_once(metrics, tmp_path, caplog, value):
    for step in (10, 20):
        metrics.log({"episode_return": value, "loss": 1.0}, step=step, prefix="train")

    assert all("train/episode_return" not in row for row in rows_of(tmp_path))
    assert [record.message for record in caplog.records] == [
        "train/episode_return is not finite at env step 10; left out"
    ]


def test_without_any_number_no_row_is_written(metrics, tmp_path):
    metrics.log({"episode_return": None}, prefix="rollout")
    assert not (tmp_path / "metrics.jsonl").exists()


# --- files ----------------------------------------------------------------------------------------


def test_a_row_carries_the_three_axes(metrics, tmp_path, clock):
    metrics.advance(env_step=2048, epoch=3)
    clock.now_s += 1.25
    metrics.log({"loss": 0.5}, prefix="train")

    assert rows_of(tmp_path) == [
        {"stream": "train", "env_step": 2048, "epoch": 3, "wall_s": 1.25, "train/loss": 0.5}
    ]


def test_the_default_prefix_is_the_project_name(metrics):
    assert metrics.log({"x": 1}) == {"rlightning/x": 1.0}
    assert metrics.log({"x": 1}, prefix="") == {"x": 1.0}


def test_new_columns_grow_the_csv_and_old_rows_stay(metrics, tmp_path):
    metrics.log({"a": 1}, step=1, prefix="s")
    metrics.log({"a": 2, "b": 3}, step=2, prefix="s")
    metrics.log({"c": 4}, step=2, prefix="t")
    metrics.close()

    picked = [(row["env_step"], row["s/a"], row["s/b"], row["t/c"]) for row in csv_of(tmp_path)]
    assert picked == [("1", "1.0", "", ""), ("2", "2.0", "3.0", ""), ("2", "", "", "4.0")]


def test_the_same_step_of_a_stream_is_one_row(metrics, tmp_path):
    metrics.log({"a": 1}, step=5, prefix="s")
    metrics.log({"a": 9}, step=5, prefix="other")
    metrics.log({"b": 2, "a": 3}, step=5, prefix="s")
    metrics.log({"c": 1}, step=6, prefix="other")
    metrics.log({"d": 1}, step=6, prefix="other")
    metrics.close()

    rows = [{k: v for k, v in row.items() if "/" in k} for row in rows_of(tmp_path)]
    assert rows == [{"s/a": 3.0, "s/b": 2.0}, {"other/a": 9.0}, {"other/c": 1.0, "other/d": 1.0}]
    assert len(csv_of(tmp_path)) == 3


def test_a_late_record_is_kept_at_the_newest_step_and_said_once(metrics, tmp_path, caplog):
    metrics.log({"a": 1}, step=10, prefix="s")
    metrics.log({"b": 2}, step=4, prefix="s")

    assert [(row["env_step"], row["s/a"], row["s/b"]) for row in rows_of(tmp_path)] == [(10, 1, 2)]
    assert "s: env step 4 came after 10; recorded there" in caplog.text


def test_steps_strictly_increase_per_stream_whatever_is_logged(metrics, tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(200):
        stream = rng.choice(["a", "b", "c"])
        metrics.log({f"k{rng.integers(3)}": 1.0}, step=int(rng.integers(30)), prefix=stream)
    metrics.close()

    for name in "abc":
        steps = [row["env_step"] for row in rows_of(tmp_path) if row["stream"] == name]
        assert steps == sorted(set(steps))
    as_text = [{k: str(v) for k, v in row.items()} for row in rows_of(tmp_path)]
    as_csv = [{k: v for k, v in row.items() if v} for row in csv_of(tmp_path)]
    assert sorted(as_text, key=str) == sorted(({k: r[k] for k in r} for r in as_csv), key=str)


def test_a_run_directory_used_before_keeps_the_old_files_aside(tmp_path):
    for number in (1, 2, 3):
        files = MetricsFiles(tmp_path)
        files.write({"stream": "s", "env_step": number, "epoch": 0, "wall_s": 0.0})
        files.close()
    assert [row["env_step"] for row in read_rows(tmp_path / "metrics-1.jsonl")] == [1]
    assert [row["env_step"] for row in read_rows(tmp_path / "metrics-2.jsonl")] == [2]
    assert [row["env_step"] for row in rows_of(tmp_path)] == [3]


def test_a_resume_loses_no_point_and_repeats_none(tmp_path, clock):
    def run(until, resume_at=None):
        options = BackendOptions(project="p", name="n", run_dir=tmp_path)
        metrics = MetricsLogger(get_logger("metrics"), options, clock=lambda: clock.now_s)
        first = 0
        if resume_at is not None:
            metrics.resume(env_step=resume_at * 10, epoch=resume_at)
            first = resume_at
        for epoch in range(first + 1, until + 1):
            clock.now_s += 1.0
            metrics.advance(env_step=epoch * 10, epoch=epoch)
            metrics.log({"loss": epoch}, prefix="train")
            if epoch % 2 == 0:
                metrics.log({"episode_return": epoch}, prefix="eval")
        return metrics  # not closed: the process was killed

    run(until=7)  # the last checkpoint is of epoch 4
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stream": "train", "env_st')  # killed while writing
    run(until=10, resume_at=4).close()

    train = [row for row in rows_of(tmp_path) if row["stream"] == "train"]
    assert [row["env_step"] for row in train] == [10 * n for n in range(1, 11)]
    evaluations = [row["env_step"] for row in rows_of(tmp_path) if row["stream"] == "eval"]
    assert evaluations == [20, 40, 60, 80, 100]
    assert len(csv_of(tmp_path)) == 15
    walls = [row["wall_s"] for row in train]
    assert walls[3:6] == [4.0, 5.0, 6.0]  # the clock goes on from the checkpoint's row


def test_a_resume_without_earlier_files_starts_new_ones(metrics, tmp_path):
    metrics.resume(env_step=100, epoch=2)
    metrics.log({"a": 1}, prefix="s")
    assert [(row["env_step"], row["epoch"]) for row in rows_of(tmp_path)] == [(100, 2)]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON"):
        rows_of(tmp_path)


# --- log_metric -----------------------------------------------------------------------------------


def test_log_metric_before_setup_records_nowhere_and_says_so_in_the_log(caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger="rlightning"):
        log_metric({"loss": np.float64(0.25)}, step=3, prefix="train")
    record = caplog.records[0]
    assert record.message == "train/loss=0.25"
    assert record.metric_payload == {"train/loss": 0.25}
    assert record.step == 3
    assert get_metrics_logger().latest == {"train/loss": 0.25}


def test_log_metric_after_setup_reaches_files_and_event_file_but_not_the_terminal(tmp_path, capsys):
    metrics = setup_logger(Settings(), run_dir=tmp_path)
    metrics.advance(env_step=7, epoch=1)
    log_metric({"loss": 0.25}, prefix="train")
    close_logger()

    assert rows_of(tmp_path)[0]["train/loss"] == 0.25
    assert "train/loss=0.25" in (tmp_path / "run.log").read_text()
    assert capsys.readouterr().err == ""
    assert scalars_of(tmp_path / "tensorboard", "train/loss") == [(7, 0.25)]


def scalars_of(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


# --- backends -------------------------------------------------------------------------------------


class Recorder:
    """Stands in for the packages wandb, swanlab, trackio and mlflow: notes every call."""

    def __init__(self):
        self.calls = []
        self.info = types.SimpleNamespace(run_id="id-1")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "wandb",
            (
                "log",
                ({"train/loss": 0.5, "env_step": 64, "epoch": 2, "wall_s": 0.0},),
                {},
            ),
        ),
        ("swanlab", ("log", ({"train/loss": 0.5},), {"step": 64})),
        ("trackio", ("log", ({"train/loss": 0.5, "epoch": 2, "wall_s": 0.0},), {"step": 64})),
        ("mlflow", ("log_metrics", ({"train/loss": 0.5},), {"step": 64, "run_id": "id-1"})),
    ],
)
def test_each_backend_gets_the_values_at_our_env_step(tmp_path, monkeypatch, name, expected):
    package = Recorder()
    monkeypatch.setitem(sys.modules, name, package)
    options = BackendOptions(project="p", name="n", run_dir=tmp_path)
    metrics = MetricsLogger(get_logger("metrics"), options, backend=name, clock=lambda: 0.0)
    metrics.advance(env_step=64, epoch=2)
    metrics.log({"loss": 0.5}, prefix="train")
    metrics.close()

    assert expected in package.calls
    assert package.calls[-1][0] in ("finish", "end_run")


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_backend_with_a_service_is_offline_by_default(tmp_path, monkeypatch, name):
    package = Recorder()
    monkeypatch.setitem(sys.modules, name, package)
    options = BackendOptions(project="p", name="n", run_dir=tmp_path)
    MetricsLogger(get_logger("metrics"), options, backend=name)

    assert package.calls[0][2]["mode"] == "offline"


def test_wandb_has_our_step_axis(tmp_path, monkeypatch):
    package = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", package)
    options = BackendOptions(project="p", name="n", run_dir=tmp_path)
    MetricsLogger(get_logger("metrics"), options, backend="wandb")

    assert ("define_metric", ("*",), {"step_metric": "env_step"}) in package.calls


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "mlflow"])
def test_a_missing_backend_warns_once_with_the_extra_and_the_run_goes_on(
    tmp_path, monkeypatch, caplog, name
):
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError
    options = BackendOptions(project="p", name="n", run_dir=tmp_path)
    metrics = MetricsLogger(get_logger("metrics"), options, backend=name)
    for step in (1, 2):
        metrics.log({"loss": 0.5}, step=step, prefix="train")

    assert len(rows_of(tmp_path)) == 2
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert f"pip install 'rlightning[{name}]'" in warnings[0]


def test_a_backend_that_fails_later_warns_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    package = Recorder()
    package.log = lambda *_, **__: (_ for _ in ()).throw(ConnectionError("network is down"))
    monkeypatch.setitem(sys.modules, "wandb", package)
    options = BackendOptions(project="p", name="n", run_dir=tmp_path)
    metrics = MetricsLogger(get_logger("metrics"), options, backend="wandb")
    for step in (1, 2, 3):
        metrics.log({"loss": 0.5}, step=step, prefix="train")
    metrics.close()

    assert len(rows_of(tmp_path)) == 3
    assert [record.message for record in caplog.records] == [
        "WandbBackend failed and is off, the run goes on: network is down"
    ]


def test_an_unknown_backend_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match=r"'tensorbord' is not.* Did you mean 'tensorboard'"):
        setup_logger(Settings(backend="tensorbord"), run_dir=tmp_path)


def test_every_backend_but_tensorboard_is_an_extra_of_the_distribution():
    import tomllib

    import rlightning

    pyproject = Path(rlightning.__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    assert set(BACKENDS) - {"tensorboard"} <= set(extras)


# --- the curve ------------------------------------------------------------------------------------


def test_the_curve_is_drawn_from_every_stream_with_a_return(metrics, tmp_path):
    for step in range(0, 100, 10):
        metrics.log({"episode_return": step}, step=step, prefix="rollout")
        metrics.log({"loss": 1.0}, step=step, prefix="train")
    path = write_curve(tmp_path)
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_curve_has_a_line_for_each_task(metrics, tmp_path, monkeypatch):
    drawn, plot = {}, Axes.plot

    def watched(axes, steps, values, label, **options):
        drawn[label] = (list(steps), list(values))
        return plot(axes, steps, values, label=label, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    for step in (1, 2):
        both = {"episode_return": 3.0, "arm/episode_return": 2.0 * step, "arm/episode_length": 9.0}
        metrics.log(both, step=step, prefix="rollout")
    assert write_curve(tmp_path) is not None
    assert drawn == {
        "rollout/episode_return": ([1, 2], [3.0, 3.0]),
        "rollout/arm/episode_return": ([1, 2], [2.0, 4.0]),
    }


def test_there_is_no_curve_before_the_first_episode(metrics, tmp_path):
    assert write_curve(tmp_path) is None
    metrics.log({"loss": 1.0}, step=1, prefix="train")
    assert write_curve(tmp_path) is None
    assert not (tmp_path / "curve.png").exists()


def test_a_file_is_json_that_any_reader_takes(metrics, tmp_path):
    metrics.log({"x": 1}, prefix="s")
    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["s/x"] == 1.0
