"""One rank executes its list: each instruction is bound once to a function, and the functions are called in order."""
