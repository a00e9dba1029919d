"""How the processes of a fleet know each other: a token that lets clients in, and certificates of an authority of the fleet's own.

The authority's key is with whoever keeps the fleet and with Ray, which has it to start that one again: in its head's memory, and where its fault tolerance is
on in the Redis behind it. It is in no file of ours. An agent is given a certificate for its own address; clients trust that
authority and nobody else's, whatever the machine trusts otherwise.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_TOKEN_BYTES = 32
_VALID_DAYS = 3650
_EARLY = dt.timedelta(days=1)  # clocks may differ by what a node is refused for, and this is far more


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key, PEM."""

    certificate: str
    key: str = field(repr=False)

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Below a directory that only this user can enter, each readable by nobody else from its first moment on."""
        return _written(directory / "agent-cert.pem", self.certificate), _written(directory / "agent-key.pem", self.key)


@dataclass(frozen=True, slots=True)
class Trust:
    """Everything that makes a fleet's processes trust each other; made once, when it comes up."""

    token: str = field(repr=False)
    authority: Identity

    @classmethod
    def new(cls, name: str) -> Trust:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"untax fleet {name}"[:64])])
        certificate = (
            _begun(subject, subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(secrets.token_urlsafe(_TOKEN_BYTES), _identity(certificate, key))

    def identity_for(self, address: str) -> Identity:
        """An agent's own, good for `address` only: an IP address or a name."""
        signer = x509.load_pem_x509_certificate(self.authority.certificate.encode())
        signing = serialization.load_pem_private_key(self.authority.key.encode(), None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address[:64])])
        certificate = (
            _begun(subject, signer.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_named(address)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
            .sign(signing, hashes.SHA256())
        )
        return _identity(certificate, key)


def pinned(authority: str) -> ssl.SSLContext:
    """What a client speaks TLS with: this authority's agents, and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks host names, and wants a certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    return context


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + dt.timedelta(days=_VALID_DAYS))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _identity(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Identity:
    return Identity(
        certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode(),
    )


def _written(path: Path, text: str) -> Path:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of an agent that was killed
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        file.write(text)
    return path
