"""Where a room is, and who waits for whom.

Owns:      `KVPoll` and its legal moves; the rooms (sender.py, receiver.py) keep one each.
Invariant: monotone: a room goes up or fails, and never leaves FAILED or SUCCESS.

    BOOTSTRAPPING ──> WAITING_FOR_INPUT ──> TRANSFERRING ──> SUCCESS
          │                  │                   │
          └──────────────────┴───────────────────┴──> FAILED, then drained: its pages are safe again

                     decode side (KVReceiver)               prefill side (KVSender)
    BOOTSTRAPPING      no connection to the peer yet          leg or open is missing
    WAITING_FOR_INPUT  open is sent, no page came             SendReady is out, the engine gave no page yet
    TRANSFERRING       pages come                             pages go
    SUCCESS            all pages and meta are verified        the receiver said so, and every write has ended

Every wait, its owner and its limit:
    a decode leg waits for row and pages       replicas/disagg        open_timeout_s; then it is computed there, and the
      (before there is a room)                                          prefill leg aborted
    a stranger's hello, our own call           kvtransfer/peers/link.py     call_timeout_s
    a prefill leg waits for open               KVSender               SendOrder.deadline_s
    an open waits for its prefill leg          KVSender               open_timeout_s
    a room from receive() to its first page,   KVReceiver             ReceiveOrder.deadline_s: room_timeout_s; prefill's
      and from each page to the next                                    queue included, so a last bound
    a sender, from its last written page to    KVSender               Open.deadline_s + call_timeout_s (a backstop)
      the acknowledgement
    a peer's sign of life                      kvtransfer/peers/peers.py    heartbeat_s * heartbeat_misses
    a sign of life of a rank's own port        replicas/runner        rank_timeout_s; then the desk ends, and the
      (remote_port.py)                                                  replica is replaced
    pages in quarantine                        kvtransfer/peers      none: only the peer's word or its proven death
    goodbye                                    kvtransfer/rooms      call_timeout_s

Source: SGLang's KVPoll, where ranks agree by all-reduce MIN; here one desk sees the ports of all ranks.
"""

import enum


class KVPoll(enum.IntEnum):
    """SPEC H02."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


LEGAL_MOVES: dict[KVPoll, frozenset[KVPoll]] = {
    KVPoll.BOOTSTRAPPING: frozenset({KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
    KVPoll.WAITING_FOR_INPUT: frozenset({KVPoll.TRANSFERRING, KVPoll.FAILED}),
    KVPoll.TRANSFERRING: frozenset({KVPoll.SUCCESS, KVPoll.FAILED}),
    KVPoll.SUCCESS: frozenset(),
    KVPoll.FAILED: frozenset(),
}


def move(state: KVPoll, to: KVPoll) -> KVPoll:
    """``to``, if that is a legal move."""
    assert to in LEGAL_MOVES[state], f"a room cannot go from {state.name} to {to.name}"
    return to
