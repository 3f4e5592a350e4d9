"""Access networks, one TOML file each, with provenance; data only."""
