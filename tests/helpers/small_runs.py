"""`cleave run` on a model of one layer, for tests of everything around the training: capturing and planning more layers
takes seconds and tells such a test nothing. A tenth of each line, so that a step takes time whatever the model. Without
a prediction, which such a test does not read."""

from __future__ import annotations

from places import HELPERS

CLEAVE = "import sys; from testbed.commands.cli import main; sys.exit(main())"
MODEL = ("--set", f"model.config={HELPERS / 'one_layer.json'}")
SMALL = (*MODEL, "--no-predict", "--set", "data.batch=2", "--set", "data.sequence=16", "--set", "fleet.line_share=0.1")
RUN_LIMIT_S = 200.0  # limit of one run; reached only when something is broken
