"""Public Internet addresses, distinguished from all others."""

from __future__ import annotations

import ipaddress

# What Python's `is_global` lets pass, in this version or in an older one.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocols' own; a cloud's metadata service at .192
            "192.88.99.0/24",  # relays to 6to4
            "168.63.129.16",  # a cloud's metadata service, at an address that looks public
            "2001::/23",  # protocols' own, Teredo among them, which holds IPv4 addresses
            "2001:db8::/32",  # examples
            "2002::/16",  # 6to4, which holds IPv4 addresses
            "3fff::/20",  # examples
        ),
    )
)
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(text: str) -> bool:
    """Return True if an address belongs to the public Internet, including any address embedded in
    it."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)))
        # IPv4-mapped and all other forms that hold IPv4 addresses are outside, or special.
        if address not in _UNICAST:
            return False
    if address.is_multicast or not address.is_global:
        return False
    return not any(address in network for network in _SPECIAL)
