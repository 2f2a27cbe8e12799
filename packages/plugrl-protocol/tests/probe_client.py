"""An env client that runs ``probe-v1`` on the blocking facade, to be judged."""

import argparse
import sys

from plugrl_protocol import Backoff, EnvClient, ServerStopped, WireError
from plugrl_protocol.testing import ProbeEnv, play


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--library", default="websockets")
    parser.add_argument("--api-key")
    parser.add_argument("--replan-steps", type=int)
    parser.add_argument("--episodes", type=int, default=200)
    given = parser.parse_args()
    backoff = Backoff(limit_s=60.0)
    try:
        with EnvClient(
            given.url, library=given.library, api_key=given.api_key, backoff=backoff
        ) as client:
            play(client, ProbeEnv(4), episodes=given.episodes, replan_steps=given.replan_steps)
    except ServerStopped:
        return 0
    except WireError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
