"""What goes wrong in a shard server.

ShardError
├── StartError       the server cannot start; its text is one sentence that tells the fix
└── ProtocolError    the router broke the link's rules; the text names the field and the value; ends the epoch
"""

from __future__ import annotations


class ShardError(Exception):
    """Any error of this package whose text says all that its reader needs."""


class StartError(ShardError):
    """The server cannot start; the text is one sentence that tells the fix."""


class ProtocolError(ShardError):
    """A step that contradicts the tables or the link's format."""
