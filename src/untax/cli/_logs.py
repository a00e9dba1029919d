"""Log lines: one record each, whatever a workload put into them."""

from __future__ import annotations

import logging
import sys

from untax.cli._terminal import one_line


class OneLineFormatter(logging.Formatter):
    """Quotes what a record holds, so that no output of a command can forge a second record or move the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


def log_to_stderr(*, verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("untax")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
