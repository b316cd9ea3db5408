"""Entry of the engine's process. Imports nothing heavy at module level: a spawn reads it."""

from __future__ import annotations

import logging
import signal

from truespec.config import EngineConfig


def engine_main(config: EngineConfig, endpoint_in: str, endpoint_out: str, log_level: str) -> None:
    """Run the engine between two sockets until the server goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s engine %(levelname)s %(message)s"
    )
    from truespec.scheduler.process import run_engine_process  # torch is imported here, not before
    from truespec.tokenizer.backend import load_tokenizer

    tokenizer_path = config.tokenizer_path or config.model_path
    run_engine_process(config, lambda: load_tokenizer(tokenizer_path), endpoint_in, endpoint_out)
