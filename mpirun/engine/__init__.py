"""One rank executes its list: every instruction bound once to a function, then called in order."""
