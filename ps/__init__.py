"""The parameter server: captures the training step, cuts its products into blocks, assembles the answers."""
