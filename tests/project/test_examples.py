"""The programs in examples/ work as described: they are run as a user would run them."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from places import ROOT

import cleave

if TYPE_CHECKING:
    from conftest import Start


@pytest.mark.slow
def test_two_agents_train_a_module_with_the_losses_of_plain_pytorch(start: Start) -> None:
    program = start.command(sys.executable, "examples/two_agents.py")
    assert program.wait(100.0) == 0, program.output
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), [1-9]", program.output, re.MULTILINE)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(512, 64)
    wanted = inputs[:, :8].sum(dim=1, keepdim=True)
    for loss in losses:
        plain = torch.nn.functional.mse_loss(model(inputs), wanted)
        plain.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(plain.item(), abs=1e-5)
    assert len(losses) == 10


def test_the_facade_has_only_names_and_no_logic() -> None:
    source = (ROOT / "cleave" / "__init__.py").read_text(encoding="utf-8")
    assert sorted(cleave.__all__) == sorted(re.findall(r"^from \S+ import (\w+)$", source, re.MULTILINE))
    assert "def " not in source
    assert (ROOT / "cleave" / "py.typed").exists()
