"""Pictures of schedules: rows are workers, time runs to the right.

scene.py     what a picture shows, computed once from a simulation or a measured run, before any pixels
colours.py   the colours of all pictures
terminal.py  a scene as text
figure.py    scenes as SVG or PNG by matplotlib; figure_axes.py draws one scene
page.py      scenes as an HTML page to zoom into; web/ has its scripts
"""
