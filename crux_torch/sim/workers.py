"""Many runs at a time: in processes of this machine, or on a Dask or Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from crux_torch._version import __version__
from crux_torch.errors import CruxError, first_line

#: A number of processes here, or the address of a cluster.
Workers = int | str
ADDRESS = re.compile(r"(?P<kind>dask|ray)://(?P<at>\S+:\d+)")
#: Seconds that a cluster may take to answer, and to have a worker.
LIMIT_S = 30.0

T = TypeVar("T")


class WorkersError(CruxError):
    """A cluster that can't be used: its address, and what is wrong with it."""


def mapped(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], workers: Workers = 1
) -> Iterator[T]:
    """Yields ``function(*task)`` of each of ``tasks``, in their order.

    The results of a function without side effects are the same wherever it runs. Leaving the
    iterator ends the processes; on a cluster, what runs already goes on to its end.

    Args:
        function: a module's, so that other processes find it.
        workers: 1: this process; N: as many processes; ``dask://HOST:PORT`` or
            ``ray://HOST:PORT``: all workers of that cluster.

    Raises:
        WorkersError: the cluster can't be used.
    """
    from joblib import Parallel, delayed

    with _backend(workers) as how:
        yield from Parallel(**how)(delayed(_call)(__version__, function, task) for task in tasks)


def _call(release: str, function: Callable[..., T], task: tuple[Any, ...]) -> T:
    if release != __version__:
        raise WorkersError(f"a worker has crux_torch {__version__}, this process {release}")
    return function(*task)


@contextmanager
def _backend(workers: Workers) -> Iterator[dict[str, Any]]:
    """Gives the arguments of ``joblib.Parallel``."""
    if isinstance(workers, int):
        yield {"n_jobs": workers, "return_as": "generator"}
        return
    address = ADDRESS.fullmatch(workers)
    if address is None:
        raise WorkersError(f"{workers!r} is neither dask://HOST:PORT nor ray://HOST:PORT")
    opened = _dask if address["kind"] == "dask" else _ray
    try:
        with opened(address["at"]) as how:
            yield how
    except _Unusable as error:
        raise WorkersError(f"{workers}: {error}") from None


class _Unusable(Exception):
    pass


@contextmanager
def _dask(at: str) -> Iterator[dict[str, Any]]:
    from concurrent.futures import Future

    try:
        from distributed import Client
        from distributed import TimeoutError as DaskTimeoutError
        from joblib._dask import DaskDistributedBackend
    except ModuleNotFoundError as error:
        raise _Unusable(f"needs {error.name}: pip install distributed") from None

    class Backend(DaskDistributedBackend):  # type: ignore[misc]
        """joblib's, which waits for ever for a task that no worker could run."""

        def effective_n_jobs(self, n_jobs: int) -> int:
            # joblib would do the work of a single worker in this process.
            return max(2, int(super().effective_n_jobs(n_jobs)))

        def submit(self, func: Any, callback: Callable[[Any], object]) -> Future[Any]:
            def failed(done: Future[Any]) -> None:
                error = done.exception()
                if error is not None:
                    callback(WorkersError(f"no worker of {at} ran a task: {first_line(error)}"))

            future: Future[Any] = super().submit(func, callback)
            future.add_done_callback(failed)
            return future

        def retrieve_result_callback(self, out: Any) -> Any:
            if isinstance(out, WorkersError):
                raise out
            return super().retrieve_result_callback(out)

    try:
        client = Client(at, timeout=LIMIT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise _Unusable(f"no Dask scheduler answers: {first_line(error)}") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=LIMIT_S)
        except DaskTimeoutError:
            raise _Unusable("has no worker: start some with `dask worker --nthreads 1`") from None
        # Runs beside each other in one process would count each other's CPU and memory.
        if max(client.nthreads().values()) > 1:
            raise _Unusable("a worker has several threads: start it with `--nthreads 1`")
        yield {"backend": Backend(client=client), "n_jobs": -1, "return_as": "generator"}


@contextmanager
def _ray(at: str) -> Iterator[dict[str, Any]]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ModuleNotFoundError as error:
        raise _Unusable(f"needs {error.name}: pip install ray") from None
    register_ray()
    try:
        context = ray.init(at, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _Unusable(f"no Ray cluster answers: {first_line(error)}") from None
    with context:
        # Its backend gives no result before it has all.
        yield {"backend": "ray", "n_jobs": -1, "return_as": "list"}
