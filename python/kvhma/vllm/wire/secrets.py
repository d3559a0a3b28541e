# SPDX-License-Identifier: Apache-2.0
"""The secret that engines share: engines with it may ask questions, and trust each other's answers.

Each secret gives a key that signs parameters, and an Ed25519 key with a certificate. They are the same at every engine.
Both sides of a connection present the certificate of their first secret and accept those of all their secrets.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import hmac
import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from kvhma.errors import SettingsError

logger = logging.getLogger("vllm.kvhma")

ENVIRONMENT = "KVHMA_SECRET"
MIN_SECRET_BYTES = 16
MAX_SECRETS = 16
_MAX_FILE_BYTES = 64 << 10

_DIGEST_BYTES = 16

_REREAD_SECONDS = 1.0
"""How often the file is checked for changes."""


class SecretSettings(Protocol):
    """Settings that may name a file."""

    @property
    def secret_file(self) -> str | None:
        """Path of a file with one secret a line; None to use the environment variable."""


@dataclass(frozen=True)
class _Credential:
    """The keys of one secret.

    Attributes:
        sign_key: keys the digests of parameters.
        private_key: of the certificate.
        certificate: what a connection presents.
    """

    sign_key: bytes = field(repr=False)
    private_key: Ed25519PrivateKey = field(repr=False)
    certificate: x509.Certificate

    @property
    def der(self) -> bytes:
        """The certificate as a connection presents it."""
        return self.certificate.public_bytes(serialization.Encoding.DER)


@dataclass(frozen=True)
class _Current:
    """The secrets at one time. Without secrets the contexts are `None`."""

    credentials: tuple[_Credential, ...] = ()
    sign_keys: tuple[bytes, ...] = field(default=(b"",), repr=False)
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    accepted: frozenset[bytes] = frozenset()


class Secrets:
    """The secrets of an engine. Safe to use from several threads.

    It reads a changed file again. If that fails for any reason, the secrets stay as they were, and the log says why.

    Attributes:
        enabled: whether there is a secret. This does not change while the process lives.
    """

    def __init__(self, secrets: Sequence[bytes] = (), *, file: Path | None = None) -> None:
        """Use the first secret, and accept all.

        Args:
            secrets: empty for an engine that trusts every peer that reaches it.
            file: where they come from, if they may change.

        Raises:
            SettingsError: a secret is too short, or there are too many secrets.
        """
        self._file = file
        self._lock = threading.Lock()
        self._read = tuple(secrets)
        self.enabled = bool(self._read)
        self._current = _derive(self._read)
        self._read_at = time.monotonic()
        self._seen: bytes | None = None
        """Content of the file when it was last read again."""
        self._unusable = False
        """Whether the file is unusable now, which is logged once."""
        self._is_refreshed = False
        """Whether a listener's thread reads the file, so that no step of the engine does: keys take 50 ms a secret."""

    @classmethod
    def load(cls, settings: SecretSettings) -> Secrets:
        """Read the secrets from the file of the settings, or else from the environment; without both, no secrets.

        Raises:
            SettingsError: the file cannot be read, its content or the variable is unusable, or the system has no room
                for the keys.
        """
        if settings.secret_file is not None:
            file = Path(settings.secret_file)
            with _settings_errors(_name(file)):
                return cls(_lines(_read_file(file)[0], _name(file)), file=file)
        if ENVIRONMENT in os.environ:
            with _settings_errors(ENVIRONMENT):
                return cls(_lines(os.environ[ENVIRONMENT].encode("utf-8", "surrogateescape"), ENVIRONMENT))
        return cls()

    def server_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for accepting a connection now; None without a secret."""
        return self._now().server

    def client_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for opening a connection now; None without a secret. It changes with the file."""
        return self._now().client

    def accepts(self, certificate: bytes | None) -> bool:
        """Return whether the certificate (DER) that a peer has presented still belongs to one of the secrets."""
        return certificate in self._now().accepted

    def sign(self, data: bytes) -> bytes:
        """Return a digest of 16 bytes. With a secret, only engines that have it can make this digest."""
        current = self._current if self._file is None else self._now(in_step=True)
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=current.sign_keys[0]).digest()

    def verify(self, data: bytes, digest: bytes) -> bool:
        """Return whether a digest was made by :meth:`sign` with any of the secrets."""
        current = self._current if self._file is None else self._now(in_step=True)
        for key in current.sign_keys:
            own = hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=key).digest()
            if hmac.compare_digest(own, digest):
                return True
        return False

    def refresh(self) -> None:
        """Read the file again if it may have changed. The listener's thread calls this at least every second."""
        self._is_refreshed = True
        self._now()

    def _now(self, *, in_step: bool = False) -> _Current:
        """Return the secrets. A step of the engine reads no file if the listener's thread does."""
        file = self._file
        if file is not None and time.monotonic() - self._read_at > _REREAD_SECONDS:
            if in_step and self._is_refreshed:
                return self._current
            with self._lock:
                if time.monotonic() - self._read_at > _REREAD_SECONDS:
                    self._reread(file)
                    self._read_at = time.monotonic()
        return self._current

    def _reread(self, file: Path) -> None:
        try:
            with _settings_errors(_name(file)):
                data, changed_at = _read_file(file)
                seen, self._seen = self._seen, data
                if data != seen and time.time() - changed_at < _REREAD_SECONDS:
                    return  # its writer may not have finished
                found = tuple(_lines(data, _name(file)))
                known = dict(zip(self._read, self._current.credentials, strict=True))
                current = self._current if found == self._read else _derive(found, known)
        except SettingsError as error:
            if not self._unusable:
                logger.warning("kvhma: %s; the secrets stay as they were", error)
            self._unusable = True
            return
        self._unusable = False
        if found != self._read:
            self._current, self._read = current, found
            logger.info("kvhma: %d secrets read from %s", len(found), file)


def _name(file: Path) -> str:
    return f"secret_file {str(file)!r}"


@contextlib.contextmanager
def _settings_errors(source: str) -> Iterator[None]:
    """Raise every error as one that names the setting: no memory, no descriptor, a failure of OpenSSL."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"{source} cannot be used: {type(error).__name__}: {error}") from error


def _read_file(file: Path) -> tuple[bytes, float]:
    """Return the content, and when it was last written, renamed or touched: no program can choose that time."""
    try:
        with open(file, "rb", opener=_open_at_once) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise SettingsError(f"{_name(file)} is not a regular file")
            data = opened.read(_MAX_FILE_BYTES + 1)
            changed_at = os.fstat(opened.fileno()).st_ctime
    except OSError as error:
        raise SettingsError(f"{_name(file)} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise SettingsError(f"{_name(file)} has more than {_MAX_FILE_BYTES} bytes")
    return data, changed_at


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # else opening a FIFO waits for its writer


def _lines(data: bytes, source: str) -> list[bytes]:
    """Return the secrets of a text. No error text contains a secret."""
    lines = [line for line in map(bytes.strip, data.split(b"\n")) if line]
    if not 0 < len(lines) <= MAX_SECRETS:
        raise SettingsError(f"{source} has {len(lines)} secrets, expected 1..{MAX_SECRETS}, one a line")
    for number, line in enumerate(lines, 1):
        if len(line) < MIN_SECRET_BYTES:
            raise SettingsError(
                f"{source}: secret {number} has {len(line)} bytes, expected {MIN_SECRET_BYTES} or more; "
                "`openssl rand -hex 32` makes a good one"
            )
    return lines


def _derive(secrets: Sequence[bytes], known: Mapping[bytes, _Credential] = MappingProxyType({})) -> _Current:
    """Return the keys of secrets; those that are `known` are not made again."""
    if not secrets:
        return _Current()
    credentials = tuple(known.get(secret) or _credential(secret) for secret in secrets)
    return _Current(
        credentials,
        tuple(credential.sign_key for credential in credentials),
        _context(ssl.PROTOCOL_TLS_SERVER, credentials),
        _context(ssl.PROTOCOL_TLS_CLIENT, credentials),
        frozenset(credential.der for credential in credentials),
    )


def _credential(secret: bytes) -> _Credential:
    """Derive the keys of a secret, and a certificate that is the same at every engine with this secret."""
    # Unknown peers see signed parameters and the certificate, and may guess secrets offline: make each guess expensive.
    stretched = hashlib.scrypt(secret, salt=b"kvhma-secret-3", n=1 << 14, r=8, p=1, dklen=64)
    key = Ed25519PrivateKey.from_private_bytes(stretched[:32])
    public = key.public_key()
    # A different name for each secret, so TLS finds the right certificate at once.
    name = hashlib.sha256(public.public_bytes_raw()).hexdigest()[:32]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvhma-{name}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(int(name[:16], 16) | 1)
        .not_valid_before(dt.datetime(2000, 1, 1))
        .not_valid_after(dt.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, None)
    )
    return _Credential(stretched[32:], key, certificate)


def _context(protocol: int, credentials: Sequence[_Credential]) -> ssl.SSLContext:
    """Return a TLS 1.3 context that presents the first certificate, demands one of the peer, and accepts all."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The secret identifies an engine; its certificate names no host.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a connection stays open and is never resumed
    encoding = serialization.Encoding
    accepted = b"".join(credential.certificate.public_bytes(encoding.PEM) for credential in credentials)
    context.load_verify_locations(cadata=accepted.decode("ascii"))
    private = credentials[0].private_key.private_bytes(
        encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    presented = credentials[0].certificate.public_bytes(encoding.PEM)
    # The ssl module only reads private keys from files. This file is memory: no disk has to have room, or gets the key.
    with os.fdopen(os.memfd_create("kvhma-key"), "wb") as file:
        file.write(private + presented)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
