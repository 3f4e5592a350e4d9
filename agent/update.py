def update() -> int:
    return 2
