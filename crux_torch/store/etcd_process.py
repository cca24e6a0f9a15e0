"""The store process of an etcd, which keeps gRPC out of a training process.

    python -m crux_torch.store.etcd_process --fd N URL

It speaks the frames of the embedded store over the socket that it inherits, and ends with its
parent, or when the other end of the socket is closed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from typing import TYPE_CHECKING

from crux_torch.errors import SettingsError
from crux_torch.store.endpoint import parse_etcd
from crux_torch.store.frames import (
    FAILED,
    MAX_GREETING_BYTES,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    ChildSocket,
    Handshake,
    Welcome,
    hello_decoder,
    pack,
    proof_decoder,
    request_decoder,
    unpack,
    unpack_request,
)

if TYPE_CHECKING:
    from crux_torch.store.etcd import EtcdContents

#: Seconds that one frame may take.
FRAME_S = 10.0


def serve(connected: socket.socket, contents: EtcdContents, parent: int) -> None:
    """Answer until the other side is gone."""
    frames = ChildSocket(connected, parent, FRAME_S)
    hello = unpack(frames.next_frame(MAX_GREETING_BYTES), hello_decoder)
    nonce = secrets.token_bytes(NONCE_BYTES)
    challenge, life = Challenge(PROTOCOL_VERSION, nonce, False), secrets.token_hex(8)
    handshake = Handshake(b"", hello, challenge)
    frames.answer(pack(challenge))
    unpack(frames.next_frame(MAX_GREETING_BYTES), proof_decoder)
    welcome = Welcome(handshake.digest("server", life), life)
    frames.answer(pack(welcome))
    while True:
        request = unpack_request(frames.next_frame(MAX_REQUEST_BYTES), request_decoder)
        frames.answer(pack(contents.answer(request)))


def main() -> None:
    """The command of the module."""
    parser = argparse.ArgumentParser(prog="crux-etcd")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("url")
    args = parser.parse_args()
    connected = socket.socket(fileno=args.fd)
    try:
        from crux_torch.store.etcd import EtcdContents

        contents = EtcdContents(parse_etcd(args.url))
    except ModuleNotFoundError as error:
        how = f"an etcd needs {error.name}: pip install 'crux-torch[etcd]'"
        connected.sendall(FAILED + how.encode())
        return
    except SettingsError as error:
        connected.sendall(FAILED + str(error).encode())
        return
    contents.start()
    try:
        serve(connected, contents, args.parent)
    except (EOFError, OSError, ValueError):
        # gRPC's threads need not end in order.
        os._exit(0)


if __name__ == "__main__":
    main()
