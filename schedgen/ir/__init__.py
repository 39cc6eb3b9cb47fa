"""The instruction list: instructions and what they mean, the header, the program, and its file.

instructions.py       opcodes, operands, kinds of buffers
effects.py            what each instruction does to which buffers; accesses.py: what each row of a program does
header.py             all but the instructions; of it stage_graph.py, tensor_parallel.py, weight_shards.py,
                      weight_versions.py
program.py            a header and the instructions as arrays
file.py               writes and reads the file: validate_header.py its header, line_codec.py its instructions;
                      version_1.py renames the keys of older files
limits.py             how large a schedule may be
graph_file.py         what a schedule must know of a model
cost.py               durations of jobs
job_graph.py          what each job waits for, and jobs that never start

Imports `util` only; all other packages build on it.
"""
