"""A new interpreter that finds what this one found: Ray gives its workers paths that no other process would have."""

from __future__ import annotations

import json
import sys

# Without -P the working directory would come before the standard library, until the path is replaced.
_BEGIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(json.loads(sys.argv[2]))"


def command(module: str, said: object) -> list[str]:
    """A command line that calls the `main` of a module with `said`, which JSON can carry."""
    return [sys.executable, "-P", "-c", _BEGIN.format(module=module), json.dumps(sys.path), json.dumps(said)]
