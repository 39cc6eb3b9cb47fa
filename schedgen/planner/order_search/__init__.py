"""The search for a new order: placement, sizes, costs and a memory limit in, a schedule and a lower bound out.

question.py           the input of a search, `Question`, and its result, `FoundOrder`
budget.py             how much work a search does, and how it is divided
problem.py            jobs, what they wait for and what memory they take, as arrays; an order is a sequence per worker
placed_problem.py     the problem of a placed scheme, and its bound
run_order.py          the start times of an order's jobs: the kernel that judges every candidate
steady_states.py      starting orders for a V with a memory limit: blocks of jobs repeated for every microbatch
priority_rules.py     list scheduling by random rules
annealing.py          simulated annealing: jobs on the critical path move
late_weights.py       moves the W jobs of an order into gaps
heuristic_orders.py   all of these, within a budget of work
cp_sat.py             OR-Tools' CP-SAT: proofs for small problems
compiled_orders.py    orders as schedules: compiled, read back, judged by the simulator
search_order.py       the whole search: begin, find, prove; the simulator has the last word
ways.py               of an order's forwards, which are kept, redone or away so that it keeps to the memory; a bound
recompute.py          orders and the ways of their forwards; `search`, all of this as one call
"""
