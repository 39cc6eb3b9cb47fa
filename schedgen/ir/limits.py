"""How large a schedule may be: what is larger is refused before memory is taken for it."""

MOST_PAIRS = 2**25  # of a worker and a stage: what tables of these may have
MOST_TIES = 16  # of one stage
MOST_USES = 64  # of parts of weights, for every instruction
