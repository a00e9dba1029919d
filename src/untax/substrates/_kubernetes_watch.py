"""One watch for all objects of an engine: what changes is told as it changes, across broken connections and restarts of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from untax.core.errors import BackendError, UntaxError
from untax.substrates._kubernetes_api import Api, ApiError, path_of

log = logging.getLogger("untax.kubernetes")

_SERVER_ENDS_S = 290  # the server closes a watch after this long; another follows where it ended
_SILENT_S = 330.0  # a connection that is silent for longer is dead, whatever TCP thinks
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Watch:
    """Calls `on_object(kind, object)` for what is there and for each change, kind being ADDED, MODIFIED or DELETED.

    After a gap that the server cannot fill, what is there is listed anew and `on_listed` gets the names: whatever else was known is gone.
    """

    def __init__(
        self,
        api: Api,
        path: tuple[str, ...],
        query: Mapping[str, str],
        on_object: Callable[[str, Mapping[str, Any]], None],
        on_listed: Callable[[set[str]], None] | None = None,
    ) -> None:
        self._api = api
        self._path = path
        self._query = query
        self._on_object = on_object
        self._on_listed = on_listed
        self._version: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once what is there is known and everything later will be told. `ApiError` when that is forbidden."""
        await self._list()
        self._task = asyncio.ensure_future(self._run())

    async def aclose(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _list(self) -> None:
        answer = await self._api.request("GET", path_of(*self._path, query=self._query))
        items = answer.get("items") or []
        self._version = str((answer.get("metadata") or {}).get("resourceVersion", "0"))
        for item in items:
            self._on_object("ADDED", item)
        if self._on_listed is not None:
            self._on_listed({item["metadata"]["name"] for item in items})

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._follow()
                pause = _FIRST_PAUSE_S
                continue
            except ApiError as exc:
                if exc.status == 410:
                    self._version = None
                    continue
                log.info("watch of %s: %s", self._path[-1], exc)
            except (OSError, EOFError, ValueError, TimeoutError, BackendError) as exc:
                log.info("watch of %s: %s; trying again", self._path[-1], exc or type(exc).__name__)
            except UntaxError as exc:
                log.warning("watch of %s: %s", self._path[-1], exc)
            await asyncio.sleep(pause)  # nobody announces that the server is back
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _follow(self) -> None:
        query = {
            **self._query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_SERVER_ENDS_S),
            "resourceVersion": self._version or "0",
        }
        async for event in self._api.watch(path_of(*self._path, query=query), silent_s=_SILENT_S):
            kind, thing = str(event.get("type")), event.get("object") or {}
            if kind == "ERROR":
                raise ApiError(int(thing.get("code", 500)), str(thing.get("reason", "")), str(thing.get("message", "")))
            version = (thing.get("metadata") or {}).get("resourceVersion")
            if version:
                self._version = str(version)
            if kind != "BOOKMARK":
                self._on_object(kind, thing)
