"""Train a plain PyTorch module over two agents on this machine: python examples/two_agents.py"""

from __future__ import annotations

import subprocess
import sys

import torch

from cleave import Executor, Server, distribute

server = Server().start()
command = [sys.executable, "-m", "agent", "--ps", server.address, "--unmeasured", "--once"]
agents = [subprocess.Popen([*command, "--name", f"agent-{number}"]) for number in range(2)]
try:
    server.wait_for_devices(2, timeout_s=60)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    forward, optimizer = distribute(model, Executor(server).run), torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(512, 64)
    wanted = inputs[:, :8].sum(dim=1, keepdim=True)
    for step in range(1, 11):
        loss = torch.nn.functional.mse_loss(forward(inputs), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}, {server.totals.blocks} blocks so far")
finally:
    server.stop()
    for agent in agents:
        agent.wait()
