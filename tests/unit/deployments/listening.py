"""An ASGI app over a real socket, in the test's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    """Its port on the loopback, for as long as this lasts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        yield int(listener.getsockname()[1])
        server.should_exit = True
        await asyncio.wait_for(serving, 10)
