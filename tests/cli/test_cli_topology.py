"""``crux topology``: files in, files out, exit codes and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crux_torch.cli.main import main
from crux_torch.network.loaders import load_topology

TREE = "SwitchName=s Switches=a,b\nSwitchName=a Nodes=n[0-1]\nSwitchName=b Nodes=n[2-3]\n"
RATES = ("--capacity", "host-tor=400Gbps", "--capacity", "tor-aggregation=1600Gbps")
INSIDE = """<system version="1"><cpu numaid="0">
<pci busid="0000:06:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
<pci busid="0000:07:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/></cpu></system>"""


def crux(*argv: object) -> Result:
    return CliRunner().invoke(main, ["topology", *map(str, argv)], prog_name="crux")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    file = tmp_path / "topology.conf"
    file.write_text(TREE)
    return file


def test_import_export_and_check(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "cluster.yaml"
    done = crux("import", tree, *RATES, "--out", out)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "gives no paths to choose from" in done.stderr
    assert load_topology(out).capacity_Bps["a->s"] == 200e9
    assert crux("import", tree, *RATES).stdout == out.read_text()
    assert crux("export", out, "--format", "slurm").stdout == TREE
    graph = json.loads(crux("export", out, "--format", "topograph").stdout)
    assert graph["instances"][0] == {"id": "n0", "network_layers": ["a", "s"]}
    done = crux("check", out)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0].startswith("missing  no host has a choice of paths")
    done = crux("check", out, "--json")
    assert [each["state"] for each in json.loads(done.stdout)] == ["missing", "info", "info"]


def test_check_of_a_file_that_is_no_topology(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("version: 1\nhosts: {h0: , h1: }\nlinks: []\n")
    done = crux("check", file)
    assert done.exit_code == 1
    assert done.stdout.startswith("wrong    ")
    assert "host 'h1' cannot be reached from 'h0'" in done.stdout


def test_check_of_a_file_that_lacks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    ends = ("h0, t0", "h0, t1", "h1, t0", "h1, t1")
    links = "".join(f"  - {{between: [{pair}], capacity_Bps: 1}}\n" for pair in ends)
    given = "addresses: {h0: ['::1'], h1: ['::2'], t0: ['::3'], t1: ['::4']}\n"
    head = "version: 1\nhosts: {h0: , h1: }\nswitches: {t0: tor, t1: tor}\n"
    file.write_text(f"{head}{given}links:\n{links}")
    assert crux("check", file).exit_code == 0


def test_draw(tree: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "cluster.yaml", tmp_path / "cluster.svg"
    crux("import", tree, *RATES, "--out", out)
    assert crux("draw", out).stdout == (
        "s  aggregation\n"
        "├── a  tor, 1 × 1.6 Tbps up\n"
        "│   └── n[0-1]  2 × host, each 1 × 400 Gbps up\n"
        "└── b  tor, 1 × 1.6 Tbps up\n"
        "    └── n[2-3]  2 × host, each 1 × 400 Gbps up\n"
    )
    assert crux("draw", out, "--out", picture).exit_code == 0
    assert picture.read_text().startswith("<svg")


def test_a_folder_with_a_file_for_each_host(tmp_path: Path) -> None:
    folder = tmp_path / "lldp"
    folder.mkdir()
    for host in ("h0", "h1"):
        neighbour = {"chassis": {"leaf0": {"descr": "x"}}, "port": {"descr": "1"}}
        text = json.dumps({"lldp": {"interface": {"eth0": neighbour}}})
        (folder / f"{host}.json").write_text(text)
    done = crux("import", folder, "--capacity", "host-tor=100Gbps")
    assert done.exit_code == 0
    assert "between: [h1/eth0, leaf0]" in done.stdout


def test_the_inside_of_a_host(tree: Path, tmp_path: Path) -> None:
    out, inside = tmp_path / "cluster.yaml", tmp_path / "n2.xml"
    crux("import", tree, *RATES, "--out", out)
    inside.write_text(INSIDE)
    assert "n2/gpu0: gpu" in crux("import", inside).stdout
    done = crux("import", inside, "--into", out, "--out", tmp_path / "more.yaml")
    assert done.exit_code == 0, done.output
    assert load_topology(tmp_path / "more.yaml").inside("n2", "nic") == ("n2/nic0",)
    other = crux("import", inside, "--into", out, "--host", "n3").stdout
    assert "n3/nic0" in other
    assert "n2/nic0" not in other


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["import", "topology.conf"], 1, "there is no capacity of host-tor (4 links)"),
        (["import", "topology.conf", "--capacity", "host-tor=fast"], 2, "'fast' is no rate"),
        (["import", "topology.conf", "n.xml"], 1, "expected files of one format"),
        (["import", "other"], 1, "other is none of lldp, ibnetdiscover, slurm"),
        (["import", "n.xml", "m.xml"], 2, "several hosts need --into"),
        (["import", "n.xml", "m.xml", "--host", "a"], 2, "--host goes with one file"),
        (
            ["import", "topology.conf", "--host", "a"],
            2,
            "--into and --host go with nccl and nvidia-smi",
        ),
        (["import", "empty"], 2, "the folders hold no files"),
        (["import", "topology.conf", "--format", "topograph"], 1, "topology.conf: "),
        (["export", "other", "--format", "slurm"], 1, "expected a mapping"),
        (["draw", "other"], 1, "expected a mapping"),
    ],
)
def test_errors(
    argv: list[str], code: int, words: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.parent)
    for name in ("n.xml", "m.xml"):
        Path(name).write_text(INSIDE)
    Path("other").write_text("hello")
    Path("empty").mkdir()
    done = crux(*argv)
    assert words in " ".join(done.output.split())
    assert done.exit_code == code
