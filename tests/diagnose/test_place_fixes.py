"""The fix of a tensor in the wrong place: the named line is the one that changes, and the changed program runs."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
from test_causes import rehearse

from trimtab.diagnose import rewrite
from trimtab.diagnose.causes import diagnose_exception
from trimtab.diagnose.raised_common import frames_and_lines
from trimtab.diagnose.source import place
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.observer import Observer

CASES = {
    "what an ended function made, where it is taken": (
        "x.masked_fill(mask_for(5).to(x.device), 0.0)",
        """
        def mask_for(n):
            return torch.ones(n) > 0
        def forward(x):
            return x.masked_fill(mask_for(5), 0.0)  # CAUSE
        forward(torch.randn(3, 5, device="cuda"))
        """,
    ),
    "what an ended function made, beside what it was given": (
        "torch.randn(3, 5, device=x.device) * scale",
        """
        def noise(x, scale):
            return torch.randn(3, 5) * scale  # CAUSE
        def forward(x):
            return x + noise(x, 0.1)
        forward(torch.randn(3, 5, device="cuda"))
        """,
    ),
    "a layer that is made in every call": (
        "self.batchnorm = nn.BatchNorm2d(8)",
        """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3)
            def forward(self, x):
                x = self.conv(x)
                x = nn.BatchNorm2d(x.size(1))(x)  # CAUSE
                return x
        Block().to("cuda")(torch.randn(2, 3, 5, 5, device="cuda"))
        """,
    ),
    "a draw with the generator of a loader": (
        "torch.randint(0, 10, (x.shape[0],), generator=g).to(x.device)",
        """
        from torch.utils.data import DataLoader
        def shifted(x, g):
            return x + torch.randint(0, 10, (x.shape[0],), generator=g, device=x.device)  # CAUSE
        def train():
            g = torch.Generator().manual_seed(0)
            for x in DataLoader(torch.randn(8), batch_size=4, shuffle=True, generator=g):
                shifted(x.to("cuda"), g)
        train()
        """,
    ),
    "a result that goes on through a parameter": (
        "net(draw(4).to(device))",
        """
        def draw(n):
            return torch.randint(0, 9, (n,))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(9, 2)
            def forward(self, rows):
                return self.table(rows)
        def train(device):
            net = Net().to(device)
            net(draw(4))  # CAUSE
        train("cuda")
        """,
    ),
    "an average that is written in place, and kept on the host": (
        "kept.lerp_(value.to(kept.device), 0.1)",
        """
        import copy
        class Average:
            def __init__(self, model):
                self.module = copy.deepcopy(model).to(device="cpu")
            @torch.no_grad()
            def update(self, model):
                for kept, value in zip(self.module.state_dict().values(), model.state_dict().values()):
                    kept.lerp_(value, 0.1)  # CAUSE
        model = nn.Linear(2, 2).to("cuda")
        Average(model).update(model)
        """,
    ),
    "the choice that is a tensor": (
        "torch.from_numpy(self.mean).to(data.device) if torch.is_tensor(data) else self.mean",
        """
        class Scaler:
            def __init__(self):
                self.mean = torch.ones(3).numpy()
            def back(self, data):
                mean = torch.from_numpy(self.mean) if torch.is_tensor(data) else self.mean  # CAUSE
                return data + mean
        Scaler().back(torch.ones(2, 3, device="cuda"))
        """,
    ),
    "what is computed from a table that the object keeps": (
        'self.register_buffer("rows", torch.ones(4), persistent=False)',
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.rows = torch.ones(4)  # CAUSE
            def forward(self, x):
                scale = torch.outer(self.rows, self.rows).sqrt()
                return x / scale.sqrt()
        Net().to("cuda")(torch.ones(4, 4, device="cuda"))
        """,
    ),
    "a list that is put together afterwards": (
        "layers.append(torch.ones(len(p), device=parts[0].device) * i)",
        """
        def assign(parts):
            layers = []
            for i, p in enumerate(parts):
                layers.append(torch.ones(len(p)) * i)  # CAUSE
            return torch.cat(layers), 1
        def loss(parts):
            layer, _ = assign(parts)
            return layer * torch.cat(parts)
        loss([torch.ones(2, device="cuda"), torch.ones(3, device="cuda")])
        """,
    ),
    "state that was loaded before the move of another method": (
        "        self.net.to(self.device)",
        """
        class Trainer:
            def __init__(self, state=None):
                self.device, self.net = "cuda", nn.Linear(2, 1)
                self.opt = torch.optim.Adam(self.net.parameters())
                if state is not None:
                    self.resume(state)
            def resume(self, state):
                self.opt.load_state_dict(state)  # CAUSE
            def step(self):
                self.net.to(self.device)
                self.net(torch.ones(3, 2, device=self.device)).sum().backward()
                self.opt.step()
        first = Trainer()
        first.step()
        Trainer(first.opt.state_dict()).step()
        """,
    ),
    "state that the program puts beside a parameter": (
        'self.state[p]["rate"] = rate.clone().to(p.device)',
        """
        class Own(torch.optim.Optimizer):
            def restore(self, rate):
                for p in self.param_groups[0]["params"]:
                    self.state[p]["rate"] = rate.clone()  # CAUSE
            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad * self.state[p]["rate"])
        net = nn.Linear(2, 1, bias=False).cuda()
        opt = Own(net.parameters(), {})
        opt.restore(torch.ones(1, 2))
        net(torch.ones(3, 2, device="cuda")).sum().backward()
        opt.step()
        """,
    ),
    "a method that moves all of an object but for one": (
        "        self.masks = self.masks.to(device)",
        """
        class Rollouts:
            def __init__(self):
                self.values, self.masks = torch.zeros(3), torch.ones(3)
            def to(self, device):
                self.values = self.values.to(device)  # CAUSE
            def returns(self):
                return self.values * self.masks
        rollouts = Rollouts()
        rollouts.to("cuda")
        rollouts.returns()
        """,
    ),
    "a buffer that is built anew": (
        "self.table = self.build(len(x)).to(self.table.device)",
        """
        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("table", self.build(2))
            def build(self, n):
                return torch.arange(n).float()
            def forward(self, x):
                if len(x) > len(self.table):
                    self.table = self.build(len(x))  # CAUSE
                return x + self.table
        Positions().cuda()(torch.ones(4, device="cuda"))
        """,
    ),
    "weights that are assigned instead of copied": (
        "net.load_state_dict(state, assign=False)",
        """
        state = nn.Linear(2, 1).state_dict()
        net = nn.Linear(2, 1).cuda()
        net.load_state_dict(state, assign=True)  # CAUSE
        net(torch.ones(3, 2, device="cuda"))
        """,
    ),
    "a loss that does not heed the setting": (
        "centre = Centre().to(device)",
        """
        class Centre(nn.Module):
            def __init__(self):
                super().__init__()
                self.point = nn.Parameter(torch.ones(2).cuda())
            def forward(self, x):
                return (x - self.point).sum()
        def train(device):
            net = nn.Linear(3, 2).to(device)
            centre = Centre()  # CAUSE
            centre(net(torch.ones(4, 3, device=device)))
        train("cuda:1")
        """,
    ),
    "a stage of a model that is split by hand": (
        "x = stage(x.to(next(stage.parameters()).device))",
        """
        stages = [nn.Linear(2, 2).to(f"cuda:{i}") for i in range(2)]
        x = torch.ones(3, 2, device="cuda:0")
        for stage in stages:
            x = stage(x)  # CAUSE
        """,
    ),
    "a list inside a batch": (
        "[t.to(device) if torch.is_tensor(t) else t for t in v] if isinstance(v, (list, tuple)) else v",
        """
        def moved(batch, device):
            out = {}
            for k, v in batch.items():
                if torch.is_tensor(v):
                    out[k] = v.to(device)
                else:
                    out[k] = v  # CAUSE
            return out
        batch = moved({"x": torch.ones(2), "more": [torch.ones(2), "clean"]}, "cuda")
        batch["x"] * batch["more"][0]
        """,
    ),
    "lengths that the host reads": (
        "nn.utils.rnn.pack_padded_sequence(x, lengths.cpu())",
        """
        x, lengths = torch.ones(3, 2, 4, device="cuda"), torch.tensor([3, 2], device="cuda")
        nn.utils.rnn.pack_padded_sequence(x, lengths)  # CAUSE
        """,
    ),
    "two constants in one expression": (
        "(x - mean.to(x.device)) / std.to(x.device)",
        """
        MEAN, STD = torch.zeros(3), torch.ones(3)
        def normal(x, mean=MEAN, std=STD):
            return (x - mean) / std  # CAUSE
        device = torch.device("cuda")
        normal(torch.ones(2, 3).to(device))
        """,
    ),
    "tensors that were prepared with the model": (
        "user, item = user.to(accelerator.device), item.to(accelerator.device)",
        """
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        AcceleratorState._reset_state(True)  # what another test left
        def main():
            accelerator = Accelerator()
            net, user, item = nn.Embedding(4, 2), torch.arange(4), torch.arange(4)
            net, user, item = accelerator.prepare(net, user, item)  # CAUSE
            return net(user[:2]) * net(item[:2])
        main()
        AcceleratorState._reset_state(True)
        """,
    ),
    "a module that a model keeps past the table of its parts": (
        "net.teacher.cuda()",
        """
        def make(n):
            return nn.Sequential(nn.Linear(n, n))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = make(2)
                self.__dict__["teacher"] = make(2)
            def forward(self, x):
                return self.body(x) - self.teacher(x)
        net = Net()
        net.cuda()  # CAUSE
        net(torch.ones(3, 2, device="cuda"))
        """,
    ),
    "a module alone in a tuple, which is not to be trained": (
        "net.frozen[0].to(device)",
        """
        def make(n):
            return nn.Sequential(nn.Linear(n, n)).requires_grad_(False)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.frozen = nn.Linear(2, 2), (make(2),)
            def forward(self, x):
                return self.body(x) - self.frozen[0](x)
        def train(device):
            net = Net().to(device)  # CAUSE
            net(torch.ones(3, 2, device=device))
        train("cuda")
        """,
    ),
    "a part that the model's own to() passes by": (
        "        self.head.to(device)",
        """
        def make(n):
            return nn.Sequential(nn.Linear(n, n))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = make(2), make(2)
            def to(self, device):
                self.body.to(device)  # CAUSE
                return self
            def forward(self, x):
                return self.head(self.body(x))
        Net().to("cuda")(torch.ones(3, 2, device="cuda"))
        """,
    ),
    "modules in a list of the function": (
        "nets = [make(2).to(device) for _ in range(2)]",
        """
        def make(n):
            return nn.Sequential(nn.Linear(n, n))
        def train(device):
            nets = [make(2) for _ in range(2)]  # CAUSE
            x = torch.ones(3, 2, device=device)
            return sum(net(x) for net in nets)
        train("cuda")
        """,
    ),
    "a device in the place of another argument": (
        "self.block = Block(2, device=device)",
        """
        class Block(nn.Module):
            def __init__(self, width, dropout=0.0, device="cpu"):
                super().__init__()
                self.layer = nn.Linear(width, width, device=device)
        class Net(nn.Module):
            def __init__(self, device):
                super().__init__()
                self.first = nn.Linear(2, 2, device=device)
                self.block = Block(2, device)  # CAUSE
            def forward(self, x):
                return self.block.layer(self.first(x))
        Net("cuda")(torch.ones(3, 2, device="cuda"))
        """,
    ),
    "a constructor that never asked for a device": (
        "self.mean, self.var = torch.zeros(n, device=device), torch.ones(n, device=device)",
        """
        class Normal:
            def __init__(self, n, eps=1e-4):
                self.mean, self.var = torch.zeros(n), torch.ones(n)  # CAUSE
            def __call__(self, x):
                return (x - self.mean) / self.var
        class Agent:
            def __init__(self, device):
                self.normal = Normal(4)
                self.net = nn.Linear(4, 2).to(device)
            def act(self, x):
                return self.net(self.normal(x))
        Agent("cuda").act(torch.ones(3, 4, device="cuda"))
        """,
    ),
    "the part of a split model that a loop calls": (
        "x = block(x.to(next(block.parameters()).device))",
        """
        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([nn.Linear(4, 4).to(f"cuda:{i}") for i in (0, 1)])
            def forward(self, x):
                for block in self.blocks:
                    x = block(x)  # CAUSE
                return x
        Deep()(torch.ones(3, 4, device="cuda:0"))
        """,
    ),
    "a sum that meets what lies in a dict": (
        'total = torch.zeros(1, device=outputs["seg"].device)',
        """
        def loss(outputs):
            total = torch.zeros(1)  # CAUSE
            for part in outputs.values():
                total += part.mean().reshape(1)
            return total
        loss({"seg": torch.ones(3, device="cuda"), "depth": torch.ones(2, device="cuda")})
        """,
    ),
    "a setting that names the present GPU": (
        'self.device = torch.device(f"cuda:{number}")',
        """
        class Runner:
            def __init__(self, model, number):
                self.model = model.cuda(number)
                self.device = torch.device("cuda")  # CAUSE
            def run(self, batch):
                return self.model(*[t.to(self.device) for t in batch])
        Runner(nn.Linear(2, 2), 1).run([torch.ones(3, 2)])
        """,
    ),
    "rows in host memory that a GPU picks": (
        "rows = torch.multinomial(self.weights, 3).cpu()",
        """
        class Memory:
            def __init__(self, device):
                self.states, self.rewards = torch.ones(9, 2), torch.ones(9)
                self.weights, self.device = torch.ones(9, device=device), device
            def sample(self):
                rows = torch.multinomial(self.weights, 3)  # CAUSE
                return self.states[rows].to(self.device), self.rewards[rows].to(self.device)
        Memory("cuda").sample()
        """,
    ),
    "an object that a function moves part by part": (
        "    graph.w = graph.w.to(device)",
        """
        class Graph:
            def __init__(self):
                self.x, self.w = torch.ones(3, 2), torch.ones(3, 1)
        def to_device(graph, device):
            graph.x = graph.x.to(device)  # CAUSE
            return graph
        def forward(graph):
            return graph.x * graph.w
        graph = to_device(Graph(), "cuda")
        forward(graph)
        """,
    ),
    "copies in a list of lists, taken before the move": (
        "self.net.to(device)",
        """
        class Slow:
            def __init__(self, net):
                self.kept = [[p.detach().clone() for p in net.parameters()]]
            def step(self, net):
                for p, q in zip(net.parameters(), self.kept[0]):
                    q.add_(p.detach() - q)
        class Run:
            def __init__(self, device):
                self.net = nn.Linear(2, 2)
                self.opt = Slow(self.net)  # CAUSE
                self.net.to(device)
        run = Run("cuda")
        run.opt.step(run.net)
        """,
    ),
    "a move whose other settings stay": (
        'y = batch["y"].to(second, non_blocking=True)',
        """
        def step(batch, first, second):
            x = batch["x"].to(first)
            y = batch["y"].to(first, non_blocking=True)  # CAUSE
            return nn.functional.mse_loss(nn.Linear(2, 1).to(second)(x.to(second)), y)
        step({"x": torch.ones(3, 2), "y": torch.ones(3, 1)}, "cuda:0", "cuda:1")
        """,
    ),
    "a copy to the host that only torch reads": (
        "step = x.argmax(-1, keepdim=True)\n",
        """
        def decode(x):
            step = x.argmax(-1, keepdim=True).cpu()  # CAUSE
            seen = torch.cat([x, step.float()], dim=1)
            if (step == 2).all():
                seen = seen * 2
            return seen
        decode(torch.ones(2, 3, device="cuda"))
        """,
    ),
    "a list of dicts beside a list that is moved": (
        "targets = [{k: v.to(device) for k, v in t.items()} for t in targets]",
        """
        def loss(images, targets):
            return sum((i - t["box"]).abs().sum() for i, t in zip(images, targets))
        def train(rows, device):
            for images, targets in rows:
                images = [i.to(device) for i in images]  # CAUSE
                loss(images, targets)
        train([([torch.ones(2), torch.ones(2)], [{"box": torch.ones(2)}, {"box": torch.ones(2)}])], "cuda")
        """,
    ),
    "a constant of the module": (
        "return x + MASKS[n].to(x.device)",
        """
        MASKS = {n: torch.ones(n) for n in (2, 3)}
        def forward(x):
            n = len(x)
            return x + MASKS[n]  # CAUSE
        forward(torch.ones(3).to("cuda"))
        """,
    ),
}


def test_a_device_in_a_place_that_means_one_is_not_blamed(tmp_path: Path) -> None:
    program = """
    class Block(nn.Module):
        def __init__(self, width, place=None, device=None):
            super().__init__()
            self.layer = nn.Linear(width, width, device=device)
            self.place = place
    block = Block(2, "cuda", None)
    block.layer(torch.ones(3, 2, device="cuda"))
    """
    findings, _ = rehearse(program, tmp_path)
    assert findings
    assert all("by its position" not in f.cause.why for f in findings if f.cause is not None)


@pytest.mark.parametrize("name", CASES)
def test_the_named_line_is_mended_and_the_program_runs(name: str, tmp_path: Path) -> None:
    expected, program = CASES[name]
    findings, marks = rehearse(program, tmp_path)
    first = findings[0]
    assert first.cause is not None
    assert first.cause.line == marks["CAUSE"]
    mended = rewrite.applied(Path(first.cause.file).read_text(), first.edits)
    assert expected in mended
    assert expected.strip() in first.fix
    again, _ = rehearse(mended, tmp_path)
    assert not again


RAISED = {
    "a list that does not begin with the model's GPU": (
        "nn.DataParallel(model, device_ids=[0, 1])",
        """
model = nn.Linear(2, 1).cuda()
wide = nn.DataParallel(model, device_ids=[1, 0])
wide(torch.ones(4, 2, device="cuda"))
""",
    ),
    "a model that is not moved to the first of the list": (
        "model = nn.Linear(2, 1).to(gpus[0])",
        """
gpus = [1, 0]
model = nn.Linear(2, 1).cuda()
wide = nn.DataParallel(model, device_ids=gpus)
wide(torch.ones(4, 2, device="cuda:1"))
""",
    ),
    "a replica that is asked for its parameters": (
        "        return x.device",
        """
class Net(nn.Linear):
    def forward(self, x):
        return next(self.parameters()).device
replica = nn.parallel.replicate(Net(2, 1).cuda(), [0])[0]
replica(torch.ones(4, 2, device="cuda"))
""",
    ),
    "an old constructor": ("x = x.float()", "\nx = torch.ones(2).cuda()\nx = torch.FloatTensor(x)\n"),
}


@pytest.mark.parametrize("name", RAISED)
def test_errors_of_torch_about_devices(name: str, tmp_path: Path) -> None:
    expected, program = RAISED[name]
    path = tmp_path / "program.py"
    text = "import torch\nfrom torch import nn\n" + program
    path.write_text(text)
    linecache.checkcache(str(path))
    with virtual_gpus(2, observer=Observer()):
        with pytest.raises((RuntimeError, TypeError, StopIteration)) as caught:
            exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
        places = [place(frame.f_code.co_filename, line) for frame, line in frames_and_lines(caught.value)]
        finding = diagnose_exception(caught.value, places)
        mended = rewrite.applied(text, finding.edits)
        assert expected in mended
        exec(compile(mended, str(path), "exec"), {"__name__": "__main__"})
