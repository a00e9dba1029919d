"""Whom a sandbox over a chain of layers belongs to, where the agent makes the directories that it needs itself."""

from __future__ import annotations

from dataclasses import dataclass

from untax.core.root import Root
from untax.core.spec import EnvSpec
from untax.core.stage import WORKDIR
from untax.core.substrate import Facts
from untax.substrates._namespace_sandbox import HOME, facts_of

_USER_ID = "1000"


@dataclass(frozen=True, slots=True)
class Tenant:
    facts: Facts
    user: str
    """As the agent is told: the sandbox's own user has a number and need not be in the image's list of users."""
    own: list[str]
    """Directories to be made and given to the user; none where a layer has them already."""

    @classmethod
    def of(cls, spec: EnvSpec, root: Root) -> Tenant:
        facts = facts_of(spec, root)
        own = [] if root.is_furnished else [WORKDIR, HOME, *([spec.workdir] if spec.workdir else [])]
        return cls(facts, _USER_ID if facts.user == "user" else facts.user, own)
