"""Views of a schedule for people and for other tools. Nothing here changes a schedule.

draw/            pictures: in the terminal, as SVG, PNG and HTML
stats_table.py   the numbers of a schedule, a simulation or a run as text
diff.py          what changed between two schedules
compare.py       all built-in schemes side by side
chrome_trace.py  traces of runs, written, read and summed up
chakra.py, torch_csv.py  exports for other tools
"""
