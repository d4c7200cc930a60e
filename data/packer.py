"""The packer: samples of varying length into packs of at most so many tokens."""


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """lengths of samples -> packs of their numbers, each of at most ``budget`` tokens.

    First fit, longest first: at most 11/9 of the fewest packs possible, and one more. A sample
    longer than the budget is a pack of its own. The same lengths give the same packs.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        place = next((i for i, left in enumerate(room) if length <= left), None)
        if place is None:
            packs.append([])
            room.append(budget)
            place = -1
        packs[place].append(number)
        room[place] -= length
    return packs
