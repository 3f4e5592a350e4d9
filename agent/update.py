from pathlib import Path


def update(folder: Path) -> int:
    return 2
