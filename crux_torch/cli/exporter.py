"""``crux exporter``: a cluster's metrics for Prometheus, and its page for the operator."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from crux_torch.cli.results import FILE
from crux_torch.cli.status import cluster_option, settings_of, store_option
from crux_torch.report.cluster_status import ClusterReader
from crux_torch.report.exporter import TEXTFILE, Exporter
from crux_torch.report.page.server import PageServer, WebConfig

PORT = 29480


@click.command(context_settings={"show_default": True})
@store_option
@cluster_option
@click.option("--listen", default="127.0.0.1", metavar="ADDRESS", help="Address to serve at.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="Port; 0: a free one.")
@click.option(
    "--web-config",
    type=FILE,
    help="File with a TLS certificate and users' passwords, as Prometheus' exporters have it.",
)
@click.option(
    "--textfile",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help=f"Serve nothing; write FOLDER/{TEXTFILE} for node_exporter every few seconds.",
)
def exporter(
    store: str | None,
    cluster: str | None,
    listen: str,
    port: int,
    web_config: Path | None,
    textfile: Path | None,
) -> None:
    """Serve a cluster's metrics at /metrics, and the operator's page at /.

    One exporter a cluster is enough. It reads the store as crux status does, every five seconds,
    and goes on through outages of the store. Whoever reaches it can read the names of all jobs.
    """
    settings = settings_of(store, cluster)
    serving = Exporter(lambda: ClusterReader(settings))
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        serving.end()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if textfile is not None:
        try:
            serving.run(textfile)
        except OSError as error:
            raise click.ClickException(f"{textfile}: {error.strerror}") from None
        return
    try:
        config = WebConfig.load(web_config) if web_config is not None else None
        server = PageServer(serving.routes(), (listen, port), config)
    except OSError as error:
        raise click.ClickException(f"{listen}:{port}: {error.strerror or error}") from None
    kind = "https" if config is not None and config.tls is not None else "http"
    host = f"[{listen}]" if ":" in listen else listen
    click.echo(f"metrics at {kind}://{host}:{server.server_port}/metrics")
    if config is None and not server.is_loopback:
        click.echo("everyone who reaches this address can read all jobs' names (--web-config)")
    threading.Thread(target=serving.run, daemon=True).start()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stopped.wait()
    server.shutdown()
