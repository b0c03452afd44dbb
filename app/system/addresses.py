"""Addresses and network interfaces of this machine."""

import os
import socket
from contextlib import suppress
from itertools import chain
from typing import Any

import psutil

# an address for documentation, which no machine has: https://www.rfc-editor.org/rfc/rfc5737
NOBODY = ("192.0.2.1", 9)


def own_addresses() -> list[str]:
    """Return this machine's IP addresses, loopback addresses last."""
    addresses = []
    for entry in chain.from_iterable(psutil.net_if_addrs().values()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            addresses.append(entry.address)
    return sorted(
        addresses, key=lambda address: (address.startswith(("127.", "::1")), ":" in address)
    )


def outward_address() -> str:
    """Return the address of this machine for other hosts: gloo's, or that of the default route."""
    chosen = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    addresses = [entry.address for entry in chosen if entry.family == socket.AF_INET]
    with suppress(OSError):  # no route
        addresses.append(_own_address_towards(NOBODY))
    return (addresses or own_addresses())[0]


def _own_address_towards(target: Any, family: int = socket.AF_INET) -> str:
    """Return the address from which this machine reaches another, without sending a packet."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def use_loopback() -> None:
    """Make gloo use the loopback interface, unless the user configured one."""
    if "lo" in psutil.net_if_addrs():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def use_interface_to(address: str) -> None:
    """Make gloo and NCCL use the interface towards an address, unless the user configured one.

    By default, gloo resolves the host's name, which often leads to the loopback interface.
    """
    try:
        family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        source = _own_address_towards(target, family)
        if source == "127.0.0.1" and not address.startswith(("127.", "localhost")):
            # the host's own name often resolves to the loopback
            source = _own_address_towards(NOBODY)
    except OSError:
        return
    if source in ("127.0.0.1", "::1"):
        use_loopback()
    for name, entries in psutil.net_if_addrs().items():
        if name != "lo" and source in [entry.address for entry in entries]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # `=`: exact name, not a prefix
