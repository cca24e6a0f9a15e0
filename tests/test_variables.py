"""Variables that nobody reads are named; those that something of ours reads are not."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from crux_torch.settings import SETTINGS
from crux_torch.variables import NO_SETTINGS, misspelt, misspelt_in_words

ROOT = Path(__file__).parent.parent
NAMES = [setting.env for setting in SETTINGS]


def test_a_misspelt_setting_is_named_with_the_nearest_one_and_without_its_value() -> None:
    env = {
        "CRUX_POLCIY": "ecmp",
        "CRUX_STORE_SECRETS": "hush",
        "CRUX_TOPOLGY": "a.yaml",
        "CRUX_dscp_map": "0",
        "CRUX_XYZZY": "1",
        "CRUXRUN": "1",
        "PATH": "/bin",
    }
    assert misspelt(env) == {
        "CRUX_POLCIY": "CRUX_POLICY",
        "CRUX_STORE_SECRETS": "CRUX_STORE_SECRET",
        "CRUX_TOPOLGY": "CRUX_TOPOLOGY",
        "CRUX_XYZZY": "",
        "CRUX_dscp_map": "CRUX_DSCP_MAP",
    }
    said = misspelt_in_words(env)
    assert "CRUX_POLCIY (did you mean CRUX_POLICY?)" in said
    assert "CRUX_XYZZY, " in said
    assert "hush" not in said
    one = misspelt_in_words({"CRUX_LEVEL": "4"})
    assert one == ("CRUX_LEVEL (did you mean CRUX_LEVELS?) is no setting of Crux and has no effect")


def test_what_is_known_is_not_named() -> None:
    assert misspelt_in_words(dict.fromkeys([*NAMES, *NO_SETTINGS], "1")) == ""


def test_kubernetes_variables_of_a_service_are_not_named() -> None:
    service = {
        "CRUX_STORE_SERVICE_HOST": "10.0.0.11",
        "CRUX_STORE_SERVICE_PORT": "29410",
        "CRUX_STORE_SERVICE_PORT_MAIN": "29410",
        "CRUX_STORE_PORT": "tcp://10.0.0.11:29410",
        "CRUX_STORE_PORT_29410_TCP": "tcp://10.0.0.11:29410",
        "CRUX_STORE_PORT_29410_TCP_ADDR": "10.0.0.11",
        "CRUX_SERVICE_HOST": "10.0.0.12",
        "CRUX_PORT": "tcp://10.0.0.12:80",
    }
    assert misspelt(service) == {}
    assert misspelt({"CRUX_PORT": "20000-20999"}) == {"CRUX_PORT": "CRUX_PORTS"}


@given(st.sampled_from(NAMES), st.integers(6, 30), st.sampled_from("AEXZ_"))
def test_one_wrong_letter_leads_back_to_the_setting(name: str, at: int, letter: str) -> None:
    wrong = f"{name[:at]}{letter}{name[at:]}"
    if wrong not in (*NAMES, *NO_SETTINGS):
        # Of two that are alike, such as CRUX_PATHS and CRUX_PORTS, either may be nearer.
        assert misspelt({wrong: "1"})[wrong] in NAMES


def test_the_list_has_every_variable_that_a_program_of_the_repository_reads() -> None:
    read: set[str] = set()
    calls = r"(?:environ(?:\.get\(|\[)|getenv\(|is_true\(|setting\(|_ENV = |export )"
    folders = ("crux_torch", "launcher", "csrc", "lab", "tests", "benchmarks", "tools")
    for file in [ROOT / "setup.py", *(f for each in folders for f in (ROOT / each).rglob("*"))]:
        if file.suffix in (".py", ".cc", ".cpp", ".h", ".sh"):
            read |= set(re.findall(rf'{calls}"(CRUX_[A-Z0-9_]+)"', file.read_text()))
    assert {"CRUX_JOB_OF", "CRUX_TRANSPORT_LOG", "CRUX_BUILD", "CRUX_SOAK_SEED"} <= read
    assert read <= {*NAMES, *NO_SETTINGS}
