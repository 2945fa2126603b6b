"""When the replica's end of the token channel writes: once a step, at once, and never by a timer."""

import asyncio

from deployments.channel.channel_client import ChannelClient
from deployments.channel.channel_server import ChannelAddress
from deployments.channel.frames import FrameReader, decode_deltas
from replicas.types import TokenDelta, Usage

ADDRESS = ChannelAddress(router_id="router", node_id="here", unix_path="", host="127.0.0.1", port=1, token="t")


class Wire(asyncio.Transport):
    """What was written, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def tokens(self) -> list[list[tuple[int, ...]]]:
        """Of each write, the token ids of each delta."""
        frames = [FrameReader().feed(data) for data in self.writes]
        return [[delta.token_ids for _, payload in each for delta in decode_deltas(payload)] for each in frames]


def connected() -> tuple[ChannelClient, Wire]:
    client, wire = ChannelClient(ADDRESS, on_lost=lambda client: None), Wire()
    client.connection_made(wire)
    return client, wire


def delta(rid: str, token: int) -> TokenDelta:
    usage = Usage(prompt_tokens=1, completion_tokens=token + 1, cached_tokens=0)
    return TokenDelta(rid=rid, token_ids=(token,), text=f"{token},", usage=usage)


async def one_turn() -> None:
    """The event loop runs what is ready and nothing that waits for a time."""
    await asyncio.sleep(0)


async def test_all_deltas_of_a_step_are_one_write() -> None:
    client, wire = connected()
    client.sink([delta(f"r{i}", 0) for i in range(32)])
    await one_turn()
    assert wire.tokens() == [[(0,)] * 32]


async def test_a_delta_is_written_in_the_next_turn_of_the_event_loop_the_first_as_any() -> None:
    """Nothing waits for a timer to have company: not the first token, and not the later ones."""
    client, wire = connected()
    for token in range(3):
        client.sink([delta("a", token)])
        await one_turn()
    assert wire.tokens() == [[(0,)], [(1,)], [(2,)]]


async def test_steps_that_end_before_the_event_loop_gets_to_write_are_one_write() -> None:
    """Backlog, and nothing else, merges: of the loop here, of the socket in test_channel.py."""
    client, wire = connected()
    for token in range(4):
        client.sink([delta("a", token), delta("b", token)])
    await one_turn()
    assert wire.tokens() == [[(0, 1, 2, 3), (0, 1, 2, 3)]]
