"""Programs that name `cuda`, on a simulated card: the host is real, what is read back is known or made up."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import batchwright as bw
import batchwright.errors
from batchwright.scripts.command import read_command
from batchwright.scripts.estimate_script import ScriptEstimate, estimate_script
from batchwright.scripts.probe import Probes
from batchwright.scripts.script import Script
from batchwright.timing.step_time import StepTime

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """
    import copy, math, sys
    import torch, torch.utils.tensorboard
    from torch import nn
    def build():
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
"""


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probes]:
    """Probes of one folder, whose process imports once."""
    script = Script(["train.py"], cwd=tmp_path_factory.mktemp("programs"), seconds=120)
    with Probes(script, "a100-40gb") as opened:
        yield opened


def run(folder: Path, program: str, *arguments: str) -> ScriptEstimate:
    (folder / "train.py").write_text(dedent(HEAD) + dedent(program))
    return estimate_script(Script(["train.py", *arguments], cwd=folder, seconds=120), on="a100-40gb")


def test_the_peak_is_that_of_a_workload_of_the_same_step(tmp_path: Path) -> None:
    seen = run(
        tmp_path,
        """
        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model = build().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        while True:
            step(torch.randn(32, 64).to("cuda"))
        """,
    )
    workload = bw.Workload(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
        batch=lambda n: torch.randn(n, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters),
    )
    estimate = bw.estimate(workload, micro_batch=32, on="a100-40gb")
    expected = estimate.peak_bytes
    assert isinstance(estimate.time, StepTime)
    assert isinstance(seen.time, StepTime)
    assert seen.time.flops == estimate.time.flops
    assert seen.time.seconds == pytest.approx(estimate.time.seconds, rel=0.05)
    assert seen.run.peak_bytes is not None
    # Four bytes for each of Adam's counters, in blocks of 512, and the like.
    assert seen.run.peak_bytes.allocated == pytest.approx(expected.allocated, abs=8192)
    assert (seen.micro_batch, seen.run.made_up_reads) == (32, 0)


@pytest.mark.parametrize(
    "program",
    {
        "mixed precision": """
            model = build().cuda(); optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            while True:
                with torch.autocast("cuda", torch.float16):
                    loss = model(torch.randn(8, 64, device="cuda")).mean()
                scaler.scale(loss).backward(); scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
                print(f"{loss.item():.2f} {norm:.2f} {math.exp(loss):.1f}", loss)
                assert math.isfinite(loss.item())
        """,
        "averages and a checkpoint": """
            model = build(); optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            model.to(torch.device("cuda")); average = copy.deepcopy(model)
            while True:
                model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
                for a, b in zip(average.parameters(), model.parameters()): a.data.lerp_(b.data, 0.1)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        "labels that are read": """
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            labels = torch.arange(8) % 3
            while True:
                y = labels.cuda()
                assert y.max().item() == 2 and y.tolist() == labels.tolist() and (y == 1).sum().item() == 3
                out = model(torch.randn(8, 64).cuda())
                picked = out[y == 1]
                assert picked.shape[0] == 3
                nn.functional.cross_entropy(out, y).backward(); optimizer.step()
        """,
        "counts of what is not known, and sizes that follow from them": """
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            graph = (torch.arange(8) // 2).cuda()
            while True:
                out = model(torch.randn(8, 64).cuda())
                mask = out[:, 0] > 0
                count = mask.sum()
                assert count.item() == out[mask].shape[0] == 8 and count.cpu() == 8
                if not count > 0: sys.exit("a mask that keeps every element keeps some")
                order = out[:, 0].sort(descending=True)[1]
                kept = graph[order][:5]
                assert torch.equal(kept.sort()[0].cpu(), torch.arange(5) // 2)
                picked = graph[out.argmax(1)[mask] % 8]
                assert int(picked.max()) + 1 == 4
                chosen = torch.bincount(out[:, :5].argmax(1))
                assert chosen.tolist() == [2, 2, 2, 1, 1] and len(out.split(chosen.tolist())) == 5
                assert graph[torch.randperm(8, device="cuda")].bincount().tolist() == [2] * 4
                places = torch.arange(2000, device="cuda")
                assert (places[torch.rand(2000, device="cuda").argsort()] < 500).nonzero().shape[0] == 500
                while (out[:, 1] > 0).sum() > 0: pass
                out[kept].mean().backward(); optimizer.step()
        """,
        "TorchScript, of functions and modules": """
            @torch.jit.script
            def gated(x: torch.Tensor) -> torch.Tensor:
                return torch.tanh(x) * torch.sigmoid(x)
            model = torch.jit.script(build()).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                gated(model(torch.randn(8, 64).cuda())).mean().backward(); optimizer.step()
        """,
        "sparse gradients and a sparse matrix": """
            tables = [nn.Embedding(100, 16, sparse=True).cuda(), nn.EmbeddingBag(100, 16, mode="sum", sparse=True).cuda()]
            head = nn.Linear(16, 1).cuda()
            optimizers = [torch.optim.SparseAdam(tables[0].parameters()), torch.optim.Adagrad(tables[1].parameters()),
                          torch.optim.SGD(head.parameters(), 0.1, momentum=0.9)]
            near = torch.eye(8).to_sparse().cuda()
            while True:
                ids = torch.randint(0, 100, (8, 5)).cuda()
                for _ in range(2):
                    out = torch.spmm(near, head(tables[0](ids).mean(1) + tables[1](ids)))
                    out.mean().backward()
                for table in tables:
                    assert table.weight.grad.is_sparse and table.weight.grad._nnz() == 80
                    nn.utils.clip_grad_norm_(table.parameters(), 1.0)
                for optimizer in optimizers: optimizer.step(); optimizer.zero_grad()
        """,
        "unknown masks": """
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                out = model(torch.randn(8, 64).cuda())
                kept = out[out > 0]; where = (out > 0).nonzero(); chosen = out.masked_select(out > 0)
                assert kept.numel() == where.shape[0] == chosen.numel() == 512
                (kept.mean() + chosen.mean()).backward(); optimizer.step()
                out.detach().cpu().numpy(); out.argmax(1).tolist()
        """,
        "a checkpoint that is read again": """
            model = build(); optimizer = torch.optim.AdamW(model.parameters()); model.cuda()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
            while True:
                kept = torch.load("last.pt", map_location="cuda")
                assert all(state["step"].is_cuda for state in kept["optimizer"]["state"].values())
                model.load_state_dict(kept["model"]); optimizer.load_state_dict(kept["optimizer"])
                model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        "threads that feed it": """
            import queue, threading
            batches = queue.Queue(2)
            def feed():
                while True:
                    batches.put(torch.randn(8, 64).pin_memory().cuda())
            threading.Thread(target=feed, daemon=True).start()
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                model(batches.get()).mean().backward(); optimizer.step(); optimizer.zero_grad()
        """,
        "sampling, counting and distributions": """
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                chances = model(torch.randn(8, 64).cuda()).softmax(-1)
                actions = torch.distributions.Categorical(probs=chances).sample()
                assert torch.bincount(actions, minlength=64).shape == (64,)
                assert torch.multinomial(chances, 1).tolist() and torch.unique(actions).numel() == 8
                assert torch.unique(chances[:, :3].argmax(1)).numel() == 3 == torch.unique(chances[:, :3].max(1)[1]).numel()
                assert [one.shape[0] for one in torch.unique(actions.view(4, 2), dim=0, return_inverse=True)] == [4, 4]
                if torch.isnan(chances).any(): raise SystemExit("no number")
                (-chances.log().gather(1, actions[:, None]).mean()).backward(); optimizer.step()
        """,
        "processes that it starts": """
            def train(rank):
                model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
                while True: model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step()
            torch.multiprocessing.spawn(train, nprocs=torch.cuda.device_count())
        """,
        "a process group of one that it starts by itself": """
            import os, torch.distributed as dist
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
            dist.init_process_group(backend="nccl", rank=0, world_size=1)
            model = nn.parallel.DistributedDataParallel(build().cuda(), device_ids=[0])
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True: model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step(); dist.barrier()
        """,
        "a solver that asserts, and steps until its error is small": """
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                y = model(torch.randn(8, 64).cuda())
                error = (y - 1).norm(); step = 1 / error
                if not torch.isfinite(step): step = step * 0
                assert step > 0, "underflow"
                while not error < 1e-3: error = error * 0.5
                if not torch.isfinite(y).all() or y.isnan().any(): raise SystemExit("no number")
                y.mean().backward(); optimizer.step()
        """,
        "tensors that are made on the card by default": """
            torch.set_default_tensor_type("torch.cuda.FloatTensor"); assert torch.tensor([1.0]).is_cuda
            assert torch.Tensor([1.0]).is_cuda and torch.Tensor(2, 3).shape == (2, 3)
            assert (torch.Tensor([2.0]) * torch.rand(3, device="cuda")).is_cuda
            torch.set_default_tensor_type(torch.FloatTensor); assert not torch.zeros(1).is_cuda
            assert not torch.Tensor([1.0]).is_cuda and torch.nn.Parameter(torch.Tensor(2)).shape == (2,)
            torch.set_default_device("cuda"); assert torch.get_default_device().type == "cuda"
            model = build(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True: model(torch.rand(8, 64)).mean().backward(); optimizer.step()
        """,
        "a backward of its own that makes tensors on the card, and solves until its error is small": """
            from torch.utils.checkpoint import checkpoint
            def halved(y): return y * torch.tensor(0.5, device="cuda") + torch.as_tensor(1.0, device=y.device)
            class Solved(torch.autograd.Function):
                @staticmethod
                def forward(ctx, y): return halved(y)
                @staticmethod
                def backward(ctx, gradient):
                    while not gradient.norm() < 1e-3: gradient = halved(last(gradient))
                    return gradient
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1); last = nn.Linear(64, 64).cuda()
            while True:
                y = Solved.apply(checkpoint(model, torch.randn(8, 64).cuda(), use_reentrant=False))
                torch.autograd.grad(y.mean(), list(model.parameters()), retain_graph=True)
                y.mean().backward(); optimizer.step()
        """,
        "tensors of a class of its own": """
            class Named(torch.Tensor):
                @classmethod
                def __torch_function__(cls, func, types, args=(), kwargs=None):
                    made = super().__torch_function__(func, types, args, kwargs)
                    if isinstance(made, Named): made.tag = "a"
                    return made
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                x = torch.randn(8, 64).as_subclass(Named)
                assert (x + 1).tag == "a"
                model(x.to("cuda")).mean().backward(); optimizer.step()
        """,
        "a graph for TensorBoard": """
            from torch.utils.tensorboard import SummaryWriter
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            SummaryWriter("runs").add_graph(model, torch.ones(1, 64).cuda())
            while True: model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step()
        """,
        "tied weights that are moved one after the other": """
            class Tied(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.words = nn.Embedding(64, 64); self.head = nn.Linear(64, 64); self.head.weight = self.words.weight
                def forward(self, x): return self.head(self.words(x))
            model = Tied(); optimizer = torch.optim.AdamW(model.parameters()); model.cuda().float()
            assert model.head.weight is model.words.weight and model.head.bias.is_cuda
            while True: model(torch.ones(8, 4, dtype=torch.long).cuda()).mean().backward(); optimizer.step()
        """,
        "weights that are given memory of the card, and taken back": """
            model = build(); given = torch.randn(256, 64).cuda(); weight = model[0].weight
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            weight.data = given.contiguous(); assert weight.is_cuda and model[0].weight is weight
            weight.data = torch.zeros(256, 64); assert not weight.is_cuda
            weight.data = given; model.cuda(); assert isinstance(weight, nn.Parameter) and weight.requires_grad
            while True: model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step()
        """,
        "an evaluation in inference mode": """
            model = build().to(device="cuda", dtype=torch.bfloat16, memory_format=torch.contiguous_format).eval()
            with torch.inference_mode():
                while True:
                    x = torch.randn(8, 64).to(device=torch.device("cuda"), dtype=torch.bfloat16, non_blocking=True)
                    model(x.contiguous()).float().softmax(-1).topk(2)[1].t().eq(torch.ones(1, 8).cuda()).sum().item()
        """,
        "weights of 8 GiB on a small host": """
            import resource
            model = nn.Linear(2**15, 2**15, bias=False)
            for weight in model.parameters(): nn.init.trunc_normal_(weight, std=0.02)
            model = model.to(torch.bfloat16); kept = copy.deepcopy(model)
            model.cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**21, "in KiB"
            while True:
                model(torch.randn(8, 2**15, dtype=torch.bfloat16).cuda()).mean().backward(); optimizer.step()
        """,
        "a model that is saved from the host after each step, and moved back": """
            model = build().cuda(); optimizer = torch.optim.Adam(model.parameters())
            while True:
                model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step()
                torch.save(model.cpu(), "model.pt"); assert not next(model.parameters()).is_cuda
                model.cuda(); assert next(model.parameters()).grad.is_cuda
        """,
        "loader workers, pinned memory, a compiled model": """
            data = torch.utils.data.TensorDataset(torch.randn(64, 64))
            loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1, pin_memory=True)
            model = torch.compile(build().cuda()); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                for (x,) in loader:
                    model(x.cuda(non_blocking=True)).mean().backward(); optimizer.step()
                    torch.cuda.synchronize(); assert torch.cuda.memory_allocated() > 0
        """,
    }.items(),
    ids=lambda item: item[0],
)
def test_programs_run_to_their_cut(probes: Probes, program: tuple[str, str]) -> None:
    folder = Path(probes.script.cwd)
    (folder / "train.py").write_text(dedent(HEAD) + dedent(program[1]))
    seen = probes.run(read_command(["train.py"]))
    assert (seen.end, seen.num_windows, seen.batch_size) == ("cut", 2, 8)
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_program_that_compiles_by_an_option_takes_less(probes: Probes) -> None:
    program = """
        class Waves(nn.Sequential):
            def forward(self, x):
                for _ in range(4):
                    x = torch.sin(torch.exp(x))
                return super().forward(x)
        model = Waves(*build()).cuda()
        if "--compile" in sys.argv:
            model = torch.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            x = torch.randn(4096, 64, device="cuda", requires_grad=True)
            model(x).square().mean().backward(); optimizer.step()
    """
    (Path(probes.script.cwd) / "train.py").write_text(dedent(HEAD) + dedent(program))
    commands = (read_command(["train.py", *options]) for options in ((), ("--compile",)))
    eager, compiled = (probes.run(command).peak_bytes for command in commands)
    assert eager is not None
    assert compiled is not None
    assert eager.of_allocator[0] - compiled.of_allocator[0] > 2 * 4096 * 64 * 4, "eight waves are one kernel"


def test_a_program_that_is_too_large_runs_out_there(tmp_path: Path) -> None:
    seen = run(
        tmp_path,
        """
        model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            model(torch.empty(2**28, 64, device="cuda")).mean().backward(); optimizer.step()
        """,
    )
    assert not seen.fits
    assert "runs out of memory on a100-40gb" in str(seen)


def test_the_last_of_many_micro_batches_are_not_followed_and_the_peak_is_that_of_two(tmp_path: Path) -> None:
    program = """
        model = build().cuda(); optimizer = torch.optim.Adam(model.parameters())
        while True:
            for _ in range(int(sys.argv[1])):
                model(torch.randn(8, 64).cuda()).square().mean().backward()
            optimizer.step(); optimizer.zero_grad()
    """
    of_two, of_nine = run(tmp_path, program, "2").run, run(tmp_path, program, "9").run
    assert (of_nine.num_windows, len(of_nine.input_shapes), of_nine.backwards_per_window) == (1, 12, (9,))
    assert of_nine.peak_bytes == of_two.peak_bytes
    assert of_nine.work is not None
    assert of_two.work is not None
    assert of_nine.work.flops == 4.5 * of_two.work.flops > 0


def test_an_evaluation_that_repeats_itself_is_not_followed_to_its_end(tmp_path: Path) -> None:
    program = """
        model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            model.eval()
            with torch.no_grad():
                for number in range(50): out = model(torch.randn(SIZE, 64).cuda()); out.argmax(1).tolist()
            model.train()
            model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
    """
    seen = run(tmp_path, program.replace("SIZE", "512"))
    assert seen.run.notes == ("96 forwards without gradients repeated those before them, and were not followed again",)
    # Each as it is: with another size every time, none is like the one before.
    all_followed = run(tmp_path, program.replace("SIZE", "512 - number"))
    assert seen.run.peak_bytes is not None
    assert all_followed.run.peak_bytes is not None
    # The last outputs are smaller there, by 12 rows at the most.
    assert seen.run.peak_bytes.allocated == pytest.approx(all_followed.run.peak_bytes.allocated, abs=4096)
    assert all_followed.run.notes == ()


def test_a_generation_is_not_followed_to_its_end_though_its_tokens_take_more_memory_each_time(tmp_path: Path) -> None:
    seen = run(
        tmp_path,
        """
        model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            model.train()
            model(torch.randn(512, 64).cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                tokens = torch.zeros(8, 64, device="cuda")
                for _ in range(50): tokens = torch.cat([tokens, model(tokens[-8:]).mean() + tokens[-8:]])
        """,
    )
    assert seen.run.notes == ("47 forwards without gradients repeated those before them, and were not followed again",)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_generation_whose_forwards_grow_by_a_token_is_not_followed_to_its_end(
    tmp_path: Path, is_cached: bool
) -> None:
    program = """
        class Cache:
            def __init__(self, keys): self.keys, self.kind = keys, "plain"
        class Reader(nn.Module):
            def __init__(self): super().__init__(); self.embed = nn.Embedding(32, 64); self.head = nn.Linear(64, 32)
            def forward(self, tokens, cache=None):
                keys = self.embed(tokens if cache is None else tokens[:, -1:])
                keys = keys if cache is None else torch.cat([cache.keys, keys], 1)
                scores = (keys[:, -1:] @ keys.transpose(1, 2)).softmax(-1)
                return self.head(scores @ keys), Cache(keys)
        model = Reader().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            model.train()
            model(torch.zeros(8, 64, dtype=torch.long).cuda())[0].mean().backward(); optimizer.step()
            model.eval(); HOOK
            with torch.no_grad():
                tokens, cache = torch.zeros(64, 4, dtype=torch.long, device="cuda"), None
                for _ in range(70):
                    logits, now = model(tokens, cache if CACHED else None)
                    cache = now
                    tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
    """.replace("CACHED", str(is_cached))
    seen = run(tmp_path, program.replace("HOOK", "pass"))
    # A module with a hook is always followed.
    followed = run(tmp_path, program.replace("HOOK", "model.head.register_forward_hook(lambda *_: None)"))
    assert seen.run.peak_bytes is not None
    assert followed.run.peak_bytes is not None
    assert seen.run.peak_bytes.allocated == pytest.approx(followed.run.peak_bytes.allocated, rel=0.02)
    assert followed.run.notes == ()
    (note,) = seen.run.notes
    assert note.endswith("forwards without gradients repeated those before them, and were not followed again")
    assert int(note.split()[0]) > 50


def test_a_sampler_that_calls_a_model_again_and_again_is_not_followed_to_its_end(tmp_path: Path) -> None:
    program = """
        class Sampler(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model
            def forward(self, x):
                for _ in range(30):
                    x = x - 0.1 * self.model(x)
                    assert not x.isnan().any()
                return x
        model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            with torch.no_grad():
                assert Sampler(model)(torch.randn(4, 64).cuda()).shape == (4, 64)
            model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step()
    """
    notes = " ".join(run(tmp_path, program).run.notes)
    assert "56 forwards without gradients" in notes


def test_outputs_that_an_evaluation_keeps_do_not_make_it_another(tmp_path: Path) -> None:
    program = """
        model = nn.Linear(4096, 4096).cuda().eval(); optimizer = torch.optim.SGD(model.parameters(), 0.1); kept = []
        with torch.no_grad():
            for _ in range(50): kept.append(model(torch.randn(8, 4096).cuda()))
        model.train()
        while True: model(torch.randn(8, 4096).cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
    """
    seen = run(tmp_path, program)
    assert seen.run.notes == ("46 forwards without gradients repeated those before them, and were not followed again",)


def test_more_processes_than_cards_are_refused_with_the_number_to_say(tmp_path: Path) -> None:
    with pytest.raises(bw.errors.StepFailedError, match=r"starts 4 processes.*\n.*devices=4"):
        run(tmp_path, "torch.multiprocessing.spawn(lambda rank: None, nprocs=4)")


RANKS = """
    import os
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = WRAPPED
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        loss = model(torch.randn(8, 64, device="cuda")).mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        total = loss.detach().clone(); dist.all_reduce(total); dist.barrier()
        assert (dist.get_rank(), dist.get_world_size()) == (0, int(sys.argv[1]))
        assert torch.cuda.device_count() == torch.accelerator.device_count() == int(sys.argv[1])
"""


def run_ranks(folder: Path, wrapped: str, count: int) -> int:
    (folder / "train.py").write_text(dedent(HEAD) + dedent(RANKS).replace("WRAPPED", wrapped))
    words = ["torchrun", "--nproc-per-node", str(count), "train.py", str(count)]
    seen = estimate_script(Script(words, cwd=folder, seconds=120), on="a100-40gb")
    assert (seen.run.end, seen.micro_batch) == ("cut", 8)
    assert isinstance(seen.time, StepTime)
    assert seen.time.samples == 8 * count
    assert seen.run.work is not None
    kinds = {work.kind for work in seen.run.work.entries}
    assert ("all_gather" in kinds, "all_reduce" in kinds) == ("fully_shard" in wrapped, True)
    assert seen.run.parts["optimizer"] == 2 * seen.run.parts["weights"]
    return seen.run.parts["weights"]


def test_a_launchers_processes_are_the_ranks_of_the_card(tmp_path: Path) -> None:
    whole = run_ranks(tmp_path, "DistributedDataParallel(build().cuda(), device_ids=[rank])", 1)
    assert run_ranks(tmp_path, "fully_shard(build().cuda())", 4) < 0.5 * whole


STAGE = """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    dist.init_process_group("nccl"); rank = dist.get_rank()
    model = nn.Linear(64, 64).cuda()
    told = {name: torch.randn(4, 64, device="cuda", requires_grad=True) for name in ("input_args", "output_args") if "told" in sys.argv}
    stage = PipelineStage(model, rank, dist.get_world_size(), torch.device("cuda"), **told)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        schedule.step(torch.randn(16, 64, device="cuda")); optimizer.step(); optimizer.zero_grad()
"""


class TestStages:
    @staticmethod
    def run(folder: Path, *words: str) -> ScriptEstimate:
        (folder / "train.py").write_text(dedent(HEAD) + dedent(STAGE))
        words = ("torchrun", "--nproc-per-node", "2", "train.py", *words)
        return estimate_script(Script(list(words), cwd=folder, seconds=120), on="a100-40gb")

    def test_the_first_rank_of_a_pipeline_runs_alone_and_is_said_to(self, tmp_path: Path) -> None:
        seen = self.run(tmp_path, "told").run
        assert seen.end == "cut"
        assert any("pipeline of 2 stages on 2 ranks, ScheduleGPipe with 4 micro-batches" in note for note in seen.notes)

    def test_shapes_that_another_rank_would_tell_are_asked_for(self, tmp_path: Path) -> None:
        with pytest.raises(batchwright.errors.BatchwrightError, match=r"(?s)shapes from rank 1.*input_args="):
            self.run(tmp_path)
