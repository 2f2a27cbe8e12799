"""Two checkers of the wire, for programs in any language.

``plugrl-conformance`` plays a server and judges a client; ``plugrl-conformance-server`` plays
clients, honest and hostile, and judges a server. Each sentence of the page that can be observed is
one named clause; a violated clause makes the exit code 1.
"""

from plugrl_protocol.conformance.clauses import Report, Verdict, ViolationError

__all__ = ["Report", "Verdict", "ViolationError"]
