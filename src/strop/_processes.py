"""What a launcher such as torchrun tells the processes it starts."""

import os


def refuse_several_processes() -> None:
    """Raise where this is one of several processes: each would train alone, and all write into one folder."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdecimal() and int(world_size) > 1:
        raise ValueError(
            f"WORLD_SIZE must be 1: training in several processes is not supported yet, found {world_size}; start strop "
            f"without torchrun, or unset WORLD_SIZE for processes that train apart"
        )
