"""Each check alone, on a few lines in which its fault is there and a few in which it only looks so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from marks import named_lines

from trimtab.rehearse.checks.angles import Angles
from trimtab.rehearse.checks.base import BaseCheck
from trimtab.rehearse.checks.checkpoints import Checkpoints
from trimtab.rehearse.checks.clearing import Clearing
from trimtab.rehearse.checks.consumed import Consumed
from trimtab.rehearse.checks.data_order import DataOrder
from trimtab.rehearse.checks.gradients import Gradients
from trimtab.rehearse.checks.graph_kept import GraphKept
from trimtab.rehearse.checks.in_place import InPlace
from trimtab.rehearse.checks.left_out import LeftOut
from trimtab.rehearse.checks.losses import Losses
from trimtab.rehearse.checks.made_anew import MadeAnew
from trimtab.rehearse.checks.modes import Modes
from trimtab.rehearse.checks.no_effect import NoEffect
from trimtab.rehearse.checks.nothing_loaded import NothingLoaded
from trimtab.rehearse.checks.replicas import Replicas
from trimtab.rehearse.checks.roles import Roles
from trimtab.rehearse.checks.rounded import Rounded
from trimtab.rehearse.checks.rows import Rows
from trimtab.rehearse.checks.scaler import Scaler
from trimtab.rehearse.checks.squares import Squares
from trimtab.rehearse.checks.states import States
from trimtab.rehearse.checks.steps import Steps
from trimtab.rehearse.checks.underflow import Underflow
from trimtab.rehearse.checks.untrained import Untrained
from trimtab.rehearse.checks.unwritten import Unwritten
from trimtab.rehearse.checks.values import Values

Checked = Callable[..., dict[str, Any]]

FAULTS: dict[str, tuple[type[BaseCheck], str, str]] = {
    "a buffer that a replica binds anew": (
        Replicas,
        "garbage-buffer",
        """
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
                self.register_buffer("center", torch.zeros(2))
                self.register_buffer("last", torch.zeros(2))
            def forward(self, x):
                y = self.layer(x)
                self.center = 0.9 * self.center + 0.1 * y.detach().mean(0)  # cause
                return y - self.center
        model = nn.DataParallel(Centred().cuda())
        for step in range(3):
            model(torch.randn(4, 2).cuda()).sum().backward()  # where
        """,
    ),
    "a loss rebuilt as a new leaf": (
        Gradients,
        "no-gradient",
        """
        model = nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.tensor(model(torch.ones(1, 4).cuda()).sum().item(), requires_grad=True)  # cause
        loss.backward()  # where
        opt.step()
        """,
    ),
    "a model that gives its values alone, and a loss that is flagged": (
        Gradients,
        "no-gradient",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2)
            def forward(self, x):
                out = self.layer(x)
                return out.data  # cause
        model = Net().cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(1, 4).cuda()).sum()
        loss.requires_grad_(True)
        loss.backward()  # where
        opt.step()
        """,
    ),
    "gradients cleared between backward and step": (
        Gradients,
        "no-gradient",
        """
        model = nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4).cuda()).sum().backward()
        opt.zero_grad()  # cause
        opt.step()  # where
        """,
    ),
    "a re-entrant checkpoint without an input that needs a gradient": (
        Checkpoints,
        "no-gradient",
        """
        from torch.utils.checkpoint import checkpoint
        first, head = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        h = checkpoint(first, torch.ones(2, 4).cuda(), use_reentrant=True)  # where, cause
        head(h).sum().backward()
        """,
    ),
    "the parameters of another model": (
        Gradients,
        "no-gradient",
        """
        used, other = nn.Linear(4, 2), nn.Linear(4, 2)
        opt = torch.optim.SGD(other.parameters(), lr=0.1)  # cause
        used(torch.ones(1, 4)).sum().backward()
        opt.step()  # where
        """,
    ),
    "layers in a plain list": (
        Untrained,
        "no-gradient",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(4, 1)
                self.layers = [nn.Linear(4, 4)]  # where, cause

            def forward(self, x):
                return self.head(self.layers[0](x))

        net = Net()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 4)).sum().backward()
        opt.step()
        """,
    ),
    "a running sum of losses": (
        GraphKept,
        "graph-kept",
        """
        model = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        total = 0
        for _ in range(8):
            loss = model(torch.ones(2, 4).cuda()).mean()
            total = total + loss  # where, cause
            loss.backward()
            opt.step()
        """,
    ),
    "weights that a step changed before backward": (
        InPlace,
        "other-error",
        """
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        early = model(torch.ones(2, 4).cuda()).sum()
        model(torch.ones(2, 4).cuda()).sum().backward()
        opt.step()  # cause
        early.backward()  # where
        """,
    ),
    "weights of attention that a mask sets to 0 after the softmax": (
        InPlace,
        "other-error",
        """
        scores = torch.ones(2, 4, device="cuda", requires_grad=True)
        weights = torch.softmax(scores * 2, dim=-1)
        hidden = torch.arange(8, device="cuda").view(2, 4) > 5
        weights[hidden] = 0.0  # cause
        weights.sum().backward()  # where
        """,
    ),
    "a hook that keeps outputs with their graphs on its class": (
        GraphKept,
        "graph-kept",
        """
        class Hook:
            outputs = []
            def __call__(self, module, given, out):
                Hook.outputs.append(out)  # where, cause
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).cuda()
        model[0].register_forward_hook(Hook())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            opt.zero_grad()
            model(torch.ones(2, 4).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "a step past the scaler": (
        Scaler,
        "scaler-misuse",
        """
        model = nn.Linear(4, 2).cuda()
        opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        scaler.scale(model(torch.ones(1, 4).cuda()).sum()).backward()
        opt.step()  # where, cause
        """,
    ),
    "scaled gradients that are clipped": (
        Scaler,
        "scaler-misuse",
        """
        model = nn.Linear(4, 2).cuda()
        opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        scaler.scale(model(torch.ones(1, 4).cuda()).sum()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)  # where, cause
        scaler.step(opt)
        """,
    ),
    "the mean over no element": (
        Values,
        "non-finite",
        """
        model = nn.Linear(4, 2).cuda()
        out = model(torch.ones(3, 4).cuda())
        loss = out[out > 1e9].mean()  # cause
        loss.backward()  # where
        """,
    ),
    "a root at zero": (
        Values,
        "non-finite",
        """
        w = nn.Parameter(torch.zeros(2, device="cuda"))
        opt = torch.optim.SGD([w], lr=0.1)
        loss = w.square().sum().sqrt()  # cause
        loss.backward()
        opt.step()  # where
        """,
    ),
    "an evaluation that adds up its losses with their graphs, by blocks of its own": (
        GraphKept,
        "graph-kept",
        """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.wide = nn.Linear(4, 4)
            def forward(self, x):
                return x + self.wide(nn.functional.gelu(x))
        model = nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 1)).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4).cuda()).mean().backward()
        opt.step()
        opt.zero_grad()
        def evaluate():
            model.eval()
            total = 0
            for _ in range(14):
                total += model(torch.ones(2, 4).cuda()).square().mean()  # where, cause
            return total / 14
        print(evaluate().item())
        """,
    ),
    "activations that a hook keeps": (
        GraphKept,
        "graph-kept",
        """
        model = nn.Sequential(nn.Linear(4, 4), *[nn.Tanh() for _ in range(8)], nn.Linear(4, 1)).cuda()
        seen = []
        model[0].register_forward_hook(lambda layer, given, out: seen.append(out))  # where, cause
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            opt.zero_grad()
            model(torch.ones(2, 4).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "a scaled and a plain loss in one gradient": (
        Scaler,
        "scaler-misuse",
        """
        model = nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            opt.zero_grad()
            scaler.scale(model(torch.ones(1, 4).cuda()).sum()).backward()
            model.weight.square().sum().backward()  # where, cause
            scaler.step(opt)
            scaler.update()
        """,
    ),
    "gradients that are 0 in half precision only": (
        Underflow,
        "no-gradient",
        """
        model = nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(torch.ones(1, 4).cuda())
            opt.zero_grad()
            (1e-9 * out.float().sum()).backward()  # where, cause
            opt.step()
        """,
    ),
    "updates that 16-bit weights round away": (
        Rounded,
        "no-gradient",
        """
        model = nn.Linear(64, 64, bias=False).cuda()
        model.to(torch.bfloat16)  # cause
        opt = torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=0.0)
        for _ in range(5):
            opt.zero_grad()
            model(torch.ones(2, 64).cuda().bfloat16()).pow(2).sum().backward()
            opt.step()  # where
        """,
    ),
    "a state of which no name fits": (
        NothingLoaded,
        "other-error",
        """
        saved = nn.DataParallel(nn.Linear(4, 2).cuda()).state_dict()
        model = nn.Linear(4, 2).cuda()
        model.load_state_dict(saved, strict=False)  # where, cause
        model(torch.ones(1, 4).cuda())
        """,
    ),
    "a layer that is replaced under training, while the optimizer holds the old one": (
        Untrained,
        "no-gradient",
        """
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)  # where
        old = model[1]
        for step in range(8):
            if step == 5:
                model[1] = nn.Linear(4, 2).cuda()  # cause
            opt.zero_grad(set_to_none=False)
            model(torch.ones(2, 4).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "a layer that forward makes anew": (
        MadeAnew,
        "no-gradient",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(4, 4)

            def forward(self, x):
                head = nn.Linear(4, 1).to(x.device)  # where, cause
                return head(self.body(x))

        net = Net().cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            opt.zero_grad()
            net(torch.ones(2, 4).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "steps that are too large": (
        Values,
        "non-finite",
        """
        w = nn.Parameter(torch.ones(1, device="cuda"))
        opt = torch.optim.SGD([w], lr=1e4)  # cause
        for _ in range(12):
            loss = w.pow(4).sum()
            opt.zero_grad()
            loss.backward()  # where
            opt.step()
        """,
    ),
    "memory that nobody wrote to, and that is trained without a forward pass": (
        Unwritten,
        "garbage-buffer",
        """
        with torch.device("meta"):
            model = nn.Linear(4, 2)
        model.to_empty(device="cuda")  # where, cause
        nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model.bias.grad = torch.ones(2, device="cuda")
        opt.step()
        """,
    ),
    "memory that nobody wrote to, and that is saved": (
        Unwritten,
        "garbage-buffer",
        """
        import io
        with torch.device("meta"):
            model = nn.Linear(4, 2)
            model.register_buffer("scale", torch.ones(2))
        model.to_empty(device="cuda")  # where, cause
        model.reset_parameters()
        torch.save(model.state_dict(), io.BytesIO())
        """,
    ),
    "memory that nobody wrote to": (
        Unwritten,
        "garbage-buffer",
        """
        with torch.device("meta"):
            model = nn.Linear(4, 2)
        model.to_empty(device="cuda")  # where, cause
        model(torch.ones(1, 4).cuda())
        """,
    ),
    "a parameter that was moved after it became one": (
        Untrained,
        "no-gradient",
        """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)
                self.scale = nn.Parameter(torch.ones(4)).cuda()  # where, cause

            def forward(self, x):
                return self.fc(x) * self.scale

        model = Scaled().cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(2, 4).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "weights of the loss that no optimizer holds": (
        LeftOut,
        "no-gradient",
        """
        model, criterion = nn.Linear(4, 8).cuda(), nn.Linear(8, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)  # cause
        for _ in range(4):
            opt.zero_grad()
            criterion(model(torch.ones(2, 4).cuda())).sum().backward()
            opt.step()  # where
        """,
    ),
    "gradients that nobody clears": (
        Clearing,
        "stale-gradient",
        """
        model = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            model(torch.ones(2, 4).cuda()).pow(2).sum().backward()
            opt.step()  # where, cause
        """,
    ),
    "gathered gradients that are cleared in every round": (
        Clearing,
        "stale-gradient",
        """
        model = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(8):
            opt.zero_grad()  # cause
            model(torch.ones(2, 4).cuda()).sum().backward()
            if (i + 1) % 2 == 0:
                opt.step()  # where
        """,
    ),
    "eval mode that is left on": (
        Modes,
        "eval-mode",
        """
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            opt.zero_grad()
            model(torch.ones(2, 4).cuda()).sum().backward()
            opt.step()  # where
            model.eval()  # cause
            with torch.no_grad():
                model(torch.ones(2, 4).cuda())
        """,
    ),
    "a recurrent layer in eval mode": (
        Modes,
        "eval-mode",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = nn.GRU(4, 4)
            def forward(self, x):
                return self.rnn(x)[0]
        model = Net().cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            opt.zero_grad()
            model(torch.ones(2, 1, 4).cuda()).sum().backward()  # where
            opt.step()
            model.eval()  # cause
            with torch.no_grad():
                model(torch.ones(2, 1, 4).cuda())
        """,
    ),
    "angles in bfloat16": (
        Angles,
        "rounded-away",
        """
        model = nn.Linear(8, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = torch.logspace(0, -4, 8, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            angles = torch.arange(400.0, device="cuda")[:, None] @ rates[None]  # cause
            loss = model(angles.sin()).mean()  # where
        loss.backward()
        opt.step()
        """,
    ),
    "parameters that were gone through before they are clipped": (
        Consumed,
        "used-up",
        """
        model = nn.Linear(4, 1).cuda()
        parameters = model.parameters()  # cause
        opt = torch.optim.SGD(parameters, lr=0.1)
        model(torch.ones(2, 4).cuda()).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)  # where
        opt.step()
        """,
    ),
    "batches that the second epoch lacks": (
        Consumed,
        "used-up",
        """
        model = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = (torch.ones(2, 4).cuda() for _ in range(2))  # cause
        for epoch in range(3):
            for x in batches:  # where
                opt.zero_grad()
                model(x).sum().backward()
                opt.step()
        """,
    ),
    "a sampler that is never told its epoch": (
        DataOrder,
        "data-order",
        """
        from torch.utils.data import DataLoader, DistributedSampler
        loader = DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=2, rank=0))
        next(iter(loader))
        w = nn.Parameter(torch.ones(1, device="cuda"))
        opt = torch.optim.SGD([w], lr=0.1)
        for epoch in range(2):
            print(epoch)  # cause
            for row in loader:  # where
                opt.step()
        """,
    ),
    "probabilities for scores": (
        Losses,
        "wrong-loss",
        """
        body = nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)).cuda()  # cause
        for _ in range(2):
            x = torch.randn(6, 4).cuda()
            nn.functional.cross_entropy(body(x), torch.zeros(6, dtype=torch.long).cuda()).backward()  # where
        """,
    ),
    "a column of predictions against a row of targets": (
        Losses,
        "wrong-loss",
        """
        value = nn.Linear(4, 1).cuda()
        for _ in range(2):
            x, y = torch.randn(6, 4).cuda(), torch.randn(6).cuda()
            ((value(x) - y) ** 2).mean().backward()  # where, cause
        """,
    ),
    "a detached column of values against a row of returns": (
        Squares,
        "wrong-loss",
        """
        value, policy = nn.Linear(4, 1).cuda(), nn.Linear(4, 3).cuda()
        for _ in range(2):
            x, returns = torch.randn(6, 4).cuda(), torch.randn(6).cuda()
            advantage = returns - 0.5 * value(x).detach()  # where, cause
            advantage = (advantage - advantage.mean()) / advantage.std()
            chosen = policy(x).log_softmax(-1)[:, 0]
            (-(chosen * advantage).mean()).backward()
        """,
    ),
    "a stream that every worker gives whole": (
        Rows,
        "same-rows",
        """
        from torch.utils.data import DataLoader, IterableDataset
        class Stream(IterableDataset):
            def __iter__(self):
                for epoch in range(1):
                    for n in range(12):  # cause
                        yield torch.arange(4) + n
        for batch in DataLoader(Stream(), batch_size=2, num_workers=2):  # where
            pass
        """,
    ),
    "an average that is only bound to a name": (
        NoEffect,
        "no-effect",
        """
        model, average = nn.Linear(2, 2).cuda(), nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()
            for a, p in zip(average.parameters(), model.parameters()):
                a = 0.9 * a + 0.1 * p  # where, cause
        """,
    ),
    "a method that is not called": (
        NoEffect,
        "no-effect",
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad  # where, cause
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "a schedule of an optimizer that was made again": (
        Roles,
        "no-effect",
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1)  # where, cause
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()
            schedule.step()
        """,
    ),
    "an optimizer in whose place another one steps": (
        Roles,
        "no-effect",
        """
        one, two = nn.Linear(2, 2).cuda(), nn.Linear(2, 2).cuda()
        first = torch.optim.SGD(one.parameters(), lr=0.1)
        second = torch.optim.SGD(two.parameters(), lr=0.1)
        for _ in range(3):
            one(torch.ones(1, 2).cuda()).sum().backward()
            first.step()
            two(torch.ones(1, 2).cuda()).sum().backward()  # where
            first.step()  # cause
        """,
    ),
    "a rate that is 0 too soon": (
        Roles,
        "no-effect",
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=2)  # cause
        for _ in range(6):
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()  # where
            schedule.step()
        """,
    ),
    "a kept state that is no copy": (
        States,
        "no-effect",
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        best = model.state_dict()  # cause
        model(torch.ones(1, 2).cuda()).sum().backward()
        opt.step()
        model.load_state_dict(best)  # where
        """,
    ),
    "weights that are drawn again after they were loaded": (
        States,
        "no-effect",
        """
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda()
        model.load_state_dict(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict())  # where
        model.apply(lambda m: nn.init.normal_(m.weight) if hasattr(m, "weight") else None)  # cause
        model(torch.ones(1, 2).cuda())
        """,
    ),
    "a tie that memory without values breaks": (
        States,
        "no-effect",
        """
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
            model[1].weight = model[0].weight
        model.to_empty(device="cuda")  # where, cause
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "gradients that are clipped after the step": (
        Clearing,
        "no-effect",
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # where, cause
        """,
    ),
    "gradients that are clipped before they are there, under a condition": (
        Clearing,
        "no-effect",
        """
        model, limit = nn.Linear(2, 2).cuda(), 1.0
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            opt.zero_grad()
            loss = model(torch.ones(1, 2).cuda()).sum()
            if limit > 0:
                nn.utils.clip_grad_norm_(model.parameters(), limit)  # where, cause
            loss.backward()
            opt.step()
        """,
    ),
    "dropout in an evaluation": (
        Modes,
        "eval-mode",
        """
        class Net(nn.Module):
            def forward(self, x):
                return nn.functional.dropout(x, 0.5)  # where, cause
        with torch.no_grad():
            Net().eval()(torch.ones(4).cuda())
        """,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_lines(checked: Checked, name: str) -> None:
    check, kind, code = FAULTS[name]
    report = checked(check, code)
    assert [finding["kind"] for finding in report["findings"]] == [kind], report
    assert {finding["severity"] for finding in report["findings"]} == {"fault"}
    assert named_lines(report, "where") == report["marks"]["where"], report
    assert named_lines(report, "cause") == report["marks"]["cause"], report


CLEAN: dict[str, tuple[type[BaseCheck], str]] = {
    "angles in float32, and small ones in bfloat16": (
        Angles,
        """
        rates = torch.logspace(0, -4, 8, device="cuda")
        (torch.arange(400.0, device="cuda")[:, None] * rates).sin()
        (torch.arange(60.0, device="cuda")[:, None] * rates).bfloat16().cos()
        """,
    ),
    "gradients that are put there by hand, and clipped": (
        Clearing,
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(torch.full((1, 2), step + 1.0).cuda()).sum()
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                p.grad = g
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        """,
    ),
    "dropout that is off in an evaluation, or on by a layer's own mode": (
        Modes,
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.off, self.dropout = nn.Dropout(0.5), nn.Dropout(0.5)
            def forward(self, x):
                x = nn.functional.dropout(self.off(x), p=0.5 if self.training else 0.0)
                return self.dropout(x)
        model = Net().eval()
        model.dropout.train()
        with torch.no_grad():
            model(torch.ones(4).cuda())
        """,
    ),
    "buffers that replicas write in place, or make anew each time": (
        Replicas,
        """
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
                self.register_buffer("center", torch.zeros(2))
                self.register_buffer("last", torch.zeros(2))
            def forward(self, x):
                y = self.layer(x)
                self.center.copy_(0.9 * self.center + 0.1 * y.detach().mean(0))
                self.last = y.detach().mean(0)
                return y - self.center
        model = nn.DataParallel(Centred().cuda())
        for step in range(3):
            model(torch.randn(4, 2).cuda()).sum().backward()
        assert model.module.center.abs().sum() > 0
        """,
    ),
    "a gradient that is 0 in any precision": (
        Underflow,
        """
        model = nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(torch.zeros(1, 4).cuda())
            opt.zero_grad()
            (0 * out.float().sum()).backward()
            opt.step()
        """,
    ),
    "16-bit weights that a warm-up does not change yet, and others that change": (
        Rounded,
        """
        for first, grows in ((1e-7, 1.5), (1e-3, 1.0)):
            model = nn.Linear(64, 64, bias=False).cuda().bfloat16()
            opt = torch.optim.AdamW(model.parameters(), lr=first, weight_decay=0.0)
            sched = torch.optim.lr_scheduler.ExponentialLR(opt, grows)
            for _ in range(5):
                opt.zero_grad()
                model(torch.ones(2, 64).cuda().bfloat16()).pow(2).sum().backward()
                opt.step()
                sched.step()
        """,
    ),
    "names that do not fit at first, and parts that a state lacks": (
        NothingLoaded,
        """
        model, head = nn.Linear(4, 2).cuda(), nn.Linear(2, 2).cuda()
        saved = {f"module.{k}": v for k, v in nn.Linear(4, 2).cuda().state_dict().items()}
        if model.load_state_dict(saved, strict=False).unexpected_keys:
            model.load_state_dict({k[7:]: v for k, v in saved.items()}, strict=False)
        head.load_state_dict({}, strict=False)
        head.load_state_dict({"other.scale": torch.ones(2).cuda()}, strict=False)
        head(model(torch.ones(1, 4).cuda()))
        """,
    ),
    "layers that are replaced under training and given to an optimizer": (
        Untrained,
        """
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            if step == 5:
                model[1] = nn.Linear(4, 2).cuda()
                opt.add_param_group({"params": model[1].parameters()})
            if step == 9:
                model[0].weight = nn.Parameter(model[0].weight.data * 2)
                opt = torch.optim.SGD(model.parameters(), lr=0.1)
            opt.zero_grad()
            model(torch.ones(2, 4).cuda()).sum().backward()
            opt.step()
        """,
    ),
    "parameters made anew for an attack, and one that is made once": (
        MadeAnew,
        """
        model, scale = nn.Linear(4, 1).cuda(), nn.Parameter(torch.ones(1).cuda())
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            x = torch.ones(2, 4).cuda()
            noise = nn.Parameter(torch.zeros_like(x))
            inner = torch.optim.SGD([noise], lr=0.1)
            model(x + noise).sum().backward()
            inner.step()
            other = nn.Parameter(torch.zeros_like(x))
            opt.zero_grad()
            (scale * model(x + noise.detach() + other)).sum().backward()
            print(other.grad.norm())
            opt.step()
        """,
    ),
    "two losses that are both scaled, and a plain one for other weights": (
        Scaler,
        """
        model, other = nn.Linear(4, 2).cuda(), nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            opt.zero_grad()
            other.zero_grad()
            scaler.scale(model(torch.ones(1, 4).cuda()).sum()).backward()
            other(torch.ones(1, 4).cuda()).sum().backward()
            scaler.scale(model.weight.square().sum()).backward()
            scaler.step(opt)
            scaler.update()
        """,
    ),
    "layers that take turns keep what they last gave": (
        GraphKept,
        """
        heads = [nn.Linear(4, 1).cuda() for _ in range(4)]
        last = {}
        opt = torch.optim.SGD([p for head in heads for p in head.parameters()], lr=0.1)
        for step in range(12):
            last[step % 2] = heads[step % 4](torch.ones(2, 4).cuda())
            opt.zero_grad()
            last[step % 2].sum().backward()
            opt.step()
        """,
    ),
    "a network that only judges, in front of which an input or a small layer is trained": (
        LeftOut,
        """
        prompt, judge = nn.Linear(4, 4).cuda(), nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 1)).cuda()
        opt = torch.optim.SGD(prompt.parameters(), lr=0.1)
        for _ in range(4):
            opt.zero_grad()
            judge(prompt(torch.ones(2, 4).cuda())).sum().backward()
            opt.step()
        """,
    ),
    "the two halves of a GAN": (
        LeftOut,
        """
        maker, judge = nn.Linear(4, 32).cuda(), nn.Linear(32, 1).cuda()
        first = torch.optim.SGD(maker.parameters(), lr=0.1)
        for _ in range(4):
            first.zero_grad()
            judge(maker(torch.ones(2, 4).cuda())).sum().backward()
            first.step()
        second = torch.optim.SGD(judge.parameters(), lr=0.1)
        """,
    ),
    "gradients that another loss leaves by the way, cleared before their own": (
        Clearing,
        """
        maker, judge = nn.Linear(4, 8).cuda(), nn.Linear(8, 1).cuda()
        first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge))
        for _ in range(4):
            made = maker(torch.ones(2, 4).cuda())
            second.zero_grad()
            judge(made.detach()).pow(2).sum().backward()
            second.step()
            first.zero_grad()
            judge(made).pow(2).sum().backward()
            first.step()
        """,
    ),
    "an input that is trained through a model in eval mode": (
        Modes,
        """
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4).cuda()).sum().backward()
        opt.step()
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 4).cuda())
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        attack = torch.optim.SGD([x], lr=0.1)
        for _ in range(3):
            model(x).sum().backward()
            attack.step()
        """,
    ),
    "a stream without an end": (
        Consumed,
        """
        import itertools
        model = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = itertools.repeat(torch.ones(2, 4).cuda())
        for epoch in range(2):
            for x in itertools.islice(stream, 2):
                opt.zero_grad()
                model(x).sum().backward()
                opt.step()
        """,
    ),
    "a closure computes the gradients inside the step": (
        Gradients,
        """
        w = nn.Parameter(torch.ones(2, device="cuda"))
        opt = torch.optim.LBFGS([w], max_iter=2)

        def closure():
            opt.zero_grad()
            loss = w.square().sum()
            loss.backward()
            return loss

        opt.step(closure)
        """,
    ),
    "a logged value is detached and goes nowhere": (
        Gradients,
        """
        model = nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(1, 4).cuda()).sum()
        print(loss.detach(), loss.item())
        loss.backward()
        opt.step()
        """,
    ),
    "a checkpoint that is not re-entrant": (
        Checkpoints,
        """
        from torch.utils.checkpoint import checkpoint
        first = nn.Linear(4, 1).cuda()
        checkpoint(first, torch.ones(2, 4).cuda(), use_reentrant=False).sum().backward()
        """,
    ),
    "layers left out of the optimizer on purpose": (
        Untrained,
        """
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        opt = torch.optim.SGD(model[1].parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        """,
    ),
    "a running sum of numbers": (
        GraphKept,
        """
        model = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        total, history = 0, []
        for _ in range(8):
            loss = model(torch.ones(2, 4).cuda()).mean()
            total = total + loss.detach()
            history.append(loss.item())
            loss.backward()
            opt.step()
        """,
    ),
    "losses that one backward pass is for": (
        GraphKept,
        """
        model = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            losses = [model(torch.ones(2, 4).cuda()).mean() for _ in range(6)]
            opt.zero_grad()
            sum(losses).backward()
            opt.step()
        """,
    ),
    "an in-place change that backward does not need": (
        InPlace,
        """
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        h = x + 1
        h += 1
        h.sum().backward()
        """,
    ),
    "clipped after unscaling": (
        Scaler,
        """
        model = nn.Linear(4, 2).cuda()
        opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        scaler.scale(model(torch.ones(1, 4).cuda()).sum()).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        """,
    ),
    "a scaler that is switched off": (
        Scaler,
        """
        model = nn.Linear(4, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        scaler.scale(model(torch.ones(1, 4).cuda()).sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        """,
    ),
    "a mask of minus infinity": (
        Values,
        """
        model = nn.Linear(4, 4).cuda()
        mask = torch.full((4, 4), float("-inf"), device="cuda").triu(1)
        scores = model(torch.ones(4, 4).cuda()) + mask
        scores.softmax(-1)[:, 0].sum().backward()
        """,
    ),
    "memory that is written before it is used": (
        Values,
        """
        gain = torch.empty(4, device="cuda")
        nn.init.ones_(gain)
        w = nn.Parameter(gain)
        w.sum().backward()
        """,
    ),
    "a sampler that is told its epoch, one that evaluates, and a look at a batch before": (
        DataOrder,
        """
        from torch.utils.data import DataLoader, DistributedSampler
        def loader():
            return DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=2, rank=0))
        train, once, test = loader(), loader(), loader()
        opt = torch.optim.SGD([nn.Parameter(torch.ones(1, device="cuda"))], lr=0.1)
        for epoch in range(2):
            train.sampler.set_epoch(epoch)
            for row in train:
                opt.step()
            list(test)
        next(iter(once))
        opt.step()
        for row in once:
            opt.step()
        """,
    ),
    "a workspace of an emptied module, written before it is read": (
        Unwritten,
        """
        class Cached(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
                self.register_buffer("cache", torch.zeros(4, 2), persistent=False)
            def forward(self, x):
                self.cache[: len(x)] = self.layer(x).detach()
                return self.layer(x) + self.cache[: len(x)]
        with torch.device("meta"):
            model = Cached()
        model.to_empty(device="cuda")
        model.layer.reset_parameters()
        model(torch.ones(2, 2, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        """,
    ),
    "scores, logarithms, and all compared with all on purpose": (
        Losses,
        """
        model = nn.Linear(4, 3).cuda()
        for _ in range(2):
            x, y = torch.randn(6, 4).cuda(), torch.randn(6).cuda()
            out = model(x)
            loss = nn.functional.cross_entropy(out, torch.zeros(6, dtype=torch.long).cuda())
            loss = loss + nn.functional.nll_loss(out.log_softmax(-1), torch.zeros(6, dtype=torch.long).cuda())
            loss = loss + (out[:, :1] - y[:, None]).mean() + (out[:, 0][:, None] - y).abs().mean()
            column = model(x) @ torch.ones(3, 1).cuda()
            nearest, kernel = (column - y).abs().min(dim=1).values, torch.exp(-((column - y) ** 2))
            (loss + nearest.mean() + kernel.mean()).backward()
        """,
    ),
    "columns made of rows, masked, summed along one side, compared with themselves, and rows with rows": (
        Squares,
        """
        value, policy = nn.Linear(4, 1).cuda(), nn.Linear(4, 1).cuda()
        for _ in range(3):
            x, y = torch.randn(6, 4).cuda(), torch.randn(6).cuda()
            seen, score = value(x).detach(), policy(x)
            row = score.squeeze(-1)
            loss = (row * (y - seen.squeeze(-1))).mean() + (row * (y - seen.squeeze(-1)[:, None])).mean()
            loss = loss + ((y - seen) * row * (torch.ones(6, 6).cuda().triu())).mean()
            loss = loss + ((y - seen) * row).logsumexp(1).mean() + (score - row).abs().mean()
            (y - seen).mean()
            loss.backward()
        """,
    ),
    "streams that share out or draw their rows, one worker, rows that are all alike, and rows by number": (
        Rows,
        """
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info
        class Stream(IterableDataset):
            def __init__(self, rows):
                self.rows = rows
            def __iter__(self):
                return iter(self.rows(get_worker_info()))
        def shared(info):
            return (torch.arange(4) + n for n in range(info.id, 12, info.num_workers))
        def drawn(info):
            return (torch.rand(4) for _ in range(12))
        def alike(info):
            return (torch.arange(4) for _ in range(3))
        for rows in (shared, drawn, alike):
            list(DataLoader(Stream(rows), batch_size=2, num_workers=2))
        list(DataLoader(Stream(shared), batch_size=2, num_workers=1))
        list(DataLoader([torch.arange(4) + n % 4 for n in range(16)], batch_size=2, num_workers=2))
        """,
    ),
    "loops that read what they bind, lines under a condition, a property and a flag that is read": (
        NoEffect,
        """
        class Cut(nn.Linear):
            def __init__(self):
                super().__init__(2, 2)
                self.requires_grad = False
            def forward(self, x):
                return super().forward(x) if self.requires_grad else super().forward(x).detach()
        class Counter:
            n = 0
            @property
            def step(self):
                self.n += 1
        counter, model = Counter(), nn.Sequential(Cut(), nn.Linear(2, 2)).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sums = []
        for step in range(2):
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()
            for name, p in model.named_parameters():
                name = name.replace(".", "_")
                p = p.detach()
                sums.append(p.sum())
            for p in model.parameters():
                for _ in range(2):
                    sums.append(p.sum())
                    p = p.detach() / 2
            counter.step
            if step > 5:
                opt.zero_grad
        """,
    ),
    "optimizers in turn, a schedule of epochs and a warm-up from 0": (
        Roles,
        """
        one, two = nn.Linear(2, 2).cuda(), nn.Linear(2, 2).cuda()
        first = torch.optim.SGD(one.parameters(), lr=0.1)
        second = torch.optim.SGD(two.parameters(), lr=0.1)
        warm = torch.optim.lr_scheduler.LambdaLR(first, lambda n: n / 4)
        for step in range(6):
            two(one(torch.ones(1, 2).cuda())).sum().backward()
            first.step()
            warm.step()
            if step == 5:
                second.step()
        """,
    ),
    "gradients that are only measured": (
        Roles,
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        squares = torch.zeros(2, 2).cuda()
        for _ in range(4):
            opt.zero_grad()
            model(torch.ones(1, 2).cuda()).sum().backward()
            squares += model.weight.grad ** 2
        """,
    ),
    "steps that a scaler skips": (
        Roles,
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**100)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(model(1e20 * torch.ones(1, 2).cuda()).sum()).backward()
            scaler.step(opt)
            scaler.update()
        """,
    ),
    "a rate that is put to 0 by hand": (
        Roles,
        """
        one, two = nn.Linear(2, 2).cuda(), nn.Linear(2, 2).cuda()
        first = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(8):
            if step == 4:
                first.param_groups[0]["lr"] = 0.0
            one(torch.ones(1, 2).cuda()).sum().backward()
            first.step()
        """,
    ),
    "copies of a state, a head that is drawn anew and a tie that is tied again": (
        States,
        """
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        state = model.state_dict()
        state.update({})
        model.load_state_dict(state)
        model.load_state_dict({k: v.clone() for k, v in state.items()})
        nn.init.normal_(model[1].weight)
        model.cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        best = {k: v.clone() for k, v in model.state_dict().items()}
        for _ in range(3):
            model(torch.ones(1, 2).cuda()).sum().backward()
            opt.step()
            state = model.state_dict()
            state["0.weight"].clamp_(-1, 1)
            model.load_state_dict(state)
        model.load_state_dict(best)
        """,
    ),
    "norms that are measured after the step": (
        Clearing,
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(1, 2).cuda()).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        """,
    ),
    "gradients that are set by hand, and clipped": (
        Clearing,
        """
        model = nn.Linear(2, 2).cuda()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            loss = model(torch.ones(1, 2).cuda()).pow(2).sum()
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                p.grad = g
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            opt.step()
        """,
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_only_looks_like_a_fault_is_none(checked: Checked, name: str) -> None:
    report = checked(*CLEAN[name])
    assert report["findings"] == [], report


STEPS = """
w = nn.Parameter(torch.ones(1))
first, second = torch.optim.SGD([w], lr=0.1), torch.optim.SGD([w], lr=0.1)
for _ in range(3):
    w.sum().backward()
    first.step()
second.step()
"""


def test_the_optimizer_with_most_steps_counts(checked: Checked) -> None:
    assert checked(Steps, STEPS)["steps"] == 3


SAMPLED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        {run}
        return self.used(x)
model = Net().cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4).cuda()).sum().backward()
    opt.step()
with torch.no_grad():
    model(torch.ones(2, 4).cuda())
"""


def test_a_part_that_the_loss_leaves_out_is_no_fault_for_being_sampled_from_without_gradients(
    checked: Checked,
) -> None:
    """Its layers ran with gradients as well; where they never do, the line that switches them off is the fault."""
    (found,) = checked(Gradients, SAMPLED.format(run="self.left(x)"))["findings"]
    assert (found["severity"], found["cause"]) == ("warning", None)
    off = "with torch.no_grad(): self.left(x)  # cause"
    report = checked(Gradients, SAMPLED.format(run=off))
    (found,) = report["findings"]
    assert found["severity"] == "fault"
    assert named_lines(report, "cause") == report["marks"]["cause"]
