"""The ZeroMQ shell around the scheduler: connections, operands out, answers in, records."""
