"""Prefill and decode replicas in this process that say when they die; their desks are one dict.

`PdTransferReplica` plays the leg that it is asked for as an engine does; it cannot show what engines and desks do
among themselves (tests of replicas/disagg and kvtransfer).
"""

import asyncio
import dataclasses

from deployments.channel.channel_client import ChannelClient
from deployments.channel.channel_server import ChannelAddress
from deployments.dispatch.leases import ReplicaGone, ReplicaInfo
from kvtransfer.types import PeerAddress
from replicas.errors import MantaError
from replicas.types import Finish, FinishReason, GenerateRequest, PdLeg, PdTransferReport, TokenDelta, Usage
from routing.types import Role
from tests.unit.deployments.in_process import ScriptedReplica
from tests.unit.deployments.sample_values import token


class Desks:
    """All rooms between the replicas of one test."""

    def __init__(self) -> None:
        self.rooms: dict[int, asyncio.Future[bool]] = {}  # True: the K/V came; False: it will not

    def room(self, room: int) -> "asyncio.Future[bool]":
        return self.rooms.setdefault(room, asyncio.get_running_loop().create_future())

    def settle(self, room: int, came: bool) -> None:
        if not self.room(room).done():
            self.room(room).set_result(came)

    def check(self) -> None:
        """Raises AssertionError if a room is still open."""
        assert all(future.done() for future in self.rooms.values())


class PdTransferReplica(ScriptedReplica):
    """``prefill_hold``: a prefill leg waits for it. ``leg_ends``: a prefill leg ends so, instead of handing over.
    ``gives_up``: a decode leg ends so, before it has heard of its pages."""

    def __init__(
        self,
        replica_id: str,
        role: Role,
        desks: Desks,
        *,
        die_at: int | None = None,
        refuse: MantaError | None = None,
        leg_ends: Finish | None = None,
        gives_up: Finish | None = None,
    ) -> None:
        super().__init__(replica_id, die_at=die_at, refuse=refuse)
        self.role = role
        self.desks = desks
        self.leg_ends = leg_ends
        self.gives_up = gives_up
        self.pause_at: int | None = None  # a decode leg clears ``hold`` before this token
        self.dead = False
        self.prefill_hold = asyncio.Event()
        self.prefill_hold.set()
        self.address = PeerAddress(host="here", port=1, incarnation=replica_id)

    async def attach(self, address: ChannelAddress) -> ReplicaInfo:
        info = await super().attach(address)
        return dataclasses.replace(info, role=self.role, page_bytes=1 << 20, transfer=self.address)

    def die(self) -> None:
        """Its process is gone: the connection ends at once, and so do its leases."""
        self.dead = True
        self.prefill_hold.set()
        self.hold.set()
        assert self._client is not None
        self._client.close()

    async def _generate(self, client: ChannelClient, request: GenerateRequest) -> None:
        kv_transfer = request.kv_transfer
        if kv_transfer is None:
            await super()._generate(client, request)
            return
        room = kv_transfer.ticket.room
        try:
            if kv_transfer.leg is PdLeg.PREFILL:
                await self._hand_over(client, request, room)
            else:
                await self._receive(client, request, room)
        except BaseException:
            self.desks.settle(room, came=False)
            raise

    async def _hand_over(self, client: ChannelClient, request: GenerateRequest, room: int) -> None:
        await self.prefill_hold.wait()
        self._die_if_dead()
        finish = self.leg_ends or Finish(reason=FinishReason.HANDED_OFF)
        if finish.retry_as in (None, "step_failed"):  # of an engine that crashed, its peer hears nothing
            self.desks.settle(room, came=finish.reason is FinishReason.HANDED_OFF)
        client.sink([end(request, finish)])

    async def _receive(self, client: ChannelClient, request: GenerateRequest, room: int) -> None:
        if self.gives_up is not None:
            client.sink([end(request, self.gives_up)])
            return
        came = await self.desks.room(room)
        report = PdTransferReport(
            transferred=came, reason=None if came else "the peer failed",
            num_pages=2, num_bytes=2 << 20, transfer_s=0.01,
        )  # fmt: skip
        if not came:  # told at once, as an engine does; then the prompt is computed here
            client.sink([dataclasses.replace(end(request, None), kv_transfer=report)])
        wanted, first = request.sampling.max_new_tokens, len(request.resumed_ids)
        for position in range(first, wanted):
            if position == self.pause_at:
                self.hold.clear()
            await self.hold.wait()
            self._die_if_dead()
            if position == self.die_at:
                self.die()
                self._die_if_dead()
            finish = self.finish if position == wanted - 1 else None
            made = token(request, 0, position, finish)
            client.sink([dataclasses.replace(made, kv_transfer=report if came and position == first else None)])
            await asyncio.sleep(0)

    def _die_if_dead(self) -> None:
        if self.dead:
            raise ReplicaGone(f"replica {self.replica_id} died")


def end(request: GenerateRequest, finish: Finish | None) -> TokenDelta:
    """The last delta of a prefill leg; without ``finish``, one that says nothing."""
    usage = Usage(prompt_tokens=len(request.token_ids), completion_tokens=0, cached_tokens=0)
    return TokenDelta(rid=request.rid, usage=usage, finish=finish)
