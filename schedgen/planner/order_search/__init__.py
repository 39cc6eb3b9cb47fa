"""The search for an order that nobody wrote: placement, sizes, costs and a memory limit in, a schedule and a bound out.

found_order.py     what an order must keep to, and what a search gives
problem.py         jobs, what they wait for and what memory they take, as arrays; an order is a sequence a worker
placed_problem.py  the problem of a placed scheme, and its bound
evaluate.py        when the jobs of an order run: the kernel that judges every candidate
built_ins.py       where the search begins: the orders of built-in schemes with the same placement
steady_states.py   and, for a V with a limit, blocks of jobs repeated for every microbatch
priority_rules.py  list scheduling by random rules
local_search.py    simulated annealing: jobs on the critical path move
late_weights.py    the W of an order placed anew, in gaps
find_order.py      all of these, for so much work
cp_sat.py          OR-Tools' CP-SAT: proofs for small problems
schedules.py       orders as schedules: compiled, read back, judged by the simulator
order_search.py    the story: begin, find, prove; the simulator has the last word
least_memory.py    the other way round: the least memory for the scheme's own time
recompute.py       orders that redo forwards to keep to the memory
whole_or_split.py  which backwards are whole and which are split, where the costs of both are known
redo_choice.py     the fewest forwards of an order that must be redone
table.py           what the command prints
"""
