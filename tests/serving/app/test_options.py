"""Serve options: what is refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.serving.app.build import EngineOptions
from headrace.serving.app.options import ServeOptions
from headrace.serving.core.errors import ConfigError

LOCAL = ServeOptions(model_name="m", model_path=Path("m.gguf"), engine=EngineOptions(model="m.gguf"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert replace(LOCAL, host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_beyond_loopback_needs_keys_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="--host.*--api-keys.*--unsafe-bind"):
        replace(LOCAL, host=host)
    assert not replace(LOCAL, host=host, unsafe_bind=True).is_loopback
    assert not replace(LOCAL, host=host, api_keys=Path("keys")).is_loopback


def test_certificate_and_key_belong_together() -> None:
    for half in ({"tls_cert": Path("c")}, {"tls_key": Path("k")}):
        with pytest.raises(ConfigError, match="--tls-cert and --tls-key"):
            replace(LOCAL, **half)
    assert replace(LOCAL, tls_cert=Path("c"), tls_key=Path("k")).scheme == "https"
    assert LOCAL.scheme == "http"
