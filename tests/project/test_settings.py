import itertools
import re
from dataclasses import fields

import pytest
from dscp_maps import CLASS_SELECTORS, MARKED_ENV
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from crux_torch.errors import SettingsError
from crux_torch.misspelt import misspelt, misspelt_text
from crux_torch.settings import (
    LIVE_POLICIES,
    OTHER_VARIABLES,
    SETTINGS,
    TUNING,
    Marks,
    PortRange,
    Settings,
    process_settings,
    settings_table,
)

NAMES = [setting.env for setting in SETTINGS]


def test_a_default_survives_being_written_and_read_and_an_empty_variable_means_it():
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({s.env: s.default_text for s in SETTINGS}) == Settings()
    assert Settings.from_env({s.env: "" for s in SETTINGS}) == Settings()


def test_every_field_has_a_variable_a_flag_and_a_meaning():
    assert [s.field for s in (*SETTINGS, *TUNING)] == [f.name for f in fields(Settings)]
    named = {s.field: (s.env, s.flag) for s in SETTINGS}
    assert named["reserved_levels"] == ("CRUX_RESERVED_LEVELS", "--crux-reserved-levels")
    assert named["disable"] == ("CRUX_DISABLE", "--crux-disable")
    assert named["transport"] == ("CRUX_TRANSPORT", "--crux-no-transport"), "it is on by default"
    assert not any(s.meaning.endswith(".") for s in SETTINGS)


def test_the_document_shows_the_current_table():
    (document,) = (ROOT / "docs").rglob("settings.md")
    assert settings_table() in document.read_text(), "run: python -m crux_torch.settings"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("CRUX_DISABLE", "Yes", True),
        ("CRUX_PATHS", " off ", False),
        ("CRUX_MAX_SLOWDOWN", "1.5", 1.5),
        ("CRUX_LEVELS", " 16 ", 16),
        ("CRUX_PORTS", "1024-65535", PortRange(1024, 65535)),
        ("CRUX_PORTS", " 30000 - 30000 ", PortRange(30000, 30000)),
        ("CRUX_DSCP_MAP", "0x0,46, 1,2,3,4,5,63", (0, 46, 1, 2, 3, 4, 5, 63)),
        ("CRUX_LINKS", "a, b", ("a", "b")),
        ("CRUX_STORE", "none", "none"),
        ("CRUX_STORE", "tcp://[fd00::1]:29410", "tcp://[fd00::1]:29410"),
        ("CRUX_LOG_LEVEL", "info", "INFO"),
        ("CRUX_ROCE_ECN", "Auto", "auto"),
        *(("CRUX_POLICY", policy, policy) for policy in LIVE_POLICIES),
        ("CRUX_TOPOLOGY", "a file.yaml", "a file.yaml"),
    ],
)
def test_a_value_may_be_written_so(variable, text, value):
    assert getattr(Settings.from_env({variable: text}), variable[5:].lower()) == value


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        ("CRUX_DISABLE", "perhaps|2"),
        ("CRUX_STORE", "localhost|tcp://localhost|tcp://:80|tcp://a:0|tcp://a:99999"),
        ("CRUX_STORE", "http://localhost:80|tcp://localhost:80/path"),
        ("CRUX_CLUSTER", "a/b"),
        ("CRUX_JOB", "two words|" + "x" * 129),
        ("CRUX_LEVELS", "0|65|eight|4.5"),
        ("CRUX_RESERVED_LEVELS", "1,x|64|-1|9|0,8"),
        ("CRUX_DSCP_MAP", ",|0,64|0,8,16,24,32,40,48,8"),
        ("CRUX_RDMA_DSCP_MAP", ",|0,64|0,8,16,24,32,40,48,8"),
        ("CRUX_LEASE_S", "1e-9|601"),
        ("CRUX_LOG_LEVEL", "loud"),
        ("CRUX_POLICY", "best|ideal"),
        ("CRUX_ROCE_ECN", "3"),
        ("CRUX_PROFILE_S", "0|nan|inf|soon"),
        ("CRUX_DEVICE_FLOPS", "-1"),
        ("CRUX_MAX_SLOWDOWN", "0.5|-1"),
        ("CRUX_PORTS", "20000|80-90|30000-20000|20000-65536|1-2-3"),
        ("CRUX_LINKS", ",|a,a|auto,a|a b"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_was_expected(variable, texts):
    for text in texts.split("|"):
        with pytest.raises(SettingsError, match=rf"^{variable}='?{text}'?: expected \w"):
            Settings.from_env({variable: text})


def test_tuning_sets_several_values_at_once():
    found = Settings.from_env({"CRUX_TUNING": " tick_s=1e-2, records = 16,timing=Always"})
    assert found == Settings(tick_s=0.01, records=16, timing="always")
    assert Settings.from_env({f"CRUX_{s.field.upper()}": "1" for s in TUNING}) == Settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tick_s", "='tick_s': expected NAME=VALUE,NAME=VALUE, names are .*tick_s"),
        ("tick_s=", "='tick_s=': expected NAME"),
        ("levels=4", "='levels=4': expected NAME"),
        ("tick_s=0.1,", "='tick_s=0.1,': expected NAME"),
        *((f"tick_s={text}", f": tick_s='{text}': expected a number") for text in ("0", "inf")),
        ("records=8,plan_valid_s=601", ": plan_valid_s='601': expected a number of seconds"),
        ("link_wait_ms=10001", ": link_wait_ms='10001': expected a number of milliseconds"),
        ("timing=never", ": timing='never': expected one of measuring, always"),
        ("records=-5", ": records='-5': expected a whole number"),
    ],
)
def test_bad_tuning_is_refused_with_its_name_and_what_was_expected(text, says):
    with pytest.raises(SettingsError, match=f"^CRUX_TUNING{says}"):
        Settings.from_env({"CRUX_TUNING": text})


def test_this_process_has_the_settings_of_its_environment(monkeypatch):
    monkeypatch.setenv("CRUX_LEVELS", "4")
    monkeypatch.setenv("CRUX_TUNING", "records=8")
    first = process_settings()
    assert (first.levels, first.records) == (4, 8)
    assert process_settings() is first
    monkeypatch.delenv("CRUX_LEVELS")
    assert process_settings().levels == 8


def test_levels_and_dscp_values_must_fit_each_other():
    with pytest.raises(SettingsError, match="CRUX_DSCP_MAP names 2 DSCP values"):
        Settings.from_env({"CRUX_DSCP_MAP": "0,8"})
    two = Settings.from_env({"CRUX_DSCP_MAP": "0x0,0x2e", "CRUX_LEVELS": "2"})
    assert two.dscp_map == (0, 46)
    with pytest.raises(SettingsError, match=r"expected .* levels below CRUX_LEVELS, which is 2"):
        Settings.from_env({"CRUX_RESERVED_LEVELS": "2", "CRUX_LEVELS": "2"})
    unused = Settings.from_env({"CRUX_DSCP_MAP": "0,46,46", "CRUX_LEVELS": "2"})
    assert unused.dscp_map == (0, 46, 46), "values of levels that do not exist are not compared"


@given(levels=st.integers(1, 8), data=st.data())
def test_levels_are_split_into_reserved_profiling_and_plan(levels, data):
    reserved = data.draw(st.sets(st.integers(0, levels - 1)))
    env = {"CRUX_LEVELS": str(levels), "CRUX_RESERVED_LEVELS": ",".join(map(str, reserved))}
    env |= MARKED_ENV
    usable = [n for n in range(levels) if n not in reserved]
    if not usable:
        with pytest.raises(SettingsError, match="CRUX_RESERVED_LEVELS leaves no level"):
            Settings.from_env(env)
        return
    settings = Settings.from_env(env)
    assert list(settings.usable_levels) == usable
    assert settings.marks.are_sound
    assert settings.marks.measuring_level == max(usable)
    if len(usable) > 1:
        assert max(settings.marks.plan_levels) < settings.marks.measuring_level
    else:
        assert list(settings.marks.plan_levels) == usable
    assert settings.control_dscp == CLASS_SELECTORS[max(usable)]


@pytest.mark.parametrize("env", [{}, {"CRUX_LEVELS": "2"}, {"CRUX_RESERVED_LEVELS": "0,1"}])
def test_nothing_is_marked_unless_the_operator_says_so(env):
    settings = Settings.from_env(env)
    assert not settings.marks
    assert settings.marks.plan_levels == (0,), "no level has an effect"
    assert settings.control_dscp == 0
    rdma = Settings.from_env({**env, "CRUX_RDMA_DSCP_MAP": MARKED_ENV["CRUX_DSCP_MAP"]})
    assert (rdma.marks.tcp, rdma.control_dscp) == ((), 0), "queue pairs' map is theirs alone"
    assert rdma.marks.rdma == CLASS_SELECTORS[: rdma.levels]
    dry = Settings.from_env({**env, **MARKED_ENV, "CRUX_DRY_RUN": "1"})
    assert dry.marks
    assert dry.control_dscp == 0


@given(st.builds(Marks, *[st.lists(st.integers(0, 63), max_size=4).map(tuple)] * 3))
def test_only_sound_marks_of_others_count(marks):
    sizes = [len(values) for values in (marks.tcp, marks.rdma) if values]
    each = all(n < size for n in marks.usable for size in sizes)
    ascending = all(a < b for a, b in itertools.pairwise(marks.usable))
    assert marks.are_sound == bool(sizes and marks.usable and each and ascending)


def test_a_misspelt_setting_is_named_with_the_nearest_one_and_without_its_value():
    env = {
        "CRUX_POLCIY": "ecmp",
        "CRUX_STORE_SECRETS": "hush",
        "CRUX_TOPOLGY": "a.yaml",
        "CRUX_dscp_map": "0",
        "CRUX_XYZZY": "1",
        "CRUX_TICK_S": "1",
        "CRUXRUN": "1",
        "PATH": "/bin",
    }
    assert misspelt(env) == {
        "CRUX_POLCIY": "CRUX_POLICY",
        "CRUX_STORE_SECRETS": "CRUX_STORE_SECRET",
        "CRUX_TICK_S": "CRUX_TUNING=tick_s=...",
        "CRUX_TOPOLGY": "CRUX_TOPOLOGY",
        "CRUX_XYZZY": "",
        "CRUX_dscp_map": "CRUX_DSCP_MAP",
    }
    said = misspelt_text(env)
    assert "CRUX_POLCIY (did you mean CRUX_POLICY?)" in said
    assert "CRUX_XYZZY, " in said
    assert "hush" not in said
    one = misspelt_text({"CRUX_LEVEL": "4"})
    assert one == ("CRUX_LEVEL (did you mean CRUX_LEVELS?) is no setting of Crux and has no effect")


def test_what_is_known_is_not_named():
    assert misspelt_text(dict.fromkeys([*NAMES, *OTHER_VARIABLES], "1")) == ""


def test_kubernetes_variables_of_a_service_are_not_named():
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
def test_one_wrong_letter_leads_back_to_the_setting(name, at, letter):
    wrong = f"{name[:at]}{letter}{name[at:]}"
    if wrong not in (*NAMES, *OTHER_VARIABLES):
        # Of two that are alike, such as CRUX_PATHS and CRUX_PORTS, either may be nearer.
        assert misspelt({wrong: "1"})[wrong] in NAMES


def test_the_list_has_every_variable_that_a_program_of_the_repository_reads():
    read = set()
    calls = r"(?:environ(?:\.get\(|\[)|getenv\(|is_true\(|setting\(|_ENV = |export )"
    folders = ("crux_torch", "launcher", "csrc", "lab", "tests", "benchmarks", "tools")
    for file in [ROOT / "setup.py", *(f for each in folders for f in (ROOT / each).rglob("*"))]:
        if file.suffix in (".py", ".cc", ".cpp", ".h", ".sh"):
            read |= set(re.findall(rf'{calls}"(CRUX_[A-Z0-9_]+)"', file.read_text()))
    assert {"CRUX_TRANSPORT_LOG", "CRUX_BUILD", "CRUX_SOAK_SEED"} <= read
    assert read <= {*NAMES, *OTHER_VARIABLES}
