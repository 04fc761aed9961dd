"""From a fault on virtual GPUs to its cause: small programs, the line to change and the line that fails marked.

The marks are for the tests alone: the programs run with them cut off.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from trimtab.diagnose.causes import diagnose, diagnose_exception
from trimtab.diagnose.finding import Finding, Place
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.faults import Fault
from trimtab.virtual.observer import Observer

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


class Gathering(Observer):
    """Diagnoses each fault when it happens, as a rehearsal does."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def fault(self, fault: Fault) -> None:
        self.findings.append(diagnose(fault))


def rehearse(program: str, folder: Path) -> tuple[list[Finding], dict[str, int]]:
    """Run a program on two virtual GPUs; its findings, and the lines of its marks."""
    lines = (HEAD + textwrap.dedent(program)).splitlines()
    marks = {}
    for number, line in enumerate(lines, 1):
        if found := re.search(r"\s*# (CAUSE|WHERE|BOTH)$", line):
            names = ("CAUSE", "WHERE") if found[1] == "BOTH" else (found[1],)
            marks |= dict.fromkeys(names, number)
            lines[number - 1] = line[: found.start()]
    # A new name each time: source lines are cached by file.
    path = folder / f"program{len(list(folder.iterdir()))}.py"
    path.write_text("\n".join(lines) + "\n")
    observer = Gathering()
    namespace = {"__name__": "__main__", "__file__": str(path)}
    with virtual_gpus(2, observer=observer, on_fault="repair"):
        exec(compile(path.read_text(), str(path), "exec"), namespace)
    return observer.findings, marks


CASES = {
    "a move whose result is dropped": (
        "device-mismatch",
        """
        model = nn.Linear(4, 2).cuda()
        x = torch.randn(3, 4)
        x.cuda()  # CAUSE
        model(x)  # WHERE
        """,
    ),
    "one of a pair is moved": (
        "device-mismatch",
        """
        model = nn.Linear(4, 2).to("cuda")
        for x, y in [(torch.randn(3, 4), torch.zeros(3).long())]:
            x = x.to("cuda")  # CAUSE
            out = model(x)
            loss = F.cross_entropy(out, y)  # WHERE
        """,
    ),
    "one parameter of a step function is moved": (
        "device-mismatch",
        """
        def step(model, x, y):
            x = x.cuda()  # CAUSE
            return F.mse_loss(model(x), y)  # WHERE
        step(nn.Linear(4, 2).cuda(), torch.randn(3, 4), torch.randn(3, 2))
        """,
    ),
    "one argument of a call is moved": (
        "device-mismatch",
        """
        def step(model, x, y):
            out = model(x)
            return F.mse_loss(out, y)  # WHERE
        model = nn.Linear(4, 2).cuda()
        for x, y in [(torch.randn(3, 4), torch.randn(3, 2))]:
            step(model, x.cuda(), y)  # CAUSE
        """,
    ),
    "some entries of a batch are moved": (
        "device-mismatch",
        """
        model = nn.Linear(4, 2).cuda()
        batch = {"x": torch.randn(3, 4), "labels": torch.zeros(3).long()}
        batch["x"] = batch["x"].to("cuda")  # CAUSE
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])  # WHERE
        """,
    ),
    "a mask made in forward and shaped afterwards": (
        "device-mismatch",
        """
        class Net(nn.Module):
            def forward(self, x):
                n = x.size(0)
                mask = torch.ones(n, n)  # CAUSE
                mask = mask.tril()
                return x @ mask  # WHERE
        Net()(torch.randn(3, 3, device="cuda"))
        """,
    ),
    "positions made in the failing line": (
        "device-mismatch",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(8, 4)
            def forward(self, x):
                return x + self.table(torch.arange(x.size(0)))  # BOTH
        Net().cuda()(torch.randn(3, 4, device="cuda"))
        """,
    ),
    "a hidden state made by a helper method": (
        "device-mismatch",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = nn.RNNCell(4, 4)
            def start(self, n):
                return torch.zeros(n, 4)  # CAUSE
            def forward(self, x):
                h = self.start(x.size(0))
                return self.cell(x, h)  # WHERE
        Net().cuda()(torch.randn(3, 4, device="cuda"))
        """,
    ),
    "a tensor in a plain attribute": (
        "unmoved-state",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)
                self.scale = torch.ones(4)  # CAUSE
            def forward(self, x):
                return self.fc(x) * self.scale  # WHERE
        Net().cuda()(torch.randn(3, 4, device="cuda"))
        """,
    ),
    "layers in a plain dict": (
        "unmoved-state",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = {"a": nn.Linear(4, 2)}  # CAUSE
            def forward(self, x):
                return self.heads["a"](x)  # WHERE
        Net().cuda()(torch.randn(3, 4, device="cuda"))
        """,
    ),
    "a head replaced after the move": (
        "device-mismatch",
        """
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model.cuda()
        model[1] = nn.Linear(4, 3)  # CAUSE
        model(torch.randn(3, 4).cuda())  # WHERE
        """,
    ),
    "an adapter class built after the move": (
        "device-mismatch",
        """
        class Adapter(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base, self.down = base, nn.Linear(4, 4)
            def forward(self, x):
                return self.base(x) + self.down(x)  # WHERE
        model = nn.Sequential(nn.Linear(4, 4)).cuda()
        model[0] = Adapter(model[0])  # CAUSE
        model(torch.randn(3, 4).cuda())
        """,
    ),
    "a model that is never moved": (
        "device-mismatch",
        """
        model = nn.Linear(4, 2)  # CAUSE
        x = torch.randn(3, 4).cuda()
        model(x)  # WHERE
        """,
    ),
    "class weights of a loss": (
        "device-mismatch",
        """
        model = nn.Linear(4, 2).cuda()
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))  # CAUSE
        y = torch.zeros(3).long().cuda()
        criterion(model(torch.randn(3, 4).cuda()), y)  # WHERE
        """,
    ),
    "the second half of a split model": (
        "device-mismatch",
        """
        a, b = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 2).to("cuda:1")
        x = torch.randn(3, 4, device="cuda:0")
        h = a(x).relu()  # CAUSE
        b(h)  # WHERE
        """,
    ),
    "labels on the first GPU of a split model": (
        "device-mismatch",
        """
        head = nn.Linear(4, 2).to("cuda:1")
        y = torch.zeros(3, dtype=torch.long, device="cuda:0")  # CAUSE
        loss = F.cross_entropy(head(torch.randn(3, 4, device="cuda:1")), y)  # WHERE
        """,
    ),
    "tied weights on two GPUs": (
        "device-mismatch",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.mid, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
                self.head.weight = self.embed.weight
            def forward(self, ids):
                return self.embed(ids)  # WHERE
        net = Net()
        net.embed.to("cuda:0")
        net.mid.to("cuda:1")
        net.head.to("cuda:1")  # CAUSE
        net(torch.zeros(2, 3, dtype=torch.long, device="cuda:0"))
        """,
    ),
    "state of an optimizer built before the move": (
        "unmoved-state",
        """
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # CAUSE
        model.cuda()
        model(torch.randn(3, 4, device="cuda")).sum().backward()
        optimizer.step()  # WHERE
        """,
    ),
    "a table on the CPU read by an index on the GPU": (
        "index-device",
        """
        table = torch.linspace(0, 1, 10)  # CAUSE
        t = torch.randint(0, 10, (3,), device="cuda")
        table[t]  # WHERE
        """,
    ),
    "predictions gathered on the CPU": (
        "device-mismatch",
        """
        model = nn.Linear(4, 2).cuda()
        gathered = torch.zeros(0, 2)  # CAUSE
        out = model(torch.randn(3, 4).cuda())
        torch.cat([gathered, out])  # WHERE
        """,
    ),
    "a counter on the CPU": (
        "device-mismatch",
        """
        hits = torch.zeros(1)  # CAUSE
        x = torch.randn(3, device="cuda")
        hits += (x > 0).sum().float().view(1)  # WHERE
        """,
    ),
    "helpers on a device of the function's own": (
        "index-device",
        """
        def mask(ids, main):
            device = main  # CAUSE
            ends = ids == 2
            index = torch.full((3,), 6, device=device)
            has = ends.any(dim=1)
            index[has] = ends.int().argmax(dim=1)[has]  # WHERE
            return torch.arange(6, device=device)
        mask(torch.full((3, 6), 2, device="cuda:1"), "cuda:0")
        """,
    ),
    "an input in full precision for half weights": (
        "dtype-mismatch",
        """
        model = nn.Linear(4, 2).to("cuda", torch.bfloat16)
        x = torch.randn(3, 4, device="cuda")  # CAUSE
        model(x)  # WHERE
        """,
    ),
    "an adapter in full precision on a half base": (
        "dtype-mismatch",
        """
        base = nn.Linear(4, 4).to("cuda", torch.bfloat16)
        down = nn.Linear(4, 2, device="cuda")  # CAUSE
        x = torch.randn(3, 4, device="cuda", dtype=torch.bfloat16)
        base(x)
        down(x)  # WHERE
        """,
    ),
    "a norm that was cast back to full precision": (
        "dtype-mismatch",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)
            def forward(self, x):
                return self.out(self.norm(x))  # WHERE
        net = Net().cuda().half()
        net.norm.float()  # CAUSE
        net(torch.ones(2, 4, device="cuda", dtype=torch.float16))
        """,
    ),
    "an average of a plain attribute": (
        "unmoved-state",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.mean = torch.zeros(4)  # CAUSE
            def forward(self, x):
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # WHERE
                return x - self.mean
        Net().cuda()(torch.randn(3, 4, device="cuda"))
        """,
    ),
    "a cache filled in forward": (
        "unmoved-state",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.past = None
            def forward(self, x):
                if self.past is None:
                    self.past = torch.zeros(1, 4)  # CAUSE
                return torch.cat([self.past, x])  # WHERE
        Net().cuda()(torch.randn(3, 4, device="cuda"))
        """,
    ),
    "a cache of another GPU": (
        "device-mismatch",
        """
        class Rope:
            cache = {}
            def __call__(self, x):
                if 4 not in Rope.cache:
                    Rope.cache[4] = torch.arange(4, device=x.device).cos()  # CAUSE
                return x * Rope.cache[4]  # WHERE
        rope = Rope()
        for device in ("cuda:0", "cuda:1"):
            rope(torch.randn(2, 4, device=device))
        """,
    ),
    "an average of weights taken before the move": (
        "device-mismatch",
        """
        class Average:
            def __init__(self, model):
                self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
            def update(self, model):
                for n, p in model.named_parameters():
                    self.shadow[n] = 0.9 * self.shadow[n] + 0.1 * p.detach()  # WHERE
        model = nn.Linear(4, 2)
        average = Average(model)  # CAUSE
        model.cuda()
        average.update(model)
        """,
    ),
    "a nested batch and a mover that does not go down": (
        "device-mismatch",
        """
        def move(batch):
            return {k: v.cuda() if torch.is_tensor(v) else v for k, v in batch.items()}  # CAUSE
        model = nn.Linear(4, 3).cuda()
        batch = {"x": torch.randn(5, 4), "targets": {"y": torch.zeros(5).long()}}
        batch = move(batch)
        F.cross_entropy(model(batch["x"]), batch["targets"]["y"])  # WHERE
        """,
    ),
    "rows on the GPU that are to be pinned": (
        "pin-of-gpu-tensor",
        """
        class Rows:
            def __init__(self):
                self.x = torch.randn(4, 3).cuda()  # CAUSE
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return self.x[index]
        from torch.utils.data import DataLoader
        for x in DataLoader(Rows(), batch_size=2, pin_memory=True):  # WHERE
            pass
        """,
    ),
    "a checkpoint of the other GPU": (
        "map-location",
        """
        import io
        file = io.BytesIO()
        torch.save(nn.Linear(4, 2).to("cuda:1").state_dict(), file)
        file.seek(0)
        model = nn.Linear(4, 2).to("cuda:0")
        state = torch.load(file)  # CAUSE
        model.weight + state["weight"]  # WHERE
        """,
    ),
    "optimizer state brought to the CPU": (
        "unmoved-state",
        """
        model = nn.Linear(4, 2).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(3, 4, device="cuda")).sum().backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].cpu()  # CAUSE
        optimizer.step()  # WHERE
        """,
    ),
    "a loss module that is never moved": (
        "device-mismatch",
        """
        class Loss(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("w", torch.ones(2))
            def forward(self, out, y):
                return F.cross_entropy(out, y, weight=self.w)  # WHERE
        model = nn.Linear(4, 2).cuda()
        loss = Loss()  # CAUSE
        loss(model(torch.randn(3, 4).cuda()), torch.zeros(3).long().cuda())
        """,
    ),
    "a batch object whose own mover forgets a field": (
        "device-mismatch",
        """
        class Batch:
            def __init__(self, x, y):
                self.x, self.y = x, y
            def to(self, device):
                self.x = self.x.to(device)  # CAUSE
                return self
        model = nn.Linear(4, 2).cuda()
        batch = Batch(torch.randn(3, 4), torch.zeros(3).long()).to("cuda")
        F.cross_entropy(model(batch.x), batch.y)  # WHERE
        """,
    ),
    "a layer on the wrong GPU of a split model": (
        "device-mismatch",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 4).to("cuda:0")
                self.norm = nn.LayerNorm(4).to("cuda:0")  # CAUSE
            def forward(self, x):
                h = self.a(x).to("cuda:1")
                return self.norm(h)  # WHERE
        Net()(torch.randn(3, 4, device="cuda:0"))
        """,
    ),
    "autocast for another device": (
        "autocast-device",
        """
        model = nn.Linear(4, 2).to("cuda", torch.bfloat16)
        x = torch.randn(3, 4, device="cuda")
        with torch.autocast("cpu", dtype=torch.bfloat16):  # CAUSE
            model(x)  # WHERE
        """,
    ),
    "a NumPy array of a GPU tensor": (
        "device-mismatch",
        """
        out = nn.Linear(4, 2).cuda()(torch.randn(3, 4).cuda()).detach()
        out.numpy()  # BOTH
        """,
    ),
    "a pinned GPU tensor": (
        "pin-of-gpu-tensor",
        """
        rows = torch.randn(3, 4).cuda()  # CAUSE
        rows.pin_memory()  # WHERE
        """,
    ),
    "a CPU generator for numbers on the GPU": (
        "generator-device",
        """
        g = torch.Generator().manual_seed(0)  # CAUSE
        torch.randperm(8, generator=g, device="cuda")  # WHERE
        """,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cause(name: str, tmp_path: Path) -> None:
    kind, program = CASES[name]
    findings, marks = rehearse(program, tmp_path)
    assert findings, "no fault was found"
    first = findings[0]
    assert first.kind == kind
    assert first.where is not None
    assert first.where.line == marks["WHERE"]
    assert first.cause is not None
    assert (first.cause.line, first.cause.why) == (marks["CAUSE"], first.cause.why)
    assert first.fix


def test_the_fix_is_code_to_write(tmp_path: Path) -> None:
    findings, _ = rehearse(CASES["a mask made in forward and shaped afterwards"][1], tmp_path)
    assert "mask = torch.ones(n, n, device=x.device)" in findings[0].fix
    findings, _ = rehearse(CASES["a move whose result is dropped"][1], tmp_path)
    assert findings[0].fix == "assign it: x = x.cuda()"
    findings, _ = rehearse(CASES["a tensor in a plain attribute"][1], tmp_path)
    assert 'register_buffer("scale"' in findings[0].fix
    findings, _ = rehearse(CASES["one of a pair is moved"][1], tmp_path)
    assert "y = y.to('cuda')" in findings[0].fix


def test_a_second_operand_left_behind_is_named_too(tmp_path: Path) -> None:
    program = """
        share = torch.ones(2)
        model = nn.Linear(4, 2).cuda()
        y = torch.zeros(3).long()  # CAUSE
        F.cross_entropy(model(torch.randn(3, 4, device="cuda")), y, weight=share)  # WHERE
        """
    findings, marks = rehearse(program, tmp_path)
    assert findings[0].cause is not None
    assert findings[0].cause.line == marks["CAUSE"]
    assert f"share, made at line {marks['CAUSE'] - 2}" in findings[0].fix


def test_operands_are_named_as_in_the_program(tmp_path: Path) -> None:
    findings, _ = rehearse(CASES["a table on the CPU read by an index on the GPU"][1], tmp_path)
    assert {(t.name, t.device) for t in findings[0].tensors} == {("table", "cpu"), ("t", "cuda:0")}
    assert all(t.born is not None for t in findings[0].tensors)


def raised(program: str, folder: Path) -> tuple[Finding, dict[str, int]]:
    """Run a program that raises; what is made of its exception."""
    lines = (HEAD + textwrap.dedent(program)).splitlines()
    marks = {m[1]: n for n, line in enumerate(lines, 1) if (m := re.search(r"# (CAUSE|WHERE)$", line))}
    path = folder / "program.py"
    path.write_text("\n".join(re.sub(r"\s*# (CAUSE|WHERE)$", "", line) for line in lines) + "\n")
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    places = []
    traceback = caught.value.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file != __file__:
            places.insert(0, Place(file, traceback.tb_lineno, ""))
        traceback = traceback.tb_next
    return diagnose_exception(caught.value, places), marks


RAISED = {
    "a field that is not there": (
        "dataset-field",
        """
        def collate(rows):
            return [row["question"] for row in rows]  # WHERE
        collate([{"query": "a", "label": 1}])
        """,
    ),
    "strings in a batch": (
        "batch-type",
        """
        batch = {"x": torch.zeros(2), "task": ["a", "b"]}
        batch = {k: v.to("cpu") for k, v in batch.items()}  # WHERE
        """,
    ),
    "fp16 weights under a scaler": (
        "scaler-misuse",
        """
        model = nn.Linear(4, 4).half()  # CAUSE
        raise ValueError("Attempting to unscale FP16 gradients.")  # WHERE
        """,
    ),
    "a loss under no_grad": (
        "no-gradient",
        """
        model = nn.Linear(4, 2)
        with torch.no_grad():  # CAUSE
            loss = model(torch.randn(3, 4)).sum()
        loss.backward()  # WHERE
        """,
    ),
    "a state carried through a loop": (
        "graph-kept",
        """
        cell = nn.RNNCell(4, 4)
        h = torch.zeros(2, 4)
        for _ in range(2):
            h = cell(torch.randn(2, 4), h)  # CAUSE
            h.sum().backward()  # WHERE
        """,
    ),
    "an output that the loss leaves out": (
        "ddp-unused",
        """
        said = "Expected to have finished reduction in the prior iteration before starting a new one."
        def model(x, step=[]):
            step.append(x)
            if len(step) > 1:
                raise RuntimeError(said)
            return x, x
        def train():
            for _ in range(2):
                c, r = model(torch.ones(1, requires_grad=True))
                c.sum().backward()  # CAUSE
        train()
        """,
    ),
    "a GPU number that is not there": (
        "placement-conflict",
        """
        device = torch.device("cuda", 5)  # CAUSE
        raise RuntimeError(f"CUDA error: invalid device ordinal\\n{device}")  # WHERE
        """,
    ),
    "re-entrant checkpointing under DDP": (
        "ddp-ready-twice",
        """
        from torch.utils.checkpoint import checkpoint
        def forward(body, x):
            return checkpoint(body, x, use_reentrant=True)  # CAUSE
        raise RuntimeError("Expected to mark a variable ready only once. This error is caused by")  # WHERE
        """,
    ),
    "an output that DDP cannot look into": (
        "ddp-ready-twice",
        """
        class Output:
            def __init__(self, loss):
                self.loss = loss
        class Net(nn.Module):
            def forward(self, x):
                return Output(x.sum())  # CAUSE
        raise RuntimeError("Expected to mark a variable ready only once. This error is caused by")  # WHERE
        """,
    ),
    "a layer that forward does not use": (
        "ddp-unused",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.used = nn.Linear(4, 2)
                self.aux = nn.Linear(4, 2)  # CAUSE
            def forward(self, x):
                return self.used(x)
        said = "Expected to have finished reduction in the prior iteration before starting a new one."
        raise RuntimeError(said)  # WHERE
        """,
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_raised(name: str, tmp_path: Path) -> None:
    kind, program = RAISED[name]
    finding, marks = raised(program, tmp_path)
    assert finding.kind == kind
    assert finding.where is not None
    assert finding.where.line == marks.get("WHERE", finding.where.line)
    assert finding.cause is not None
    assert finding.cause.line == marks.get("CAUSE", finding.where.line)
    assert finding.fix


def test_the_fields_that_are_there_are_named(tmp_path: Path) -> None:
    finding, _ = raised(RAISED["a field that is not there"][1], tmp_path)
    assert "query, label" in finding.message


def test_an_unknown_error_has_a_place_and_no_invented_cause(tmp_path: Path) -> None:
    finding, marks = raised("1 / 0  # WHERE", tmp_path)
    assert (finding.kind, finding.cause) == ("other-error", None)
    assert finding.where is not None
    assert finding.where.line == marks["WHERE"]
    assert "ZeroDivisionError" in finding.message
