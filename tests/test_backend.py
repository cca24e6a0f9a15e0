"""A script that runs on stock Gloo runs on Crux with the same results, bit for bit."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKLOAD = Path(__file__).with_name("backend_workload.py")
#: What stock Gloo itself refuses; everything else must give a value, or the comparison is empty.
REFUSED = {
    "all_reduce_avg_is_refused": False,
    "wrong_shape_is_refused": True,
}


OLD_TORCH = torch.__version__.startswith("2.11")
#: torch 2.11 has sequence numbers for its own types of backend only, and its _set_pg_timeout knows
#: them by class.
UNLIKE_STOCK_ON_OLD_TORCH = {"sequence_numbers", "timeouts"}
#: What stock Gloo itself refuses on torch 2.11 while collectives are checked.
REFUSED_BY_OLD_WRAPPER = {
    "compiled_collectives",
    "device_mesh",
    "fsdp2",
    "functional_collectives",
}


def run(
    mode: str, size: int, folder: Path, *parts: str, env: dict[str, str] | None = None
) -> list[dict[str, tuple[str, Any]]]:
    """The workload in ``size`` processes; the results of each rank."""
    outs = [folder / f"{mode}.{rank}" for rank in range(size)]
    errors = [(folder / f"{mode}.{rank}.err").open("w+b") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-X",
                "faulthandler",
                str(WORKLOAD),
                mode,
                str(rank),
                str(size),
                str(folder / f"store.{mode}"),
                str(outs[rank]),
                *parts,
            ],
            stderr=errors[rank],
            env={**os.environ, "CRUX_STORE": "none", "OMP_NUM_THREADS": "1", **(env or {})},
        )
        for rank in range(size)
    ]
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = []
    for rank, error in enumerate(errors):
        error.seek(0)
        said.append(f"rank {rank} of {mode}, code {codes[rank]}: {error.read().decode()[-2000:]}")
        error.close()
    assert not any(codes), "\n".join(said)
    return [pickle.loads(out.read_bytes()) for out in outs]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, Any]]]:
    return run("stock", 2, tmp_path_factory.mktemp("stock"))


def compare(
    got: list[dict[str, tuple[str, Any]]], expected: list[dict[str, tuple[str, Any]]]
) -> None:
    known = UNLIKE_STOCK_ON_OLD_TORCH if OLD_TORCH else set()
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        differing = [n for n in theirs if mine[n] != theirs[n] and n not in known]
        assert not differing, f"rank {rank}: {[(mine[n], theirs[n]) for n in differing[:2]]}"


def test_the_stock_backend_does_all_that_is_compared(stock: list[dict[str, Any]]) -> None:
    # What torch 2.11 can't do with Gloo: there the error messages are compared.
    refused = {"all_to_all", "split_group"} if OLD_TORCH else set()
    for name, (kind, value) in stock[0].items():
        expected = "error" if REFUSED.get(name) or name in refused else "value"
        assert kind == expected, f"{name}: {value}"


@pytest.mark.parametrize("mode", ["crux", "attached"])
def test_same_results_as_stock(mode: str, stock: list[dict[str, Any]], tmp_path: Path) -> None:
    compare(run(mode, 2, tmp_path), stock)


@pytest.mark.parametrize("mode", ["crux", "attached"])
def test_same_results_while_collectives_are_checked(
    mode: str, stock: list[dict[str, Any]], tmp_path: Path
) -> None:
    # Stock Gloo can't be asked here: DDP's logger crashes on it under DETAIL in torch 2.15.
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    left_out = {"wrong_shape_is_refused", "sequence_numbers"}
    left_out |= REFUSED_BY_OLD_WRAPPER if OLD_TORCH else set()
    names = [n for n in stock[0] if n not in left_out]
    got = run(mode, 2, tmp_path, *names, env=env)
    compare(got, [{name: results[name] for name in names} for results in stock])


def test_same_results_on_four_ranks(tmp_path: Path) -> None:
    names = (
        "all_reduce",
        "all_to_all_single",
        "send_and_receive",
        "sub_groups",
        "device_mesh",
        "fsdp2",
    )
    results = {mode: run(mode, 4, tmp_path, *names) for mode in ("stock", "crux", "attached")}
    for mode in ("crux", "attached"):
        compare(results[mode], results["stock"])


def test_disabled_is_stock(stock: list[dict[str, Any]], tmp_path: Path) -> None:
    names = ("all_reduce", "ddp", "names")
    for mode in ("crux", "attached"):
        got = run(mode, 2, tmp_path, *names, env={"CRUX_DISABLE": "1"})
        compare(got, [{name: results[name] for name in names} for results in stock])


def test_a_late_rank_times_out_as_with_stock(tmp_path: Path) -> None:
    results = {
        mode: run(mode, 2, tmp_path, "late_rank_times_out")[0]["late_rank_times_out"]
        for mode in ("stock", "crux", "attached")
    }
    # Which end notices first decides between several texts, with stock Gloo too.
    for kind, message in results.values():
        assert kind == "error"
        assert message.startswith("RuntimeError: ")
        assert re.search("Timed out|closed by peer|reset by peer", message), message


MANY_WORLDS = """
import gc, sys, tempfile, torch, torch.distributed as dist, crux_torch
crux_torch.attach()
for number in range(8):
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model.itself = model  # a cycle, for the collector to find on whatever thread
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    model(torch.ones(2, 8)).sum().backward()
    del model
    dist.destroy_process_group()
    del works
    gc.collect()
print("alive")
"""


def test_worlds_come_and_go_in_one_process() -> None:
    done = _python(MANY_WORLDS)
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CRUX_STORE": "none", **env},
    )


def test_registering_is_idempotent_and_closed_on_a_collision() -> None:
    done = _python(
        "import torch, torch.distributed as dist, crux_torch\n"
        "from crux_torch import backend\n"
        "backend.register(); backend.register(); crux_torch.attach(); crux_torch.attach()\n"
        "assert backend.is_attached()\n"
    )
    assert done.returncode == 0, done.stderr
    taken = _python(
        "import torch, torch.distributed as dist\n"
        "dist.Backend.register_backend('crux', lambda *a: None, devices=['cpu'])\n"
        "try:\n"
        "    import crux_torch\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert taken.returncode == 0, taken.stderr
    assert "CruxError" in taken.stdout
    assert "is taken by" in taken.stdout


def test_the_name_is_known_without_an_import_of_crux() -> None:
    done = _python(
        "import torch.distributed as dist\n"
        "dist.Backend._ensure_backend_registered('crux') if hasattr(dist.Backend,"
        " '_ensure_backend_registered') else __import__('crux_torch')\n"
        "assert 'crux' in dist.Backend.backend_list\n"
    )
    assert done.returncode == 0, done.stderr


ATTACHED_NAMES = """
import os, sys, tempfile, torch, torch.distributed as dist
import crux_torch
crux_torch.attach()
from torch.distributed import distributed_c10d as c10d
dist.init_process_group(BACKEND, init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert type(backend).__name__ == "DelegatingBackend", type(backend)
assert backend.name() == "gloo" and isinstance(backend, c10d.ProcessGroupGloo)
assert not isinstance(backend, c10d.ProcessGroupNCCL)
assert backend.options._timeout.total_seconds() > 0
dist.all_reduce(torch.ones(3))
recorded = crux_torch.status()["recorder"]["recorded"]
assert recorded == 1, recorded
print(dist.get_backend())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backend", "name"), [("'gloo'", "gloo"), ("None", None), ("'cpu:gloo'", None)]
)
def test_attached_backends_answer_to_their_own_name(backend: str, name: str | None) -> None:
    done = _python(ATTACHED_NAMES.replace("BACKEND", backend))
    assert done.returncode == 0, done.stderr
    if name is not None:
        assert done.stdout.strip() == name


def test_a_backend_for_each_device_string() -> None:
    code = ATTACHED_NAMES.replace("BACKEND", "'cpu:crux,cuda:crux'").replace(
        "crux_torch.attach()", ""
    )
    code = code.replace(
        'assert backend.name() == "gloo" and isinstance(backend, c10d.ProcessGroupGloo)',
        'assert backend.name() == "crux"',
    )
    done = _python(code)
    assert done.returncode == 0, done.stderr


def test_flight_recorder_sees_the_same(tmp_path: Path) -> None:
    code = """
import pickle, sys, tempfile, torch, torch.distributed as dist
if sys.argv[1] != "stock":
    import crux_torch
    crux_torch.attach()
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(5))
dist.barrier()
dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
if dump is None:
    print("absent")
else:
    entries = pickle.loads(dump())["entries"]
    keys = ("input_sizes", "process_group", "pg_id")
    print([(e["profiling_name"].split(":")[-1], *(e.get(k) for k in keys)) for e in entries])
"""
    seen = {}
    for mode in ("stock", "attached"):
        done = subprocess.run(
            [sys.executable, "-c", code, mode],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "CRUX_STORE": "none", "TORCH_FR_BUFFER_SIZE": "100"},
        )
        assert done.returncode == 0, done.stderr
        seen[mode] = done.stdout
    if seen["stock"].strip() == "absent":
        pytest.skip("this torch has no flight recorder for Gloo")
    assert seen["attached"] == seen["stock"]
    assert "all_reduce" in seen["stock"]


def test_a_group_may_be_collected_on_gloos_own_thread() -> None:
    """Gloo's destructor joins its threads: run on one of them it would abort the process."""
    code = """
import ctypes, gc, tempfile, threading, torch, torch.distributed as dist, crux_torch
crux_torch.attach()
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
held = [backend]
del backend
dist.destroy_process_group()
gc.collect()

def drop():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.pthread_setname_np(ctypes.c_ulong(threading.get_ident()), b"pt_gloo_runloop")
    held.clear()

thread = threading.Thread(target=drop)
thread.start()
thread.join(10)
assert not thread.is_alive()
print("alive")
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout
