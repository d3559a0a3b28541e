# SPDX-License-Identifier: Apache-2.0
"""TLS of a peer that does not have the secret."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def untrusted_context(*, certificate: Path | None = None, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """The context of a client that accepts any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if version is not None:
        context.maximum_version = version
    if certificate is not None:
        context.load_cert_chain(certificate)
    return context


def untrusted_certificate(folder: Path, name: str, padding: int = 0) -> Path:
    """A file with a key and its certificate, which has an extension of so many bytes."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(dt.datetime(2000, 1, 1))
        .not_valid_after(dt.datetime(2100, 1, 1))
        .add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), bytes(padding)), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "own.pem"
    path.write_bytes(pem_of(key) + certificate.public_bytes(serialization.Encoding.PEM))
    return path


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
