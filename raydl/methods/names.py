"""The methods by name."""

from __future__ import annotations

from raydl.core.rules import Rule
from raydl.methods.cgad import CGAD
from raydl.methods.data_parallel import SyncMSGD, SyncSGD
from raydl.methods.dc_asgd import DCASGD
from raydl.methods.demo import DeMo
from raydl.methods.des_loc import DESLOC
from raydl.methods.diloco import AsyncDiLoCo, DiLoCo, MuLoCo, RestartedDiLoCo
from raydl.methods.easgd import (
    EAMSGD,
    AsyncEASGD,
    AsyncMEASGD,
    HogwildEASGD,
    HogwildMEASGD,
    OriginalEASGD,
    SyncEASGD,
    SyncMEASGD,
)
from raydl.methods.fednova import FedNova
from raydl.methods.heloco import HeLoCo
from raydl.methods.local_sgd import QSR, LocalSGD, PostLocalSGD
from raydl.methods.master_sgd import AsyncMSGD, AsyncSGD, HogwildMSGD, HogwildSGD
from raydl.methods.scaffold import Scaffold
from raydl.methods.slowmo import SlowMo
from raydl.methods.sparse_loco import SparseLoCo
from raydl.methods.streaming_diloco import StreamingDiLoCo

METHODS: dict[str, type[Rule]] = {
    kind.name: kind
    for kind in (
        OriginalEASGD, AsyncSGD, AsyncMSGD, HogwildSGD, HogwildMSGD, AsyncEASGD, AsyncMEASGD,
        EAMSGD, HogwildEASGD, HogwildMEASGD, SyncEASGD, SyncMEASGD, SyncSGD, SyncMSGD, LocalSGD,
        DiLoCo, MuLoCo, AsyncDiLoCo, SparseLoCo, StreamingDiLoCo, RestartedDiLoCo, SlowMo, FedNova,
        Scaffold, DESLOC, DCASGD, CGAD, HeLoCo, DeMo, QSR, PostLocalSGD,
    )
}  # fmt: skip
"""Every named method. Those of SC17 (arXiv 1708.02983) have their names there."""
