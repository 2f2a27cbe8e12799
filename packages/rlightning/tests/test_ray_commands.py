"""A run on Ray as a command: how it ends, with what exit code, and what it leaves behind."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

CONFIGURATION = {
    "engine": "syncrl",
    "verbose": False,
    "debug": False,
    "env": {"name": "cp", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 2},
    "buffer": {"type": "RolloutBuffer", "capacity": 64},
    "policy": {"type": "PPOPolicy"},
    "train": {
        "max_epochs": 1_000_000,
        "max_rollout_steps": 32,
        "save_interval": 5,
        "keep_checkpoints": 2,
        "eval_episodes": 1,
        "max_eval_rollout_steps": 5,
        "seed": 0,
        "torch_threads": 1,
    },
    "cluster": {"ray_address": "local"},
}


def start(folder, *arguments, **train):
    content = CONFIGURATION | {"log": {"log_dir": str(folder), "project": "p", "name": "n"}}
    content["train"] = content["train"] | train
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    program = str(pathlib.Path(sys.executable).parent / "rlightning")
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen(
            [program, "train", str(path), *arguments],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_worker_niceness": "0"},
        )


def wait_until(condition, process, limit_s=200):
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.2)


def log_of(folder):
    path = folder / "p" / "n" / "run.log"
    return path.read_text() if path.exists() else ""


def has_saved(folder):
    return any((folder / "p" / "n" / "checkpoints").glob("epoch_*/manifest.json"))


def children(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def test_a_stop_request_saves_and_ends_normally(tmp_path):
    process = start(tmp_path)
    wait_until(lambda: has_saved(tmp_path), process)
    workers = children(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 0
    assert (tmp_path / "p" / "n" / "checkpoints" / "epoch_last" / "manifest.json").exists()
    assert_gone(workers)


def test_a_dead_learner_ends_the_command_and_resume_goes_on(tmp_path):
    process = start(tmp_path)
    wait_until(lambda: has_saved(tmp_path), process)
    [pid] = re.findall(r"worker train-0 is process (\d+)", log_of(tmp_path))
    workers = children(process)
    begin_s = time.monotonic()
    os.kill(int(pid), signal.SIGKILL)
    assert process.wait(100) not in (0, 2)
    assert time.monotonic() - begin_s < 60
    assert "worker train-0 is lost" in log_of(tmp_path)
    assert_gone(workers)
    done = max(
        int(path.parent.name.removeprefix("epoch_"))
        for path in (tmp_path / "p" / "n" / "checkpoints").glob("epoch_*/manifest.json")
    )
    resumed = start(tmp_path, "--resume", max_epochs=done + 3)
    assert resumed.wait(200) == 0
    assert (tmp_path / "p" / "n" / "checkpoints" / "epoch_last" / "manifest.json").exists()


def test_memory_does_not_grow(tmp_path):
    process = start(tmp_path, "--overwrite")
    wait_until(lambda: has_saved(tmp_path), process)
    sizes = []
    for _ in range(4):
        time.sleep(15)
        assert process.poll() is None
        everyone = [psutil.Process(process.pid), *children(process)]
        ours = [p for p in everyone if "ray::" in " ".join(p.cmdline()) or p.pid == process.pid]
        sizes.append(sum(p.memory_info().rss for p in ours) / 1e6)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 0
    assert sizes[-1] - sizes[1] < 20  # megabytes in half a minute of several hundred epochs
