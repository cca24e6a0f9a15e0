"""Runs the store's server or client of an older tree of this package.

    older_release.py TREE serve          prints the port, and serves until nobody is connected
    older_release.py TREE join PORT      reads the jobs, and adds the first one again as `older`

``join`` prints the jobs that it read as JSON, or why it can't.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import types


def main(tree: str, what: str, port: str = "0") -> None:
    # The package's own __init__ wants the extension, which the older tree has not built.
    package = types.ModuleType("crux_torch")
    package.__path__ = [f"{tree}/crux_torch"]
    sys.modules["crux_torch"] = package
    if what == "serve":
        from crux_torch.store.server import Server

        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        asyncio.run(Server(b"").run(listener))
        return
    import msgspec

    from crux_torch.errors import StoreError
    from crux_torch.store import client, endpoint

    assert (client.__file__ or "").startswith(tree), client.__file__
    connector = getattr(endpoint, "TcpConnector", None) or client.TcpConnector
    store = client.StoreClient(connector("127.0.0.1", int(port)), b"", timeout_s=60.0)
    try:
        store.clients()
    except StoreError as error:
        print(error)
        return
    try:
        from crux_torch.agreement.registry import Registry
    except ModuleNotFoundError:
        from crux_torch.control.registry import Registry  # as it was called before

    registry = Registry(store, "c")
    records = registry.look().jobs
    print(msgspec.json.encode(records).decode())
    registry.publish_job(msgspec.structs.replace(records[0], job="older"), 60.0)
    store.close()


main(*sys.argv[1:])
