"""One secret, one authority: mutual TLS 1.3 between nodes that share a cluster secret, and nothing else to set up.

Every node derives the same P-256 key from the secret and signs its own certificate with it, its node id as common
name. A peer is let in if its certificate is signed by that key. Host names are not checked, as addresses are
discovered; whoever holds the secret can claim any name. There is no revocation but a new secret, so certificates are
valid for ever, whatever a machine's clock says.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.errors import ConfigError

MIN_SECRET = 16
"""Shortest secret, in characters: the certificates let anyone who sees one test guesses at it."""

_SALT = b"tandem cluster authority 1"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2199, 12, 31, tzinfo=datetime.UTC)


class Identity(NamedTuple):
    """A node's certificate and key, and the authority's certificate, as PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    def server_context(self) -> ssl.SSLContext:
        """For accepting connections: only from peers of the same authority."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """For opening connections: only to peers of the same authority."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        # The ssl module reads a key from files only; the folder is the owner's alone and gone in a moment.
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            path = Path(folder) / "identity.pem"
            path.touch(mode=0o600)
            path.write_bytes(self.certificate + self.key)
            context.load_cert_chain(path)
        return context


class Authority:
    """The certificate authority that a cluster secret stands for.

    Raises:
        ConfigError: the secret is too short.
    """

    def __init__(self, secret: str) -> None:
        if len(secret) < MIN_SECRET:
            raise ConfigError(
                f"The cluster secret has {len(secret)} characters; it needs {MIN_SECRET} or more, as it is all that "
                "keeps strangers out. Take the output of `openssl rand -hex 32`."
            )
        seed = HKDF(hashes.SHA256(), 48, _SALT, b"certificate key").derive(secret.encode())
        # 16 bytes more than the order has, so that taking the remainder favours no key measurably.
        self._key = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tandem cluster")])
        self.certificate = self._sign(self._name, self._key.public_key(), authority=True)

    def issue(self, common_name: str) -> Identity:
        """A fresh key with a certificate for the node `common_name` (1 to 64 characters).

        Raises:
            ConfigError: the name cannot be in a certificate.
        """
        if not 1 <= len(common_name) <= 64:
            raise ConfigError(f"The node name {common_name!r} has to have 1 to 64 characters to be in a certificate.")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Identity(_pem(self._sign(name, key.public_key(), authority=False)), pem, _pem(self.certificate))

    def _sign(self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, authority: bool) -> x509.Certificate:
        public = self._key.public_key()
        builder = (
            x509.CertificateBuilder(self._name, name, key, x509.random_serial_number(), _FROM, _UNTIL)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
            .add_extension(_key_usage(authority=authority), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        )
        if not authority:
            usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def identity_for(secret: str, common_name: str) -> Identity | None:
    """The node's identity under a cluster secret; None where there is no secret.

    Raises:
        ConfigError: secret or name cannot be used.
    """
    return Authority(secret).issue(common_name) if secret else None


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
