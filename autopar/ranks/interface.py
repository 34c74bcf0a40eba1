"""Interface: the network interface of this host that leads to another."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16s16x")


def interface_towards(address: str, port: int) -> str | None:
    """Return the name of the interface from which this host reaches the address, or None where it cannot be told.

    That is where the address means this host alone, is IPv6, or the system is not Linux.
    """
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it looks up the route.
            probe.connect((address, port))
            own = probe.getsockname()[0]
            if ipaddress.ip_address(own).is_loopback:
                return None
            names = [name for _, name in socket.if_nameindex()]
            return next((name for name in names if _address(probe, name) == own), None)
    except OSError:
        return None


def _address(probe: socket.socket, name: str) -> str | None:
    import fcntl

    try:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, _REQUEST.pack(name.encode()))
    except OSError:
        return None
    # struct ifreq: the name, then a sockaddr_in: family, port, address.
    return socket.inet_ntoa(answer[20:24])
