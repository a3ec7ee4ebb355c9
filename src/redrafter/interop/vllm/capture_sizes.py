"""For which numbers of tokens vLLM's second runner records its steps, if steps with and without guesses alternate."""


def capture_sizes(requests: int, width: int, most: int) -> list[int]:
    """Numbers of tokens, up to `most`, for at most so many requests, each with `width` tokens in a step or with one.

    vLLM looks only at the next larger recording. It is of no use for a step with another number of tokens per request,
    or if it is of more requests than there can be. So the sizes are as close as vLLM's own, but multiples of the width:
    these are recorded for both. Smaller sizes, and the largest batches of either kind, are exact.

    >>> capture_sizes(8, 5, 80)
    [1, 2, 4, 5, 8, 10, 20, 25, 35, 40, 50, 60, 65, 75, 80]
    """
    spaced = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
    sizes = {-(-size // width) * width for size in spaced} | {size for size in spaced if size < width}
    sizes |= {requests // width * width, requests, requests * width, most // width * width}
    return sorted(size for size in sizes if 0 < size <= most)
