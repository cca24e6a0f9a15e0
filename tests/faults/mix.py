"""Faults drawn from a seed, under jobs that train and an etcd of three members."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from control_fakes import until
from dscp_maps import MARKED_ENV
from etcd_server import Etcd
from onlooker import Cluster
from training_job import BOUND_S, Job

from crux_torch.agreement.registry import Registry
from crux_torch.errors import StoreError
from crux_torch.store import MAX_VALUE_BYTES
from crux_torch.store.endpoint import open_store
from faults import wall_clock
from faults.link import Direction, Link

LEASE_S = 4.0
#: Longest time for which a fault lasts. A leader may stand still for longer than its lease.
LONGEST_S = 8.0
CRUX = {
    **MARKED_ENV,
    # The default gives no levels where it knows no link that jobs share.
    "CRUX_POLICY": "crux-paper",
    "CRUX_LEASE_S": str(LEASE_S),
    "CRUX_PROFILE_S": "3",
    "CRUX_TUNING": "profile_iterations=5,plan_valid_s=10",
}
#: Old revisions are kept for a while, and all of an etcd has to fit into a quota.
ETCD = (
    *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "1000"),
    *("--quota-backend-bytes", str(32 << 20)),
)
#: What a slow member does again and again: it stands still, then it works.
STILL_S, WORKS_S = 0.3, 0.1
#: More steps than a job gets to.
STEPS = 10_000_000

#: What ends a fault.
Heal = Callable[[], None]


class Mix:
    """Two jobs that agree through an etcd, one fault at a time.

    ``stays`` trains from the beginning to the end; ``comes`` may die and be started again under its
    name, each time with another wrong wall clock. Each job has links of its own to the members.
    After each fault both must be planned again, and both ranks of both carry the plan out.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._wall_clock = wall_clock.build(folder)
        self._etcd = Etcd(folder, members=3, flags=ETCD)
        self._endpoint = f"etcd://{self._etcd.endpoints}/mix"
        self._jobs: dict[str, Job] = {}
        self._links = {
            name: [Link(port) for port in self._etcd.ports] for name in ("stays", "comes")
        }
        #: What was done, the last fault last.
        self.schedule: list[str] = []
        self._epoch = 0

    def __enter__(self) -> Mix:
        self._cluster = Cluster(self._endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs.values():
            job.kill_everything()
        self._cluster.close()
        for link in (link for links in self._links.values() for link in links):
            link.close()
        self._etcd.__exit__()

    @property
    def stays(self) -> Job:
        return self._jobs["stays"]

    def run(self, seconds: float) -> None:
        """One fault after the other for so long; raises AssertionError where jobs don't recover."""
        faults = [
            self._a_member_dies, self._a_member_stands_still, self._the_majority_dies,
            self._the_majority_stands_still, self._all_members_are_slow, self._the_store_is_full,
            self._the_store_forgets_everything, self._a_store_process_dies,
            self._store_processes_die_again_and_again, self._a_link_is_slow,
            self._nothing_arrives_from_a_job, self._nothing_arrives_at_a_job,
            self._a_leader_stands_still_past_its_lease, self._a_job_dies,
            self._a_job_dies_as_it_begins, self._a_leader_dies, self._keys_are_compacted_away,
            self._others_write_junk,
        ]  # fmt: skip
        for name in self._links:
            self._start(name)
        # The store is absent when they start.
        for job in self._jobs.values():
            until(lambda job=job: job.leader() and job.steps() > 5, BOUND_S, "jobs that train")
            assert job.leader()["store"] != "ok"
        self._etcd.__enter__()
        self._recovered()
        ends_s = time.monotonic() + seconds
        queue: list[Callable[[], Heal]] = []
        while time.monotonic() < ends_s:
            # Each kind comes once before one comes again.
            queue = queue or self._rng.sample(faults, len(faults))
            fault, lasts_s = queue.pop(), self._rng.uniform(0.0, LONGEST_S)
            self.schedule.append(f"{fault.__name__.strip('_')} for {lasts_s:.1f} s")
            steps = self.stays.steps()
            heal = fault()
            try:
                time.sleep(lasts_s)
            finally:
                heal()
            print(self.schedule[-1], flush=True)
            self._recovered()
            until(lambda before=steps: self.stays.steps() > before + 5, BOUND_S, "more steps")

    def end(self) -> None:
        """End both jobs; nothing of them is left when their leases have ended."""
        for job in self._jobs.values():
            job.end()
        until(lambda: not self._left(), BOUND_S, f"the processes to end: {self._left()}")
        until(lambda: not self._cluster.jobs(), BOUND_S, "the records to end")

    def _start(self, name: str) -> None:
        folder = self._folder / name
        for old in folder.glob("*") if folder.exists() else ():
            old.unlink()
        members = ",".join(f"127.0.0.1:{link.port}" for link in self._links[name])
        env = {**CRUX, "CRUX_STORE": f"etcd://{members}/mix", "CRUX_JOB": name}
        if name == "comes":
            ahead_s, rate = self._rng.uniform(-3600.0, 3600.0), self._rng.uniform(0.5, 2.0)
            env |= wall_clock.environment(self._wall_clock, ahead_s, rate)
        self._jobs[name] = Job("cruxrun", folder, f"--steps={STEPS}", "--status", **env)

    def _recovered(self) -> None:
        until(self._planned, BOUND_S, f"a plan for {sorted(self._jobs)}")
        plan = self._cluster.plan()
        if plan is not None:
            assert plan.epoch >= self._epoch, "an older plan came back"
            self._epoch = plan.epoch

    def _planned(self) -> bool:
        plan = self._cluster.plan()
        if plan is None or {entry.job for entry in plan.entries} != set(self._jobs):
            return False
        return all(
            job.leader().get("snapshot") == plan.fingerprint and job.follows(plan)
            for job in self._jobs.values()
        )

    def _left(self) -> list[str]:
        """Command lines of processes that were started for the jobs, by their environment."""
        found = []
        mine = [f":{links[0].port},".encode() for links in self._links.values()]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (folder / "environ").read_bytes()
                if any(port in environ for port in mine):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def _some_job(self) -> Job:
        return self._jobs[self._rng.choice(sorted(self._jobs))]

    def _store_processes(self, job: Job) -> list[int]:
        """Those of the rank that leads."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
                if parent == job.pid(0) and b"crux_torch.store.etcd_process" in command:
                    found.append(int(folder.name))
        return found

    def _members(self, count: int) -> list[int]:
        return self._rng.sample(range(3), count)

    def _members_die(self, count: int) -> Heal:
        members = self._members(count)
        for n in members:
            self._etcd.processes[n].kill()
            self._etcd.processes[n].wait()

        def heal() -> None:
            for n in members:
                self._etcd.restart(n)

        return heal

    def _members_stand_still(self, count: int) -> Heal:
        processes = [self._etcd.processes[n] for n in self._members(count)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)

        def heal() -> None:
            for process in processes:
                process.send_signal(signal.SIGCONT)

        return heal

    def _a_member_dies(self) -> Heal:
        return self._members_die(1)

    def _the_majority_dies(self) -> Heal:
        return self._members_die(2)

    def _a_member_stands_still(self) -> Heal:
        return self._members_stand_still(1)

    def _the_majority_stands_still(self) -> Heal:
        return self._members_stand_still(2)

    def _all_members_are_slow(self) -> Heal:
        healed = threading.Event()

        def slow(process: subprocess.Popen[bytes], begins_s: float) -> None:
            healed.wait(begins_s)
            while not healed.is_set():
                process.send_signal(signal.SIGSTOP)
                time.sleep(STILL_S)
                process.send_signal(signal.SIGCONT)
                healed.wait(WORKS_S)

        period_s = STILL_S + WORKS_S
        threads = [
            threading.Thread(target=slow, args=(process, self._rng.uniform(0.0, period_s)))
            for process in self._etcd.processes
        ]
        for thread in threads:
            thread.start()

        def heal() -> None:
            healed.set()
            for thread in threads:
                thread.join()

        return heal

    def _the_store_is_full(self) -> Heal:
        """Up to its quota: an etcd reads on, but takes no write and gives no lease."""
        store = open_store(f"etcd://{self._etcd.endpoints}/another", timeout_s=10.0)
        ends_s = time.monotonic() + BOUND_S
        while True:
            assert time.monotonic() < ends_s, "it is not full"
            try:
                store.put("large", self._rng.randbytes(MAX_VALUE_BYTES), 60.0)
            except StoreError as error:
                if "space exceeded" in str(error):
                    break
        store.close()

        def heal() -> None:
            """As the manual of etcd says."""
            told = self._etcd.ctl("get", "another", "-w", "json")
            self._etcd.ctl("compact", told.split('"revision":')[1].split(",")[0])
            self._etcd.ctl("defrag")
            self._etcd.ctl("alarm", "disarm")

        return heal

    def _the_store_forgets_everything(self) -> Heal:
        """All members die, and start again with empty disks."""
        heal = self._members_die(3)

        def heal_without_disks() -> None:
            for n in range(3):
                self._etcd.wipe(n)
            heal()

        return heal_without_disks

    def _a_store_process_dies(self) -> Heal:
        for pid in self._store_processes(self._some_job()):
            os.kill(pid, signal.SIGKILL)
        return lambda: None

    def _store_processes_die_again_and_again(self) -> Heal:
        """At moments that have nothing to do with what they are doing."""
        job, healed, rng = self._some_job(), threading.Event(), random.Random(self._rng.random())

        def kill() -> None:
            while not healed.wait(rng.uniform(0.0, 1.0)):
                for pid in self._store_processes(job):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()

        def heal() -> None:
            healed.set()
            thread.join()

        return heal

    def _links_of_a_job(self) -> tuple[list[Link], Heal]:
        links = self._links[self._rng.choice(sorted(self._links))]

        def heal() -> None:
            for link in links:
                link.heal()

        return links, heal

    def _a_link_is_slow(self) -> Heal:
        links, heal = self._links_of_a_job()
        for link in links:
            link.delay_s = self._rng.uniform(0.0, 1.0)
        return heal

    def _nothing_arrives(self, direction: Direction) -> Heal:
        links, heal = self._links_of_a_job()
        for link in links:
            link.cut(direction)
        return heal

    def _nothing_arrives_from_a_job(self) -> Heal:
        return self._nothing_arrives("there")

    def _nothing_arrives_at_a_job(self) -> Heal:
        return self._nothing_arrives("back")

    def _a_leader_stands_still_past_its_lease(self) -> Heal:
        pid = self._some_job().pid(0)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(LEASE_S)
        return lambda: os.kill(pid, signal.SIGCONT)

    def _a_job_dies(self) -> Heal:
        self._jobs["comes"].kill_everything()
        return lambda: self._start("comes")

    def _a_job_dies_as_it_begins(self) -> Heal:
        """Starting, registering, in the line for measuring, measuring, or planned just now."""
        self._jobs["comes"].kill_everything()
        self._start("comes")
        job = self._jobs["comes"]
        stages: dict[str, Callable[[], bool]] = {
            "starting": lambda: bool(job.worker_pids()),
            "registering": lambda: bool(job.leader()),
            "measuring": lambda: bool((job.status().get("order") or {}).get("measuring")),
            "planned": lambda: bool((job.status().get("order") or {}).get("plan_epoch")),
        }
        stage = self._rng.choice(sorted(stages))
        self.schedule[-1] += f" ({stage})"
        until(stages[stage], BOUND_S, stage)
        job.kill_everything()
        return lambda: self._start("comes")

    def _a_leader_dies(self) -> Heal:
        job = self._jobs["comes"]
        os.kill(job.pid(0), signal.SIGKILL)

        def heal() -> None:
            job.launcher.wait(BOUND_S)
            self._start("comes")

        return heal

    def _keys_are_compacted_away(self) -> Heal:
        """While a job's store process stands still, so that its watch has a gap."""
        stopped = self._store_processes(self._some_job())
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        told = self._etcd.ctl("put", "another", "key", "-w", "json")
        self._etcd.ctl("compact", told.split('"revision":')[1].split(",")[0])

        def heal() -> None:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        return heal

    def _others_write_junk(self) -> Heal:
        """Records and a plan that nobody can use, beside those in force."""
        store = open_store(self._endpoint, timeout_s=10.0)
        registry = Registry(store, "default")
        junk = {
            registry.job_key("junk"): b"\xff\xfe{",
            registry.job_key("newer"): b'{"version": 99, "job": "newer"}',
            registry.job_key("large"): b"[" * 60_000,
            registry.job_key("odd\x1b[2J"): b"{}",
            registry.plan_key: b'{"renewal": 4503599627370496, "plan": {"epoch": 1}}',
        }

        def tried(operation: Callable[[], object]) -> bool:
            try:
                operation()
            except StoreError:
                return False
            return True

        for key, value in junk.items():
            until(lambda k=key, v=value: tried(lambda: store.put(k, v, 60.0)), what="a write")

        def heal() -> None:
            for key in set(junk) - {registry.plan_key}:
                until(lambda k=key: tried(lambda: store.delete(k)), what="a write")
            store.close()

        return heal
