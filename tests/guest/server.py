"""A server on asyncio: answers every line with its process, the number of the line in this connection
and the line."""

import asyncio
import os
import sys


async def answer(reader, writer):
    number = 0
    while line := await reader.readline():
        number += 1
        writer.write(f"{os.getpid()} {number} {line.decode()}".encode())
        await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


asyncio.run(main())
