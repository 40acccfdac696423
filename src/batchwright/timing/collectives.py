"""What ranks send each other, in seconds, and how much of it the step has to wait for.

The time of a collective is a latency and the bytes over the bus: an all-reduce sends each byte `2 (n - 1) / n` times, a
gather or scatter half as often. Within a node the bus is a share of the link that was measured on A100 and V100 nodes
(data of VIA-Research/vTrain); of other links it is a guess. Beyond one node it is a model, and called one: the slower
of the link and of each card's part of the network.

Promises:
- what is reduced may overlap the rest of the backward, as DDP's buckets and FSDP2 do, and is waited for before the
  optimizer; what is gathered was asked for one layer ahead;
- nothing is charged where there is one rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.catalogue.speeds import CardSpeed
    from batchwright.trace.work import Work

REDUCED = ("all_reduce", "reduce_scatter")
COLLECTIVES = (*REDUCED, "all_gather", "all_to_all")
# Shares of a link, one way, that the bus of a large all-reduce reaches. NVLink: 0.76 of 300 GB/s on eight A100, 0.89 of
# 150 on eight V100. PCIe and AMD's fabric were not measured: a guess.
_SHARE_OF_LINK = {"nvlink": 0.78, "fabric": 0.6, "pcie": 0.3}
# Seconds until a small one is through: 80 microseconds for 1 MiB on eight A100, less what its bytes take.
_LATENCY = {"nvlink": 5e-5, "fabric": 6e-5, "pcie": 6e-5}
_LATENCY_OF_NETWORK = 1e-4
_SHARE_OF_NETWORK = 0.8
_DEVICES_OF_A_NODE = 8


@dataclass(frozen=True)
class Network:
    """What joins nodes: bytes per second of one node, one way.

    >>> Network.parse("400Gb/s").node_bytes
    50000000000.0
    """

    node_bytes: float
    devices_per_node: int = _DEVICES_OF_A_NODE

    @staticmethod
    def parse(text: str) -> Network:
        """Read a bandwidth per node: `400Gb/s` in bits, `50GB/s` in bytes."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GT])([bB])(?:/s|ps)\s*", text) if isinstance(text, str) else None
        if match is None or float(match[1]) <= 0:
            raise InvalidInputError(
                f"a network is a bandwidth per node; received {shortened(text)}.", remedy='"400Gb/s" or "50GB/s"'
            )
        scale = 1e9 if match[2] == "G" else 1e12
        return Network(float(match[1]) * scale / (8 if match[3] == "b" else 1))


def collective_seconds(kind: str, num_bytes: int, devices: int, speed: CardSpeed, network: Network | None) -> float:
    """Return the seconds of one collective over so many ranks; `num_bytes` is the whole, gathered tensor.

    >>> from batchwright.catalogue.speeds import find_speed
    >>> a100 = find_speed("a100-40gb-sxm")
    >>> f"{collective_seconds('all_reduce', 2**30, 8, a100, None):.4f}"
    '0.0081'
    """
    if devices == 1:
        return 0.0
    sent = num_bytes * (devices - 1) / devices * (2 if kind == "all_reduce" else 1)
    bus = speed.link_bytes / 2 * _SHARE_OF_LINK[speed.link]
    latency = _LATENCY[speed.link]
    per_node = network.devices_per_node if network is not None else _DEVICES_OF_A_NODE
    if devices > per_node and network is not None:
        # A ring enters and leaves each node once, so a node's bandwidth is that of the ring.
        bus = min(bus, network.node_bytes * _SHARE_OF_NETWORK)
        latency += _LATENCY_OF_NETWORK * max(1, (devices // per_node).bit_length() - 1)
    return latency + sent / bus


def is_beyond_a_node(devices: int, network: Network | None) -> bool:
    """Whether so many ranks do not fit into one node."""
    return devices > (network.devices_per_node if network is not None else _DEVICES_OF_A_NODE)


def exposed_seconds(
    entries: Sequence[Work],
    seconds: Sequence[float],
    devices: int,
    speed: CardSpeed,
    network: Network | None = None,
    *,
    spread: float = 1.0,
) -> float:
    """Return how long the device waits for collectives, by walking the step with one lane for each.

    `seconds` are those of each entry on the device; `spread` is by how much the step takes longer than their sum (the
    host), which leaves collectives more time to hide in.
    """
    device = link = begun = busy = 0.0
    for work, lasts in zip(entries, seconds, strict=True):
        if work.kind in COLLECTIVES:
            takes = collective_seconds(work.kind, work.read_bytes, devices, speed, network)
            if work.kind in REDUCED:
                link = max(link, device) + takes
            else:
                link = max(link, begun) + takes
                device = max(device, link)
                begun = device
            continue
        if work.phase == "optimizer":
            device = max(device, link)
        device += lasts * spread
        busy += lasts * spread
    return max(device, link) - busy
