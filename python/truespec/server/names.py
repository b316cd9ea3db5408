"""Names of requests: what clients see, and what the engine sees.

A client may use a name again as soon as it has its reply, while the engine still sends output for
the old request (after a stop string, say). So the engine gets a name that is never used twice.
"""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """A name that no other request has."""
    return f"{prefix}-{secrets.token_hex(16)}"


def new_rid(name: str) -> str:
    """A name for the engine of a request that clients call `name`."""
    return f"{name}#{secrets.token_hex(8)}"


def name_of(rid: str) -> str:
    """What clients call a request."""
    return rid.rpartition("#")[0]


def is_part(name: str, asked: str) -> bool:
    """`name` is the asked request, or one of its prompts or choices (`asked-0`, `asked-0-1`)."""
    if not name.startswith(asked):
        return False
    rest = name[len(asked) :]
    return not rest or (rest[0] in "-_" and all(part.isdigit() for part in _parts(rest[1:])))


def _parts(text: str) -> list[str]:
    return text.replace("_", "-").split("-")
