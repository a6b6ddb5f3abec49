"""Check for public IP addresses, to prevent fetches from internal networks."""

from __future__ import annotations

import ipaddress

# Networks to reject although Python's `is_global` accepts them, in this or an older version.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # IETF protocol assignments; a cloud's metadata service is at .192
            "192.88.99.0/24",  # 6to4 relays
            "168.63.129.16",  # a cloud's metadata service, at an address that looks public
            "2001::/23",  # IETF protocol assignments, including Teredo, which embeds IPv4 addresses
            "2001:db8::/32",  # for documentation
            "2002::/16",  # 6to4, which embeds IPv4 addresses
            "3fff::/20",  # for documentation
        ),
    )
)
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(text: str) -> bool:
    """Return True if `text` is a public IP address, and False for any other text. A NAT64 address
    is public if the IPv4 address that it embeds is public."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)))
        # Other forms that embed IPv4, such as IPv4-mapped, are outside `_UNICAST` or in `_SPECIAL`.
        if address not in _UNICAST:
            return False
    if address.is_multicast or not address.is_global:
        return False
    return not any(address in network for network in _SPECIAL)
