"""Entry of the engine's process. Imports nothing heavy at module level: a spawn reads it."""

from __future__ import annotations

import logging

from truespec.config import EngineConfig


def engine_main(config: EngineConfig, endpoint_in: str, endpoint_out: str, log_level: str) -> None:
    """Run the engine between two sockets until the server goes away."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s engine %(levelname)s %(message)s"
    )
    from truespec.scheduler.process import run_engine_process  # torch is imported here, not before

    run_engine_process(config, endpoint_in, endpoint_out)
