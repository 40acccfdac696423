"""Where ranks meet: one TCP store, reached by each through connections of its own.

Promises:
- under torchrun it is the store of its agent, which outlives any rank, and nothing of ours listens anywhere;
- elsewhere rank 0 opens one, on the loopback interface where all ranks are on one machine;
- what is written there is JSON, and is read as JSON: whoever reaches the port can end a run, but runs no code in it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from batchwright.errors import RankFailedError
from batchwright.ranks.place import Place, rank_timeout, read_place

# Of one request; waiting for other ranks is never done inside one.
_REQUEST = timedelta(seconds=20)
# Stores that this process opened stay open as long as it lives: a rank that is late still reads the verdict.
_opened: list[Any] = []


@dataclass(frozen=True)
class Address:
    """Where the store listens."""

    host: str
    port: int
    is_ours: bool = False
    """Rank 0 holds it, and it ends with rank 0."""

    def connect(self, prefix: str) -> Any:
        """Connect, and return the part of the store below `prefix`."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        try:
            return PrefixStore(prefix, TCPStore(self.host, self.port, is_master=False, timeout=_REQUEST))
        except RuntimeError as error:
            raise RankFailedError(
                f"the store of the ranks at {self.host}:{self.port} cannot be reached.",
                details=[str(error).splitlines()[0][:200]],
                remedy="start all ranks together, by torchrun",
            ) from None


def find_place() -> Place:
    """Which rank this is: by the process group where there is one, else by the environment."""
    from torch import distributed

    place = read_place()
    if not (distributed.is_available() and distributed.is_initialized()):
        return place
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (rank, world_size) == (place.rank, place.world_size):
        return place
    return Place(rank, world_size, int(os.environ.get("LOCAL_RANK") or rank), world_size)


def find_address(place: Place, call: int) -> Address:
    """Return where the ranks meet; `call` counts how often, the same on every rank."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    known = _launchers_store()
    key = f"batchwright/at/{call}"
    _opened.append(known)
    if place.rank == 0:
        address = _open(place)
        known.set(key, f"{address.host} {address.port}")
        return address
    try:
        known.wait([key], timedelta(seconds=rank_timeout()))
        host, _, port = known.get(key).decode().partition(" ")
    except RuntimeError:
        raise RankFailedError(
            f"rank 0 did not come to meet rank {place.rank} within {rank_timeout():.0f} s.",
            remedy="look at the output of rank 0; every rank has to make the same call",
        ) from None
    return Address(host, int(port), is_ours=True)


def _open(place: Place) -> Address:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_local = place.local_world_size == place.world_size
    host = "127.0.0.1" if is_local else os.environ.get("MASTER_ADDR") or socket.gethostname()
    listener = socket.socket()
    listener.bind(("127.0.0.1" if is_local else "0.0.0.0", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_REQUEST,
        # A listener of ours: torch's own listens on every interface.
        master_listen_fd=listener.detach(),
    )
    _opened.append(store)
    return Address(host, port, is_ours=True)


def _launchers_store() -> Any:
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    if distributed.is_initialized():
        return _get_default_store()
    wait = timedelta(seconds=rank_timeout())
    try:
        store, _, _ = next(distributed.rendezvous("env://", timeout=wait))  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, OSError) as error:
        raise RankFailedError(
            f"no other rank was met at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}.",
            details=[str(error).splitlines()[0][:200]],
            remedy="start all ranks together, by torchrun; or unset WORLD_SIZE and RANK for one process",
        ) from None
    return store
