"""Errors of training and of indices out of range: the line to change, and a fix that runs in its place.

The line to change is marked `# CAUSE`; the program is diagnosed without its mark. Its edits are made, and the mended
program runs to its end on virtual GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_raised import raised

from trimtab.diagnose import rewrite
from trimtab.virtual.context import virtual_gpus

FAULTS = {
    "scores with the classes last": """
        scores = nn.Linear(4, 3).cuda()(torch.ones(2, 5, 4).cuda())
        labels = torch.zeros(2, 5, dtype=torch.long).cuda()
        loss = nn.functional.cross_entropy(scores, labels)  # CAUSE
        """,
    "a mask with a channel": """
        scores = torch.randn(2, 3, 4, 4).cuda()
        mask = torch.zeros(2, 1, 4, 4, dtype=torch.long).cuda()
        loss = nn.functional.cross_entropy(scores, mask)  # CAUSE
        """,
    "a column of scores for a row of targets": """
        scores, target = nn.Linear(4, 1).cuda()(torch.ones(6, 4).cuda()), torch.ones(6).cuda()
        loss = nn.functional.binary_cross_entropy_with_logits(scores, target)  # CAUSE
        """,
    "a data set that promises windows that it has not": """
        class Windows(torch.utils.data.Dataset):
            def __init__(self):
                self.series, self.width = torch.arange(10.0), 3
            def __len__(self):
                return len(self.series)  # CAUSE
            def __getitem__(self, i):
                return self.series[i + self.width]
        for batch in torch.utils.data.DataLoader(Windows(), batch_size=4):
            batch.cuda()
        """,
    "a last batch of one row": """
        data = torch.utils.data.TensorDataset(torch.randn(9, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=4)  # CAUSE
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).cuda()
        for (rows,) in loader:
            out = model(rows.cuda())
        """,
    "a last slice of one row": """
        rows, size = torch.randn(9, 4), 4
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).cuda()
        for i in range(0, len(rows), size):  # CAUSE
            out = model(rows[i : i + size].cuda())
        """,
    "a head whose loss joins later is stepped from the start": """
        def train(warmup):
            body, aux = nn.Linear(4, 1).cuda(), nn.Linear(4, 1).cuda()
            opt, aux_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (body, aux))
            scaler = torch.amp.GradScaler("cuda")
            for epoch in range(4):
                x = torch.ones(2, 4).cuda()
                loss, side = body(x).mean(), aux(x).mean()
                if epoch >= warmup:
                    loss = loss + side
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.step(aux_opt)  # CAUSE
                scaler.update()
                opt.zero_grad(), aux_opt.zero_grad()
        train(2)
        """,
    "a frozen teacher in DDP": """
        import torch.distributed as dist
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        teacher = nn.Linear(4, 2).requires_grad_(False).cuda()
        wrapped = nn.parallel.DistributedDataParallel(teacher)  # CAUSE
        out = wrapped.module(torch.ones(1, 4).cuda())
        dist.destroy_process_group()
        """,
    "a saved head of another size": """
        saved = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9)).state_dict()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).cuda()
        model.load_state_dict(saved)  # CAUSE
        """,
    "a parameter that is scaled after it became one": """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4, device="cuda")) * 2  # CAUSE

            def forward(self, x):
                return (x * self.scale).pow(2)
        model = Scaled()
        for _ in range(2):
            loss = model(torch.ones(2, 4).cuda()).sum()
            loss.backward()
        """,
    "parameters that were counted before the optimizer got them": """
        model = nn.Linear(4, 2).cuda()
        trained = (p for p in model.parameters() if p.requires_grad)  # CAUSE
        print(sum(p.numel() for p in trained))
        opt = torch.optim.SGD(trained, lr=0.1)
        """,
    "layers in a list, and nothing else": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = [nn.Linear(4, 4)]  # CAUSE
        net = Net()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        """,
    "features that are computed once": """
        encoder, head = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        features = encoder(torch.ones(2, 4).cuda()).tanh()  # CAUSE
        for _ in range(2):
            loss = head(features).sum()
            loss.backward()
        """,
    "a state that goes from round to round": """
        cell = nn.LSTMCell(4, 4).cuda()
        x, state = torch.ones(2, 4).cuda(), (torch.zeros(2, 4).cuda(), torch.zeros(2, 4).cuda())
        for _ in range(2):
            state = cell(x, state)  # CAUSE
            loss = state[0].sum()
            loss.backward()
        """,
    "gradients switched off for good": """
        def check(model):
            torch.set_grad_enabled(False)  # CAUSE
            return model(torch.ones(2, 4).cuda()).sum().item()
        model = nn.Linear(4, 1).cuda()
        for _ in range(2):
            loss = model(torch.ones(2, 4).cuda()).sum()
            loss.backward()
            check(model)
        """,
    "a mark in a mask that is no class": """
        criterion = nn.CrossEntropyLoss()  # CAUSE
        scores = torch.zeros(2, 3, 4, 4, device="cuda")
        mask = torch.zeros(2, 4, 4, dtype=torch.long)
        mask[0, 0] = 255
        criterion(scores, mask.cuda())
        """,
    "a head that is too narrow": """
        classes = 2  # CAUSE
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, classes)).cuda()
        labels = torch.tensor([0, 1, 2]).cuda()
        nn.functional.cross_entropy(model(torch.ones(3, 4).cuda()), labels)
        """,
    "a table without a row for the padding": """
        words = {"a": 0, "b": 1}
        table = nn.Embedding(len(words), 4).cuda()  # CAUSE
        table(torch.tensor([[0, 1, len(words)]]).cuda())
        """,
    "one_hot of a class too many": """
        count = 3  # CAUSE
        labels = torch.tensor([0, 3]).cuda()
        nn.functional.one_hot(labels, count)
        """,
    "labels that are marked for a loss, used as row numbers": """
        def picked(scores, labels):
            found = torch.gather(scores, -1, labels[:, None])[:, 0]  # CAUSE
            return (found * (labels != -100)).sum()
        labels = torch.tensor([0, 2, -100]).cuda()
        picked(torch.zeros(3, 4, device="cuda"), labels)
        """,
    "one_hot of labels that are marked": """
        target = torch.tensor([0, 2, 1]).cuda()
        target[1:] = -1
        hot = nn.functional.one_hot(target, num_classes=3)  # CAUSE
        hot = hot * (target >= 0)[:, None]
        """,
    "a loss that is told to skip another number": """
        criterion = nn.CrossEntropyLoss(ignore_index=0)  # CAUSE
        labels = torch.tensor([1, 2, 1, 0])
        labels[3:] = -100
        criterion(torch.zeros(4, 3, device="cuda"), labels.cuda())
        """,
    "numbers from 1 that index from 0": """
        edges = torch.tensor([1, 2, 3])  # CAUSE
        nodes = torch.zeros(3, 4, device="cuda")
        nodes[edges.cuda()]
        """,
    "a number of classes that is left to its default": """
        WORDS = ["yes", "no", "up", "down"]
        class Net(nn.Module):
            def __init__(self, width=4, classes=2):
                super().__init__()
                self.head = nn.Linear(width, classes)
            def forward(self, x):
                return self.head(x)
        net = Net().cuda()  # CAUSE
        nn.functional.cross_entropy(net(torch.ones(4, 4).cuda()), torch.tensor([0, 1, 2, 3]).cuda())
        """,
    "a count of ids that are not counted through": """
        items = [0, 4, 8, 4]
        count = len(set(items))  # CAUSE
        nn.Embedding(count, 4).cuda()(torch.tensor(items).cuda())
        """,
    "a length that rows and table share, and marks around the rows": """
        config = {"length": 3}
        row = [1, *[5, 6, 7, 8][: config["length"]], 2]
        places = nn.Embedding(config["length"], 4).cuda()  # CAUSE
        places(torch.arange(len(row), device="cuda"))
        """,
    "a mark that the program writes itself, gathered by": """
        near = torch.tensor([[0, 2], [1, 2]]).cuda()
        near[1:] = -1
        found = torch.ones(2, 3, device="cuda").gather(1, near)  # CAUSE
        """,
    "actions that are chosen from 1 on": """
        import random
        random.seed(1)
        def act(n):
            return random.randint(1, n)  # CAUSE
        taken = torch.tensor([act(3) for _ in range(20)]).cuda()
        torch.zeros(20, 3, device="cuda").gather(1, taken[:, None])
        """,
    "ids of classes that are taken for their numbers": """
        from torch.utils.data import DataLoader, Dataset
        NAMES = {3: "car", 17: "cat"}
        class Rows(Dataset):
            def __init__(self):
                self.rows = [{"x": 0.5, "kind": 3}, {"x": 1.5, "kind": 17}]
            def __len__(self):
                return len(self.rows)
            def __getitem__(self, i):
                row = self.rows[i]
                return torch.tensor([row["x"]]), row["kind"]  # CAUSE
        loader, net = DataLoader(Rows(), batch_size=2), nn.Linear(1, len(NAMES)).cuda()
        for x, y in loader:
            nn.functional.cross_entropy(net(x.cuda()), y.cuda())
        """,
    "features of inference mode, and another use of it that is right": """
        encoder, head = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        @torch.inference_mode()  # CAUSE
        def features(x):
            return encoder(x)
        @torch.inference_mode()
        def evaluate(x):
            return head(encoder(x)).sum().item()
        x = torch.ones(2, 4).cuda()
        evaluate(x)
        found = features(x)
        loss = head(found).sum()
        loss.backward()
        """,
    "a function with a backward of its own, under autocast": """
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight.t()
            @staticmethod
            def backward(ctx, grad):  # CAUSE
                x, weight = ctx.saved_tensors
                return grad @ weight, grad.t() @ x
        x, weight = torch.ones(2, 4, device="cuda"), nn.Parameter(torch.ones(3, 4, device="cuda"))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = Product.apply(x, weight).sum()
        loss.backward()
        """,
    "a penalty on what required no gradient yet": """
        def penalty(out, x):
            return torch.autograd.grad(out.sum(), x, create_graph=True)[0].pow(2).mean()
        critic, x = nn.Linear(4, 1).cuda(), torch.ones(2, 4, device="cuda")
        out = critic(x)
        x.requires_grad = True  # CAUSE
        loss = penalty(out, x)
        loss.backward()
        """,
    "the values of a tensor with a graph": """
        out = nn.Linear(4, 1).cuda()(torch.ones(2, 4).cuda())
        print(out.cpu().numpy())  # CAUSE
        """,
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_line_is_named_and_its_fix_runs(name: str, tmp_path: Path) -> None:
    finding, marked = raised(FAULTS[name], tmp_path)
    torch.set_grad_enabled(True)  # one of the programs leaves gradients off
    assert finding.cause is not None
    assert finding.cause.line == marked, finding
    assert finding.edits, finding
    path = Path(finding.edits[0].file)
    mended = rewrite.applied(path.read_text(), finding.edits)
    with virtual_gpus(1):
        exec(compile(mended, "mended.py", "exec"), {"__name__": "__main__"})


def test_a_number_that_came_out_too_small_is_no_mark(tmp_path: Path) -> None:
    program = """
        local_rank, ages = 0, torch.tensor([1, 2, 0])
        if local_rank != -1:
            classes = ages - 1  # CAUSE
        nn.functional.one_hot(classes.cuda(), num_classes=3)
        """
    finding, marked = raised(program, tmp_path)
    assert finding.cause is not None
    assert finding.cause.line == marked
    assert "clamp" not in finding.fix


ADAPTER = """
    import copy, tempfile
    from peft import LoraConfig, PeftModel, get_peft_model
    base, path = nn.Sequential(nn.Linear(4, 4)), tempfile.mkdtemp()
    get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules=["0"])).save_pretrained(path)
    model = PeftModel.from_pretrained(base, path)  # CAUSE
    model = model.to("cuda")
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    """


def test_an_adapter_that_is_loaded_frozen(tmp_path: Path) -> None:
    finding, marked = raised(ADAPTER, tmp_path)
    assert finding.cause is not None
    assert finding.cause.line == marked
    assert [edit.text for edit in finding.edits] == [", is_trainable=True"]


def test_an_adapter_that_is_frozen_by_the_program_itself_is_not_laid_to_its_loading(tmp_path: Path) -> None:
    again = "for p in model.parameters(): p.requires_grad = False\n    "
    finding, _ = raised(ADAPTER.replace("model = model.to", f"{again}model = model.to"), tmp_path)
    assert "is_trainable" not in finding.fix


def test_a_filter_that_finds_nothing_trainable_was_not_used_up(tmp_path: Path) -> None:
    program = """
        model = nn.Linear(4, 2).cuda().requires_grad_(False)
        trained = filter(lambda p: p.requires_grad, model.parameters())
        opt = torch.optim.SGD(trained, lr=0.1)  # CAUSE
        """
    finding, _ = raised(program, tmp_path)
    assert "once only" not in str(finding.cause)
