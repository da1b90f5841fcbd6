"""Probe on two gloo processes: every rank ends with the table of all batches."""

import pytest
import torch
from torch import nn

from skipless.probes import Probe, excess_kurtosis


def _measure(rank: int, store: str, results: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Probe(model) as probe:
        model(x[:3] if rank == 0 else x[3:])
    probe.all_reduce()
    torch.save(probe.table(), f"{results}.{rank}")
    dist.destroy_process_group()


def test_two_processes_merge_to_one_table(tmp_path):
    store, results = str(tmp_path / "store"), str(tmp_path / "table")
    torch.multiprocessing.spawn(_measure, args=(store, results), nprocs=2)
    tables = [torch.load(f"{results}.{rank}") for rank in (0, 1)]
    assert tables[0] == tables[1]
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    assert tables[0][0]["count"] == 10
    assert tables[0][0]["kurtosis"] == pytest.approx(float(excess_kurtosis(x)), rel=1e-10)
