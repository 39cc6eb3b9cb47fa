"""What a list does, computed once from the list alone: lifetimes of buffers, matched messages, who waits for whom."""
