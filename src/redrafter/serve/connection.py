"""One connection to the server: uvicorn's, and no client is waited for without end."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_SILENT = 256
"""Connections that may be open without a whole request; for one more, the one that was silent longest is closed."""


class Connection(H11Protocol):
    """A client has `header_seconds` to send all of its headers, and `stalled_seconds` to read what is written to it.

    How long a body may take is the matter of `bodies`.
    """

    header_seconds = 10.0
    stalled_seconds = 60.0
    silent_since = 0.0
    heading: asyncio.TimerHandle | None = None  # runs while headers are waited for
    stalled: asyncio.TimerHandle | None = None  # runs while the client does not read

    @property
    def waits_for_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def silent(self) -> bool:
        """Nothing can be done before the client sends more."""
        return self.waits_for_headers or self.cycle.more_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.silent_since = self.loop.time()
        self.heading = self.loop.call_later(self.header_seconds, self._give_up)
        if len(self.connections) > MOST_SILENT:
            silent = [c for c in self.connections if isinstance(c, Connection) and c.silent]
            if len(silent) > MOST_SILENT:
                min(silent, key=lambda connection: connection.silent_since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits_for_headers:
            self._stop_heading()
        elif self.heading is None:  # of the next request on this connection
            self.heading = self.loop.call_later(self.header_seconds, self._give_up)

    def send_400_response(self, msg: str) -> None:
        """A request that becomes wrong in its body ends, also where its answer has begun."""
        if not self.waits_for_headers:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        self.silent_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.loop.call_later(self.stalled_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stalled is not None:
            self.stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_heading()
        if self.stalled is not None:
            self.stalled.cancel()

    def _stop_heading(self) -> None:
        if self.heading is not None:
            self.heading.cancel()
            self.heading = None

    def _give_up(self) -> None:
        if self.waits_for_headers:
            self.transport.close()
