"""A client of HTTP/2 on a bare socket, which gives the server only the room that the test asks for, as no library would."""

import asyncio
import struct
from typing import NamedTuple

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4
"""Numbers of settings."""
WINDOW = 65535
"""Bytes that a server may send before it is given more room, on each stream and on the connection."""


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class RawClient:
    """One connection. `room`: bytes that the server may send on each stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: int) -> None:
        self._reader = reader
        self._writer = writer
        self._stream = -1
        self._room = {0: WINDOW}
        self.settings: dict[int, int] = {}
        """The server's, by their numbers."""
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, room))

    def send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Send any frame."""
        self._writer.write(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    async def call(self, method: str, *messages: bytes, metadata: tuple[tuple[str, str], ...] = (), end: bool = True) -> int:
        """Begin a call of the inference service with these messages; its stream. `end`: there will be no more of them."""
        self._stream += 2
        path = f"/inference.GRPCInferenceService/{method}"
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"), ("te", "trailers")]
        fields += [("content-type", "application/grpc"), *metadata]
        self.send(HEADERS, _END_HEADERS, self._stream, b"".join([field(*each) for each in fields]))
        data = b"".join([b"\0" + struct.pack(">I", len(message)) + message for message in messages])
        pieces = [data[at : at + 16384] for at in range(0, len(data), 16384)] or [b""]
        room = self._room
        room[self._stream] = self.settings.get(INITIAL_WINDOW_SIZE, WINDOW)
        for piece in pieces:
            while min(room[0], room[self._stream]) < len(piece):
                await self.frame()
            for each in (0, self._stream):
                room[each] -= len(piece)
            self.send(DATA, _END_STREAM * (end and piece is pieces[-1]), self._stream, piece)
        return self._stream

    def give_room(self, stream: int, nbytes: int) -> None:
        """Let the server send so many bytes more."""
        for each in (0, stream):
            self.send(WINDOW_UPDATE, 0, each, struct.pack(">I", nbytes))

    async def frame(self) -> Frame:
        """The next frame. Answers pings and settings. Raises EOFError or ConnectionError when the connection is closed."""
        head = await self._reader.readexactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        frame = Frame(kind, flags, stream, await self._reader.readexactly(int.from_bytes(head[:3])))
        if frame.kind == WINDOW_UPDATE:
            self._room[frame.stream] = self._room.get(frame.stream, 0) + int.from_bytes(frame.payload)
        if frame.kind == SETTINGS:
            self.settings |= dict(struct.iter_unpack(">HI", frame.payload))
        if frame.kind in (SETTINGS, PING) and not frame.flags & _ACK:
            self.send(frame.kind, _ACK, 0, frame.payload if frame.kind == PING else b"")
        return frame

    async def data(self, nbytes: int) -> bytes:
        """Bytes of answers until there are so many. Raises as `frame` does."""
        found = b""
        while len(found) < nbytes:
            if (frame := await self.frame()).kind == DATA:
                found += frame.payload
        return found

    async def closed(self) -> None:
        """Wait until the server has closed the connection."""
        try:
            while True:
                await self.frame()
        except (EOFError, ConnectionError):
            self.close()

    def close(self) -> None:
        self._writer.close()


async def connect(port: int, room: int = WINDOW) -> RawClient:
    """A connection whose server has sent its settings."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port), room)
    while not client.settings:
        await client.frame()
    return client


def field(name: str, value: str, indexed: bool = False) -> bytes:
    """A header as HPACK's literal that is not compressed, and remembered only if it is `indexed`."""
    return (b"\x40" if indexed else b"\0") + _string(name.encode()) + _string(value.encode())


def _string(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text
    size, left = bytearray([127]), len(text) - 127
    while left > 127:
        size.append(left & 127 | 128)
        left >>= 7
    return bytes([*size, left]) + text
