"""Other people's loops: the page's FSDP2 program under torchrun, HF Trainer, torch.compile.

The other examples of docs/optimizers.md run in tests/test_docs.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from skipless.optim import KLShampoo, Muon

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_the_fsdp_program_of_the_page_runs_under_torchrun(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    net = next(b for b in blocks if "class Net" in b)
    program = next(b for b in blocks if "fully_shard" in b)
    (tmp_path / "fsdp.py").write_text(f"{net}\n{program}")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         "fsdp.py"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"rank (\d): loss (\S+), (\d+) bytes", done.stdout)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"], done.stdout
    assert all(float(loss) < 3.3 for _, loss, _ in found)  # from log(32) = 3.47
    sizes = [int(size) for _, _, size in found]
    # Each rank owns one of the two matrices; whole on both ranks it would be all of it twice.
    assert sum(sizes) < 1.2 * single_process_state() and min(sizes) > 0.25 * sum(sizes)


def single_process_state() -> int:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16, bias=False))
    extra = 2 * 4 * (2 * 32 * 16 + 2 * 16)  # AdamW's two moments of embedding, head and norm
    optimizer = KLShampoo(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_bytes() + extra


# --- HF Trainer -----------------------------------------------------------------------------------


def trainer(folder: Path, cls=KLShampoo, **arguments):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=8,
        )
    )  # fmt: skip
    rows = [{"input_ids": (torch.arange(8) * (1 + i % 3) + i) % 16} for i in range(24)]
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), max_steps=30, per_device_train_batch_size=4, use_cpu=True,
            report_to="none", save_steps=15, logging_steps=10, disable_tqdm=True, seed=0,
            lr_scheduler_type="cosine", warmup_steps=3, **arguments,
        ),
        train_dataset=[{**row, "labels": row["input_ids"]} for row in rows],
        optimizer_cls_and_kwargs=(lambda: cls, {"lr": 1e-2, "adamw_lr": 1e-2}),
    )  # fmt: skip


def test_hf_trainer_trains_and_resumes_where_it_stopped(tmp_path):
    straight = trainer(tmp_path / "run")
    straight.train()
    assert straight.state.global_step == 30
    losses = [row["loss"] for row in straight.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.2
    groups = {g["role"]: g for g in straight.optimizer.param_groups}
    assert groups["matrix"]["algorithm"] == "kl_shampoo"
    assert groups["embedding"]["algorithm"] == groups["head"]["algorithm"] == "adamw"
    assert groups["norm"]["weight_decay"] == 0.0

    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-15"))
    assert resumed.state.global_step == 30
    for (name, a), b in zip(
        straight.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [KLShampoo, Muon])
def test_a_compiled_step_is_the_eager_step(cls):
    """Traced by dynamo and run by its "eager" backend, which needs no C++ compiler."""
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
        optimizer = cls(model, lr=1e-2)

        def step(x, model=model, optimizer=optimizer):
            loss = F.mse_loss(model(x), x.flip(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = torch.compile(step, backend="eager") if compiled else step
        generator = torch.Generator().manual_seed(1)
        for _ in range(12):
            run(torch.randn(8, 6, generator=generator))
        weights.append([p.detach().clone() for p in model.parameters()])
    for eager, traced in zip(*weights, strict=True):
        assert torch.allclose(eager, traced, atol=1e-6)


# --- Lightning ------------------------------------------------------------------------------------


def test_lightning_trains_and_resumes_bit_for_bit(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

        def training_step(self, batch):
            (x,) = batch
            return F.mse_loss(self.down(F.gelu(self.up(x))), x.flip(-1))

        def configure_optimizers(self):
            return KLShampoo(self, lr=1e-2)

    data = torch.utils.data.TensorDataset(torch.randn(32, 8))
    batches = torch.utils.data.DataLoader(data, batch_size=8)

    def fit(epochs, start=None):
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        before = module.up.weight.clone()
        trainer.fit(module, batches, ckpt_path=start)
        assert not torch.equal(before, module.up.weight)
        assert trainer.global_step == 4 * epochs
        return trainer, module

    _, straight = fit(6)
    fit(3)[0].save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = fit(6, tmp_path / "half.ckpt")
    assert torch.equal(straight.up.weight, resumed.up.weight)
    assert torch.equal(straight.down.weight, resumed.down.weight)
