"""``plugrl-run-server-ray``: the same server, which acts and learns in workers on Ray.

This process holds the sockets, the frames and the run's directory, and needs no GPU. Ray is loaded
after the command line has been understood.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, ClassVar

from plugrl_server import cli
from plugrl_server.cli_args import Args, Choice, read
from plugrl_server.common.logging_utils import configure_logging
from plugrl_server.common.ranges import FINITE, UNBOUNDED, Ranges
from plugrl_server.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_server.cluster.places import PlacesConfig

__all__ = ["RayArgs", "main", "places_config"]

PROGRAM = "plugrl-run-server-ray"


@dataclasses.dataclass
class RayArgs(Args):
    """A training server whose workers are on Ray."""

    _ranges: ClassVar[Ranges] = {
        "num_infer_workers": (1, UNBOUNDED),
        "num_ddp_workers": (1, UNBOUNDED),
        "infer_gpu": (0, FINITE),
        "num_ddp_gpus": (0, UNBOUNDED),
        "master_port": (0, 65535),
        "max_restarts": (0, UNBOUNDED),
    }

    inline_limit_ms: float = 0.0
    """Only 0: the event loop never waits for a worker."""
    ray_address: str = "auto"
    """auto joins the cluster that this machine is part of and otherwise starts one here, local
    always starts one; anything else is a cluster's address."""
    num_infer_workers: int = 1
    """Workers that act; the rows of each batch are spread over them."""
    num_ddp_workers: int | None = None
    """Workers that learn together, each on its part of every batch; None: --num-ddp-gpus, or 1."""
    infer_gpu: float | None = None
    """GPUs of one worker that acts, or a share of one; None: one where there are enough."""
    num_ddp_gpus: int | None = None
    """GPUs of the workers that learn, in all; None: one each where there are enough."""
    master_addr: str | None = None
    """Where the workers that learn meet: an address of the first one's machine; None finds it."""
    master_port: int | None = None
    """And the port there; None takes a free one."""
    max_restarts: int = 3
    """How often a worker that acts, or the workers that learn, are started again."""

    def validate(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UsageError: as `Args.validate`; a number of workers, GPUs or restarts makes no sense.
        """
        super().validate()
        if self.inline_limit_ms != 0.0:
            raise UsageError(
                f"--inline-limit-ms is {self.inline_limit_ms:g}; on Ray only 0 is possible: a "
                "worker that is started again would hold up the event loop"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server; the program ends with the exit code.

    Args:
        argv: the command line without the program; None takes it from the process.
    """
    with cli.exit_on_known_error(PROGRAM):
        choice = read(sys.argv[1:] if argv is None else argv, RayArgs, PROGRAM)
        if choice is None:
            return
        configure_logging(choice.args.log_level)
        from plugrl_server.cluster.places import open_places

        with open_places(places_config(choice)) as places:
            cli.serve(cli.build_server(choice, places))


def places_config(choice: Choice) -> PlacesConfig:
    """Give the workers that a command line asks for.

    Raises:
        UsageError: the algorithm cannot be spread over so many.
    """
    from plugrl_server.cluster.places import PlacesConfig

    args = choice.args
    asked = args.num_ddp_workers or args.num_ddp_gpus or None
    config = PlacesConfig(
        address=args.ray_address,
        infer_workers=args.num_infer_workers,
        infer_gpu=args.infer_gpu,
        num_ddp_gpus=args.num_ddp_gpus,
        meeting=(args.master_addr or "", args.master_port or 0),
        max_restarts=args.max_restarts,
        torch_threads=args.torch_threads,
    )
    if choice.config is not None:
        train = choice.config.train
        return dataclasses.replace(
            config,
            ddp_workers=asked or 1,
            imports=tuple(choice.config.imports),
            seed=train.seed,
            torch_threads=train.torch_threads or args.torch_threads,
        )
    from plugrl_server.cluster.building import number_of_learners

    recipe = cli.recipe_of(choice)
    return dataclasses.replace(config, ddp_workers=number_of_learners(recipe.algo.cls, asked))


if __name__ == "__main__":
    main()
