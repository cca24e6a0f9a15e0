"""Figures 19 to 22 on the testbed of Figure 18, beside the paper's gains.

    python benchmarks/testbed.py [--sensitivity] [--out benchmarks/results]

The same as ``crux sim testbed``; ``--help`` lists the options, and docs/evaluation.md says where
the parameters come from.
"""

from crux_torch.sim.commands.testbed import testbed

if __name__ == "__main__":
    testbed()
