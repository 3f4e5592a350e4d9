"""The public Python API: names to build on. Everything else of the project may move.

server = Server().start()                          # devices join it: python -m agent --ps ADDRESS
forward = distribute(model, Executor(server).run)  # the same model, its products computed by devices
"""

from ps.graph.capture import distribute
from ps.graph.executor import Executor
from ps.transport.server import Server

__all__ = ["Executor", "Server", "distribute"]
