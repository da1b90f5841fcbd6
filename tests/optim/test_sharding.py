"""A sharded matrix gets the whole matrix's update: 2 and 4 gloo processes under FSDP2."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skipless.optim.sharding import Exchange

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_equals_whole(world):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        results = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
    errors = "\n".join(err[-2000:] for _, err in results)
    assert all(worker.returncode == 0 for worker in workers), errors
    assert results[0][0].strip() == "OK"


class FakeMesh:
    ndim = 1

    def get_group(self, dim):
        return None

    def get_local_rank(self, dim):
        return 0

    def size(self, dim):
        return 4


class Shard:
    dim = 0


def test_owners_share_the_work():
    """Greedy by m^3 + n^3: the busiest rank has at most 1.2 times the mean here."""
    params = []
    for shape in [(768, 256), (256, 256), (1024, 256), (256, 1024)] * 12:
        p = torch.empty(shape, device="meta")
        p.device_mesh, p.placements = FakeMesh(), (Shard(),)
        params.append(p)

    def cost(p):
        return p.shape[0] ** 3 + p.shape[1] ** 3

    exchange = Exchange(params, cost)
    load = [0.0] * 4
    for p in params:
        load[exchange.owner[p]] += cost(p)
    assert max(load) <= 1.2 * sum(load) / 4
