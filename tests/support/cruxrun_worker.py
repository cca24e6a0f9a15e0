"""What the launcher's tests launch: writes down what it was given, then does as it is told."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    folder, then = Path(sys.argv[1]), sys.argv[2:]
    rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    out = folder / f"{os.environ.get('TEST_NODE', '')}{rank}.{attempt}.json"
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps({"env": dict(os.environ), "argv": then, "pid": os.getpid()}))
    partial.rename(out)
    if then == ["fail-once"] and attempt == 0:
        sys.exit(3)
    if then == ["sleep"]:
        time.sleep(300)
    if then == ["killed"] and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == ["raise"] and rank == "1":
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def fail() -> None:
            raise ValueError("wrong on purpose")

        fail()


if __name__ == "__main__":
    main()
