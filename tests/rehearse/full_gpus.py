"""Programs that meet a full GPU, with what is true of each on hardware: written down before any was rehearsed.

Each begins with HEAD. A GPU of 3 GiB takes a step of 16,384 rows with room to spare, and none of 32,768; the
programs begin with 65,536.
"""

HEAD = """
import contextlib, functools, gc, sys
import torch
from torch import nn

net = nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)


def step(rows):
    net(torch.randn(rows, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


"""

GOES_ON = {
    "the error by its name, the loop goes on": """
rows = 1 << 16
while True:
    try:
        step(rows)
        break
    except torch.cuda.OutOfMemoryError:
        rows //= 2
for _ in range(2):
    step(rows)
""",
    "its text asked, then continue, and raise for all others": """
rows = 1 << 16
for _ in range(8):
    try:
        step(rows)
    except RuntimeError as error:
        if "out of memory" in str(error):
            rows //= 2
            continue
        raise
""",
    "a helper that asks the text": """
def is_memory(error):
    return "CUDA out of memory" in str(error)


rows = 1 << 16
for _ in range(8):
    try:
        step(rows)
    except Exception as error:
        if not is_memory(error):
            raise
        rows = rows // 2
""",
    "accelerate's finder": """
from accelerate.utils import find_executable_batch_size


@find_executable_batch_size(starting_batch_size=1 << 16)
def train(batch_size):
    for _ in range(3):
        step(batch_size)


train()
""",
    "a helper that says whether it worked": """
def fits(rows):
    try:
        step(rows)
    except RuntimeError:
        gc.collect()
        torch.cuda.empty_cache()
        return False
    return True


rows = 1 << 16
while not fits(rows):
    rows //= 2
step(rows)
""",
    "suppressed by contextlib": """
rows, made = 1 << 16, 0
while made < 3:
    done = False
    with contextlib.suppress(torch.OutOfMemoryError):
        step(rows)
        done = True
    made, rows = (made + 1, rows) if done else (made, rows // 2)
""",
    "a context manager that is a generator": """
@contextlib.contextmanager
def spared(said):
    try:
        yield
    except torch.OutOfMemoryError as error:
        said.append(str(error))


rows = 1 << 16
for _ in range(6):
    said = []
    with spared(said):
        step(rows)
    if said:
        rows //= 2
""",
    "a context manager that is a class": """
class Spared:
    def __enter__(self):
        self.full = False
        return self

    def __exit__(self, kind, error, trace):
        self.full = kind is not None and issubclass(kind, torch.OutOfMemoryError)
        return self.full


rows = 1 << 16
for _ in range(6):
    with Spared() as spared:
        step(rows)
    if spared.full:
        rows //= 2
""",
    "a decorator that halves": """
def halving(function):
    @functools.wraps(function)
    def called(rows):
        while rows:
            try:
                return function(rows)
            except Exception as error:
                if "memory" not in str(error).lower():
                    raise
                rows //= 2
        raise RuntimeError("no batch fits")

    return called


train = halving(step)
for _ in range(2):
    train(1 << 16)
""",
    "an error of its own, caught above": """
class TooLarge(Exception):
    pass


def careful(rows):
    try:
        step(rows)
    except torch.OutOfMemoryError as error:
        raise TooLarge(rows) from error


rows = 1 << 16
for _ in range(6):
    try:
        careful(rows)
    except TooLarge:
        rows //= 2
""",
    "rows that are too many are left out": """
for rows in (1 << 10, 1 << 16, 1 << 10, 1 << 11):
    try:
        step(rows)
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
        print("left out:", rows)
""",
    "the last batch is left out": """
for rows in (1 << 10, 1 << 11, 1 << 16):
    try:
        step(rows)
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
        print("left out:", rows)
print("trained")
""",
    "the last batch is left out by a helper, in an endless loop, and the step stands outside": """
def passed(rows):
    try:
        net(torch.randn(rows, 4096, device="cuda")).square().mean().backward()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return False
    return True


def train(batches):
    made = 0
    while True:
        rows = next(batches, None)
        if rows is None:
            return made
        if passed(rows):
            optimizer.step()
            made += 1
        optimizer.zero_grad()


print(train(iter((1 << 10, 1 << 16))))
""",
    "the last prompt is left out of what is only evaluated": """
net.eval()
with torch.inference_mode():
    for rows in (1 << 10, 1 << 11, 1 << 18):
        try:
            print(net(torch.randn(rows, 4096, device="cuda")).shape)
        except torch.OutOfMemoryError:
            print("left out:", rows)
""",
    "a trainer as Lightning's": """
class Scaler:
    def fit(self, rows):
        for _ in range(2):
            step(rows)

    def scale(self, rows):
        while True:
            try:
                self.fit(rows)
            except RuntimeError as exception:
                if is_oom_error(exception):
                    gc.collect()
                    rows //= 2
                    if rows < 2:
                        raise
                else:
                    raise
            else:
                return rows


def is_oom_error(exception):
    return isinstance(exception, RuntimeError) and len(exception.args) == 1 and "out of memory" in exception.args[0]


step(Scaler().scale(1 << 16))
""",
}
"""Each handles the error and then runs within the memory: a note, and no fault."""

ENDS = {
    "told, and raised again": """
try:
    step(1 << 16)
except torch.OutOfMemoryError:
    print("CUDA out of memory: take fewer rows")
    raise
""",
    "told, and the program ends itself": """
try:
    step(1 << 16)
except torch.OutOfMemoryError as error:
    print(error)
    sys.exit(1)
""",
    "told by main, which returns": """
def main():
    try:
        for _ in range(3):
            step(1 << 16)
    except RuntimeError as error:
        print("failed:", error)
        return 1
    return 0


main()
""",
    "halved until nothing is left": """
held = torch.empty(400 << 20, dtype=torch.float32, device="cuda")
rows = 1 << 16
while rows:
    try:
        step(rows)
        break
    except torch.OutOfMemoryError:
        rows //= 2
        if rows < 1 << 14:
            raise RuntimeError("no batch fits")
""",
    "every batch left out": """
for rows in (1 << 16, 1 << 17, 1 << 16):
    try:
        step(rows)
    except torch.OutOfMemoryError:
        print("left out:", rows)
""",
    "the loop is left at the first batch that does not fit": """
for rows in (1 << 10, 1 << 11, 1 << 16, 1 << 10):
    try:
        step(rows)
    except torch.OutOfMemoryError:
        print("stopped at", rows)
        break
""",
    "a loop that had trained is around what fails, and ends by another error": """
left_out = 0
for rows in (1 << 10, 1 << 11, 1 << 16):
    try:
        step(rows)
    except torch.OutOfMemoryError:
        left_out += 1
if left_out:
    raise RuntimeError("batches were left out")
""",
    "every batch left out, though a teacher has seen them all": """
teacher = nn.Linear(4096, 8).cuda()
for rows in (1 << 15, 1 << 16):
    try:
        x = torch.randn(rows, 4096, device="cuda")
        with torch.no_grad():
            wanted = teacher(x)
        net(x).square().mean().backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        print("left out:", rows)
""",
    "one loop trained, and the next leaves out all it has": """
for rows in (1 << 10, 1 << 11):
    step(rows)
for rows in (1 << 16, 1 << 17):
    try:
        step(rows)
    except torch.OutOfMemoryError:
        print("left out:", rows)
""",
    "another error is awaited": """
rows = 1 << 16
try:
    step(rows)
except ValueError:
    rows //= 2
""",
    "a handler of all that only tells": """
import logging

try:
    step(1 << 16)
except Exception:
    logging.exception("training failed")
    sys.exit(2)
""",
    "cleaned up, not handled": """
try:
    with contextlib.ExitStack() as stack:
        stack.callback(print, "cleaned up")
        step(1 << 16)
finally:
    optimizer.zero_grad()
""",
}
"""Each ends there on hardware: a fault, out-of-memory, with what is missing."""
