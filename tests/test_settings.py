from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.errors import SettingsError
from crux_torch.settings import SETTINGS, PortRange, Settings, settings_table

DOC = Path(__file__).parent.parent / "docs" / "settings.md"


def test_defaults_are_valid_and_survive_a_round_trip_through_the_environment():
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({s.env: s.default for s in SETTINGS}) == Settings()


def test_every_field_is_a_setting_with_a_meaning_and_its_own_variable():
    assert [s.field for s in SETTINGS] == [f.name for f in fields(Settings)]
    assert len({s.env for s in SETTINGS}) == len(SETTINGS)
    for s in SETTINGS:
        assert s.env == "CRUX_" + s.field.upper()
        assert s.meaning
        assert not s.meaning.endswith(".")
    assert [s.field for s in SETTINGS if s.flag is None] == ["attach"]


def test_what_is_on_by_default_has_a_flag_that_switches_it_off():
    switches = {s.field: (s.default, s.switch, s.flag) for s in SETTINGS if s.switch}
    assert switches["transport"] == ("1", "0", "--crux-no-transport")
    assert switches["live_qp"] == ("0", "1", "--crux-live-qp")
    for default, switch, flag in switches.values():
        assert {default, switch} == {"0", "1"}
        assert flag is None or flag.startswith("--crux-no-") == (default == "1")


def test_a_range_of_ports_is_written_first_to_last():
    assert Settings.from_env({"CRUX_PORTS": "1024-65535"}).ports == PortRange(1024, 65535)
    assert Settings.from_env({"CRUX_PORTS": " 30000 - 30000 "}).ports == PortRange(30000, 30000)


def test_the_document_shows_the_current_table():
    assert settings_table() in DOC.read_text(), "run: python -m crux_torch.settings"


def test_an_empty_variable_means_the_default():
    assert Settings.from_env({"CRUX_LEVELS": "", "CRUX_STORE": ""}) == Settings()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CRUX_DISABLE", "perhaps"),
        ("CRUX_STORE", "localhost"),
        ("CRUX_STORE", "tcp://localhost"),
        ("CRUX_STORE", "tcp://localhost:99999"),
        ("CRUX_STORE", "http://localhost:80"),
        ("CRUX_CLUSTER", "a/b"),
        ("CRUX_JOB", "two words"),
        ("CRUX_JOB", "x" * 129),
        ("CRUX_LEVELS", "0"),
        ("CRUX_LEVELS", "65"),
        ("CRUX_LEVELS", "eight"),
        ("CRUX_LEVELS", "4.5"),
        ("CRUX_RESERVED_LEVELS", "1,x"),
        ("CRUX_RESERVED_LEVELS", "64"),
        ("CRUX_DSCP_MAP", ","),
        ("CRUX_DSCP_MAP", "0,64"),
        ("CRUX_LOG_LEVEL", "loud"),
        ("CRUX_POLICY", "best"),
        ("CRUX_POLICY", "ideal"),
        ("CRUX_PROFILE_S", "0"),
        ("CRUX_PROFILE_S", "nan"),
        ("CRUX_LEASE_S", "soon"),
        ("CRUX_DEVICE_FLOPS", "-1"),
        ("CRUX_RECORDS", "-5"),
        ("CRUX_PORTS", "20000"),
        ("CRUX_PORTS", "80-90"),
        ("CRUX_PORTS", "30000-20000"),
        ("CRUX_PORTS", "20000-65536"),
        ("CRUX_SWITCH_TIMEOUT_S", "0"),
        ("CRUX_TRANSPORT", "later"),
        ("CRUX_TIMING", "never"),
    ],
)
def test_a_bad_value_is_refused_by_name(variable, text):
    with pytest.raises(SettingsError, match=f"^{variable}={text!r}: "):
        Settings.from_env({variable: text})


def test_levels_and_dscp_values_must_fit_each_other():
    with pytest.raises(SettingsError, match="CRUX_DSCP_MAP names 2 DSCP values"):
        Settings.from_env({"CRUX_DSCP_MAP": "0,8"})
    two = Settings.from_env({"CRUX_DSCP_MAP": "0x0,0x2e", "CRUX_LEVELS": "2"})
    assert two.dscp_map == (0, 46)
    with pytest.raises(SettingsError, match="CRUX_RESERVED_LEVELS leaves no level"):
        Settings.from_env({"CRUX_LEVELS": "2", "CRUX_RESERVED_LEVELS": "0,1"})


@given(levels=st.integers(1, 8), reserved=st.sets(st.integers(0, 9)))
def test_levels_are_split_into_reserved_profiling_and_plan(levels, reserved):
    env = {
        "CRUX_LEVELS": str(levels),
        "CRUX_RESERVED_LEVELS": ",".join(map(str, reserved)),
    }
    usable = [n for n in range(levels) if n not in reserved]
    if not usable:
        with pytest.raises(SettingsError):
            Settings.from_env(env)
        return
    settings = Settings.from_env(env)
    assert list(settings.usable_levels) == usable
    assert settings.profiling_level == max(usable)
    if len(usable) > 1:
        assert max(settings.plan_levels) < settings.profiling_level
    else:
        assert list(settings.plan_levels) == usable
