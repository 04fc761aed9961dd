"""Graphs, gradients and numbers: the line to change, and the code that is to stand there, beside what is no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from marks import named_lines

from trimtab.rehearse.checks.averages import Averages
from trimtab.rehearse.checks.base import BaseCheck
from trimtab.rehearse.checks.gradients import Gradients
from trimtab.rehearse.checks.graph_kept import GraphKept
from trimtab.rehearse.checks.in_place import InPlace
from trimtab.rehearse.checks.lost_terms import LostTerms
from trimtab.rehearse.checks.scaler import Scaler
from trimtab.rehearse.checks.values import Values

Checked = Callable[..., dict[str, Any]]

FAULTS: dict[str, tuple[type[BaseCheck], str, str]] = {
    "a critic that is given what the actor's pass has freed, from another function": (
        GraphKept,
        "critic_step(h.detach())",
        """
        body, head = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        first = torch.optim.SGD(body.parameters(), lr=0.1)
        second = torch.optim.SGD(head.parameters(), lr=0.1)
        def actor_step(h):
            loss = h.pow(2).mean()
            loss.backward()
            first.step()
        def critic_step(h):
            loss = head(h).mean()
            loss.backward()  # where
            second.step()
        h = body(torch.randn(2, 4).cuda()).tanh()
        actor_step(h)
        critic_step(h)  # cause
        """,
    ),
    "log-probabilities that a buffer keeps with their graphs": (
        GraphKept,
        "value.detach()",
        """
        class Buffer:
            def __init__(self):
                self.values = []
            def add(self, value):
                self.values.append(value)  # cause
        net = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        buffer = Buffer()
        for _ in range(3):
            buffer.add(net(torch.randn(4).cuda()).tanh())
        old = torch.stack(buffer.values)
        for _ in range(2):
            loss = (net(torch.randn(3, 4).cuda()) - old).exp().mean()
            opt.zero_grad()
            loss.backward()  # where
            opt.step()
        """,
    ),
    "a sum that begins before the loop": (
        GraphKept,
        "as the first line of the loop",
        """
        net = nn.Linear(4, 1).cuda()
        total = 0  # cause
        for _ in range(2):
            total += net(torch.randn(2, 4).cuda()).pow(2).mean()
            total += net(torch.randn(2, 4).cuda()).abs().mean()
            total.backward()  # where
        """,
    ),
    "a layer that works in place on what a sigmoid gave": (
        InPlace,
        "nn.Hardtanh(0.1, 1.0, inplace=False)",
        """
        class Gate(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.relu = nn.ReLU(inplace=True)
                self.clip = nn.Hardtanh(0.1, 1.0, inplace=True)  # cause
            def forward(self, x):
                return self.relu(self.layer(self.clip(torch.sigmoid(self.layer(x)))))
        net = Gate().cuda()
        net(torch.randn(2, 4).cuda()).sum().backward()  # where
        """,
    ),
    "a loss whose pass comes after a step changed its weights": (
        InPlace,
        "second.zero_grad(); judged.backward(); second.step()",
        """
        maker, judge = nn.Linear(4, 4).cuda(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).cuda()
        first = torch.optim.SGD(maker.parameters(), lr=0.1)
        second = torch.optim.SGD(judge.parameters(), lr=0.1)
        made = maker(torch.randn(2, 4).cuda())
        judged = judge(made.detach()).mean()
        fooled = judge(made).mean()
        judged.backward()
        second.step()  # cause
        fooled.backward()  # where
        first.step()
        """,
    ),
    "a round that is left between unscale_ and update": (
        Scaler,
        "scaler.update()",
        """
        net = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for step in range(3):
            scaler.scale(net(torch.ones(2, 4).cuda()).mean()).backward()
            scaler.unscale_(opt)  # where
            if step == 0:
                continue  # cause
            scaler.step(opt)
            scaler.update()
        """,
    ),
    "a second step beside the scaler's": (
        Scaler,
        "opt.step()",
        """
        net = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            opt.zero_grad()
            scaler.scale(net(torch.ones(2, 4).cuda()).mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.step()  # where, cause
        """,
    ),
    "a gradient penalty without a graph": (
        LostTerms,
        "create_graph=True",
        """
        critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).cuda()
        x = torch.randn(2, 4, device="cuda", requires_grad=True)
        slope = torch.autograd.grad(critic(x).sum(), x)[0]  # cause
        loss = critic(x.detach()).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        loss.backward()  # where
        """,
    ),
    "a quotient that only a mask hides": (
        Values,
        "(x.norm(dim=1, keepdim=True) + 1e-8)",
        """
        net = nn.Linear(4, 4, bias=False).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        rows, there = torch.eye(4).cuda(), torch.tensor([True, True, True, False]).cuda()
        x = net(rows * there[:, None])
        unit = x / x.norm(dim=1, keepdim=True)  # cause
        unit[there].sum().backward()
        opt.step()  # where
        """,
    ),
    "the length of what is 0 in both of its parts": (
        Values,
        "y + 1e-8",
        """
        net = nn.Linear(4, 2, bias=False).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        x, y = net(torch.tensor([[1.0] * 4, [0.0] * 4]).cuda()).unbind(1)
        long = torch.hypot(x, y)  # cause
        long.mean().backward()
        opt.step()  # where
        """,
    ),
    "a loss on the rows of which a mask leaves none": (
        Values,
        "if boxes[there].numel() else boxes[there].sum()",
        """
        net = nn.Linear(4, 4).cuda()
        boxes, there = net(torch.ones(2, 4).cuda()), torch.zeros(2, dtype=torch.bool, device="cuda")
        loss = nn.functional.smooth_l1_loss(boxes[there], torch.ones(2, 4).cuda()[there])  # cause
        (loss + boxes.mean()).backward()  # where
        """,
    ),
    "a step through the scaler of another loss": (
        Scaler,
        "mine.step(opt)",
        """
        net = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        mine, other = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
        other.scale(torch.ones(1).cuda())
        mine.scale(net(torch.ones(2, 4).cuda()).mean()).backward()
        other.step(opt)  # cause, where
        """,
    ),
    "a part that is trained in every second round, stepped in all": (
        Scaler,
        'if any(p.grad is not None for g in one.param_groups for p in g["params"]): scaler.step(one)',
        """
        body, extra = nn.Linear(4, 4).cuda(), nn.Linear(4, 4).cuda()
        opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (body, extra)]
        scaler = torch.amp.GradScaler("cuda")
        for step in range(2):
            x = body(torch.ones(2, 4).cuda())
            scaler.scale((extra(x) if step == 0 else x).mean()).backward()
            for one in opts:
                scaler.step(one)  # cause, where
                one.zero_grad()
            scaler.update()
        """,
    ),
    "an average of weights that 16 bits cannot hold": (
        Averages,
        "copy.deepcopy(net).float()",
        """
        import copy
        net = nn.Linear(8, 8).cuda().bfloat16()
        kept = copy.deepcopy(net)  # cause
        for _ in range(5):
            with torch.no_grad():
                for p, q in zip(kept.parameters(), net.parameters()):
                    q.mul_(1.01)
                    p.mul_(0.9999).add_(q, alpha=1 - 0.9999)  # where
        """,
    ),
    "a loss on what was compared": (
        Gradients,
        "said = torch.sigmoid(net(x))",
        """
        net = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(2, 4).cuda()
        said = (torch.sigmoid(net(x)) > 0.5).float()  # cause
        (1 - said).mean().backward()  # where
        """,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_line_and_its_fix(checked: Checked, name: str) -> None:
    check, fix, code = FAULTS[name]
    report = checked(check, code)
    assert len(report["findings"]) == 1, report
    assert named_lines(report, "where") == report["marks"]["where"], report
    assert named_lines(report, "cause") == report["marks"]["cause"], report
    assert fix in report["findings"][0]["fix"], report
    assert report["findings"][0]["edits"], report


CLEAN: dict[str, tuple[type[BaseCheck], str]] = {
    "weights that are stepped by hand with gradients of the first order, and a weight of a loss": (
        LostTerms,
        """
        scale = nn.Parameter(torch.tensor(2.0, device="cuda"))
        x = torch.randn(4, device="cuda")
        fast = scale
        for _ in range(2):
            slope = torch.autograd.grad((fast * x).pow(2).mean(), fast)[0]
            fast = fast - 0.1 * slope
        near = (fast * x).tanh().exp().pow(2).add(1).log().mul(3).sin().mean()
        (near * slope.abs()).backward()
        """,
    ),
    "layers that work in place without harm": (
        InPlace,
        """
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)).cuda()
        net(torch.randn(2, 4).cuda()).sum().backward()
        """,
    ),
    "a step through the scaler, and one without it after another pass": (
        Scaler,
        """
        net = nn.Linear(4, 1).cuda()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(net(torch.ones(2, 4).cuda()).mean()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        net(torch.ones(2, 4).cuda()).mean().backward()
        opt.step()
        """,
    ),
    "two scalers, each for its own loss, of which one goes through both nets": (
        Scaler,
        """
        gen, judge = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (gen, judge)]
        scalers = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
        for _ in range(2):
            for opt, scaler in zip(opts, scalers):
                opt.zero_grad()
                scaler.scale(judge(gen(torch.ones(2, 4).cuda())).mean()).backward()
                scaler.step(opt)
                scaler.update()
        """,
    ),
    "averages that 16 bits can hold, and one in float32": (
        Averages,
        """
        import copy
        net = nn.Linear(8, 8).cuda().bfloat16()
        near, wide = copy.deepcopy(net), copy.deepcopy(net).float()
        for _ in range(5):
            with torch.no_grad():
                for p, q, r in zip(near.parameters(), net.parameters(), wide.parameters()):
                    q.mul_(1.01)
                    p.mul_(0.9).add_(q, alpha=1 - 0.9)
                    r.lerp_(q.float(), 1 - 0.9999)
        """,
    ),
    "a scaled loss that its factor makes infinite": (
        Values,
        """
        net = nn.Linear(4, 1).cuda().half()
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            scaler.scale(net(torch.full((2, 4), 9.0).half().cuda()).abs().sum() + 2).backward()
        """,
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_only_looks_like_a_fault_is_none(checked: Checked, name: str) -> None:
    report = checked(*CLEAN[name])
    assert report["findings"] == [], report


def test_a_graph_in_a_circle_is_kept_by_nobody(checked: Checked) -> None:
    found = checked(
        GraphKept,
        """
        import gc
        gc.disable()  # as where the collector comes seldom
        class Result:
            def __init__(self, loss):
                self.loss, self.myself = loss, self
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            result = Result(model(torch.randn(2, 4).cuda()).sum())
            result.loss.backward()
            optimizer.step()
        """,
    )
    assert not found["findings"]
