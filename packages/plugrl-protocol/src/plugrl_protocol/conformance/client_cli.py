"""``plugrl-conformance``: judge an env client by playing its server."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from websockets.exceptions import ConnectionClosed

from plugrl_protocol.conformance.clauses import Report, SkippedError, ViolationError, index
from plugrl_protocol.conformance.client_scenarios import CLAUSES, SCENARIOS
from plugrl_protocol.conformance.referee import LeftError
from plugrl_protocol.conformance.stage import ClientOptions, Stage
from plugrl_protocol.console import reader_may_leave
from plugrl_protocol.messages import ALL_FEATURES

if TYPE_CHECKING:
    from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="plugrl-conformance",
        description="Judge an env client: every clause of the wire page that a server can see.",
    )
    made.add_argument("--client", metavar="CMD", help="command with {url}, or {host} and {port}")
    made.add_argument("--scenario", choices=[*SCENARIOS, "all"], default="all")
    made.add_argument("--probe", action="store_true", help="the client runs probe-v1")
    made.add_argument("--features", default=",".join(ALL_FEATURES), help="offered, comma-separated")
    made.add_argument("--api-key", help="ask for this key")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=0, help="0 takes any free port")
    made.add_argument("--timeout", type=float, default=20.0, help="seconds for any message")
    made.add_argument("--list", action="store_true", help="list the clauses and leave")
    return made


def check_client(options: ClientOptions, scenarios: Sequence[str] = tuple(SCENARIOS)) -> Report:
    """Put a client through scenarios; each starts it anew.

    Args:
        options: the client and how to judge it.
        scenarios: names; all by default.

    Returns:
        The verdicts.
    """
    report = Report(index(CLAUSES))
    for name in scenarios:
        with Stage(options, report, name) as stage:
            run_scenario(stage, name)
    return report


def run_scenario(stage: Stage, name: str) -> None:
    """Tell one scenario on a stage and note what was broken."""
    report = stage.report
    try:
        SCENARIOS[name](stage)
    except SkippedError as reason:
        report.skipped(name, str(reason))
    except ViolationError as violation:
        report.failed(violation.clause, f"{violation.found} (scenario {name})")
    except LeftError as left:
        report.failed("goes-on", f"the client closed with {left.code} (scenario {name})")
    except (ConnectionClosed, OSError) as error:
        report.failed("goes-on", f"the connection broke: {error} (scenario {name})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    made = parser()
    with reader_may_leave():
        given = made.parse_args(arguments)
        if given.list:
            for clause in CLAUSES:
                sys.stdout.write(f"{clause.name}\t{clause.section}: {clause.text}\n")
            return 0
    logging.getLogger("websockets").setLevel(logging.CRITICAL + 1)
    if given.client is not None and not ("{url}" in given.client or "{port}" in given.client):
        made.error("--client must contain {url}, or {host} and {port}")
    options = ClientOptions(
        command=given.client,
        host=given.host,
        port=given.port,
        api_key=given.api_key,
        features=tuple(name for name in given.features.split(",") if name),
        probe=given.probe,
        timeout_s=given.timeout,
    )
    chosen = list(SCENARIOS) if given.scenario == "all" else [given.scenario]
    report = check_client(options, chosen)
    with reader_may_leave():
        sys.stdout.write("\n".join(report.lines()) + "\n")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
