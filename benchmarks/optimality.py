"""Each mechanism beside the optimum of 1,500 small cases, as in the paper's §4.4 and Figure 16.

    python benchmarks/optimality.py [--cases 1500] [--threads 2] [--out benchmarks/results]

The same as ``crux sim optimality``; ``--help`` lists the options.
"""

from crux_torch.sim.commands.optimality import optimality

if __name__ == "__main__":
    optimality()
