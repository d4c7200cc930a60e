"""What a plan assumes of the machines: one table, from the makers' data sheets."""

from dataclasses import dataclass

from conf.schema import Gpu

GB = 1e9
USABLE = 0.92  # of a GPU's memory; the rest is the driver's, CUDA's own and what fragments


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links; rates in each direction, without a protocol's losses."""

    memory: float  # bytes
    peak: float  # dense bf16 FLOP/s
    link: float  # bytes a second to the other GPUs of its machine (NVLink)
    network: float  # bytes a second to other machines: one InfiniBand port a GPU

    @property
    def usable(self) -> float:
        return USABLE * self.memory


KINDS = {
    Gpu.a100_40: Hardware(40 * GB, 312e12, 300 * GB, 25 * GB),  # HDR, 200 Gbit/s
    Gpu.a100: Hardware(80 * GB, 312e12, 300 * GB, 25 * GB),
    Gpu.h100: Hardware(80 * GB, 989e12, 450 * GB, 50 * GB),  # NDR, 400 Gbit/s
    Gpu.h200: Hardware(141 * GB, 989e12, 450 * GB, 50 * GB),
}
