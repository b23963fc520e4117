"""The results of a Monitor's steps, and the file of a run: writing and reading it."""
