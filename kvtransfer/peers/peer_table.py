"""The peers of a transfer service: connections, heartbeats, redialling, and the proof that one is dead.

Owns:      for each incarnation of a peer: its links, its next dial, since when it is unreachable or dead.
Never:     knows rooms or sockets: it reports what became of a peer to a `PeerWatcher`, and dials through `Links`.
Invariant: at most one dial and one link each way for an incarnation; a link belongs to one incarnation.
Thread:    the transfer thread.

    want ─> dialling ──hello──> up ──lost, silent──> redialling (0.2 s ... 5 s) ──hello──> up
                │                                         │                       │ its own hello
                └─────── refused, or another life there ──┴──> doubted (liveness.py) ──proven──> dead

A decode engine dials, and keeps its link up. A prefill engine that has lost a receiver probes its address: without
that it would never learn of a death. A peer that does not answer may hang and live: silence is never proof.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.peers.liveness import DeathProof, Heartbeat
from kvtransfer.peers.wire import Bye, Message, PeerHello, Ping, Purpose
from kvtransfer.types import PeerAddress, TransferSettings


class Links(Protocol):
    """Authenticated connections, by number. Calls never block, and never call back."""

    def dial(self, address: PeerAddress, purpose: Purpose) -> int:
        """-> `PeerTable.link_up` or `PeerTable.link_down` with this number, within call_timeout_s."""
        ...

    def send(self, link: int, message: Message) -> None:
        """In order, as long as the link lives."""
        ...

    def close(self, link: int) -> None:
        """Close the link; no callback fires for it afterwards. Idempotent."""
        ...


class PeerWatcher(Protocol):
    """Receives what becomes of the peers of a `PeerTable`."""

    def peer_up(self, hello: PeerHello, *, outgoing: bool) -> None: ...

    def peer_down(self, incarnation: str, reason: str, *, outgoing: bool) -> None:
        """The connection was lost or, if outgoing, could not be established."""
        ...

    def peer_dead(self, incarnation: str, reason: str) -> None:
        """All its processes are proven gone, and what they sent has landed."""
        ...

    def peer_forgotten(self, incarnation: str) -> None: ...

    def has_business(self, incarnation: str) -> bool:
        """Return whether anything waits for its answer or its death."""
        ...


MIN_BACKOFF_S, MAX_BACKOFF_S = 0.2, 5.0
MIN_UP_S = 0.1  # a link that was lost sooner is not dialled again at once
FORGET_S = 600.0  # unreachable, not proven dead, and nothing of ours depends on it


@dataclass(slots=True, kw_only=True)
class _Peer:
    address: PeerAddress
    wanted: bool = False  # we receive from it: keep a link up
    outgoing: int | None = None
    incoming: int | None = None
    dialling: int | None = None
    suspect: str = ""  # why no room should be opened now
    backoff_s: float = 0.0
    dial_s: float = math.inf  # when to dial next
    lost_s: float = math.inf  # since when it is unreachable
    up_s: float = -math.inf  # when its last link came up
    followers: tuple[PeerAddress, ...] = ()  # processes of its other ranks
    death_proof: DeathProof | None = None  # it seems to be dead

    @property
    def linked(self) -> bool:
        return self.outgoing is not None or self.incoming is not None


class PeerTable:
    """The peers of one engine, indexed by incarnation, and the links to them."""

    def __init__(self, settings: TransferSettings, links: Links, watcher: PeerWatcher) -> None:
        self._settings = settings
        self._links = links
        self._watcher = watcher
        self._peers: dict[str, _Peer] = {}
        self._by_link: dict[int, str] = {}  # links that are up or being dialled -> incarnation
        self._beats: dict[int, Heartbeat] = {}  # links that are up

    def want(self, address: PeerAddress, now: float) -> str:
        """Keep a link up to it from now on. Returns: why it is out of reach just now, or an empty string."""
        peer = self._peers.setdefault(address.incarnation, _Peer(address=address))
        if peer.death_proof is not None:
            return peer.death_proof.reason
        if peer.outgoing is None and not peer.wanted:
            peer.wanted = True
            if peer.dialling is not None:  # a probe: dial anew, for good
                self._unlink(peer.dialling)
                peer.dialling = None
            self._dial(address.incarnation, peer)
        return "" if peer.outgoing is not None else peer.suspect

    def address(self, incarnation: str) -> PeerAddress | None:
        """Return where a peer listens; None for one that is not known."""
        peer = self._peers.get(incarnation)
        return None if peer is None else peer.address

    def out_of_reach(self) -> tuple[PeerAddress, ...]:
        """Return the peers without a link for whose answer, or death, something waits."""
        return tuple(
            peer.address
            for incarnation, peer in self._peers.items()
            if not peer.linked and self._watcher.has_business(incarnation)
        )

    def send(self, incarnation: str, message: Message, *, outgoing: bool) -> None:
        """Send over the link that we dialled (``outgoing``) or that the peer did; drop the message if there is none."""
        peer = self._peers.get(incarnation)
        link = None if peer is None else peer.outgoing if outgoing else peer.incoming
        if link is not None:
            self._links.send(link, message)

    def end_of(self, link: int) -> tuple[str, bool] | None:
        """The peer of a link that is up: (incarnation, whether we dialled); None for any other link."""
        incarnation = self._by_link.get(link)
        if incarnation is None or link not in self._beats:
            return None
        return incarnation, self._peers[incarnation].outgoing == link

    # reports of the links

    def link_up(self, link: int, hello: PeerHello, now: float) -> None:
        """Both hellos were exchanged."""
        incarnation = hello.address.incarnation
        dialled = self._by_link.get(link)
        if dialled is not None and (death_proof := self._peers[dialled].death_proof) is not None:
            self._unlink(link)
            if death_proof.answered(link, incarnation, now):
                self._revive(dialled, now)
            return
        if dialled is not None and dialled != incarnation:
            self._unlink(link)
            self._doubt(dialled, f"another process listens at {_name(hello.address)} now", now).service_gone(now)
            return
        for other, known in list(self._peers.items()):
            if other != incarnation and known.death_proof is None and _name(known.address) == _name(hello.address):
                self._doubt(other, f"another process listens at {_name(hello.address)} now", now).service_gone(now)
        peer = self._peers.setdefault(incarnation, _Peer(address=hello.address))
        if peer.death_proof is not None:
            self._revive(incarnation, now)
        if dialled is not None and not peer.wanted:
            self._probed(link, peer, now)
            return
        self._install(link, peer, hello, now, outgoing=dialled is not None)

    def _probed(self, link: int, peer: _Peer, now: float) -> None:
        """A probe was answered: it lives, and will dial when it needs us; probe again later."""
        self._unlink(link)
        peer.dialling = None
        peer.lost_s = now
        self._back_off(peer, now)

    def _install(self, link: int, peer: _Peer, hello: PeerHello, now: float, *, outgoing: bool) -> None:
        incarnation = hello.address.incarnation
        if outgoing:
            peer.outgoing, peer.dialling = link, None
        else:
            if peer.incoming is not None:  # the peer has given that one up, which we have not noticed yet
                self._lost(peer.incoming, "the peer connected anew", now)
            peer.incoming = link
            if peer.dialling is not None and not peer.wanted:
                self._unlink(peer.dialling)
                peer.dialling = None
        self._by_link[link] = incarnation
        self._beats[link] = Heartbeat(
            period_s=self._settings.heartbeat_s, misses=self._settings.heartbeat_misses, now=now
        )
        peer.suspect, peer.lost_s, peer.up_s = "", math.inf, now
        peer.followers = tuple(rank.alive_at for rank in hello.ranks if rank.alive_at is not None)
        if outgoing or not peer.wanted:
            peer.dial_s = math.inf
        self._watcher.peer_up(hello, outgoing=outgoing)

    def link_down(self, link: int, reason: str, now: float, *, refused: bool = False) -> None:
        """The link was lost or could not be established. ``refused``: nothing listens at its address."""
        incarnation = self._by_link.get(link)
        if incarnation is None:
            return
        if (death_proof := self._peers[incarnation].death_proof) is not None:
            self._unlink(link)
            death_proof.not_answered(link, now, refused=refused)
        elif refused:
            self._doubt(incarnation, f"the process is gone: {reason}", now).service_gone(now)
        elif link in self._beats:
            self._lost(link, reason, now)
        else:
            peer = self._peers[incarnation]
            self._unlink(link)
            peer.dialling = None
            peer.suspect = reason
            peer.lost_s = min(peer.lost_s, now)
            self._back_off(peer, now)
            if peer.wanted:
                self._watcher.peer_down(incarnation, reason, outgoing=True)

    def heard(self, link: int, now: float) -> None:
        if (beat := self._beats.get(link)) is not None:
            beat.silence.looked(now, heard=True)

    def drop(self, incarnation: str, reason: str, now: float) -> None:
        """Close the links of a peer that misbehaves; the next hello begins anew."""
        peer = self._peers.get(incarnation)
        if peer is None or peer.death_proof is not None:
            return
        peer.suspect = reason
        for link in (peer.outgoing, peer.incoming):
            if link is not None:
                self._lost(link, reason, now)
        self._back_off(peer, now)

    # the loop

    def tick(self, now: float) -> None:
        for link, beat in list(self._beats.items()):
            if link not in self._beats:
                continue
            if beat.silence.looked(now, heard=False):
                self._silent(link, beat, now)
            elif beat.take_due(now):
                self._links.send(link, Ping())
        for incarnation, peer in list(self._peers.items()):
            if peer.death_proof is not None and peer.death_proof.proven(now):
                self._remove(incarnation)
                self._watcher.peer_dead(incarnation, peer.death_proof.reason)
            elif now >= peer.lost_s + FORGET_S and not peer.linked and not self._watcher.has_business(incarnation):
                self._remove(incarnation)
                self._watcher.peer_forgotten(incarnation)
            elif peer.death_proof is not None:
                for address in peer.death_proof.due(now):
                    link = self._links.dial(address, "probe")
                    peer.death_proof.asked(address, link)
                    self._by_link[link] = incarnation
            elif now >= peer.dial_s:
                self._dial(incarnation, peer)

    @property
    def next_s(self) -> float:
        times = [peer.dial_s if peer.death_proof is None else peer.death_proof.next_s for peer in self._peers.values()]
        return min([*times, *(beat.next_s for beat in self._beats.values())], default=math.inf)

    @property
    def num_up(self) -> int:
        return sum(peer.linked for peer in self._peers.values())

    def say_bye(self) -> None:
        for link in self._beats:
            self._links.send(link, Bye())

    def _silent(self, link: int, beat: Heartbeat, now: float) -> None:
        peer = self._peers[self._by_link[link]]
        peer.suspect = f"the peer has been silent for {beat.silence.limit_s:g} s"
        self._lost(link, peer.suspect, now)

    def _lost(self, link: int, reason: str, now: float) -> None:
        """A link that was up is lost: check at once whether the peer lives."""
        incarnation = self._by_link[link]
        peer = self._peers[incarnation]
        outgoing = peer.outgoing == link
        self._unlink(link)
        if outgoing:
            peer.outgoing = None
        else:
            peer.incoming = None
        if now >= peer.up_s + MIN_UP_S:
            peer.backoff_s = 0.0
        elif outgoing:  # a link that breaks as soon as it is up
            self._back_off(peer, now)
        if peer.dialling is None and peer.dial_s == math.inf and (outgoing or not peer.linked):
            peer.dial_s = now if outgoing else min(peer.dial_s, now + MIN_BACKOFF_S)
        self._watcher.peer_down(incarnation, reason, outgoing=outgoing)

    def declare_dead(self, incarnation: str, now: float) -> None:
        """The supervisor of its machine reports that it is dead; a hello of its own within the grace refutes it."""
        self._doubt(incarnation, "its machine is dead, says the supervisor", now).declared(now)

    def _doubt(self, incarnation: str, reason: str, now: float) -> DeathProof:
        """It seems to be dead: fail its rooms, and dial each of its processes until the proof is complete."""
        peer = self._peers[incarnation]
        if peer.death_proof is not None:
            return peer.death_proof
        death_proof = peer.death_proof = DeathProof(peer.address, peer.followers, reason, now)
        peer.dial_s, peer.lost_s = math.inf, min(peer.lost_s, now)
        for link in (peer.outgoing, peer.incoming, peer.dialling):
            if link is not None:
                self._unlink(link)
        peer.outgoing = peer.incoming = peer.dialling = None
        for outgoing in (True, False):
            self._watcher.peer_down(incarnation, reason, outgoing=outgoing)
        return death_proof

    def _revive(self, incarnation: str, now: float) -> None:
        """It is not dead. Its rooms send Abort again when there is a link."""
        peer = self._peers[incarnation]
        if peer.death_proof is not None:
            for link in peer.death_proof.links:
                self._unlink(link)
        peer.death_proof, peer.backoff_s = None, 0.0
        if peer.wanted:
            peer.dial_s = now
        else:
            self._back_off(peer, now)

    def _remove(self, incarnation: str) -> None:
        del self._peers[incarnation]
        for link in [link for link, of in self._by_link.items() if of == incarnation]:
            self._unlink(link)

    def _dial(self, incarnation: str, peer: _Peer) -> None:
        peer.dial_s = math.inf
        peer.dialling = self._links.dial(peer.address, "rooms" if peer.wanted else "probe")
        self._by_link[peer.dialling] = incarnation

    def _back_off(self, peer: _Peer, now: float) -> None:
        peer.backoff_s = min(max(2 * peer.backoff_s, MIN_BACKOFF_S), MAX_BACKOFF_S)
        if peer.dialling is None:
            peer.dial_s = now + peer.backoff_s

    def _unlink(self, link: int) -> None:
        self._by_link.pop(link, None)
        self._beats.pop(link, None)
        self._links.close(link)

    def check(self) -> None:
        links = [
            (link, incarnation)
            for incarnation, peer in self._peers.items()
            for link in [
                *(peer.outgoing, peer.incoming, peer.dialling),
                *(peer.death_proof.links if peer.death_proof is not None else ()),
            ]
            if link is not None
        ]
        assert dict(links) == self._by_link, "links and peers disagree"
        assert len(links) == len(self._by_link), "two peers share a link"
        for peer in self._peers.values():
            if peer.death_proof is not None:
                assert not peer.linked
                assert peer.dialling is None
                assert peer.dial_s == math.inf
                peer.death_proof.check()
                continue
            assert peer.dialling is None or peer.dial_s == math.inf
            assert not peer.wanted or peer.outgoing is not None or peer.dialling is not None or peer.dial_s < math.inf


def _name(address: PeerAddress) -> str:
    return f"{address.host}:{address.port}"
