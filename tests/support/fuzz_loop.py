"""What programs that try random problems share: their arguments, the loop, and tensors that are not contiguous."""

from __future__ import annotations

import argparse
import math
import time
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

Found = tuple[float, str]  # error over bound, infinite where it is no matter of errors; the problem


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("count", 100), ("seed", 0), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=math.inf)
    return parser


def try_problems(arguments: argparse.Namespace, attempt: Callable[[int], Found]) -> int:
    """Prints every miss and a summary; 1 where there is a miss."""
    begin, worst, misses, done = time.time(), (0.0, -1), 0, 0
    for index in range(arguments.first, arguments.first + arguments.count):
        if time.time() - begin > arguments.seconds:
            break
        ratio, what = attempt(index)
        done += 1
        worst = max(worst, (ratio, index))
        if not ratio < 1:
            misses += 1
            print(f"{index}: {ratio:.2f} {what}", flush=True)
    print(f"{done} problems, {misses} misses, worst {worst[0]:.2f} at {worst[1]}, {time.time() - begin:.0f} s")
    return bool(misses)


def crash(error: Exception) -> str:
    """What it says, and where it came from."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} at {at.name}:{at.lineno}"


def between(t: Tensor) -> Tensor:
    """The same values with others between them, in every dimension."""
    codes = t.detach().view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t.detach()
    space = torch.full([2 * n for n in t.shape], 7, dtype=codes.dtype)
    view = space[tuple(slice(None, None, 2) for _ in t.shape)]
    view.copy_(codes)
    return view.view(t.dtype)
