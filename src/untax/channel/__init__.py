"""Actions over one byte stream: docs/protocol.md, from the host's side."""
