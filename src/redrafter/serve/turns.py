"""Turns between clients at work that takes long: many requests of one client delay those of another by one turn."""

import asyncio
from collections import OrderedDict, deque


class Turns:
    """At most `places` requests work at once. Clients take turns, and requests of one client go in order of arrival."""

    def __init__(self, places: int) -> None:
        self.free = places
        self.waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client, the next one first

    async def begin(self, client: str) -> None:
        if self.free:
            self.free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same moment
                self.end()
            raise

    def end(self) -> None:
        """The place goes to the client that has waited longest since its last turn."""
        while self.waiting:
            client, queue = self.waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self.waiting[client] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


class Turn:
    """A request's turn, begun at most once and ended at most once."""

    def __init__(self, turns: Turns, client: str) -> None:
        self.turns, self.client, self.held = turns, client, False

    async def begin(self) -> None:
        if not self.held:
            await self.turns.begin(self.client)
            self.held = True

    def end(self) -> None:
        if self.held:
            self.held = False
            self.turns.end()
