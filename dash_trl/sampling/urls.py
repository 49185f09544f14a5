"""Checks server addresses. It refuses invalid addresses, and addresses of other machines if no API key is set."""

import ipaddress
import logging
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

API_KEY = "VLLM_API_KEY"  # vLLM's own environment variable


def check_urls(urls: str | Sequence[str]) -> list[str]:
    """Check server URLs and remove trailing slashes.

    Args:
        urls: a list of URLs, or a string of URLs separated by commas or spaces, as YAML and shells produce.

    Returns:
        The URLs, each once, in the same order.

    Raises:
        ValueError: if there is no URL, if a URL is not the address of a server, or if a server is on another machine
            and VLLM_API_KEY is not set.
    """
    listed = [urls] if isinstance(urls, str) else urls
    split = (url.rstrip("/") for text in listed for url in text.replace(",", " ").split())
    cleaned = list(dict.fromkeys(split))  # a server that is named twice counts once
    if not cleaned:
        raise ValueError("vllm_server_urls is empty: name at least one server, e.g. http://127.0.0.1:8000.")
    for url in cleaned:
        _check(url)
        if is_here(url):
            continue
        if not os.environ.get(API_KEY):
            raise ValueError(
                f"vllm_server_urls has {url!r}, which is not on this machine, and there is no key for it. Without a "
                "key anyone who reaches that port could read or replace the model. Set the environment variable "
                f"{API_KEY} to the same value for the trainer and for `python -m dash_trl.serve`, or open a tunnel and "
                "name its local end here."
            )
        if url.startswith("http:"):
            logger.warning(
                f"The key, prompts and completions are sent to {url} without encryption. Use a private network or a "
                "tunnel."
            )
    return cleaned


def _check(url: str) -> None:
    """Raise `ValueError` unless the URL has the form http://HOST:PORT or https://HOST:PORT; the port may be missing."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port  # both may raise ValueError
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
    """Hide user and password of a URL, for messages and logs.

    Args:
        url: a URL, or any other text.
    """
    return re.sub(r"(?s)^([^:/?#]*://)?.*@", r"\1***@", url)


def is_here(url: str) -> bool:
    """Return whether a server is on this machine.

    Args:
        url: URL of the server.
    """
    host = urlsplit(url).hostname or ""
    return is_loopback(host) or is_unspecified(host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host.

    Args:
        host: name or IP address.
    """
    return host == "localhost" or _property(host, "is_loopback")


def is_unspecified(host: str) -> bool:
    """Return whether a host is 0.0.0.0 or `::`.

    A server that is given one of these addresses listens on all addresses of its machine. A client that is given one of
    them connects to the client's own machine.

    Args:
        host: name or IP address.
    """
    return _property(host, "is_unspecified")


def _property(host: str, name: str) -> bool:
    """Return a boolean property of an IP address; False for a host name."""
    try:
        return getattr(ipaddress.ip_address(host), name)
    except ValueError:
        return False  # a host name
