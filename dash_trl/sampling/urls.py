"""Checks server addresses. Addresses of other machines need an API key."""

import ipaddress
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

API_KEY = "VLLM_API_KEY"  # vLLM's own environment variable
ADDRESS = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^][/?#@:\s]+)(:[1-9]\d{0,4})?")


def check_urls(urls: str | Sequence[str]) -> list[str]:
    """Check server URLs and remove trailing slashes.

    Args:
        urls: a list, or a string of URLs separated by commas or spaces, as YAML and shells produce.

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
        if not ADDRESS.fullmatch(url):
            raise ValueError(
                f"vllm_server_urls has {without_user(url)!r}, which is not the address of a server. Write "
                "http://HOST:PORT, e.g. http://127.0.0.1:8000, without a path, a user or a password."
            )
        if not is_here(url) and not os.environ.get(API_KEY):
            raise ValueError(
                f"vllm_server_urls has {url!r}, which is not on this machine, and there is no key for it. Without a "
                "key anyone who reaches that port could read or replace the model. Set the environment variable "
                f"{API_KEY} to the same value for the trainer and for `dash_trl serve`, or open a tunnel and "
                "name its local end here."
            )
    return cleaned


def without_user(url: str) -> str:
    """Hide user and password of a URL, or of any other text, for messages and logs."""
    return re.sub(r"(?s)^([^:/?#]*://)?.*@", r"\1***@", url)


def is_here(url: str) -> bool:
    """Return whether a URL leads to this machine. 0.0.0.0 and `::` do: a client connects to its own machine by them."""
    host = urlsplit(url).hostname or ""
    return host in ("0.0.0.0", "::") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host, given by name or IP address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name
