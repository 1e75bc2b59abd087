"""The predefined registers of PTX (%tid, %ctaid, %laneid, ...): their values for one warp."""

from __future__ import annotations

import numpy as np

from softsm.engine import program as pg
from softsm.engine.scheduler import Machine
from softsm.engine.warps import Cta
from softsm.errors import Fault

LANE_IDS = np.arange(32, dtype=np.uint32)


def special_value(machine: Machine, cta: Cta, index: int, name: str):
    """Returns the value of a predefined register for one warp: a number or 32 of them."""
    base, _, axis = name.partition(".")
    k = "xyz".find(axis) if axis else 0
    bx, by, _ = machine.block
    linear = index * 32 + LANE_IDS
    cluster = machine.cluster_shape
    match base:
        case "tid":
            return (linear % bx, linear // bx % by, linear // (bx * by))[k]
        case "ntid":
            return machine.block[k]
        case "ctaid":
            return cta.ctaid[k]
        case "nctaid":
            return machine.grid[k]
        case "laneid":
            return LANE_IDS
        case "warpid":
            return index
        case "nwarpid":
            return -(-cta.threads // 32)
        case "smid":
            return cta.sm.index % machine.sms_per_gpu
        case "nsmid":
            return machine.sms_per_gpu
        case "gridid" | "current_graph_exec" | "envreg0" | "reserved_smem_offset_begin":
            return 0
        case "envreg1":
            return machine.options.workspace >> 32
        case "envreg2":
            return machine.options.workspace & 0xFFFFFFFF
        case "lanemask_eq":
            return np.uint32(1) << LANE_IDS
        case "lanemask_lt":
            return (np.uint32(1) << LANE_IDS) - np.uint32(1)
        case "lanemask_le":
            return ((np.uint64(2) << LANE_IDS.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
        case "lanemask_gt":
            return ~((np.uint64(2) << LANE_IDS.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
        case "lanemask_ge":
            return ~((np.uint32(1) << LANE_IDS) - np.uint32(1))
        case "cluster_ctarank":
            return cta.rank
        case "cluster_nctarank":
            return machine.cluster_size
        case "cluster_ctaid":
            rest = cta.rank // cluster[0]
            return (cta.rank % cluster[0], rest % cluster[1], rest // cluster[1])[k]
        case "cluster_nctaid":
            return cluster[k]
        case "clusterid":
            return cta.ctaid[k] // cluster[k]
        case "nclusterid":
            return machine.grid[k] // cluster[k]
        case "is_explicit_cluster":
            return pg.ALL if machine.explicit_cluster else 0
        case "dynamic_smem_size":
            return machine.shared_dynamic
        case "total_smem_size" | "aggr_smem_size":
            return machine.shared_limit - pg.SHARED_START
        case "clock" | "clock_hi" | "clock64" | "globaltimer" | "globaltimer_lo" | "globaltimer_hi":
            return 0  # a fresh value is written by the instruction that reads it (isa/moves.py)
    raise Fault("special-register", f"%{name} has no value here")
