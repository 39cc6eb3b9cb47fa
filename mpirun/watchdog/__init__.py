"""The watchdog: a process beside the ranks of a host, which reports what a rank that died or hangs cannot report.

`rank_side`   what a rank shows in shared memory, and how its host's watchdog is started
`process`     the watchdog's loop: it looks at the ranks of its host, and ends them where one has died or none moves
`hang_report`  what a rank does, in words, and why a job cannot continue
`hosts`       connections to the watchdogs of other hosts, and which host is silent

All but `rank_side` import only Python's standard library, so that a watchdog starts at once and stays small.

A rank shows `WORDS` 64-bit words. These are their indices:
"""

WORDS = 7
PHASE = 0
STEP = 1
ROW = 2  # the instruction that the rank executes, or NOTHING
WAIT = 3  # the row of the transfer that it waits for, or NOTHING, or OTHERS: for other ranks, as in a sum or a barrier
BEAT = 4  # counts up during work in which the row does not change for long
# The number of the calls of a script so far, times len(METHODS), and the last one's place in METHODS: one word, because
# two could be read between their changes.
CALL = 5
IN_SCRIPT = 6  # whether the script runs code of its own, between two calls
# Values of PHASE, and how messages call them.
SETTING_UP, TRAINING, SAVING, VERIFYING, DONE, FAILED, EVALUATING, TRYING, ENDING, EXPORTING = range(10)
PHASES = (
    "setting up", "training", "saving a checkpoint", "verifying", "done", "failed", "evaluating",
    "trying messages between GPUs", "at the end of its run", "exporting",
)  # fmt: skip
NOTHING, OTHERS = -1, -2
METHODS = (
    "", "loader", "step", "evaluate", "predict", "save", "resume", "export", "state_dict", "verify", "close",
    "begin_trace", "end_trace", "load_state_dict", "profile",
)  # fmt: skip
