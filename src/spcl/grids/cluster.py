"""Connecting to a Ray cluster."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spcl.errors import SpclError

__all__ = ["connected", "import_ray"]

PATIENCE_SECONDS = 5.0
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


def import_ray() -> Any:
    """Import Ray, which is optional."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # or it prints its nodes' warnings into our progress
    try:
        import ray
    except ImportError as error:
        raise SpclError('Ray is not installed; run: pip install "spcl[ray]"') from error
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect this process to the cluster at ``address``, and disconnect it when the block ends.

    Without an address, that is the cluster of ``$RAY_ADDRESS`` or one that runs on this machine, or else a new one of
    this machine alone, which ends with the block. A connection that the program has already is used and kept.

    Raises:
        SpclError: if there is no cluster at this address, or it refuses the connection.
    """
    ray = import_ray()
    if address not in (None, "auto"):
        _check_address(str(address))
    if ray.is_initialized():
        _check_same_cluster(ray.get_runtime_context().gcs_address, address)
        yield
        return
    with _own_signal_handler():
        _connect(ray, address)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Keep the program's SIGTERM handler, which ``ray.init`` replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _connect(ray: Any, address: str | None) -> None:
    try:
        ray.init(address=address or "auto", **QUIET)
    except ConnectionError as error:
        if address == "auto":
            raise SpclError("no Ray cluster runs on this machine; start one with: ray start --head") from error
        if address is not None:
            raise SpclError(
                f"no Ray cluster at {address} accepts this process; check the address, and that RAY_AUTH_MODE and the "
                f"token are those of the cluster"
            ) from error
        with _token_of_its_own():
            ray.init(address="local", include_dashboard=False, **QUIET)
    except (ray.exceptions.RayError, RuntimeError) as error:  # no token, or another version of Ray or Python
        reason = str(error).strip().partition(". ")[0]
        raise SpclError(f"cannot join the Ray cluster at {address or 'auto'}: {reason}") from error


def _check_address(address: str) -> None:
    """Raise an error if nothing answers there, which Ray itself finds out after two minutes only, and then exits."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise SpclError(f"{address!r} is not the address of a Ray cluster; write host:port, for example head:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise SpclError(
            f"no Ray cluster answers at {address} ({error}); start one there with: ray start --head --port {port}"
        ) from error


def _check_same_cluster(joined: str, address: str | None) -> None:
    if address not in (None, "auto", joined):
        raise SpclError(
            f"this process has joined the Ray cluster at {joined}, not {address}; leave the address out, or call "
            f"ray.shutdown() first"
        )


@contextmanager
def _token_of_its_own() -> Iterator[None]:
    """Give a new cluster a token that only this process and its children know.

    Otherwise Ray writes one to the home directory, which clusters that are started later then ask for
    (ray-project/ray#64755).
    """
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
