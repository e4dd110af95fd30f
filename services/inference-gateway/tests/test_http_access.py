"""API keys of tenants, tokens of the stack, TLS."""

import asyncio
import hashlib
import json
import logging
import ssl
from datetime import datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from reflux_inference_gateway.http.keys import load_keys
from reflux_kit import auth
from reflux_kit.errors import StartupError

from .http_harness import HANG_SECONDS, Recorder, door, hang, whole

SECRET = "a secret of the stack, long enough"
KEY, OTHER = "sk-one-3ZhQ7", "sk-two-9XwP1"


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[keys]]\nname = "one"\nsha256 = "{digest(KEY)}"\nmax_concurrent = 1\n'
        f'[[keys]]\nname = "two"\nsha256 = "{digest(OTHER)}"\nmodels = ["other"]\n'
    )
    return str(path)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_keys_open_their_models_and_nothing_else_does(keys_file):
    async with door(Recorder(), api_keys_file=keys_file) as opened:
        assert (await opened.post(headers=bearer(KEY)))[0] == 200
        for headers in (None, bearer("sk-wrong"), bearer(digest(KEY)), {"Authorization": KEY}):
            status, error = await opened.error(headers=headers)
            assert (status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
        assert (await opened.error(headers=bearer(OTHER)))[1]["code"] == "permission_denied"
        async with opened.session.get("/healthz") as response:
            assert response.status == 200


async def test_a_key_has_its_own_limit_and_others_go_on(keys_file):
    replica = Recorder(hang)
    async with door(replica, api_keys_file=keys_file, stack_secret=SECRET) as opened, asyncio.timeout(HANG_SECONDS):
        running = asyncio.create_task(opened.post(headers=bearer(KEY)))
        await replica.arrived.wait()
        status, headers, body = await opened.post(headers=bearer(KEY))
        assert (status, headers["Retry-After"]) == (429, "1")
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        replica.answer = whole(b"{}")
        assert (await opened.post(headers=bearer(auth.mint(SECRET, "someone"))))[0] == 200
        running.cancel()
        while (await opened.post(headers=bearer(KEY)))[0] != 200:
            await asyncio.sleep(0)


async def test_a_key_is_neither_logged_nor_sent_on_but_a_token_is(keys_file, caplog):
    caplog.set_level(logging.DEBUG)
    token = auth.mint(SECRET, "someone", run="m")
    replica = Recorder()
    async with door(replica, api_keys_file=keys_file, stack_secret=SECRET) as opened:
        for secret in (KEY, token, token, "sk-wrong-5TtU2"):
            await opened.post(headers=bearer(secret))
        await opened.post(data=b"{", headers=bearer(KEY))
    first, second, third = (seen.headers["authorization"].removeprefix("Bearer ") for seen in replica.requests)
    assert auth.verify(SECRET, first).subject == "gateway"
    assert (second, third) == (token, token)
    for secret in (KEY, token, "sk-wrong-5TtU2", digest(KEY)):
        assert secret not in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[keys]]\nname = 'a'\nsha256 = 'secret-hash'", "keys.0.sha256"),
        ("[[keys]]\nname = 'a'\nkey = 'sk-plain'", "keys.0"),
        ("[[keys]", "TOML"),
        ("".join(f"[[keys]]\nname = 'a'\nsha256 = '{number:064x}'\n" for number in range(2)), "name twice"),
    ],
)
def test_a_wrong_keys_file_is_refused_at_the_start_without_its_secrets(tmp_path, text, said):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(StartupError, match=said) as caught:
        load_keys(str(path))
    assert "secret-hash" not in str(caught.value)
    assert "sk-plain" not in str(caught.value)
    with pytest.raises(StartupError, match="cannot be read"):
        load_keys(str(tmp_path / "none.toml"))


async def test_the_door_speaks_tls(tmp_path):
    pem = tmp_path / "door.pem"
    pem.write_bytes(certificate())
    context = ssl.create_default_context(cafile=str(pem))
    async with door(Recorder(whole(b"x" * 300_000)), tls_certificate=str(pem), scheme="https", ssl=context) as opened:
        status, _, body = await opened.post()
        assert (status, len(body)) == (200, 300_000)
    pem.write_text("nothing")
    with pytest.raises(StartupError, match="certificate"):
        async with door(tls_certificate=str(pem)):
            pass


def certificate():
    """A self-signed certificate of localhost and its key, for the test only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    today = datetime.now()
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - timedelta(days=2))
        .not_valid_after(today + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*plain) + built.public_bytes(serialization.Encoding.PEM)
