"""A run's folder, seed and stop request, opened without an engine or a command line."""

import os
import signal
import sys
import threading

import numpy as np
import pytest
import torch

from rlightning.config import MainConfig
from rlightning.errors import RunDirectoryError, StopRequested
from rlightning.runtime import StopSignal, open_run
from rlightning.utils.logger import close_logger


def configuration(folder, name="exp", **train):
    return MainConfig.from_dict(
        {
            "env": {"name": "a", "backend": "b", "task": "t"},
            "buffer": {"type": "R", "capacity": 1},
            "policy": {"type": "P"},
            "train": {"max_epochs": 1, **train},
            "log": {"log_dir": str(folder), "project": "p", "name": name, "level": "ERROR"},
        }
    )


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    threads = torch.get_num_threads()
    yield
    close_logger()
    torch.set_num_threads(threads)


def test_a_run_is_attached_to_its_configuration(tmp_path):
    config = configuration(tmp_path, seed=4)
    run = open_run(config)
    assert config.run is run
    assert (run.run_dir, run.seed) == (tmp_path / "p" / "exp", 4)
    assert run.checkpoint_dir == run.run_dir / "checkpoints"
    assert not run.stop.requested


def test_everything_global_is_seeded(tmp_path):
    draws = []
    for name in "ab":
        open_run(configuration(tmp_path, name, seed=4))
        draws.append((float(torch.rand(())), float(np.random.rand())))
        close_logger()
    assert draws[0] == draws[1]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_run_on_a_machine_with_a_gpu_says_what_a_seed_promises(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = configuration(tmp_path, seed=4)
    config.log.level = "INFO"
    text = (open_run(config).run_dir / "run.log").read_text()
    assert text.count("what a GPU computes may differ") == has_gpu


def test_threads_are_set_only_where_they_are_configured(tmp_path):
    before = torch.get_num_threads()
    open_run(configuration(tmp_path, "a"))
    assert torch.get_num_threads() == before
    close_logger()
    open_run(configuration(tmp_path, "b", torch_threads=1))
    assert torch.get_num_threads() == 1


def test_a_named_folder_is_not_opened_twice(tmp_path):
    open_run(configuration(tmp_path))
    close_logger()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunDirectoryError, match="holds an earlier run"):
        open_run(configuration(tmp_path, seed=1))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert open_run(configuration(tmp_path), overwrite=True).run_dir == tmp_path / "p" / "exp"


def test_a_run_that_is_written_over_is_neither_lost_nor_taken_for_the_new_one(tmp_path):
    """Also where the new one is killed before it saves."""
    for number in (1, 2, 3):
        folder = open_run(configuration(tmp_path), overwrite=True).checkpoint_dir
        close_logger()
        assert not folder.exists()
        folder.mkdir()
        (folder / f"of_{number}").touch()
    assert [path.name for path in (tmp_path / "p" / "exp" / "checkpoints-1").iterdir()] == ["of_2"]


def test_a_request_is_seen_once_made():
    stop = StopSignal()
    stop.raise_if_requested()
    stop.request()
    assert stop.requested
    with pytest.raises(StopRequested):
        stop.raise_if_requested()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


class Hanging:
    """Has of an environment what the message reads."""

    def __init__(self):
        self.env_id, self.label = "e-0", "env 'arm' worker 3"

    def __getattr__(self, name):
        raise AssertionError(f"a signal handler runs no code of the user's: {name}")

    def step(self):
        os.kill(os.getpid(), signal.SIGINT)

    def reset(self):
        self.step()  # as a reset that takes a first step


@pytest.mark.parametrize("method", ["step", "reset"])
def test_a_signal_inside_an_environment_says_what_is_waited_for(method, caplog):
    with StopSignal(), caplog.at_level("WARNING"):
        getattr(Hanging(), method)()
    (said,) = caplog.messages
    assert "saving and stopping as soon as env 'arm' worker 3 returns from step" in said
    assert said.endswith("; a second one stops at once")


def test_a_signal_elsewhere_waits_for_no_environment(caplog):
    with StopSignal(), caplog.at_level("WARNING"):
        os.kill(os.getpid(), signal.SIGINT)
    assert caplog.messages == ["SIGINT: saving and stopping; a second one stops at once"]


def test_at_a_prompt_a_second_signal_ends_the_call_and_not_the_session(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter():
        with StopSignal():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert seen == [before]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "p" / "exp" / "run.log").mkdir(parents=True)
    with pytest.raises(
        RunDirectoryError, match=r"p/exp cannot be made, or not be written to: .*log"
    ):
        open_run(configuration(tmp_path))
