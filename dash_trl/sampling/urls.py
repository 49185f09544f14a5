"""Addresses of servers: what cannot be one is refused, and so is another machine's without a key."""

import ipaddress
import logging
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

API_KEY = "VLLM_API_KEY"  # vLLM's own environment variable


def check_urls(urls: str | Sequence[str]) -> list[str]:
    """The URLs without a trailing slash.

    Args:
        urls: a list, or a string with one or, between commas or spaces, several, as YAML and shells make of them.
    Raises:
        ValueError: there is none, or one twice, or what is no URL of a server, or another machine's without a key.
    """
    listed = [urls] if isinstance(urls, str) else urls
    cleaned = [url.rstrip("/") for text in listed for url in text.replace(",", " ").split()]
    if not cleaned:
        raise ValueError("vllm_server_urls is empty: name at least one server, e.g. http://127.0.0.1:8000.")
    if len(set(cleaned)) < len(cleaned):
        raise ValueError(f"vllm_server_urls={cleaned} names a server twice: each is one server with one address.")
    for url in cleaned:
        _check(url)
        if is_here(url):
            continue
        if not os.environ.get(API_KEY):
            raise ValueError(
                f"vllm_server_urls has {url!r}, which is not on this machine, and there is no key for it: whoever "
                "reaches that port could replace or read the model. Set the same environment variable "
                f"{API_KEY} for the trainer and for `python -m dash_trl.serve`, or open a tunnel and name its end here."
            )
        if url.startswith("http:"):
            logger.warning(
                f"The key goes to {url} without encryption, and so do prompts and completions: use a private network "
                "or a tunnel."
            )
    return cleaned


def _check(url: str) -> None:
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


def without_user(url: str) -> str:
    """The URL for a message or a log: nobody shall read a user or a password there."""
    return re.sub(r"(?s)^([^:/?#]*://)?.*@", r"\1***@", url)


def is_here(url: str) -> bool:
    """The server is on this machine."""
    host = urlsplit(url).hostname or ""
    return is_loopback(host) or is_unspecified(host)


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
