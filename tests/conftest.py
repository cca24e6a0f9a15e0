"""Which tests may be tried a second time: those whose outcome is not this package's alone."""

from __future__ import annotations

import os

import pytest

#: Tests of real training processes. Stock Gloo and torchrun, which they start too, now and then
#: abort a process that is being torn down or lose a race for a port; a test that fails because of
#: this package fails twice. Every second try is listed in the summary.
REAL_PROCESSES = (
    "test_absences.py",
    "test_apply_",
    "test_backend.py",
    "test_control_host.py",
    "test_control_job_channel.py",
    "test_control_store.py",
    "test_cruxrun_processes.py",
    "test_demo_job.py",
    "test_examples.py",
    "test_kill.py",
    "test_links_processes.py",
    "test_nccl_sockets.py",
    "test_netns_fabric.py",
    "test_runtime_agent.py",
    "test_transport",
)
#: A fake device's times, kept by threads of a machine that does other things too.
FAKE_TIMES = ("test_gpu_durations.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    twice = REAL_PROCESSES if os.environ.get("CRUX_TEST_GPU") else REAL_PROCESSES + FAKE_TIMES
    for item in items:
        if item.path.name.startswith(twice):
            item.add_marker(pytest.mark.flaky(reruns=1))
