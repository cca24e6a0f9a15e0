"""``crux status --history``: which plan and which settings held when, by whom, and why."""

from __future__ import annotations

import io
import json

from click.testing import CliRunner
from store_server import ServerThread

from crux_torch.agreement.audit import AuditEntry
from crux_torch.agreement.registry import Registry
from crux_torch.cli.status import history_of, render_history, status
from crux_torch.report.tables import console

ENTRIES = (
    AuditEntry(kind="plan", at_s=1000.0, who="a", before=0, after=1, why=("b started",)),
    AuditEntry(kind="operator", at_s=1010.0, who="me@h", before=0, after=1, why=("drain b",)),
    AuditEntry(
        kind="plan",
        at_s=1030.0,
        who="a",
        before=1,
        after=2,
        why=("w1", "w2", "w3", "w4", "w5"),
        changes=("b: level 3 -> 0",),
    ),
)


def test_an_entry_holds_until_the_next_of_its_kind_or_until_now() -> None:
    rows = history_of(ENTRIES, now_s=1630.0).rows
    assert [row["what"] for row in rows] == ["plan 1", "settings 1", "plan 2"]
    assert [row["held for"] for row in rows] == ["30 s", "10 min", "10 min"]
    assert rows[0]["UTC"] == "01-01 00:16:40"
    assert rows[2]["why"] == "w1; w2; w3; and 2 more"
    assert rows[2]["changed"] == "b: level 3 -> 0"


def test_a_cluster_without_a_past_says_so() -> None:
    to = io.StringIO()
    render_history(console(to), (), 0.0)
    assert to.getvalue() == "no history: no plan has been written yet, and no settings\n"


def test_status_reads_the_audit_log_if_asked() -> None:
    with ServerThread() as server:
        client = server.client()
        for entry in ENTRIES:
            Registry(client, "c").append_audit(entry)
        where = ["--store", f"tcp://127.0.0.1:{server.port}", "--cluster", "c"]
        shown = CliRunner().invoke(status, [*where, "--history"], env={"COLUMNS": "120"})
        assert shown.exit_code == 0, shown.output
        assert "settings 1" in shown.output
        assert "b: level 3 -> 0" in shown.output
        found = json.loads(CliRunner().invoke(status, [*where, "--history", "--json"]).output)
        assert [entry["after"] for entry in found["history"]] == [1, 1, 2]
        assert json.loads(CliRunner().invoke(status, [*where, "--json"]).output)["history"] == []
        client.close()
