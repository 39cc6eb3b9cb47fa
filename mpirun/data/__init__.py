"""The samples of a step: the training text, and minibatches cut into microbatches."""
