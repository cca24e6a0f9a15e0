import itertools
from dataclasses import fields
from pathlib import Path

import pytest
from dscp_maps import CLASS_SELECTORS, MARKED_ENV
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.errors import SettingsError
from crux_torch.settings import LIVE_POLICIES, SETTINGS, Marks, PortRange, Settings, settings_table

DOC = Path(__file__).parent.parent / "docs" / "settings.md"


def test_a_default_survives_being_written_and_read_and_an_empty_variable_means_it():
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({s.env: s.default_text for s in SETTINGS}) == Settings()
    assert Settings.from_env({s.env: "" for s in SETTINGS}) == Settings()


def test_every_field_has_a_variable_a_flag_and_a_meaning():
    assert [s.field for s in SETTINGS] == [f.name for f in fields(Settings)]
    named = {s.field: (s.env, s.flag) for s in SETTINGS}
    assert named["reserved_levels"] == ("CRUX_RESERVED_LEVELS", "--crux-reserved-levels")
    assert named["disable"] == ("CRUX_DISABLE", "--crux-disable")
    assert named["transport"] == ("CRUX_TRANSPORT", "--crux-no-transport"), "it is on by default"
    assert [name for name, (_, flag) in named.items() if flag is None] == ["attach"]
    assert all(s.meaning and not s.meaning.endswith(".") for s in SETTINGS)


def test_the_document_shows_the_current_table():
    assert settings_table() in DOC.read_text(), "run: python -m crux_torch.settings"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("CRUX_DISABLE", "Yes", True),
        ("CRUX_PATHS", " off ", False),
        ("CRUX_TICK_S", "1e-2", 0.01),
        ("CRUX_MAX_SLOWDOWN", "1.5", 1.5),
        ("CRUX_RECORDS", " 16 ", 16),
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
        ("CRUX_TICK_S", "1e-9|0|inf"),
        ("CRUX_LEASE_S", "1e-9|601"),
        ("CRUX_PLAN_VALID_S", "1e-9|601"),
        ("CRUX_LOG_LEVEL", "loud"),
        ("CRUX_POLICY", "best|ideal"),
        ("CRUX_TIMING", "never"),
        ("CRUX_ROCE_ECN", "3"),
        ("CRUX_PROFILE_S", "0|nan|inf|soon"),
        ("CRUX_LINK_WAIT_MS", "0|10001"),
        ("CRUX_DEVICE_FLOPS", "-1"),
        ("CRUX_MAX_SLOWDOWN", "0.5|-1"),
        ("CRUX_RECORDS", "-5"),
        ("CRUX_PORTS", "20000|80-90|30000-20000|20000-65536|1-2-3"),
        ("CRUX_LINKS", ",|a,a|auto,a|a b"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_was_expected(variable, texts):
    for text in texts.split("|"):
        with pytest.raises(SettingsError, match=rf"^{variable}='?{text}'?: expected \w"):
            Settings.from_env({variable: text})


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
