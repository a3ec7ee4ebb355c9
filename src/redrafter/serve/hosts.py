"""The names by which a server may be called.

A page on the internet may let its own name point at this machine (DNS rebinding). The browser then lets the page talk
to a server here, and sends that name in the header Host.
"""

import ipaddress
from collections.abc import Collection


def accepts(header: str, names: Collection[str]) -> bool:
    """Whether a Host header has one of these names, localhost, or a loopback address.

    >>> [accepts(header, ["box"]) for header in ("localhost:8000", "127.0.0.1", "[::1]:80", "BOX:80", "example.com")]
    [True, True, True, True, False]
    """
    host = name_of(header)
    if host == "localhost" or host in map(name_of, names):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def name_of(header: str) -> str:
    """A Host header without its port.

    >>> name_of("Example.com.:80"), name_of("[::1]:80"), name_of("::1")
    ('example.com', '::1', '::1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    name, _, port = header.rpartition(":")
    return (name if name and ":" not in name and port.isdigit() else header).lower().removesuffix(".")
