"""How large a schedule may be: what is larger is refused before memory is taken for it."""

MOST_JOBS = 2**27  # of a schedule, about a hundred bytes each
MOST_WORKERS = 2**20
MOST_STAGES = 2**20  # of a model's graph file
MOST_ROWS = 2**30  # instructions of a file
MOST_PAIRS = 2**25  # of a worker and a stage: tables are that large
MOST_TIES = 16  # of one stage
MOST_USES = 64  # of parts of weights, for every instruction
MOST_RATIO = 1e6  # of the longest job's duration to the shortest's
