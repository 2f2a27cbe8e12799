"""``plugrl-conformance-server``: judge a training server by playing its clients."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from websockets.exceptions import ConnectionClosed, InvalidHandshake

from plugrl_protocol.conformance import server_forms as _forms
from plugrl_protocol.conformance.clauses import (
    Report,
    SkippedError,
    ViolationError,
    index,
)
from plugrl_protocol.conformance.raw import RawClient, Target
from plugrl_protocol.conformance.server_checks import CHECKS, Check, Setup
from plugrl_protocol.console import reader_may_leave

if TYPE_CHECKING:
    from collections.abc import Sequence

del _forms  # imported for the checks that it registers


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="plugrl-conformance-server",
        description="Judge a training server: every clause of the wire page that a client can see.",
    )
    made.add_argument("url", nargs="?", default="ws://127.0.0.1:8000")
    made.add_argument("--api-key", help="the server's key; wrong ones are tried too")
    made.add_argument("--state-key", default="state", help="name of the state to send")
    made.add_argument("--state-dim", type=int, default=4, help="its width")
    made.add_argument("--image-key", help="name of an image to send; none by default")
    made.add_argument("--image-size", type=int, default=64, help="its height and width")
    made.add_argument("--max-message-mb", type=float, help="the server's cap; tried if given")
    made.add_argument("--feedback-timeout", type=float, help="in seconds; tried if given")
    made.add_argument("--until-stop", action="store_true", help="play until the run ends")
    made.add_argument("--echo", action="store_true", help="the action is the state's first entry")
    made.add_argument("--timeout", type=float, default=30.0, help="seconds for any answer")
    made.add_argument("--only", action="append", help="a clause by name; may be repeated")
    made.add_argument("--list", action="store_true", help="list the clauses and leave")
    return made


def check_server(setup: Setup, only: Sequence[str] | None = None) -> Report:
    """Run the checks.

    Args:
        setup: the target and what is known of it.
        only: clause names; all by default.

    Returns:
        The verdicts; checking ends early when nobody is served any more.
    """
    report = Report(index([clause for clause, _ in CHECKS]))
    witness = _Witness(setup)
    # The end of the run is judged last: nobody is served after it.
    for clause, check in sorted(CHECKS, key=lambda entry: entry[0].name == "stop"):
        if only and clause.name not in only:
            continue
        _run(setup, report, clause.name, check)
        if "metadata-first" in report.failures:
            break
        if clause.name != "stop" and not witness.still_served(report, clause.name):
            report.failed("server-gone", f"nobody is served any more after {clause.name}")
            break
    witness.leave()
    return report


def _run(setup: Setup, report: Report, name: str, check: Check) -> None:
    try:
        check(setup)
    except SkippedError as reason:
        report.skipped(name, str(reason))
    except ViolationError as violation:
        report.failed(violation.clause, violation.found)
        if violation.clause != name:
            report.skipped(name, f"stopped by {violation.clause}")
    except (OSError, InvalidHandshake, ConnectionClosed) as error:
        report.failed(name, f"no connection: {type(error).__name__}: {error}")
    else:
        report.passed(name)


class _Witness:
    """An honest client that was there before, and plays a round after every check."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._client: RawClient | None = None
        # A server that cannot play two honest rounds is judged by the checks alone.
        self._is_credible = self._plays() is None and self._plays() is None

    def still_served(self, report: Report, name: str) -> bool:
        """Play a round; a failure is blamed on the clause just tried.

        Returns:
            Whether an honest client, this one or a new one, is still served.
        """
        if not self._is_credible:
            return True
        harm = self._plays()
        if harm is None:
            return True
        report.failed(name, f"another client, an honest one, was hit: {harm}")
        return self._plays() is None

    def _plays(self) -> Exception | None:
        try:
            if self._client is None:
                self._client = RawClient(self._setup.target).__enter__()
            self._client.round("honest", [0])
            self._client.report([0])
        except (ViolationError, OSError, InvalidHandshake, ConnectionClosed) as error:
            self.leave()
            return error
        return None

    def leave(self) -> None:
        """Hang up."""
        if self._client is not None:
            self._client.connection.close()
            self._client = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    with reader_may_leave():
        given = parser().parse_args(arguments)
        if given.list:
            for clause, _ in CHECKS:
                sys.stdout.write(f"{clause.name}\t{clause.section}: {clause.text}\n")
            return 0
    # What goes wrong on a connection is a finding here, not a log line.
    logging.getLogger("websockets").setLevel(logging.CRITICAL + 1)
    target = Target(
        url=given.url,
        api_key=given.api_key,
        timeout_s=given.timeout,
        state_key=given.state_key,
        state_dim=given.state_dim,
        image_key=given.image_key,
        image_shape=(given.image_size, given.image_size, 3),
    )
    setup = Setup(
        target=target,
        max_message_mb=given.max_message_mb,
        feedback_timeout_s=given.feedback_timeout,
        until_stop=given.until_stop,
        echo=given.echo,
    )
    report = check_server(setup, given.only)
    with reader_may_leave():
        sys.stdout.write("\n".join(report.lines()) + "\n")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
