"""The search for a new order: placement, sizes, costs and a memory limit in, a schedule and a lower bound out.

question.py           the input of a search, `Question`, its result, `FoundOrder`, and how much work it does
problem.py            jobs, what they wait for and what memory they take, as arrays; an order is a sequence per worker
run_order.py          the start times of an order's jobs: the kernel that judges every candidate
steady_states.py      building blocks of a V, repeated and squeezed: orders to start from
priority_rules.py     list scheduling by random rules
late_weights.py       the W jobs of an order placed anew
heuristic_orders.py   rules, W jobs placed anew, and then simulated annealing, within a budget of work
cp_sat.py             OR-Tools' CP-SAT: proofs for small problems
compiled_orders.py    orders as schedules: compiled, read back, judged by the simulator
search_order.py       the whole search: begin, find, prove; the simulator has the last word
ways.py               of an order's forwards, which are kept, redone or away so that it keeps to the memory
search_ways.py        orders and the ways of their forwards; `search`, all of this as one call
"""
