"""Which addresses a server may be sent to by a stranger: those of the public internet, nothing near."""

from __future__ import annotations

import ipaddress

__all__ = ["is_public"]

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_V4_COMPATIBLE = ipaddress.ip_network("::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
_SITE_LOCAL = ipaddress.ip_network("fec0::/10")
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # some of it counts as global in some versions of Python


def is_public(address: str) -> bool:
    """Whether *address* (v4 or v6, as text) is a public unicast one; a v4 address that it carries must be one, too."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if ip.is_multicast or ip.is_reserved or not ip.is_global:
        return isinstance(ip, ipaddress.IPv6Address) and ip in _NAT64 and _carries_public(ip)
    if isinstance(ip, ipaddress.IPv4Address):
        return ip not in _PROTOCOLS
    return ip.scope_id is None and ip not in _LOCAL_NAT64 and ip not in _SITE_LOCAL and _carries_public(ip)


def _carries_public(ip: ipaddress.IPv6Address) -> bool:
    carried = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
    if ip in _NAT64 or ip in _V4_COMPATIBLE:
        carried.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return all(v4 is None or is_public(str(v4)) for v4 in carried)
