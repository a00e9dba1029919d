"""The command line: one file for each command, which parses, calls and prints.

Exit codes, for all commands (`docs/cli.md`): 0 well, 1 the answer is no, 2 wrong usage, 124 a command passed its
deadline, 125 the infrastructure failed, 130 interrupted (129 by SIGHUP, 143 by SIGTERM). `run` and `shell` give their command's own code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from untax.core.errors import ActionError, SubstrateError, UntaxError, UsageError

COMMANDS = ("bench", "report", "project", "advise", "workload", "run", "shell", "pool", "image", "serve", "fleet", "doctor")

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_INFRASTRUCTURE = 125


def main(argv: Sequence[str] | None = None) -> int:
    """Carry one command line out and return its exit code."""
    from untax.cli._logs import log_to_stderr
    from untax.cli._signals import Interrupts

    argv = sys.argv[1:] if argv is None else argv
    # What the other commands need is not loaded for this one: `untax run` takes a third of the time to start for it.
    arguments = _parser(argv[:1] if argv and argv[0] in COMMANDS else COMMANDS).parse_args(argv)
    log_to_stderr(verbose=arguments.verbose)
    interrupts = Interrupts()
    try:
        with interrupts.taken():
            code: int = arguments.carry_out(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return interrupts.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more at exit.
        sys.stdout = open("/dev/null", "w", encoding="utf-8")  # noqa: SIM115
        return 0
    except UntaxError as exc:
        return _report(exc, as_json=arguments.json)


def _report(exc: UntaxError, *, as_json: bool) -> int:
    from untax.cli._terminal import one_line

    code = EXIT_USAGE if isinstance(exc, UsageError) else EXIT_NO if isinstance(exc, ActionError) else EXIT_INFRASTRUCTURE
    if as_json:
        document = {"error": type(exc).__name__, "message": str(exc), "retryable": exc.retryable, "exit_code": code}
        if isinstance(exc, SubstrateError) and exc.sandbox_id:
            document["sandbox"] = exc.sandbox_id
        print(json.dumps(document))
    print(f"untax: {type(exc).__name__}: {one_line(str(exc))}", file=sys.stderr)
    return code


def _parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="untax", description="Sandboxes for coding agents, and what they cost.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        module = importlib.import_module(f"untax.cli.{name}")
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_argument("--json", action="store_true", help="print one JSON document on standard output")
        command.add_argument("-v", "--verbose", action="store_true", help="log what happens on standard error")
        module.add_arguments(command)
        command.set_defaults(carry_out=module.carry_out)
    return parser


def _version() -> str:
    import untax

    return f"untax {untax.__version__}"
