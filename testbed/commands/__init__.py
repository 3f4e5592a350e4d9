"""The `cleave` command, one file per group of verbs."""
