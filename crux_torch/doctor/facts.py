"""The facts about a host that ``crux check`` compares between the hosts of a job."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from crux_torch._version import __version__
from crux_torch.apply import preload
from crux_torch.control.places import Place, place_of_this_process
from crux_torch.control.registry import Registry
from crux_torch.control.topology_reader import TopologyReader
from crux_torch.doctor.privileges import CAP_NET_RAW, has_capability
from crux_torch.errors import CruxError, SettingsError, StoreError
from crux_torch.fabric.host_match import match_host
from crux_torch.host.addresses import own_addresses
from crux_torch.settings import SETTINGS, Settings
from crux_torch.store.endpoint import open_store
from crux_torch.store.secret import read_secret
from crux_torch.variables import misspelt_in_words

#: Settings of one host or one process. All others are to be equal in a job.
OF_ONE_HOST = (
    "attach",
    "device_flops",
    "dispatch",
    "host",
    "job",
    "links",
    "log_level",
    "ports",
    "store_secret",
    "topology",
    "trace",
)
#: Seconds of one call to the store.
STORE_CALL_S = 2.0
#: Of the digest of the secret.
HASH_ROUNDS = 100_000


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts about one process and its host; an empty problem is none.

    Attributes:
        place: where it runs.
        releases: of Crux, torch and Python.
        settings: those that are to be equal, as texts, by variable; None if one can't be used.
        settings_problem, secret_problem, store_problem, topology_problem: in words.
        misspelt: variables that nobody reads, in words.
        secret: digest of the store's secret; empty without one.
        topology: digest of the topology's file; empty without one.
        stored_topology, stored_policy: of the plan in the store; empty if it has none.
        privileges: what this process may do, by what it is for.
    """

    place: Place
    releases: dict[str, str]
    settings: dict[str, str] | None = None
    settings_problem: str = ""
    misspelt: str = ""
    secret: str = ""
    secret_problem: str = ""
    store_problem: str = ""
    topology: str = ""
    topology_problem: str = ""
    stored_topology: str = ""
    stored_policy: str = ""
    privileges: dict[str, bool] = {}


def facts(env: Mapping[str, str], salt: bytes, store_s: float = 0.0) -> Facts:
    """Facts about this process in ``env``.

    Args:
        salt: new for every check, so that a digest tells whether secrets are equal and no more.
        store_s: seconds that a store gets which may still be starting.
    """
    problem = ""
    try:
        settings = Settings.from_env(env)
    except SettingsError as error:
        settings, problem = Settings(), str(error)
    name = settings.host or socket.gethostname()
    secret, secret_problem = _secret(settings, salt)
    host, topology, topology_problem = _topology(settings, name)
    store_problem, stored_topology, stored_policy = _store(settings, store_s)
    place = place_of_this_process(settings, host or name)
    return Facts(
        place=place,
        releases={
            "crux_torch": __version__,
            "torch": _release("torch"),
            "Python": platform.python_version(),
        },
        settings=None if problem else _to_be_equal(settings),
        settings_problem=problem,
        misspelt=misspelt_in_words(env),
        secret=secret,
        secret_problem=secret_problem,
        store_problem=store_problem,
        topology=topology,
        topology_problem=topology_problem,
        stored_topology=stored_topology,
        stored_policy=stored_policy,
        privileges={
            "CAP_NET_RAW": _may_verify_paths(),
            "the transport library": not settings.transport or preload.obstacle() is None,
        },
    )


def _to_be_equal(settings: Settings) -> dict[str, str]:
    texts = {}
    for setting in SETTINGS:
        if setting.field not in OF_ONE_HOST:
            value = getattr(settings, setting.field)
            as_tuple = isinstance(value, tuple)
            texts[setting.env] = ",".join(map(str, value)) if as_tuple else str(value)
    return texts


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _secret(settings: Settings, salt: bytes) -> tuple[str, str]:
    try:
        secret = read_secret(settings.store_secret)
    except SettingsError as error:
        return "", str(error)
    if not secret:
        return "", ""
    return hashlib.pbkdf2_hmac("sha256", secret, salt, HASH_ROUNDS, dklen=8).hex(), ""


def _topology(settings: Settings, name: str) -> tuple[str, str, str]:
    """This host's name in the topology, a digest of the file, and what is wrong with either."""
    if not settings.topology:
        return "", "", ""
    try:
        topology, raw = TopologyReader().load(Path(settings.topology))
    except (OSError, ValueError) as error:
        return "", "", f"CRUX_TOPOLOGY={settings.topology!r}: {error}"
    digest = _digest(raw)
    try:
        host = match_host(topology, name, own_addresses(), told=bool(settings.host))
    except CruxError as error:
        return "", digest, f"{settings.topology}: {error}"
    return host, digest, ""


def _store(settings: Settings, patience_s: float) -> tuple[str, str, str]:
    """Returns (fault of the store or empty, digest of its topology, policy of its plan)."""
    if settings.store == "none":
        return "", "", ""
    end_s = time.monotonic() + patience_s
    try:
        client = open_store(
            settings.store, settings.store_secret, settings.store_group, timeout_s=STORE_CALL_S
        )
    except SettingsError as error:
        return str(error), "", ""
    try:
        while True:
            try:
                view = Registry(client, settings.cluster).look()
            except CruxError as error:
                if time.monotonic() >= end_s:
                    return error.told if isinstance(error, StoreError) else str(error), "", ""
                time.sleep(0.2)
            else:
                stored = view.plan.stored
                policy = stored.plan.policy if stored is not None else ""
                return "", _digest(view.topology) if view.topology else "", policy
    finally:
        client.close()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _may_verify_paths() -> bool:
    try:
        return has_capability(CAP_NET_RAW)
    except (OSError, ValueError, IndexError):
        return False
