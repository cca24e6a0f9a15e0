"""Passwords and TLS of the exporter's web server."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crux_torch.report.page.server import WebConfig, WebConfigError

#: Test vectors of crypt_blowfish and of OpenBSD's bcrypt.
VECTORS = {
    "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW": "U*U",
    "$2a$05$CCCCCCCCCCCCCCCCCCCCC.VGOzA784oUp/Z0DY336zx7pLYAy0lwK": "U*U*",
    "$2a$05$XXXXXXXXXXXXXXXXXXXXXOAcXxm9kjPGEMsLznoKqmqw7tc8WCx4a": "U*U*U",
}


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture(scope="module")
def config() -> WebConfig:
    return WebConfig({f"user{n}": hashed for n, hashed in enumerate(VECTORS)})


def test_the_right_password_lets_in(config: WebConfig) -> None:
    for n, password in enumerate(VECTORS.values()):
        assert config.lets_in(basic(f"user{n}", password))
        assert config.lets_in(basic(f"user{n}", password)), "the second time from memory"
        assert not config.lets_in(basic(f"user{n}", password + "x"))
        assert not config.lets_in(basic(f"user{(n + 1) % 3}", password))
    assert not config.lets_in(basic("nobody", "U*U"))
    assert not config.lets_in(None)
    assert WebConfig({}).lets_in(None)


@given(st.one_of(st.text(max_size=60), st.binary(max_size=60).map(
    lambda raw: "Basic " + base64.b64encode(raw).decode())))  # fmt: skip
def test_no_other_header_lets_in_or_raises(header: str) -> None:
    config = WebConfig({"user": next(iter(VECTORS))})
    assert not config.lets_in(header)


@pytest.mark.parametrize(
    "text",
    [
        "basic_auth_users: {a: plain}",
        "basic_auth_users: {a: $1$abc$def}",
        "http_server_config: {http2: true}",
        "tls_server_config: {cert_file: a}",
        "tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}",
        "tls_server_config: {cert_file: none.crt, key_file: none.key}",
        "[1, 2]",
        "a: [",
        "!!python/object/apply:os.system [true]",
    ],
)
def test_what_is_not_supported_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text(text)
    with pytest.raises(WebConfigError, match=r"web\.yml: .*; supported are"):
        WebConfig.load(file)


def test_an_empty_file_asks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text("")
    assert WebConfig.load(file).lets_in(None)
    file.write_bytes(b"#" * (2 << 20))
    with pytest.raises(WebConfigError, match="more than 1 MiB"):
        WebConfig.load(file)
