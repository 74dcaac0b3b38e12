"""The account: a model is compiled into a profile of integer coefficients, one function evaluates it."""
