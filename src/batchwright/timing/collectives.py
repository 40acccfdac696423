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
    from collections.abc import Callable, Sequence

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
_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"([MGT])(b|B|bit|bits)(?:/s|ps)")
_DELAY = re.compile(_NUMBER + r"(ns|us|ms|s)")
_SCALES = {"M": 1e6, "G": 1e9, "T": 1e12, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Network:
    """What joins nodes: bytes per second of one node, one way, and the seconds that a doubling of nodes adds.

    >>> Network.parse("400Gb/s").node_bytes, round(Network.parse("50GB/s, 20us").latency, 9)
    (50000000000.0, 2e-05)
    """

    node_bytes: float
    latency: float = _LATENCY_OF_NETWORK
    devices_per_node: int = _DEVICES_OF_A_NODE

    @staticmethod
    def parse(text: str) -> Network:
        """Read a bandwidth per node, `400Gb/s` in bits or `50GB/s` in bytes, and a latency behind a comma if known."""
        speed, comma, delay = text.partition(",") if isinstance(text, str) else ("", "", "")
        bandwidth, latency = _BANDWIDTH.fullmatch(speed.strip()), _DELAY.fullmatch(delay.strip())
        if bandwidth is None or float(bandwidth[1]) <= 0 or (comma and latency is None):
            raise InvalidInputError(
                f"network is the bandwidth of one node, and its latency if known; received {shortened(text)}.",
                remedy='network="400Gb/s", network="50GB/s" or network="400Gb/s,20us"',
            )
        num_bytes = float(bandwidth[1]) * _SCALES[bandwidth[2]] / (1 if bandwidth[3] == "B" else 8)
        seconds = _LATENCY_OF_NETWORK if latency is None else float(latency[1]) * _SCALES[latency[2]]
        return Network(num_bytes, seconds)


def read_network(text: str | None, devices: int | None = None) -> Network | None:
    """Read a network where one was named; of so many `devices` it must join more than one node."""
    network = None if text is None else Network.parse(text)
    if network is not None and devices is not None and not is_beyond_a_node(devices, network):
        node = network.devices_per_node
        raise InvalidInputError(
            f"network joins nodes, and one holds {node} devices; received devices={devices}.",
            remedy=f"leave network out, or devices={2 * node}",
        )
    return network


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
        latency += network.latency * max(1, (-(-devices // per_node) - 1).bit_length())
    return latency + sent / bus


def is_beyond_a_node(devices: int, network: Network | None) -> bool:
    """Whether so many ranks do not fit into one node."""
    return devices > (network.devices_per_node if network is not None else _DEVICES_OF_A_NODE)


def exposed_seconds(
    entries: Sequence[Work],
    seconds: Sequence[float],
    takes_of: Callable[[str, int], float],
    *,
    spread: float = 1.0,
) -> float:
    """Return how long the device waits for collectives, by walking the step with one lane for each.

    `seconds` are those of each entry on the device, `takes_of` those of a collective of so many bytes; `spread` is by
    how much the step takes longer than their sum (the host), which leaves collectives more time to hide in.
    """
    device = link = begun = busy = 0.0
    for work, lasts in zip(entries, seconds, strict=True):
        if work.kind in COLLECTIVES:
            takes = takes_of(work.kind, work.read_bytes)
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
