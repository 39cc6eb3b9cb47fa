"""The guard: a process beside the ranks of a host, which says what a rank that died or hangs cannot say.

Ranks show in shared memory what they are doing: `watch` is a rank's side of it
and starts the guard, `process` is the guard, `state` says what ranks do in
words, `link` joins the guards of several hosts. All but `watch` use Python's
own library only, so that a guard is there at once and stays small.

What a rank shows are 64-bit words:
"""

PHASE, STEP, ROW, WAIT, BEAT = range(5)
WORDS = 8
SETTING_UP, TRAINING, SAVING, VERIFYING, DONE, FAILED = range(6)
PHASES = ("setting up", "training", "saving a checkpoint", "verifying", "done", "failed")
# WAIT: the row of the transfer or sum that is waited for, or one of these.
NOTHING, OTHERS = -1, -2
