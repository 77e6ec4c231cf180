"""The machines that a plan is made for: ranks, their memory, and the speed of memory and links."""

import dataclasses
import hashlib
import math
import socket
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from torchembed.sharding.planning.node_disk import NodeDisk

MEMORY_SHARE = 0.85
"""Share of a rank's free memory that tables and their buffers may take. The rest is for the dense
part, its activations, the collectives' own buffers and gaps of the allocator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The host of one node, which its ranks share: its memory for tables' rows, and how fast GPUs
    reach it.

    The rates are those of PCIe 5.0 with 16 lanes for each of eight GPUs; those of copies and of
    rows were measured on one H200. Both directions are taken to reach them at the same time.
    """

    memory_bytes: int = 0
    """Memory of the node that rows may take, of all its ranks together."""
    link_bandwidth: float = 55e9
    """Bytes a second between a GPU and the host, in each direction: what a copy engine reaches."""
    access_bandwidth: float = 26e9
    """Bytes a second, in each direction, of a kernel that exchanges rows in the host with others at
    the same places, in the order of places: measured with rows of 544 bytes, optimizer state
    included; those of 1,056 bytes reach 35 GB/s."""
    node_bandwidth: float = 256e9
    """Bytes a second, in each direction, of all GPUs of the node at once."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, may_be_zero = getattr(self, field.name), field.name.endswith("_bytes")
            if not (value > 0 or (may_be_zero and value == 0)):
                required = "not be negative" if may_be_zero else "be positive"
                raise ValueError(f"{field.name} of a host must {required}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A rank's device and its links."""

    name: str
    memory_bytes: int
    """Memory that a program can have when nothing else runs."""
    memory_bandwidth: float
    """Bytes a second of a copy, reads and writes counted."""
    intra_node_bandwidth: float
    """Bytes a second that a rank sends to ranks of its node while it receives as many."""
    inter_node_bandwidth: float
    """Bytes a second to ranks of other nodes, likewise."""
    kernel_seconds: float = 0.0
    """Fixed overhead of a kernel."""
    exchange_seconds: float = 0.0
    """Fixed overhead of an exchange between ranks."""
    peer_seconds: float = 0.0
    """Overhead of an exchange for each rank that takes part."""
    flops: float = math.inf
    """FLOPs a second that a dense part of 16-bit products reaches."""


# Memory: a large copy on one GPU. Intra-node: NCCL all-to-alls and all-reduces of 3 to 109 MB a GPU
# over 2 and 8 H200 in CUDA graphs; the H100 has the same NVLink. Inter-node is not measured: nine
# tenths of one 400 Gb/s adapter a GPU. FLOPs: of DLRM-DCNv2's dense part. `bench.planning.costs`
# says how far off these figures are.
H100 = Hardware(
    name="H100",
    memory_bytes=78 << 30,
    memory_bandwidth=3.0e12,
    intra_node_bandwidth=290e9,
    inter_node_bandwidth=45e9,
    kernel_seconds=7e-6,
    exchange_seconds=4e-6,
    peer_seconds=3.6e-6,
    flops=530e12,
)
H200 = dataclasses.replace(H100, name="H200", memory_bytes=139 << 30, memory_bandwidth=4.23e12)
# Round numbers for one core of a server and gloo between processes: plans ask for ratios.
CPU = Hardware(
    name="CPU",
    memory_bytes=4 << 30,
    memory_bandwidth=10e9,
    intra_node_bandwidth=1e9,
    inter_node_bandwidth=1e9,
    flops=1e12,
)
GPUS = (H100, H200)
"""GPUs whose figures are known. Any other GPU is given the figures of the first, with its own
memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Equal ranks on equal nodes. Node k consists of ranks ``[k * n, (k + 1) * n)``."""

    num_nodes: int = 1
    ranks_per_node: int
    memory_bytes: int
    """Memory that tables and their buffers may take on each rank."""
    memory_bandwidth: float
    """Bytes a second, reads and writes counted."""
    intra_node_bandwidth: float
    """Bytes a second and rank, in each direction, to ranks of the same node."""
    inter_node_bandwidth: float
    """Bytes a second and rank, in each direction, to ranks of other nodes."""
    kernel_seconds: float = 0.0
    """Fixed overhead of a kernel."""
    exchange_seconds: float = 0.0
    """Fixed overhead of an exchange between ranks."""
    peer_seconds: float = 0.0
    """Overhead of an exchange for each rank that takes part."""
    flops: float = math.inf
    """FLOPs a second that a dense part of 16-bit products reaches."""
    host: Host = Host()
    """Memory of each node for rows that are not on the devices."""
    disk: NodeDisk = NodeDisk()
    """Disk of each node, for rows that are neither on the devices nor in the memory of the host."""
    devices_are_hosts: bool = False
    """True for ranks on CPUs: rows in the memory of the host take memory of their rank."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, may_be_zero = getattr(self, field.name), field.name.endswith("_seconds")
            if isinstance(value, Host | NodeDisk | bool):
                continue
            if not (value > 0 or (may_be_zero and value == 0)):
                required = "not be negative" if may_be_zero else "be positive"
                raise ValueError(f"{field.name} of a topology must {required}, got {value}")

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def has_two_levels(self) -> bool:
        """True if ranks exchange within nodes and between nodes, and not all with each other."""
        return 1 < self.num_nodes < self.num_ranks

    @property
    def collective_seconds(self) -> float:
        """Fixed overhead of an exchange between all ranks, in two levels that of both."""
        levels = (self.ranks_per_node, self.num_nodes) if self.has_two_levels else (self.num_ranks,)
        return sum(self.exchange_seconds + met * self.peer_seconds for met in levels)

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second and rank, in each direction, between devices and rows in the host."""
        host = self.host
        shared = host.node_bandwidth / self.ranks_per_node
        return min(host.link_bandwidth, host.access_bandwidth, shared)

    @property
    def disk_bandwidth(self) -> float:
        """Bytes a second and rank of rows that come from the disk while as many go there."""
        return self.disk.bandwidth / self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node that ``rank`` is on."""
        return rank // self.ranks_per_node

    @classmethod
    def of_hardware(
        cls,
        hardware: Hardware,
        *,
        ranks_per_node: int,
        num_nodes: int = 1,
        host: Host | None = None,
        disk: NodeDisk | None = None,
    ) -> "Topology":
        """Ranks of ``hardware`` that are otherwise idle; no device is asked.

        Args:
            host: of each node; by default rows have no memory but the devices'.
            disk: of each node; by default rows go to none.

        Raises:
            TypeError: for a ``hardware`` that is none.
        """
        if not isinstance(hardware, Hardware):
            raise TypeError(
                f"hardware must be a Hardware, as torchembed.sharding.H200, got {hardware!r}"
            )
        return cls(
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            memory_bytes=int(hardware.memory_bytes * MEMORY_SHARE),
            memory_bandwidth=hardware.memory_bandwidth,
            intra_node_bandwidth=hardware.intra_node_bandwidth,
            inter_node_bandwidth=hardware.inter_node_bandwidth,
            kernel_seconds=hardware.kernel_seconds,
            exchange_seconds=hardware.exchange_seconds,
            peer_seconds=hardware.peer_seconds,
            flops=hardware.flops,
            host=host or Host(),
            disk=disk or NodeDisk(),
            devices_are_hosts=hardware is CPU,
        )

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        num_nodes: int = 1,
    ) -> "Topology":
        """The ranks of a process group, each of which passes its own ``device``.

        Collective: one all-gather of CPU tensors, so that all ranks get the same topology, that of
        the weakest one. A GPU counts with the memory that is free now, the CPU with the machine's
        available memory over its ranks; of both ``MEMORY_SHARE``. Nodes of GPUs count with the
        memory that their hosts have available, of which each rank of a host has an equal part, and
        ``MEMORY_SHARE`` of that. Where a single node has ranks on several hosts, all its links are
        counted as those between nodes.

        Raises:
            RuntimeError: on every rank where one cannot tell its memory; on that one its error.
        """
        problem = None
        try:
            hardware, free_bytes = _hardware_of(device)
            host_bytes = available_host_bytes()
        except Exception as error:  # noqa: BLE001 - raised below, once all ranks know of it
            problem, hardware, free_bytes, host_bytes = error, CPU, -1, 0
        host = hashlib.sha256(socket.gethostname().encode()).digest()
        mine = torch.tensor(
            [
                int.from_bytes(host[:7], "big"),
                free_bytes,
                host_bytes,
                int(hardware.memory_bandwidth),
                int(hardware.intra_node_bandwidth),
                int(hardware.inter_node_bandwidth),
                int(hardware.flops),
                round(hardware.kernel_seconds * 1e9),
                round(hardware.exchange_seconds * 1e9),
                round(hardware.peer_seconds * 1e9),
            ],
            device="cpu",
        )
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        if problem is not None:
            raise problem
        silent = [rank for rank, figures in enumerate(gathered) if figures[1] < 0]
        if silent:
            raise RuntimeError(
                f"ranks {silent} could not tell the memory of their devices, for the errors that "
                "they raise; give the planner a topology"
            )
        is_cpu = device.type == "cpu"
        hosts = [int(figures[0]) for figures in gathered]
        ranks_of_host = Counter(hosts)
        free = [
            int(figures[1]) // (ranks_of_host[host] if is_cpu else 1)
            for host, figures in zip(hosts, gathered, strict=True)
        ]
        figures = torch.stack(gathered)
        ranks_per_node = len(hosts) // num_nodes
        # Each rank has an equal part of its host's memory.
        of_rank = min(
            int(of[2]) // ranks_of_host[host] for host, of in zip(hosts, gathered, strict=True)
        )
        memory, within, between, flops = figures[:, 3:7].amin(dim=0).tolist()
        kernel_ns, exchange_ns, peer_ns = figures[:, 7:].amax(dim=0).tolist()
        return cls(
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            memory_bytes=int(min(free) * MEMORY_SHARE),
            memory_bandwidth=memory,
            intra_node_bandwidth=between if len(ranks_of_host) > num_nodes == 1 else within,
            inter_node_bandwidth=between,
            kernel_seconds=kernel_ns * 1e-9,
            exchange_seconds=exchange_ns * 1e-9,
            peer_seconds=peer_ns * 1e-9,
            flops=flops,
            host=Host(memory_bytes=0 if is_cpu else int(of_rank * MEMORY_SHARE) * ranks_per_node),
            devices_are_hosts=is_cpu,
        )


def _hardware_of(device: torch.device) -> tuple[Hardware, int]:
    """The figures of ``device``, and its free memory in bytes."""
    free = free_bytes(device)
    if device.type != "cuda":
        return CPU, free
    name = torch.cuda.get_device_name(device)
    known = [hardware for hardware in GPUS if hardware.name in name]
    return (known or GPUS)[0], free


def free_bytes(device: torch.device) -> int:
    """Memory that ``device`` has left: a GPU's own, or the machine's for the CPU."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return available_host_bytes()


def available_host_bytes() -> int:
    """The memory that programs of this host can still have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
