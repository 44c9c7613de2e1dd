"""Authorities and certificates for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme

from outrider.tls import client_tls, server_tls


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, in files, and the authority that signed it."""

    certfile: str
    keyfile: str
    ca_certs: str

    def flags(self, prefix="ssl", ca_certs=None):
        """Flags of a process with this certificate. ca_certs: authority of client certificates, if it requires them."""
        given = {f"{prefix}_certfile": self.certfile, f"{prefix}_keyfile": self.keyfile}
        return given if ca_certs is None else given | {f"{prefix}_ca_certs": ca_certs}

    def argv(self, ca_certs=None):
        """The flags of a process that listens."""
        return [word for name, value in self.flags("ssl", ca_certs).items() for word in (_flag(name), value)]

    def serving(self, ca_certs=None):
        """TLS of a server with this certificate."""
        return server_tls(self.certfile, self.keyfile, ca_certs, None)

    def asking(self, ca_certs, server_name=None):
        """TLS of a client with this certificate."""
        return client_tls(ca_certs, self.certfile, self.keyfile, server_name)


class Authority:
    """Signs certificates."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.ca = trustme.CA(organization_name=name)
        self.ca_certs = str(folder / f"{name}.ca.pem")
        self.ca.cert_pem.write_to_path(self.ca_certs)

    def certificate(self, *names: str, **options) -> Certificate:
        """A certificate of hosts."""
        made = self.ca.issue_cert(*names, **options)
        stem = self.folder / f"{self.name}.{names[0]}"
        made.private_key_pem.write_to_path(f"{stem}.key")
        for i, part in enumerate(made.cert_chain_pems):
            part.write_to_path(f"{stem}.pem", append=i > 0)
        return Certificate(f"{stem}.pem", f"{stem}.key", self.ca_certs)


def _flag(name):
    return "--" + name.replace("_", "-")
