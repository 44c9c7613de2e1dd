"""Frames over a socket, as a peer without the transport writes them."""

import asyncio


async def write(connection, frame):
    connection.send(frame)
    while connection.unsent:
        await asyncio.sleep(0.001)
        connection.flush()
