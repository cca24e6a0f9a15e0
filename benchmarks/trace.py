"""The trace runs: Figures 23 and 25, and a network without contention.

    python benchmarks/trace.py --data FOLDER --paper [--threads N] [--out benchmarks/results]

The same as ``crux sim trace``; ``--help`` lists the options. FOLDER holds the public files of the
hybrid trace; without --data the trace is generated.
"""

from crux_torch.sim.commands.trace import trace

if __name__ == "__main__":
    trace()
