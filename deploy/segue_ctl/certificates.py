"""Certificates of a cluster: its own CA, and one certificate a daemon with the daemon's name.

Only here `cryptography` is needed (the extra `keys`); daemons and routers use what was made with the standard
library's TLS. No files, no policy. P-256: every TLS stack has it, and a handshake takes half a millisecond.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Self

from segue_core.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise ConfigError(
        "keygen needs the package cryptography", hint="pip install 'segue-ha[keys]'"
    ) from missing

_BACKDATED = datetime.timedelta(hours=1)
"""Clocks of hosts differ."""


@dataclass(frozen=True)
class Authority:
    """The cluster's CA, as PEM. Whoever has its key can make daemons."""

    certificate: bytes
    key: bytes

    @classmethod
    def make(cls, days: float) -> Self:
        """A new one, valid for `days`."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Segue cluster CA")
        builder = (
            _builder(name, name, key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        )
        return cls(_pem(builder.sign(key, hashes.SHA256())), _key_pem(key))

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> Self:
        """One that was made before. Raises ConfigError if it is none."""
        authority = cls(certificate, key)
        signer = authority._signer()
        if signer[0].public_key() != signer[1].public_key():
            raise ConfigError("the CA's key and its certificate do not belong together")
        return authority

    def issue(self, name: str, days: float) -> tuple[bytes, bytes]:
        """A certificate for the daemon `name` and its key. It is not valid longer than the CA."""
        ca, signing = self._signer()
        key = ec.generate_private_key(ec.SECP256R1())
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
        builder = (
            _builder(_name(name), ca.subject, key, days, not_after=ca.not_valid_after_utc)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(both, critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(own, critical=False)
        )
        return _pem(builder.sign(signing, hashes.SHA256())), _key_pem(key)

    def _signer(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        try:
            certificate = x509.load_pem_x509_certificate(self.certificate)
            key = serialization.load_pem_private_key(self.key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"the CA cannot be used: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError("the CA cannot be used: its key is not one that keygen made")
        return certificate, key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: float,
    not_after: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(min(until, not_after) if not_after else until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(**uses: bool) -> x509.KeyUsage:
    every: dict[str, Any] = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(**(every | uses))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
