"""What a list costs: time and bytes on a machine, and how far that is from the best possible.

simulate.py            when each instruction runs; execution.py is its loop
machine.py             the machine: links, sizes, the time of a STEP; a profile read
network.py             what joins its devices, and what messages and sums occupy; machine_file.py reads one
buffer_sizes.py        the bytes of every buffer, message and sum on it; for mpirun, those in flight
timeline.py            when instructions ran and what they waited for, simulated or measured; where time went
stats.py               the numbers of a simulation, and of a schedule where messages take no time
lower_bounds.py        how fast any order could be; memory_bound.py: with limited memory
memory_plan.py         a slot for every buffer that a rank receives
footprint.py           the bytes that every rank needs
"""
