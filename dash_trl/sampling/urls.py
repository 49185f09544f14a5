"""Addresses of servers: what cannot be one is refused, what is open to others is warned of."""

import ipaddress
import logging
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)


def check_urls(urls: str | Sequence[str]) -> list[str]:
    """The URLs without a trailing slash; raises a ValueError for what cannot be one, warns where anybody may listen.

    Args:
        urls: a list, or a string with one or, between commas or spaces, several, as YAML and shells make of them.
    """
    listed = [urls] if isinstance(urls, str) else urls
    cleaned = [url.rstrip("/") for text in listed for url in text.replace(",", " ").split()]
    if not cleaned:
        raise ValueError("vllm_server_urls is empty: name at least one server, e.g. http://127.0.0.1:8000.")
    if len(set(cleaned)) < len(cleaned):
        raise ValueError(f"vllm_server_urls={cleaned} names a server twice: each is one server with one address.")
    for url in cleaned:
        host = _host(url)
        if not (is_loopback(host) or is_unspecified(host)):
            logger.warning(
                f"{url} is not on this machine. Unless `python -m dash_trl.serve` started it with VLLM_API_KEY, its "
                "weight endpoints have no authentication: whoever reaches that port can replace or read the model. "
                "Use a private network or a tunnel."
            )
    return cleaned


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port  # each raises a ValueError of its own
    except ValueError:
        host, port = None, 0
    if (
        not host
        or port == 0
        or parts.scheme not in ("http", "https")
        or parts.path
        or parts.query
        or parts.fragment
        or without_user(url) != url
    ):
        raise ValueError(
            f"vllm_server_urls has {without_user(url)!r}, which is not the address of a server. Write http://HOST:PORT,"
            " e.g. http://127.0.0.1:8000, without a path, a user or a password."
        )
    return host


def without_user(url: str) -> str:
    """The URL for a message or a log: nobody shall read a user or a password there."""
    return re.sub(r"^([^:/?#]*://)?.*@", r"\1***@", url)


def is_loopback(host: str) -> bool:
    """Only this machine reaches it."""
    return host == "localhost" or _property(host, "is_loopback")


def is_unspecified(host: str) -> bool:
    """0.0.0.0 or ::, any address of this machine: one connects to itself, and listens to everybody."""
    return _property(host, "is_unspecified")


def _property(host: str, name: str) -> bool:
    try:
        return getattr(ipaddress.ip_address(host), name)
    except ValueError:
        return False  # a name
