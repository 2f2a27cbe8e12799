"""What processes are told, and that they make environments one after another where asked."""

import numpy as np

from plugrl_env_client.cli import main
from plugrl_env_client.envs.probe_env import ProbeEnv
from plugrl_protocol.testing import NotingApplication, serve_in_thread


def run_two(folder, monkeypatch, *flags):
    """Run two forked processes whose environments note how they were made."""
    notes = folder / "notes.txt"
    make = ProbeEnv.__init__

    def noting(self, *args, **kwargs):
        with notes.open("a") as stream:
            stream.write(f"begin {kwargs.get('process_id')} {kwargs.get('total_processes')}\n")
            stream.flush()
            sum(range(3_000_000))  # takes a while
            stream.write("end\n")
        make(self, *args, **kwargs)

    monkeypatch.setattr(ProbeEnv, "__init__", noting)
    application = NotingApplication(lambda request: np.zeros((1, len(request.env_indices), 3)))
    command = ["probe-v1", "--num-procs", "2", "--runner.start-method", "fork", *flags]
    with serve_in_thread(application) as server:
        assert main([*command, "--server-host", server.url, "--runs-dir", str(folder)]) == 0
    return notes.read_text().splitlines()


def test_environments_are_told_their_process_where_asked(tmp_path, monkeypatch):
    lines = run_two(tmp_path, monkeypatch, "--runner.pass-proc-id")
    assert sorted(line for line in lines if line != "end") == ["begin 0 2", "begin 1 2"]


def test_environments_are_made_one_after_another_where_asked(tmp_path, monkeypatch):
    lines = run_two(tmp_path, monkeypatch, "--runner.use-env-lock")
    assert lines == ["begin None None", "end", "begin None None", "end"]


def test_every_process_records_only_where_asked(tmp_path, monkeypatch):
    run_two(tmp_path / "", monkeypatch, "--exp-name", "one")
    run_two(tmp_path / "", monkeypatch, "--exp-name", "all", "--recorder.no-thread0-only")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/rollout/*")}
    assert found == {"one/rollout/proc_000", "all/rollout/proc_000", "all/rollout/proc_001"}
