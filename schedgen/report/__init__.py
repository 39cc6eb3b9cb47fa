"""Views of a schedule for people and for other tools. Nothing here changes a schedule."""
