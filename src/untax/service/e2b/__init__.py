"""The dialect of E2B: its control plane and its in-sandbox services, so that an unmodified SDK works against this server."""

from untax.service.e2b.dialect import make as make
