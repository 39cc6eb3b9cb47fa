"""Scheme in, program out: place, refine, order, lower.

compile.py       the four steps one after another; options.py: how
place.py         w and n of every job; user_functions.py calls a user's functions
refine.py        stages become substages and slices
order.py         when every job starts: greedy_order.py
lower.py         the list of every rank, by passes/; torch_program.py: that of torch's list
forward_only.py  the forwards of a scheme or of a program alone
"""
