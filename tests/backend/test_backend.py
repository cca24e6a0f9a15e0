"""A script that runs on stock Gloo runs on Crux with the same results, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import python
from rig.identity import assert_same
from rig.job import ATTACHED, CRUX, STOCK, Job, Outcomes
from rig.kind import OLD_TORCH, gloo
from rig.outcome import ERROR
from rig.part import FOUR, PAIR, load

pytestmark = pytest.mark.slow

GLOO = gloo()
PARTS = tuple(
    name
    for name, part in load().items()
    if GLOO.name in part.kinds and PAIR in part.sizes and not (part.fatal or part.measures)
)
#: What stock Gloo itself refuses on torch 2.11 while collectives are checked.
REFUSED_BY_OLD_WRAPPER = {
    "compiled_collectives",
    "device_mesh",
    "fsdp2",
    "functional_collectives",
    "tensor_parallel",
}
CHECKED = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Job(GLOO, STOCK, PAIR, PARTS).run(tmp_path_factory.mktemp("stock"))


def same(got: Outcomes, expected: Outcomes) -> None:
    for name in got:
        assert_same(got[name], expected[name], GLOO, name)


@pytest.mark.parametrize("mode", [CRUX, ATTACHED])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_same_results_as_stock(mode: str, stock: Outcomes, tmp_path: Path) -> None:
    same(Job(GLOO, mode, PAIR, PARTS).run(tmp_path), stock)


@pytest.mark.full
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_same_results_while_collectives_are_checked(stock: Outcomes, tmp_path: Path) -> None:
    # Stock Gloo can't be asked here: DDP's logger crashes on it under DETAIL in torch 2.15.
    # The checks' own collectives are in the flight recorder.
    left_out = {"wrong_shapes_are_refused", "sequence_numbers", "flight_recorder"}
    left_out |= REFUSED_BY_OLD_WRAPPER if OLD_TORCH else set()
    parts = tuple(name for name in PARTS if name not in left_out)
    same(Job(GLOO, ATTACHED, PAIR, parts, env=CHECKED).run(tmp_path), stock)


@pytest.mark.full
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_same_results_on_four_ranks(tmp_path: Path) -> None:
    parts = ("all_reduce", "scatters", "batched_point_to_point", "sub_groups", "device_mesh")
    ours, stock = (Job(GLOO, mode, FOUR, parts).run(tmp_path / mode) for mode in (ATTACHED, STOCK))
    same(ours, stock)


@pytest.mark.parametrize("mode", [CRUX, ATTACHED])
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_disabled_is_stock(mode: str, stock: Outcomes, tmp_path: Path) -> None:
    parts = ("all_reduce", "ddp", "names_and_timeouts")
    same(Job(GLOO, mode, PAIR, parts, env={"CRUX_DISABLE": "1"}).run(tmp_path), stock)


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_late_rank_times_out_as_with_stock(tmp_path: Path) -> None:
    part = "a_late_rank_of_gloo_times_out"
    for mode in (STOCK, ATTACHED):
        outcome = Job(GLOO, mode, PAIR, (part,)).run(tmp_path / mode)[part][0]
        assert outcome.kind == ERROR
        # Which end notices first decides between several texts, with stock Gloo too.
        assert outcome.value.startswith("RuntimeError: ")
        assert re.search("Timed out|closed by peer|reset by peer", outcome.value), outcome.value


# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_the_flight_recorder_has_each_operation_once(tmp_path: Path) -> None:
    env, part = {"TORCH_FR_BUFFER_SIZE": "2000"}, "flight_recorder"
    runs = {
        m: Job(GLOO, m, PAIR, (part,), env=env).run(tmp_path / m) for m in (STOCK, CRUX, ATTACHED)
    }
    same(runs[CRUX], runs[STOCK])
    same(runs[ATTACHED], runs[STOCK])
    if not OLD_TORCH:
        for outcome in runs[STOCK][part]:
            assert [entry[0].endswith("all_reduce") for entry in outcome.value].count(True) == 4


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
    assert "alive" in python(MANY_WORLDS)


def test_registering_is_idempotent_and_closed_on_a_collision() -> None:
    python(
        "import torch, torch.distributed as dist, crux_torch\n"
        "from crux_torch.backend import register as backend\n"
        "backend.register(); backend.register(); crux_torch.attach(); crux_torch.attach()\n"
        "assert backend.is_attached()\n"
    )
    taken = python(
        "import torch, torch.distributed as dist\n"
        "dist.Backend.register_backend('crux', lambda *a: None, devices=['cpu'])\n"
        "try:\n"
        "    import crux_torch\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert "CruxError" in taken
    assert "is taken by" in taken


def test_the_name_is_known_without_an_import_of_crux() -> None:
    python(
        "import torch.distributed as dist\n"
        "dist.Backend._ensure_backend_registered('crux') if hasattr(dist.Backend,"
        " '_ensure_backend_registered') else __import__('crux_torch')\n"
        "assert 'crux' in dist.Backend.backend_list\n"
    )


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
    said = python(ATTACHED_NAMES.replace("BACKEND", backend))
    if name is not None:
        assert said.strip() == name


def test_threads_in_calls_of_torch_do_not_abort_the_end_of_python() -> None:
    python(
        "import threading, time\n"
        "import torch.distributed as dist\n"
        "from crux_torch import _C\n"
        "store = dist.HashStore()\n"
        "def call():\n"
        "    while True:\n"
        "        store.check(['key'])\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=call, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )


def test_a_backend_for_each_device_string() -> None:
    code = ATTACHED_NAMES.replace("BACKEND", "'cpu:crux,cuda:crux'").replace(
        "crux_torch.attach()", ""
    )
    code = code.replace(
        'assert backend.name() == "gloo" and isinstance(backend, c10d.ProcessGroupGloo)',
        'assert backend.name() == "crux"',
    )
    python(code)


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
        seen[mode] = python(code, mode, TORCH_FR_BUFFER_SIZE="100")
    if seen["stock"].strip() == "absent":
        pytest.skip("this torch has no flight recorder for Gloo")
    assert seen["attached"] == seen["stock"]
    assert "all_reduce" in seen["stock"]


LIKE_STOCK = """
import functools, sys, tempfile, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
if sys.argv[1] != "stock":
    import crux_torch
    crux_torch.attach()

def error_of(make):
    try:
        return make()
    except (RuntimeError, TypeError) as error:
        return type(error).__name__, str(error).splitlines()[0]

def logged(group):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    return {k: v for k, v in model._get_ddp_logging_data().items() if "backend" in k or "gloo" in k}

@functools.singledispatch
def class_of(backend):
    return "unknown"

for stock in (dist.ProcessGroupNCCL, dist.ProcessGroupGloo) if dist.is_nccl_available() else ():
    class_of.register(stock, lambda backend, name=stock.__name__: name)
for name in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"):
    dist.init_process_group(name, init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
    world = dist.group.WORLD
    child = error_of(lambda: dist.split_group(split_ranks=[[0]]))
    groups = [world, dist.new_group([0]), child]
    for group in groups[: 3 if isinstance(child, dist.ProcessGroup) else 2]:
        print(name, group.name(), group._get_backend_name(), logged(group))
        print(bool(group._backend_id(c10d.ProcessGroup.BackendType.GLOO)))
        backend = group._get_backend(torch.device("cpu"))
        print(class_of(backend), backend.__class__.__name__, backend.__class__.__module__)
        print([each for each in dir(backend) if not each.startswith("__")])
        print(error_of(lambda: group._register_on_completion_hook(print)), group._has_hooks())
    for args in ((), ("x", 0, 1), (dist.HashStore(), 0)):
        print(error_of(lambda: dist.ProcessGroupGloo(*args)))
    dist.destroy_process_group()
"""


def test_groups_and_backends_look_like_stock() -> None:
    assert python(LIKE_STOCK, "attached").splitlines() == python(LIKE_STOCK, "stock").splitlines()


FIRST_GROUP = """
import os, sys, threading, time, torch, torch.distributed as dist, crux_torch
crux_torch.attach()
threads = {}

class Watcher:
    def find_spec(name, path=None, target=None):
        threads.setdefault(threading.current_thread().name, []).append(name)

sys.meta_path.insert(0, Watcher)
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
if os.fork() == 0:
    # A module that another thread was importing at the fork could never be imported here.
    import crux_torch.schedule.schedulers
    os._exit(0)
assert os.wait()[1] == 0
while crux_torch.status().get("leader") is None:
    dist.all_reduce(torch.ones(1))
assert threading.active_count() > 1
dist.destroy_process_group()
# Nothing waits for the thread, which takes everything back and ends.
until = time.monotonic() + 60
while threading.active_count() > 1 and time.monotonic() < until:
    time.sleep(0.01)
print([thread.name for thread in threading.enumerate()])
own = threads["crux"]
print(len(threads["MainThread"]), len(own), "crux_torch.agent.pipeline" in own)
"""


def test_the_first_group_imports_in_the_background_and_the_last_leaves_no_thread() -> None:
    left, imports = python(FIRST_GROUP).splitlines()
    assert left == "['MainThread']"
    on_training_thread, in_background, found = imports.split()
    assert found == "True"
    assert int(in_background) > 4 * int(on_training_thread), imports


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
thread.join(60)
assert not thread.is_alive()
print("alive")
"""
    assert "alive" in python(code)
